"""Summarise a profiler trace without torch: read timeline.py and matmul.py (parsing), then summary.py and page.py."""
