"""Bits flipped into real runs: what is found, named and repaired, and what a healthy step pays."""

import math
import random
import socket
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from config.schema import OptimizerSection
from data.text.prepare import prepare
from tests.support.jobs.process_group import ProcessGroup
from tests.support.marks import slow
from tests.training.checkpoint import resume_cases
from tests.training.corruption import corruption_cases as cases
from training.corruption import rerun
from training.engine.flips import bit_sum, flip_bit
from training.engine.optimizers.adamw import after, build
from training.engine.optimizers.rule import UpdateInputs

ON = ("guard.replica_checks=1", "guard.update_checks=100000")


def fault(place: str, bit: int, *, step: int, rank: int = 1, module: str = cases.HIT, persists: bool = False) -> str:
    where = f"step: {step}, rank: {rank}, module: {module}, persists: {str(persists).lower()}"
    return f"{{kind: flipped_bit, place: {place}, bit: {bit}, {where}}}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_the_sum_of_bits_changes_with_any_bit(dtype: torch.dtype) -> None:
    """Values need not begin or end where a word of 64 bits does."""
    storage = torch.randint(-(1 << 62), 1 << 62, (80,), generator=torch.Generator().manual_seed(3)).view(dtype)
    bits = 8 * storage.element_size()
    for offset, length in ((0, 64), (1, 63), (3, 6), (2, 1)):
        values = storage[offset : offset + length]
        sums = {int(bit_sum(values))}
        for place in (0, length - 1):
            for bit in range(bits):
                flip_bit(values, place, bit)
                sums.add(int(bit_sum(values)))
                flip_bit(values, place, bit)
        assert len(sums) >= bits + 1


def test_torchs_update_is_within_the_bounds_and_flips_of_almost_all_bits_are_not() -> None:
    """The bounds have to hold for every value, and still be so narrow that a flip is beyond them."""
    generator = torch.Generator().manual_seed(5)
    section = replace(OptimizerSection(), betas=(0.9, 0.95), eps=1e-8)
    size = 4096

    def drawn(scale: float | torch.Tensor) -> torch.Tensor:
        return scale * torch.randn(size, generator=generator)

    worst, missed = 0.0, Counter[str]()
    for step in (1, 2, 30, 5000):
        scale = 10 ** (torch.rand(size, generator=generator) * 5 - 6)  # of a value's gradients
        weight, gradient, begun = torch.nn.Parameter(drawn(0.02)), drawn(scale), float(step > 1)
        first, second = drawn(scale) * 0.3 * begun, (drawn(scale).square() + drawn(scale).square()) * begun
        group = {"params": [weight], "weight_decay": 0.1}
        optimizer = build([group], {"lr": 1e-3, "betas": section.betas, "eps": section.eps}, offload_to_host=False)
        kept = [weight.detach().clone(), first.clone(), second.clone()]
        state = {"step": torch.tensor(float(step - 1)), "exp_avg": first, "exp_avg_sq": second}
        optimizer.state[weight] = state
        weight.grad = gradient.clone()
        optimizer.step()
        found = [weight.detach(), state["exp_avg"], state["exp_avg_sq"]]
        given = UpdateInputs(
            kept[0], gradient, kept[1:], section=section, weight_decay=0.1, lr=1e-3, step=step, matrix=False
        )
        expected, slack = after(given)
        for got, right, bound in zip(found, expected, slack, strict=True):
            apart = (got.double() - right).abs()
            assert bool((apart <= bound).all())
            worst = max(worst, float((apart / bound.clamp(min=1e-300)).max()))
        for row, name in enumerate(("master", "first", "second")):
            for bit in range(4, 31) if step > 1 or not row else ():
                tried = [values.clone() for values in kept]
                tried[row] = (tried[row].view(torch.int32) ^ (1 << bit)).view(torch.float32)
                other = replace(given, master=tried[0], states=tried[1:])
                wrong = [
                    ~((got.double() - right).abs() <= bound)
                    for got, right, bound in zip(found, *after(other), strict=True)
                ]
                caught = torch.stack(wrong).any(0)
                missed[f"{name} {bit}"] += int((~caught).sum())
    assert worst > 0.05, "bounds far wider than needed find less"
    share = {what: count / size / 4 for what, count in missed.items()}
    assert all(lost == 0 for what, lost in share.items() if int(what.split()[1]) >= 18)
    assert all(lost < 0.02 for what, lost in share.items() if int(what.split()[1]) >= 10)
    assert all(share[f"{name} 8"] < 0.1 for name in ("master", "first", "second"))


