"""What a run learns: one module for each value of `task`.

Read task.py (what a task defines), then pretrain.py and sft.py.
"""
