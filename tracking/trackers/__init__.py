"""Other trackers as sinks: TensorBoard, MLflow, Trackio and CSV, each through its own client in a process of its own.

Read sink.py (starts and ends the process), worker.py (follows `events.jsonl`), clients.py (what differs between them).
"""
