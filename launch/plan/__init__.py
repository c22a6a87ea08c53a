"""Predict memory, time and cost of a run before it starts: `python -m launch.plan --config FILE --gpus N`.

Read command.py, plan.py (make_plan and what fits), model.py and layout.py (the inputs), counted.py,
memory.py, recompute.py and loss.py (bytes), devices.py and speed.py (seconds), then text.py.
"""
