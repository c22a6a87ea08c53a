"""Try a run on its first steps beside FP32 before the whole of it is started, and watch it: `python -m launch.canary`.

Read command.py, plan.py, gate.py (the canary), monitor.py (the run and the checks of its checkpoints), then record.py.
"""
