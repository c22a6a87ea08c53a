"""Mantissa compared with other training loops: `python -m lab.benchmark --config FILE`.

Read harness.py (turns, rounds, intervals and reports, for all), command.py, contestants.py and peers/ (the loops),
spec.py (the work that all of them train), report.py. Commands of their own: overhead.py (a step), telemetry.py,
save.py, loss.py, activations.py, largest.py, data.py, masters.py (the cost of masters below FP32). split.py and peak.py
measure for them.
"""
