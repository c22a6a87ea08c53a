"""THE seam to DeepSpeed: nothing outside this package touches DeepSpeed's engine.

Read engine.py, build.py (how a model comes to it), optimizer.py and optimizers/ (what updates the masters), then
masters.py and tensors.py (the FP32 states, whole or this rank's shard).
"""

from training.engine.build import build_engine
from training.engine.engine import Engine

__all__ = ["Engine", "build_engine"]
