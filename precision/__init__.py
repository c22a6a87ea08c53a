"""Numerics: precision manifests, loss scaling, the step guard. Pure torch: no collectives, no DeepSpeed."""
