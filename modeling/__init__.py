"""Hugging Face causal language models, prepared for DeepSpeed."""
