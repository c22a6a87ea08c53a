"""Asks whether training by another trainer on DeepSpeed is right: from its configs, or from steps that it recorded."""
