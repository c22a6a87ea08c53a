"""Prometheus as a sink: metrics.py defines the metrics and how each event updates them, sink.py keeps them for a run,
server.py answers whoever asks."""
