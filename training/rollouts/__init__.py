"""Answers of the model in training to the prompts of a batch: sampled from proven weights, rewarded, and kept.

Read transformers_sampler.py (what an engine does, and one in this process), vllm_sampler.py (servers), sync.py (that it
computes with the trainer's weights), gap.py (that it is the trainer's policy), rewards.py (the functions, in
processes of their own), rollouts.py (the answers of a step, on disk before their update), then batches.py, which makes
batches of them. Only a run whose task samples loads this package.
"""
