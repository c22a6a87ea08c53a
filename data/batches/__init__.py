"""Batches of a corpus as tensors, for each task."""
