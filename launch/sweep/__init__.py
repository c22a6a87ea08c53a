"""Run a grid of runs: `python -m launch.sweep FILE`.

Read command.py, file.py (the sweep file), folder.py (the plan on disk), slots.py and trial.py (running trials),
rule.py and events.py (early stopping), then table.py.
"""
