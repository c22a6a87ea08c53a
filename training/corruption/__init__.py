"""Silent data corruption: bits that flip in weights, masters, moments, gradients, activations or on the network.

Read copies.py (what several ranks hold, and 16-bit weights against their masters), updates.py (a slice of the
optimizer's update in FP64), rerun.py (a step again), then checks.py, which a step calls. What is decided from the
numbers is in precision/corruption.py. docs/corruption.md has what is found, how often, and at what cost.

self_check.py compares a step with plain torch now and then: passes.py what its modules make of their inputs, its
gradients and its loss, updates.py its update, copies.py what came of it (docs/self-check.md).
"""
