"""Masters: before the first step the FP32 values that a run starts from; split ones train as whole ones do."""

import json
import re
from pathlib import Path

import pytest
import torch

from config.cli import REPOSITORY
from precision.split_masters import SPLIT_BYTES, SPLIT_PIECE
from tests.support.jobs.process_group import ProcessGroup
from tests.support.marks import slow
from tests.support.models.small_run import gathered
from tests.training.engine import engine_cases as cases
from training.engine.split_masters import SplitAdamW, SplitMaster

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


STEPS = 16


def optimizer_of(master: torch.Tensor, *, split: bool) -> tuple[SplitAdamW, torch.Tensor, torch.Tensor]:
    """(optimizer, flat master, weight) of values that are given, rounded to BF16 for the weight."""
    flat, weight = master.clone().requires_grad_(), master.bfloat16()
    optimizer = SplitAdamW([{"params": [flat], "weight_decay": 0.1}], {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8})
    if split:
        optimizer.splits = {flat: SplitMaster(flat, weight)}
        assert optimizer.splits[flat].split() == 0
    return optimizer, flat, weight


def test_adamw_on_split_masters_is_adamw_on_masters() -> None:
    """Bit for bit, on two pieces and a part of one, from weights in FP16: one in sixteen of them is a tie that 16 bits
    confuse with another."""
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(2 * SPLIT_PIECE + 1001, generator=draw).half().float()
    start[:4] = torch.tensor([0.0, -0.0, 1e-40, -3e-45])
    whole, flat, _ = optimizer_of(start, split=False)
    lean, hidden, weight = optimizer_of(start, split=True)
    split = lean.splits[hidden]
    for step in range(20):
        gradient = torch.randn(len(start), generator=draw) * 10.0 ** -(step % 8)
        gradient[::7] = 0.0
        for optimizer, of in ((whole, flat), (lean, hidden)):
            of.grad = gradient.clone()
            optimizer.step()
        assert hidden.data is not None and torch.equal(hidden.data, weight)  # what DeepSpeed copies
        split.hide()
        values = split.values(0, len(start))
        assert torch.equal(values.view(torch.int32), flat.detach().view(torch.int32))
        assert torch.equal(weight.view(torch.int16), flat.detach().bfloat16().view(torch.int16))
    for name, kept in whole.state[flat].items():
        assert torch.equal(kept, lean.state[hidden][name]), name


def test_a_hidden_master_can_be_neither_read_by_mistake_nor_written() -> None:
    _, flat, _ = optimizer_of(torch.randn(40), split=True)
    assert flat.detach().isnan().all()
    assert flat.untyped_storage().nbytes() == 4
    with pytest.raises(RuntimeError, match="single memory location"):
        flat.data.add_(1.0)


def test_a_weight_that_is_not_its_master_is_not_split() -> None:
    flat = torch.randn(100)
    split = SplitMaster(flat, (flat + 1).bfloat16())
    assert split.split() == 100
    assert split.whole


def require_same(left: list[dict], right: list[dict], *, steps: int = STEPS) -> None:
    for a, b in zip(left, right, strict=True):
        assert a["rows"] == b["rows"]
        assert a["checksums"] == b["checksums"]
        assert a["skipped_unchanged"] and b["skipped_unchanged"]
        assert [row[2] for row in a["rows"]].count(False) == sum(
            step > steps - len(a["rows"]) for step in (cases.SKIPPED, cases.STRUCK)
        )


@pytest.mark.parametrize(("ranks", "stage"), [("pair", 2), ("pair", 3), slow("pair", 1), slow("four", 2)])
def test_a_run_is_the_run_with_fp32_masters(request, ranks: str, stage: int) -> None:
    """Losses, norms, update ratios, masters and moments of all ranks, clipped; steps that are not applied change
    nothing."""
    group, steps = request.getfixturevalue(ranks), STEPS if ranks == "pair" else 6
    options = {"stage": stage, "steps": steps}
    require_same(
        group.once(cases.trained, masters="fp32", **options),
        group.run(cases.trained, masters="split", **options),
        steps=steps,
    )


@pytest.mark.slow
@pytest.mark.parametrize("world", ["solo", "pair"])
@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 1, "more": ("bf16.immediate_grad_update",)},
        {"stage": 2, "more": ("parameter_alignment",)},
        {"stage": 3, "more": ("sub_group_size", "zero_hpz_partition_size")},
    ],
    ids=str,
)
def test_the_jsons_settings_change_nothing(request, tmp_path, world: str, zero: dict) -> None:
    """Gaps between parameters, groups cut in several, gradients summed at once, a second copy of the weights."""
    values = {"sub_group_size": 3000, "zero_hpz_partition_size": 2 if world == "pair" else 1}
    document = json.loads((REPOSITORY / f"ds_configs/zero{zero['stage']}_bf16.json").read_text())
    for key in zero["more"]:
        section, name = document["zero_optimization"], key
        if key.startswith("bf16."):
            section, name = document["bf16"], key.removeprefix("bf16.")
        section[name] = values.get(name, True)
    (tmp_path / "ds.json").write_text(json.dumps(document))
    more = [f"deepspeed.config={tmp_path}/ds.json", "model.config.hidden_size=28", "model.config.intermediate_size=47"]
    group, options = request.getfixturevalue(world), {"stage": zero["stage"], "steps": STEPS, "more": more}
    require_same(*(group.run(cases.trained, masters=masters, **options) for masters in ("fp32", "split")))


@pytest.mark.one_in(9)
@pytest.mark.parametrize("stage", [2, 1, 3])
@pytest.mark.parametrize(("before", "after"), [("split", "fp32"), ("fp32", "split"), ("split", "split")])
def test_a_run_resumes_with_either_kind_of_masters(pair, tmp_path, stage: int, before: str, after: str) -> None:
    """A checkpoint has FP32 masters, whatever the run had: the steps after it are those of a run that did not stop."""
    options = {"stage": stage, "steps": STEPS}
    expected = pair.once(cases.trained, masters="fp32", **options)
    saved = pair.run(cases.trained, masters=before, save=str(tmp_path), **options)
    found = pair.run(cases.trained, masters=after, load=str(tmp_path), **options)
    require_same(expected, saved)
    for whole, rest in zip(expected, found, strict=True):
        assert rest["rows"] == whole["rows"][STEPS // 2 :]
        assert rest["checksums"] == whole["checksums"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_masters_are_held_once(pair, stage: int) -> None:
    for found in pair.run(cases.held, stage=stage):
        dtype, size = found["row"]
        assert dtype == "float32, less their weights"
        assert size == pytest.approx(SPLIT_BYTES * found["values"], rel=1e-3)
        assert found["memory"] <= 8  # one NaN of each of two groups
        assert found["past"]
        assert found["part"]
        for name, master in found["outside"].items():
            assert torch.equal(found["masters"][name], master)
            assert torch.equal(found["deepspeed"][name], master)


def test_masters_that_are_written_wrong_are_an_error_on_every_rank(pair) -> None:
    for text, after in pair.run(cases.written_wrong):
        assert text == "precision.masters = split: 1 weights differ from their rounded FP32 masters"
        assert after["same"]
