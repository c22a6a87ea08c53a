"""Other people's loops with the probe in them: sound ones are left alone, each planted mistake is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.audit import main

PLANTS = "tests.tools.audit.plants"
# plant, or nothing: loop, stage, dtype, more arguments, kind of the finding, words in it
PLANTED: list[tuple[str, str, int, str, list[str], str, str]] = [
    ("dropped_micro_batch", "bare", 2, "bf16", [], "gradients", "micro-batch 2 is lost"),
    ("doubled_micro_batch", "accelerate", 2, "fp32", [], "gradients", "micro-batch 2 is doubled"),
    ("doubled_gradient", "hf", 1, "fp16", [], "gradients", "reduced gradient is doubled"),
    ("skipped_rank", "bare", 3, "bf16", [], "gradients", "rank 1's gradients are lost"),
    ("dropped_parameter", "hf", 2, "bf16", [], "gradients", "is lost, in some parameters"),
    ("old_gradients", "bare", 0, "fp32", [], "gradients", "not the micro-batches'"),
    ("rounded_start", "bare", 2, "fp32", ["--fp32-weights"], "masters", "start as BF16 numbers"),
    ("", "accelerate", 2, "bf16", ["--fp32-weights"], "masters", "start as BF16 numbers"),
    ("rounded_masters", "bare", 2, "fp32", [], "masters", "BF16 numbers after an update"),
    ("clipped_before_unscaling", "bare", 2, "fp16", [], "clipping", "norm of the scaled gradient"),
    ("partial_norm", "bare", 2, "fp32", [], "clipping", "norm of a part"),
    ("norm_of_a_group", "hf", 1, "bf16", [], "clipping", "norm of a part"),
    ("other_weights", "bare", 0, "fp32", [], "ranks", "rank 1 has other weights"),
    ("stale_weights", "bare", 2, "bf16", [], "ranks", "other weights than its rounded masters"),
    ("changed_masters", "bare", 2, "bf16", [], "updates", "change between two steps"),
    ("rate_one_step_ahead", "accelerate", 1, "fp32", [], "learning rate", "ahead of the updates"),
    ("other_rate", "bare", 2, "bf16", [], "learning rate", "another learning rate"),
    ("lost_update", "bare", 1, "bf16", [], "updates", "is lost"),
    ("coarse_moments", "bare", 2, "fp32", [], "updates", "second moment"),
    ("shifted_labels", "bare", 2, "fp32", [], "loss", "the token after the next"),
    ("stale_batch", "accelerate", 2, "fp32", [], "loss", "trained on again"),
    ("same_batch_on_ranks", "bare", 2, "bf16", [], "loss", "ranks train on the same batch"),
    ("loss_in_16_bits", "bare", 2, "bf16", [], "dtypes", "the loss is torch.bfloat16"),
    ("reported_sum", "hf", 2, "fp32", [], "loss", "reported is not the mean"),
    ("", "bare", 2, "fp32", ["--unequal"], "loss", "mean of the micro-batches' means"),
    ("", "accelerate", 1, "bf16", ["--unequal"], "loss", "mean of the micro-batches' means"),
    ("", "bare", 2, "bf16", [], "reduction", "summed in BF16"),
    ("", "hf", 0, "fp16", [], "gradients", "divided by a loss scale"),
    ("", "bare", 0, "bf16", [], "updates", "has counted other updates"),
]


def audited(out: Path, loop: str, stage: int, dtype: str, *more: str, plant: str = "") -> dict[str, Any]:
    """The report of a loop's probe."""
    given = ["--trainer", loop, "--stage", str(stage), "--dtype", dtype, "--out", str(out), *more]
    main([*given, *(["--plant", f"{PLANTS}:{plant}"] if plant else [])])
    found: dict[str, Any] = json.loads((out / f"{loop}-{stage}-{dtype}.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "loop", "stage", "dtype", "more", "kind", "words"), PLANTED)
def test_a_planted_mistake_is_found(
    plant: str, loop: str, stage: int, dtype: str, more: list[str], kind: str, words: str, tmp_path: Path
) -> None:
    report = audited(tmp_path, loop, stage, dtype, *more, plant=plant)
    assert any(each["kind"] == kind and words in each["what"] for each in report["findings"]), report["findings"]
