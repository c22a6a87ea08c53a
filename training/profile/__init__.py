"""Profile a few steps: `profile.steps=2`, and `python -m training.profile TRACE` for the summary of a trace.

Read profiler.py (records a trace), timeline.py and matmul.py (read one), then summary.py and page.py.
"""
