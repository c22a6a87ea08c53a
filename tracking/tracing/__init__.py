"""Spans of every step for an OpenTelemetry collector: spans.py makes them, follow.py hooks in, otlp.py sends them."""
