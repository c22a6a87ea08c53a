"""The only interface of a run to DeepSpeed's engine: nothing else in training/ touches it.

Read engine.py (forward_backward, health, step), loss.py, gradients.py and health.py (what it computes and returns),
then build.py (how a model gets into it), optimizer.py and optimizers/, flat_optimizer.py and sharded_pieces.py (whole
parameters for those that need them), masters.py and tensors.py (the FP32 states), split_masters.py (masters in less
memory), weights.py, rng.py, kernels.py, ledger.py; faults.py injects a user's faults.
"""

from training.engine.build import build_engine
from training.engine.engine import Engine

__all__ = ["Engine", "build_engine"]
