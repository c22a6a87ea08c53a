"""Prometheus as a sink: metrics.py defines the metrics and how events update them, sink.py holds those of a run,
server.py serves them."""
