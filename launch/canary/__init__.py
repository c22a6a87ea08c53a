"""Try a run on its first steps beside FP32 before the whole of it is started, and watch it: `python -m launch.canary`.

Read command.py, gate.py (the canary), whole.py (the run, the checks of its checkpoints, and what follows one that
fails), fallback.py, then record.py.
"""
