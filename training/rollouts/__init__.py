"""Answers of the model in training to the prompts of a batch, for tasks that sample.

Read transformers_sampler.py and vllm_sampler.py (the engines), sync.py (they have the trainer's weights), gap.py (they
are the trainer's policy), rewards.py, rollouts.py (a step's answers and their file), then batches.py, which joins them.
"""
