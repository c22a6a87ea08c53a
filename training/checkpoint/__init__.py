"""Checkpoints that are whole or not there: `python -m training.checkpoint verify|list|inspect|prune`."""
