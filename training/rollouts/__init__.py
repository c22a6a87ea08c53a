"""Answers of the model in training to the prompts of a batch, for tasks that sample.

Read transformers_sampler.py and vllm_sampler.py (the engines), sync.py (they have the trainer's weights), then
batches.py, which joins them with data/rows/rewards.py, data/corpora/rollouts.py (a step's answers and their file) and
precision/sampler_gap.py (whether they are the trainer's policy).
"""
