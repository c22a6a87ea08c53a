"""Mantissa against the loops its users would write: `python -m training.benchmark --config FILE`.

Read command.py, contestants.py and peers/ (who runs), spec.py (what all of them train), report.py. What is measured by
itself: overhead.py (a step), save.py, loss.py, activations.py, largest.py; split.py and peak.py are used by them.
"""