def test_transient_flips_are_named_and_made_good_and_the_run_ends_with_the_bits_of_a_clean_one(pair) -> None:
    """A weight, a gradient of one rank, a reduced gradient and an activation, one after the other in one run."""
    layer = "model.layers.0.mlp.down_proj"
    faults = [
        fault("weight", 14, step=2, rank=0),
        fault("weight", 0, step=3),
        fault("gradient", 9, step=4, rank=0),
        fault("collective", 20, step=6),
        fault("activation", 6, step=8, module=layer),
    ]
    clean = pair.run(cases.trained, stage=2, compute="bf16", overrides=(), steps=9)[0]
    planted = (*ON, "guard.reexecute=every 2", f"faults=[{', '.join(faults)}]")
    found = pair.run(cases.trained, stage=2, compute="bf16", overrides=planted, steps=9)[0]
    named = [(e["step"], e["ranks"], e["module"], e["bits"], e["repaired"]) for e in found["corruption"]]
    assert named == [(2, [0], f"{cases.HIT}.weight", [14], True), (3, [1], f"{cases.HIT}.weight", [0], True)]
    again = [(e["step"], e["outcome"], e["ranks"]) for e in found["reexecution"]]
    assert again == [(2, "transient", [0]), *((step, "transient", [r]) for step, r in ((3, 1), (4, 0), (6, 1), (8, 1)))]
    assert found["reexecution"][2]["modules"] == [f"{cases.HIT}.weight"]
    assert [e.get("drain") for e in found["reexecution"]] == [False, False, False, False, True], (
        "rank 1 for the third time"
    )
    assert found["verdicts"] == ["STEP"] * 9 and found["losses"] == clean["losses"]
    assert all(np.array_equal(found["masters"][name], value) for name, value in clean["masters"].items())


def test_a_flip_in_sharded_state_ends_the_run_with_its_rank_tensor_and_bit(pair: ProcessGroup) -> None:
    planted = (*ON, f"faults=[{fault('moment', 27, step=3)}]")
    found = pair.run(cases.trained, stage=3, compute="bf16", overrides=planted)[0]
    (event,) = found["corruption"]
    told = [event[key] for key in ("found_by", "ranks", "module", "tensor", "bits", "repaired")]
    assert told == ["update", [1], f"{cases.HIT}.weight", "exp_avg", [27], False]
    assert found["verdicts"] == ["STEP"] * 3 + ["ABORT"] and "drain" in found["reason"]


MIXTURE = ("model.architecture=mixtral", "model.config.num_local_experts=4", "parallel.expert=2", ON[1])


@pytest.mark.parametrize("stage", [2, slow(1), slow(3)])
def test_a_flip_in_shared_experts_is_named_in_the_whole_parameter(pair: ProcessGroup, stage: int) -> None:
    """Each rank checks its own. Rank 1 has the third and the fourth expert; the first value of its masters flips."""
    expert = "model.layers.1.mlp.experts"
    planted = (*MIXTURE, f"faults=[{fault('moment', 27, step=3, module=expert)}]")
    found = pair.run(cases.trained_with_shared_experts, stage=stage, compute="bf16", overrides=planted)[0]
    (event,) = found["corruption"]
    assert [event[key] for key in ("found_by", "ranks", "tensor", "bits")] == ["update", [1], "exp_avg", [27]]
    assert event["module"] == f"{expert}.gate_up_proj" and event["index"] >= 2 * 96 * 32
    assert found["verdicts"] == ["STEP"] * 3 + ["ABORT"]
    clean = pair.run(cases.trained_with_shared_experts, stage=stage, compute="bf16", overrides=MIXTURE)[0]
    assert clean["corruption"] == [] and clean["verdicts"] == ["STEP"] * 5


