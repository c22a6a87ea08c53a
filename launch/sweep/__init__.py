"""A grid of runs: `python -m launch.sweep FILE`.

Read command.py, file.py (what a sweep asks for), folder.py (what it leaves), slots.py and trial.py (jobs at a time),
rule.py and events.py (which are hopeless), then table.py.
"""
