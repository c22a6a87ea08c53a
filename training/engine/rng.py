"""The random number generators a training step draws from: torch's, on the CPU and on this rank's device."""

from __future__ import annotations

import hashlib
import random

import numpy as np
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


def load_generators(saved: dict[str, torch.Tensor] | None, device: torch.device, *, otherwise: str) -> None:
    """Restore what was saved from `generators`; where there is nothing for this rank, seed from the text `otherwise`.

    A run that goes on with more ranks than it was saved with has generators of the first ones only.
    """
    if saved is not None:
        restore_generators(saved, device)
        return
    drawn = int.from_bytes(hashlib.sha256(otherwise.encode()).digest()[:8], "big")
    random.seed(drawn)
    np.random.seed(drawn % 2**32)
    torch.manual_seed(drawn % 2**63)
