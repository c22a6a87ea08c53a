"""A Hugging Face causal language model made ready for DeepSpeed."""
