"""wandb as a sink: rank 0 only, offline by default, never blocking training.

Read sink.py (what training uses), worker.py (the process that runs wandb), upload.py (events into one wandb run:
charts.py, tables.py, models.py), then deliver.py and view.py, which are commands. The process itself, and how it
follows `events.jsonl`, are those of all trackers: tracking/trackers.
"""
