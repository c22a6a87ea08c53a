"""The random number generators that a training step uses: torch's, on the CPU and on this rank's device."""

import hashlib
import random

import numpy as np
import torch


def generators(device: torch.device) -> dict[str, torch.Tensor]:
    """The generators' states, as byte tensors by name."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_generators(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def load_generators(saved: dict[str, torch.Tensor] | None, device: torch.device, *, fallback_seed: str) -> None:
    """Restore saved states; a rank that did not exist when they were saved is seeded from `fallback_seed`."""
    if saved is not None:
        restore_generators(saved, device)
    else:
        seed_everything(int.from_bytes(hashlib.sha256(fallback_seed.encode()).digest()[:8], "big") % 2**63)


def seed_everything(seed: int) -> None:
    """Seed the generators that dropout, sampling and third-party code draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
