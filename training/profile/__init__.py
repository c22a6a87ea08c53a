"""Profile a few steps: `profile.steps=2`, and `python -m training.profile TRACE` for the summary of a trace.

Read profiler.py (what is recorded), timeline.py and matmul.py (what a trace says), then summary.py and page.py.
"""
