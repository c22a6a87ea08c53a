"""Mantissa compared with other training loops: `python -m lab.benchmark --config FILE`.

Read command.py, contestants.py and peers/ (the loops), spec.py (what all of them train), report.py. Commands of their
own: overhead.py (a step), save.py, loss.py, activations.py, largest.py, masters.py (what less than FP32 masters costs).
split.py and peak.py measure for them.
"""
