"""Split masters train bit for bit as FP32 masters do, and are FP32 masters to whoever saves, loads or reads them."""

import json

import pytest
import torch

from config.cli import REPOSITORY
from precision.split_masters import SPLIT_BYTES, SPLIT_PIECE
from tests.support.marks import slow
from tests.training.engine import engine_cases
from training.engine.split_masters import SplitAdamW, SplitMaster

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
    flat, weight = torch.randn(100), torch.randn(100).bfloat16()
    split = SplitMaster(flat, weight)
    assert split.split() == 100
    assert split.whole


def require_same(left: list[dict], right: list[dict], *, steps: int = STEPS) -> None:
    for a, b in zip(left, right, strict=True):
        assert a["rows"] == b["rows"]
        assert a["checksums"] == b["checksums"]
        assert a["skipped_unchanged"] and b["skipped_unchanged"]
        assert [row[2] for row in a["rows"]].count(False) == sum(
            step > steps - len(a["rows"]) for step in (engine_cases.SKIPPED, engine_cases.STRUCK)
        )


@pytest.mark.parametrize(("ranks", "stage"), [("pair", 2), ("pair", 3), slow("pair", 1), slow("four", 2)])
def test_a_run_is_the_run_with_fp32_masters(request, ranks: str, stage: int) -> None:
    """Losses, norms, update ratios, masters and moments of all ranks, clipped; steps that are not applied change
    nothing."""
    group, steps = request.getfixturevalue(ranks), STEPS if ranks == "pair" else 6
    options = {"stage": stage, "steps": steps}
    require_same(
        group.once(engine_cases.trained, masters="fp32", **options),
        group.run(engine_cases.trained, masters="split", **options),
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
    require_same(*(group.run(engine_cases.trained, masters=masters, **options) for masters in ("fp32", "split")))


@pytest.mark.one_in(9)
@pytest.mark.parametrize("stage", [2, 1, 3])
@pytest.mark.parametrize(("before", "after"), [("split", "fp32"), ("fp32", "split"), ("split", "split")])
def test_a_run_resumes_with_either_kind_of_masters(pair, tmp_path, stage: int, before: str, after: str) -> None:
    """A checkpoint has FP32 masters, whatever the run had: the steps after it are those of a run that did not stop."""
    options = {"stage": stage, "steps": STEPS}
    expected = pair.once(engine_cases.trained, masters="fp32", **options)
    saved = pair.run(engine_cases.trained, masters=before, save=str(tmp_path), **options)
    found = pair.run(engine_cases.trained, masters=after, load=str(tmp_path), **options)
    require_same(expected, saved)
    for whole, rest in zip(expected, found, strict=True):
        assert rest["rows"] == whole["rows"][STEPS // 2 :]
        assert rest["checksums"] == whole["checksums"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_masters_are_held_once(pair, stage: int) -> None:
    for found in pair.run(engine_cases.held, stage=stage):
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
    for text, after in pair.run(engine_cases.written_wrong):
        assert text == "precision.masters = split: 1 weights differ from their rounded FP32 masters"
        assert after["same"]
