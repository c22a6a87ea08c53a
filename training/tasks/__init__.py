"""What a run learns: one module for each value of `task`.

Read task.py (what a task defines), then pretrain.py, sft.py (with noise.py, on its embeddings), dpo.py, distill.py
(with targets.py, a teacher's cached answers), classify.py and mlm.py; shape.py has what a task decides of its model's
config.
"""
