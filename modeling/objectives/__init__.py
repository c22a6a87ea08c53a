"""The losses that a task can minimise, and the metrics reported beside them.

Read objective.py (the interface), then label_prediction.py (pre-training and supervised fine-tuning), preference.py
(pairs of answers) and divergence.py (distillation from a teacher).
"""
