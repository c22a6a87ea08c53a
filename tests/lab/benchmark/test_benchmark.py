"""Mantissa side by side with other loops: what is measured, what is compared, and real jobs of two contestants."""

import math
import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from config.errors import UserError
from config.schema import AdapterSection
from lab.benchmark import command as benchmark
from lab.benchmark.contestants import Run
from lab.benchmark.harness import in_rounds
from lab.benchmark.overhead import Stages
from lab.benchmark.report import bound, compare, page
from lab.benchmark.spec import Result, flops_per_token
from modeling.adapter import add_adapter


def run_of(seconds: list[float], *, losses: list[float] | None = None, first: float = 10.0) -> Run:
    """A run with one untimed step, launched at 0, whose timed steps took so long."""
    stamps = [first]
    for each in seconds:
        stamps.append(stamps[-1] + each)
    result = Result(losses or [2.0 - step / 10 for step in range(len(stamps))], stamps, 1000, "an engine")
    return Run(0.0, 1, result)


def compared(runs: dict[str, list[Run]], **options):
    return compare(runs, **{"tokens": 100, "flops_per_token": 50.0, "peak": 1e5, "tolerance": 1e-3, **options})


def test_ratios_are_taken_round_by_round_so_that_a_drifting_machine_disturbs_all_alike() -> None:
    runs = {
        "mantissa": [run_of([speed, speed]) for speed in (1.0, 2.0, 40.0)],
        "bare": [run_of([speed * 1.1, speed * 1.1]) for speed in (1.0, 2.0, 40.0)],
    }
    found = compared(runs)
    mine = found["contestants"]["mantissa"]
    assert found["baseline"] == "bare" and found["loss_reference"] == "mantissa"
    assert mine["ratio"]["tokens_per_second"]["rounds"] == pytest.approx([1.1] * 3)
    assert mine["tokens_per_second"]["rounds"] == pytest.approx([100, 50, 2.5])
    assert [mine["tokens_per_second"][key] for key in ("median", "least", "most")] == pytest.approx([50, 2.5, 100])
    assert mine["mfu"] == pytest.approx(50 * 50 / 1e5)
    assert mine["first_step_seconds"]["median"] == 10.0


@pytest.mark.parametrize("losses", [[2.0, 1.9, 1.9], [2.0, 1.9, math.nan], [2.0, 1.9]])
def test_a_contestant_whose_losses_differ_gets_no_ratio_and_fails_every_bound(losses) -> None:
    runs = {"mantissa": [run_of([1.0, 1.0])], "bare": [run_of([9.0, 9.0], losses=losses)]}
    found = compared(runs)
    assert not found["contestants"]["bare"]["trains_the_same"]
    assert found["contestants"]["mantissa"]["ratio"] is None  # there is nobody to compare with
    assert not bound(found, "mantissa", "bare", 0.5)["holds"]
    written = {"passed_over": {"torchtitan": "why"}, "failed": {"trainer": "trainer-1 failed: no memory"}}
    written["bounds"] = [bound(found, *names, 0.5) for names in (("mantissa", "bare"), ("mantissa", "trainer"))]
    conditions = {"model": "m", "parameters": 1, "zero_stage": 2, "compute": "fp32", "processes": 2, "tokens": 100}
    conditions |= {"rounds": 1, "timed_steps": 2, "warm_up": 1, "task": "pretrain", "adapter": ""}
    text = page(found | written | {"conditions": conditions, "peak": {"flops": 1e5, "how": ""}, "flops_per_token": 50})
    assert "| bare | 11 | losses differ |" in text
    assert "torchtitan: not measured, why." in text and "fails: losses differ" in text
    assert "trainer-1 failed: no memory." in text and "mantissa/trainer >= 0.5: fails: trainer did not fin" in text


