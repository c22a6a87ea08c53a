"""The only interface of a run to DeepSpeed's engine: nothing else in training/ touches it.

Read engine.py (forward_backward, health, step), loss.py and gradients.py (what it computes), health.py (what it
returns), then build.py (how a model gets into it), optimizer.py and optimizers/ (what updates the masters;
config/optimizers.py lists its state), flat_optimizer.py and sharded_pieces.py (whole parameters for those that need
them), masters.py and tensors.py (the FP32 states, whole or this rank's shard), split_masters.py (masters in less
memory), weights.py, rng.py, kernels.py, ledger.py; faults.py injects a user's faults.
"""

from training.engine.build import build_engine
from training.engine.engine import Engine

__all__ = ["Engine", "build_engine"]
