"""NEFTune's noise: of the scale of its paper, the same at every layout, none in evaluation."""

import hashlib
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.jobs.process_group import ProcessGroup
from tests.support.models.plain_steps import require_equal
from tests.training.tasks import sft_cases as cases

ALPHA = 5.0


def split_mix(state: np.ndarray, count: int) -> np.ndarray:
    """(..., count) uint64: the first numbers of SplitMix64 from each state, as its authors' C code writes it."""
    with np.errstate(over="ignore"):
        z = state[..., None] + np.arange(1, count + 1, dtype="u8") * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return z ^ z >> np.uint64(31)


def exact(name: str, start: int, tokens: int, width: int) -> torch.Tensor:
    """Noise of a row that begins at a place of the sequence of that name, from FP64."""
    state = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=8, person=b"mantissa-noise").digest(), "<u8")
    keys = split_mix(state, start + tokens)[0, start:]
    epsilon = ((split_mix(keys, width) >> np.uint64(41)) + 0.5) * 2.0**-22 - 1
    return torch.tensor(epsilon * ALPHA / (tokens * width) ** 0.5, dtype=torch.float32)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_every_layout_trains_on_the_noise_of_the_paper(
    solo: ProcessGroup, pair: ProcessGroup, folder: Any, packing: str
) -> None:
    """L is a row's own length, packed or padded; the same where blocks are recomputed and logits come in chunks."""
    names: list[list[tuple[str, int]]] = []

    def noise(step: int, row: int, shape: Any) -> torch.Tensor:
        return exact(*names[step][row], *shape)

    given = (f"data.packing={packing}", f"sft.neftune_alpha={ALPHA}")
    chunked = ("model.loss=chunked", "model.loss_chunk_tokens=7")
    recomputed = ("model.activation_checkpointing=full", "batch.micro_size=1")
    for group, stage, further in ((solo, 0, ("batch.micro_size=8", *chunked)), (pair, 3, recomputed)):
        found = group.run(cases.steps, folder=folder, stage=stage, overrides=(*given, *further))[0]
        if group is solo:
            names += [step["noise_names"] for step in found["steps"]]
            oracle = cases.oracle(folder, found, noise=noise)
        require_equal(found, oracle)
    plain = cases.oracle(folder, found)
    assert abs(plain["steps"][0]["loss"] - oracle["steps"][0]["loss"]) > 1e-3, "the noise is large enough to be seen"


def test_evaluation_has_no_noise(solo: ProcessGroup, folder: Any) -> None:
    given = ("data.validation_fraction=0.2", "evaluate.batches=4")
    [(plain, trained)] = solo.run(cases.evaluated, folder=folder, overrides=given)
    [(found, noisy)] = solo.run(cases.evaluated, folder=folder, overrides=(*given, f"sft.neftune_alpha={ALPHA}"))
    assert found == plain and noisy != trained
