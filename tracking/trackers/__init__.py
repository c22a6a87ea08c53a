"""Other trackers as sinks: TensorBoard, MLflow, Trackio and CSV, each through its own client in a separate process.

Read sink.py (starts and ends the process) and delivery.py (follows `events.jsonl`), which wandb shares; then clients.py
(the process, and the differences between trackers).
"""
