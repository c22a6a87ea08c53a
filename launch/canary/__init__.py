"""Compare a run's first steps with FP32 before starting the whole run, then watch it: `python -m launch.canary`.

Read command.py, plan.py, gate.py (the canary), monitor.py (the run and its checkpoint checks), then record.py.
"""
