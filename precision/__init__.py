"""Judgement about numerics. Pure torch: no collectives, no DeepSpeed."""
