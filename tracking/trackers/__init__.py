"""Other trackers as sinks: TensorBoard, MLflow, Trackio and CSV, each through its own client in a process of its own.

Read process.py (starts and ends the process), delivery.py (follows `events.jsonl`), which wandb shares; then sink.py,
worker.py and clients.py (what differs between the trackers).
"""
