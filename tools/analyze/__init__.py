"""Measure every region and propose a precision manifest: `python -m tools.analyze --config FILE --out MANIFEST`.

Read command.py, survey.py (the job), regions.py, stored.py and gradients.py (what it measures), then plot.py.
"""
