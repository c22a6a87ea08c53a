"""A run in the terminal: `python -m tracking.watch RUN`.

Read command.py, tail.py (follows `events.jsonl`), state.py and series.py (what is kept of it), screen.py and curves.py.
"""
