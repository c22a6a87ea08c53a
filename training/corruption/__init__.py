"""Detection of silent data corruption: bit flips in weights, masters, moments, gradients, activations or on the wire.

Read copies.py (replicas, and 16-bit weights against their masters), updates.py (part of each optimizer update in FP64),
rerun.py (a step run twice), then checks.py, which the training step calls; precision/corruption.py decides what their
numbers mean (docs/corruption.md). Now and then self_check.py compares a whole step with plain torch: passes.py outputs,
gradients and loss, updates.py the update, copies.py the resulting weights (docs/self-check.md), rates.py and
settings.py what the optimizer is set to.
"""
