"""The losses that a task can minimise, and the metrics beside them.

Read objective.py (what one is), then label_prediction.py, that of pre-training and supervised fine-tuning,
preference.py, of pairs of answers, and divergence.py, from a teacher.
"""
