"""The tasks that a run can learn: one module for each value of `task`.

Read task.py (what a task defines), then pretrain.py, sft.py, dpo.py, distill.py (with cached_teacher.py, a teacher's
answers on disk), grpo.py, opd.py, classify.py and mlm.py; shape.py has what a task decides of its model's config.
"""
