"""On-policy distillation (Agarwal et al. 2024): a teacher's distributions on the model's own answers (docs/rl.md)."""

from training.tasks.distill import objective
from training.tasks.grpo import make_batch, prepare

__all__ = ["make_batch", "objective", "prepare"]
