"""Repeat a step of a recorded run, or try it under another precision: `python -m tools.replay RUN --step N`.

Read command.py, recorded.py (what the run's record says about the step), repeat.py, what_if.py, then bisect.py.
"""
