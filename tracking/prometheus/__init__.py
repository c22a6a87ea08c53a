"""Prometheus as a sink: metrics.py says what is exposed and how each event moves it, sink.py serves it."""
