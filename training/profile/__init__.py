"""Profile a few steps: `profile.steps=2` (profiler.py), and `python -m training.profile TRACE` (tracking/profile/)."""
