"""wandb as a sink: rank 0 only, offline by default, never blocking training.

Read sink.py (what training uses), worker.py (the process that runs wandb), follow.py (how it reads `events.jsonl`),
upload.py (events into one wandb run: charts.py, tables.py, models.py), then deliver.py and view.py, which are commands.
"""
