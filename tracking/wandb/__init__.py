"""wandb as a sink: rank 0 only, offline by default, never blocking training.

Read sink.py (used by training), worker.py (the process that runs wandb), upload.py (sends events to one wandb run, with
charts.py and models.py), then sync.py and view.py, which are commands. Starting that process and following
`events.jsonl` are shared with the other trackers: tracking/trackers.
"""

from config.moved import refuse_old_name

refuse_old_name()