def test_a_split_master_is_no_witness_of_the_weight_that_it_is_made_of(pair: ProcessGroup) -> None:
    """The owner of two ranks would always be right, even when its own weight has flipped: nothing is overwritten."""
    planted = (*ON, "precision.masters=split", f"faults=[{fault('weight', 14, step=3, rank=0)}]")
    found = pair.run(cases.trained, stage=2, compute="bf16", overrides=planted)[0]
    (event,) = (event for event in found["corruption"] if event["found_by"] == "copies")
    assert (event["module"], event["tensor"], event["repaired"]) == (f"{cases.HIT}.weight", "weight", False)
    assert found["verdicts"] == ["STEP"] * 2 + ["ABORT"]


def test_a_numeric_event_is_left_to_the_guard_and_a_broken_rank_ends_the_run(pair: ProcessGroup) -> None:
    """The same activation again and again is broken; a loss that is nan on any rank that computes it is the data's."""
    planted = f"faults=[{fault('activation', 14, step=3, persists=True, module='model.layers.0.mlp.down_proj')}]"
    broken = pair.run(cases.trained, stage=2, compute="bf16", overrides=("guard.reexecute=every 3", planted), steps=4)[
        0
    ]
    assert [(e["step"], e["outcome"]) for e in broken["reexecution"]] == [(3, "persistent")]
    assert broken["verdicts"] == ["STEP", "STEP", "ABORT"] and "drain" in broken["reason"]
    both = "faults=[{kind: nan_loss, step: 2, rank: 0}, {kind: nan_loss, step: 2, rank: 1}]"
    numeric = pair.run(cases.trained, stage=2, compute="bf16", overrides=("guard.reexecute=suspicious", both), steps=3)[
        0
    ]
    assert [(e["step"], e["outcome"], e["ranks"]) for e in numeric["reexecution"]] == [(2, "numeric", [])]
    assert numeric["verdicts"] == ["STEP", "SKIP", "STEP"] and math.isnan(numeric["losses"][1])


def test_sums_in_another_order_are_no_fault_of_a_rank_and_a_flipped_exponent_is(pair: ProcessGroup) -> None:
    """OPT's keys have a bias, whose gradient is 0 but for rounding: softmax does not change with it."""
    opt = "{hidden_size: 32, ffn_dim: 48, num_hidden_layers: 2, num_attention_heads: 2, word_embed_proj_dim: 32}"
    shape = ("model.architecture=opt", f"model.config={opt}", "guard.reexecute=every 1")
    how = {"stage": 2, "compute": "bf16", "steps": 4}
    sound = pair.run(cases.trained_with_noise, overrides=shape, **how)[0]
    assert sound["reexecution"] == [] and sound["verdicts"] == ["STEP"] * 4
    flip = f"faults=[{fault('gradient', 14, step=3, rank=0, module='model.decoder.layers.1.fc2')}]"
    [found] = pair.run(cases.trained_with_noise, overrides=(*shape, flip), **how)[0]["reexecution"]
    assert [found[key] for key in ("step", "outcome", "ranks")] == [3, "transient", [0]]
    assert found["modules"] == ["model.decoder.layers.1.fc2.weight"]


class _Widened(TorchDispatchMode):
    """Sees how many FP64 values an operator returns at most."""

    most = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **kwargs or {})
        if isinstance(out, torch.Tensor) and out.dtype == torch.float64:
            self.most = max(self.most, out.numel())
        return out


