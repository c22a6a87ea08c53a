"""The tasks that a run can learn: one module for each value of `task`, with the interface in task.py."""
