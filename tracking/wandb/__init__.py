"""wandb as a sink: rank 0 only, offline by default, never blocking training.

Read sink.py (what training uses), worker.py (the process that runs wandb), upload.py (events into one wandb run,
with charts.py and models.py), then sync.py and view.py, which are commands. The process itself, and how it
follows `events.jsonl`, are those of all trackers: tracking/trackers.
"""

from config.moved import refuse_old_name

refuse_old_name()