def test_a_norm_where_sums_have_no_order_widens_a_part_of_a_gradient_at_a_time(monkeypatch) -> None:
    monkeypatch.setattr(rerun, "is_exact", lambda device: False)
    monkeypatch.setattr(rerun, "_PART", 1000)
    gradient = torch.randn(10_500, generator=torch.Generator().manual_seed(4)).bfloat16()
    parameter = torch.nn.Parameter(torch.zeros(105, 100, dtype=torch.bfloat16))
    monkeypatch.setattr(rerun, "trainable_parameters", lambda engine: {"embedding": parameter})
    engine: Any = SimpleNamespace(world=SimpleNamespace(device=torch.device("cpu")))
    local = rerun.LocalGradients(engine)
    with _Widened() as seen, local.signed():
        (parameter * gradient.view(105, 100)).sum().backward()
    assert seen.most == 1000
    assert local.sums.view(torch.float64).item() == pytest.approx(gradient.double().square().sum().item(), rel=1e-12)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("planted", "steps", "rank"),
    [(fault("weight", 14, step=4, persists=True), [2, 4], 1), (fault("master", 20, step=4), [2], 1)],
    ids=["a weight that sticks: the state is good, and saved", "a master: the older checkpoint stays the newest"],
)
def test_a_job_on_a_broken_machine_ends_with_its_own_code_rank_and_host(pair, tmp_path, planted, steps, rank) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("".join(random.Random(0).choices("abcdefgh ", k=1600)))
    prepare(resume_cases.resolve(str(tmp_path), "prepared", []).config.data, progress=False)
    overrides = [*ON, "guard.reexecute=suspicious", "guard.reactions=[skip, abort]", f"faults=[{planted}]"]
    zero2 = [
        "deepspeed.config=ds_configs/zero2_bf16.json",
        "precision.compute=bf16",
        "model.config.tie_word_embeddings=true",
    ]
    found = pair.run(cases.broken_job, folder=str(tmp_path), overrides=[*zero2, *overrides])[0]
    assert (found["exit_code"], found["progress"].step, found["saved"]) == (71, 4, steps)
    lines = [line for line in found["described"] if "silent corruption" in line or "the machine" in line]
    assert f"on rank {rank} (value" in lines[0] and socket.gethostname() in lines[0]
    assert "## Faults of the machine" in found["report"] and f"rank {rank}" in found["report"]
    assert any("ABORT" in line and f"drain {socket.gethostname()}" in line for line in found["described"])


@pytest.mark.slow
def test_the_figures_of_the_page(pair: ProcessGroup) -> None:
    """Figures of docs/corruption.md: flips found by place and bit, steps until found; -s prints them."""
    bits = {"weight": range(16), "gradient": range(16), "activation": range(16), "collective": range(0, 32, 2)}
    layer = "model.layers.0.mlp.down_proj"
    for stage, (place, tried) in [(stage, item) for stage in (2, 3) for item in bits.items()]:
        module = cases.HIT if place == "collective" else layer  # of which rank 1 holds the reduced gradient
        faults = ", ".join(fault(place, bit, step=2 + row, module=module) for row, bit in enumerate(tried))
        on = (*ON, "guard.reexecute=every 1", f"faults=[{faults}]", "guard.reactions=[skip, abort]")
        found = pair.run(cases.trained, stage=stage, compute="bf16", overrides=on, steps=2 + len(tried))[0]
        at = {event["step"] - 2 for event in found["corruption"] + found["reexecution"]}
        missed = [bit for row, bit in enumerate(tried) if row not in at]
        counted = f"{len(tried) - len(missed)} of {len(tried)} found, not bits {missed}"
        print(f"ZeRO-{stage}, {place}: {counted}; {found['verdicts'][-1]}")
        assert place == "activation" or not missed  # its lowest bits are rounded away by the next sum
    for place in ("master", "moment", "second_moment"):
        missed, wrong = [], []
        for bit in range(0, 31, 2):
            on = (*ON, f"faults=[{fault(place, bit, step=3, module=layer, rank=0)}]")
            found = pair.run(cases.trained, stage=2, compute="bf16", overrides=on, steps=5)[0]
            missed += [] if found["corruption"] else [bit]
            wrong += [bit for event in found["corruption"] if event["bits"] != [bit]]
        print(f"{place}: {16 - len(missed)} of 16 found, not bits {missed}; named another bit of {wrong}")
        assert all(bit < 16 for bit in missed)
    on = ("guard.replica_checks=16", f"faults=[{fault('weight', 3, step=2, module=layer)}]")
    found = pair.run(cases.trained, stage=0, compute="fp32", overrides=on, steps=40)[0]
    print("ZeRO-0, one in 16 steps: found at", [event["step"] for event in found["corruption"]])
    assert len(found["corruption"]) == 1