def test_a_contestant_that_fails_does_not_lose_what_the_others_measured(capsys) -> None:
    failed: dict[str, str] = {}
    names = ["mantissa", "bare", "trainer"]
    failing = {"mantissa-1", "trainer-2"}

    def run(_: str, label: str) -> Run:
        if label in failing:
            raise UserError(f"{label} failed: no memory; see a log")
        return run_of([1.0, 1.0])

    after = list(in_rounds(names, 3, run, failed, benchmark.tell))
    assert failed == {
        name: f"{name}-{number} failed: no memory; see a log" for name, number in (("mantissa", 1), ("trainer", 2))
    }
    assert {name: len(mine) for name, mine in after[-1].items()} == {"bare": 3, "trainer": 1}
    found = compared(after[-1])
    assert found["loss_reference"] == "bare"  # no Mantissa ran
    assert found["contestants"]["trainer"]["ratio"]["tokens_per_second"]["rounds"] == [1.0]
    assert "mantissa-1 failed: no memory" in capsys.readouterr().out
    with pytest.raises(UserError, match="mantissa-1 failed"):
        list(in_rounds(names[:1], 2, run, {}, benchmark.tell))


@pytest.mark.parametrize(("value", "holds"), [(0.99, True), (1.01, False)])
def test_a_bound_is_compared_with_the_median_of_the_rounds(value, holds) -> None:
    speeds = (1.0, 1.0, 9.0)
    runs = {"mantissa": [run_of([speed]) for speed in speeds], "trainer": [run_of([1.0]) for _ in speeds]}
    check = bound(compared(runs), "mantissa", "trainer", value)
    assert check == {"of": "mantissa/trainer", "least": value, "value": pytest.approx(1.0), "holds": holds}


@pytest.mark.parametrize("key_value_heads", [2, 4])
@pytest.mark.parametrize(
    "frozen",
    ["nothing", "nothing, tied", "factors", "factors of two", "factors, the output trained whole", "one layer"],
)
def test_flops_per_token_are_those_that_torch_counts(frozen: str, key_value_heads: int) -> None:
    """Without matmuls whose gradients nobody needs: of every frozen weight, and of inputs below the first trained."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": key_value_heads, "vocab_size": 50}
    shape = AutoConfig.for_model("llama", **sizes, tie_word_embeddings=frozen.endswith("tied"))
    model = AutoModelForCausalLM.from_config(shape, attn_implementation="eager")
    whole, tokens, not_needed = flops_per_token(model, 24), torch.randint(50, (2, 24)), 0
    if frozen == "one layer":
        model.model.layers[1].mlp.requires_grad_(False)
        assert flops_per_token(model, 24) == whole - 2 * 3 * 64 * 96
    elif frozen.startswith("factors"):
        targets = ("q_proj", "v_proj") if frozen.endswith("two") else ("all-linear",)
        kept = ("lm_head",) if frozen.endswith("whole") else ()
        add_adapter(model, AdapterSection(kind="lora", r=8, target_modules=targets, modules_to_save=kept), seed=0)
        first = model.model.layers[0].self_attn
        not_needed = 2 * 64 * (64 + 2 * 16 * key_value_heads)
        not_needed += sum(
            2 * 64 * 8 for layer in (first.q_proj, first.k_proj, first.v_proj) if hasattr(layer, "lora_A")
        )
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    # rotary embeddings multiply their frequencies by positions in a matmul of their own, forward only
    rotary = 2 * 2 * 24 * (64 // 4) / 2
    expected = (flops_per_token(model, 24) - not_needed) * tokens.numel()
    # keys of the first block without factors need no gradient themselves: a product less in its attention
    unneeded = 2 * 2 * 4 * 24 * 24 * 16 if frozen == "factors of two" else 0
    assert counter.get_total_flops() == pytest.approx(expected - unneeded, abs=2 * rotary)


def test_time_inside_a_stage_counts_for_the_inner_one_and_all_of_it_adds_up(monkeypatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    stages = Stages(torch.device("cpu"))
    for length in (1.0, 3.0):
        with stages.of("backward"):
            now += 2 * length
            with stages.of("collectives"):
                now += 4 * length
            now += length
        now += length
        stages.switch()
    assert stages.seconds == {"backward": 12.0, "collectives": 16.0, "other": 4.0}
