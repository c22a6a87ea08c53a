"""Numerics: precision manifests, loss scaling, the step guard, parity. Pure torch: no collectives, no DeepSpeed."""
