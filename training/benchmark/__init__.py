"""Mantissa against the loops its users would write: `python -m training.benchmark --config FILE`.

Read command.py, contestants.py and peers/ (who runs), spec.py (what all of them train), report.py. What is measured by
itself: steps.py, guard.py, growth.py, save.py, loss.py, activations.py, largest.py; split.py and peak.py look into a
contestant.
"""
