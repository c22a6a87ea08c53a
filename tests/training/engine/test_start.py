"""Masters are, before the first step, the FP32 values of the weights that a run starts from, to the bit."""

import re
from pathlib import Path

import pytest

from tests.support.jobs.process_group import ProcessGroup
from tests.support.marks import slow
from tests.support.models.small_run import gathered
from tests.training.engine import engine_cases as cases

ODD = ["model.config.hidden_size=28", "model.config.intermediate_size=47", "model.config.tie_word_embeddings=false"]
"""Sizes that two ranks do not divide."""
MOE = "model.config={hidden_size: 32, intermediate_size: 48, moe_intermediate_size: 16, num_hidden_layers: 2, "
MOE += "num_attention_heads: 2, num_key_value_heads: 2, head_dim: 16, num_experts: 4, num_experts_per_tok: 2}"
EXPERTS = ["model.architecture=qwen3_moe", MOE]
LORA = "adapter={kind: lora, r: 4, target_modules: [q_proj, down_proj]}"


@pytest.fixture(scope="module")
def folders(solo: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for dtype in ("float32", "bfloat16"):
        solo.run(cases.save_models, folder=str(folder), models={"tied": [], "odd": ODD, "moe": EXPERTS}, dtype=dtype)
    return folder


def from_files(folder: Path, name: str) -> list[str]:
    return [f"model.name_or_path={folder / name}", "model.architecture=null", "model.config={}"]


def cells_of(folder: Path, stage: int, compute: str) -> list[cases.Cell]:
    """Ways to start that the config takes at a stage."""
    cells = [
        ("drawn", []),
        ("drawn, odd", ODD),
        ("drawn, experts", EXPERTS),
        ("muon", ["optimizer.name=muon"]),
        ("fp32 files", from_files(folder, "tied-float32")),
        ("fp32 files, odd", from_files(folder, "odd-float32")),
        ("fp32 files, experts", from_files(folder, "moe-float32")),  # which has each expert by itself
        ("bf16 files", from_files(folder, "tied-bfloat16")),
        ("lora", [*from_files(folder, "tied-float32"), LORA]),
        (
            "fp32 files, head beside lora",
            [*from_files(folder, "odd-float32"), LORA[:-1] + ", modules_to_save: [lm_head]}"],
        ),
    ]
    if compute == "bf16" and stage:
        cells.append(("split", [*from_files(folder, "odd-float32"), "precision.masters=split"]))
    if stage == 3:  # no parameter stays whole, and masters are many flat tensors
        cells.append(("fp32 files, gathered", [*from_files(folder, "odd-float32"), gathered(folder, compute)]))
    if stage:
        cells.append(("shared experts", [*EXPERTS, "parallel.expert=2"]))
        cells.append(("shared matrices", ["parallel.tensor=2"]))
    return cells


SAID = {"fp32 files": "float32 files", "bf16 files": "bfloat16 files", "split": "float32 files"}


SETTINGS = [
    (0, "fp32", ""),
    (3, "fp32", ""),
    *((stage, "bf16", "") for stage in (1, 2, 3)),
    *((stage, "fp16", "") for stage in (1, 2, 3)),
    *((stage, "bf16", "_offload") for stage in (1, 2, 3)),
]


@pytest.mark.parametrize(
    ("stage", "compute", "variant", "part"),
    # of every three ways to start `make test` takes one, another one at the next setting
    [
        (slow if part != number % 3 else pytest.param)(*setting, part)
        for number, setting in enumerate(SETTINGS)
        for part in range(3)
    ],
)
def test_masters_start_from_the_fp32_values_to_the_bit(pair, folders, stage, compute, variant, part) -> None:
    cells = cells_of(folders, stage, compute)[part::3]
    if variant:
        cells = [cell for cell in cells if not cell[0].startswith(("shared", "split"))]
    ranks = pair.run(cases.start, stage=stage, compute=compute, variant=variant, cells=cells, seconds=600)
    for found in ranks:
        for name, cell in found.items():
            assert not cell["wrong"], (name, cell["wrong"])
            source = SAID.get(name.partition(",")[0], "drawn in float32")
            assert cell["said"].startswith(f"{source}, equal to the bit (checksum "), (name, cell["said"])
            assert cell["masters"]
            if (compute, name) != ("fp16", "bf16 files"):  # small BF16 numbers are none of FP16
                exact = compute == "fp32" or name == "bf16 files"
                assert (cell["round"] == 0) is exact, (name, "masters that were rounded would pass")
    said = {name: cell["said"] for name, cell in ranks[0].items()}
    assert said == {name: cell["said"] for name, cell in ranks[1].items()}


@pytest.mark.parametrize(("stage", "compute"), [(1, "bf16"), (3, "bf16"), slow(2, "fp16"), slow(2, "fp32")])
def test_a_master_that_changed_before_the_first_step_is_named(pair: ProcessGroup, stage: int, compute: str) -> None:
    for text, stale in pair.run(cases.changed, stage=stage, compute=compute):
        assert re.match(r"model\..*: 1 of .*weights are not what they should be at the start.* its master has", stale)
        assert text.endswith(": its master differs from its initial value (drawn in float32)"), text


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_that_are_not_the_files_are_refused(pair: ProcessGroup, folders: Path, stage: int) -> None:
    for text in pair.run(cases.misread, stage=stage, overrides=from_files(folders, "tied-float32")):
        assert text.startswith("model.norm.weight: "), text
        assert f"{folders / 'tied-float32'} has 1" in text


def test_the_checksum_is_of_the_start_and_not_of_the_layout(pair: ProcessGroup, solo: ProcessGroup) -> None:
    cells = [("drawn", [])]
    said = {
        processes.run(cases.start, stage=stage, compute=compute, cells=cells)[0]["drawn"]["said"]
        for processes, stage, compute in ((solo, 0, "fp32"), (pair, 3, "fp32"), (pair, 2, "bf16"), (pair, 3, "bf16"))
    }
    assert len(said) == 1
