"""Spans of every step for an OpenTelemetry collector: follow.py watches, spans.py makes them, otlp.py sends them."""
