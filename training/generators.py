"""The random number generators a training step draws from: torch's, on the CPU and on this rank's device."""

from __future__ import annotations

import torch


def generators(device: torch.device) -> dict[str, torch.Tensor]:
    """Their states, as byte tensors by name."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_generators(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Put states from `generators` back."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
