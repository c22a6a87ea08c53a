"""Watch a run in the terminal: `python -m tracking.watch RUN`.

Read command.py, screen.py and curves.py; tracking/live.py reads the run.
"""
