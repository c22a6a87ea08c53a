"""wandb as a sink: rank 0 only, offline by default, never in training's way.

Read sink.py (what the run holds), worker.py (the process that owns wandb), follow.py (how it reads `events.jsonl`),
upload.py (events into one wandb run: charts.py, tables.py, models.py), then deliver.py and view.py, which are commands.
"""
