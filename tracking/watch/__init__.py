"""A run in the terminal: `python -m tracking.watch RUN`.

Read command.py, state.py and series.py (what is kept of `events.jsonl`), screen.py and curves.py.
"""
