"""The summary of a profiler trace, without torch: read timeline.py and matmul.py (read a trace), then summary.py and
page.py.
"""
