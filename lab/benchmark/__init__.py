"""Mantissa compared with other training loops: `python -m lab.benchmark --config FILE`.

Read command.py, contestants.py and peers/ (the loops), spec.py (the work that they all train), report.py, and
harness.py (rounds and reports of jobs). overhead.py times parts of a step in one process; the rest are commands, too.
"""
