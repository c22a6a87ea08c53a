"""Checks whether another trainer on DeepSpeed trains correctly, from its configs or from steps recorded in it."""
