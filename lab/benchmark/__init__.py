"""Mantissa compared with other training loops: `python -m lab.benchmark --config FILE`.

Read harness.py (turns, rounds, intervals and reports, for all), command.py, contestants.py and peers/ (the loops),
spec.py (the work that all of them train), report.py. split.py and peak.py measure for them; the rest are commands.
"""
