"""Mantissa side by side with other loops: what is measured, compared and made of seconds; mistakes in one line."""

import json
import math
import multiprocessing
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.errors import UserError
from config.machine.processes import free_port
from config.schema import AdapterSection, DataSection
from lab.benchmark import command, data, largest, loss
from lab.benchmark import command as benchmark
from lab.benchmark.contestants import Run
from lab.benchmark.harness import in_rounds
from lab.benchmark.overhead import Stages, estimate, median_ratio, ratio_of_sums, report_ratio, require_comparable
from lab.benchmark.report import bound, compare, page
from lab.benchmark.spec import Result, flops_per_token
from lab.gpu_check.measure import trained
from modeling.adapter import add_adapter
from tests.lab.benchmark import benchmark_cases
from tests.lab.benchmark.benchmark_cases import RECIPE
from tests.support.jobs import forked
from tests.support.jobs.launches import BIN, LAUNCHERS, SMALL


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


def test_flops_of_layers_that_differ_are_summed() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"vocab_size": 50, "head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 50}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma4_text", **sizes, global_head_dim=32))
    assert flops_per_token(model, 24) - flops_per_token(model, 0) == pytest.approx(12 * 4 * (16 + 16 + 32) * 24)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_flops_of_experts_are_those_of_the_chosen_ones(kind: str) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"intermediate_size": 96, "vocab_size": 50, "head_dim": 16, "num_experts_per_tok": 2}
    sizes |= {"num_experts": 8, "moe_intermediate_size": 96} if kind == "qwen3_moe" else {"num_local_experts": 8}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), attn_implementation="eager")
    model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.randint(50, (1, 24)), use_cache=False).logits.sum().backward()
    assert counter.get_total_flops() / 24 == pytest.approx(flops_per_token(model, 24), rel=1e-3)


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


MISTAKES = {
    command: [
        (["--contestants", "mantissa,bear"], "there is no bear"),
        (["--contestants", "torchtitan"], "none of them can run here"),
        (["--at-least", "mantissa=1"], "takes no part"),
        (["--at-least", "mantissa/bare"], "is not of the form"),
        (["--contestants", "mantissa", "--at-least", "mantissa/bare=1"], "bare takes no part"),
        (["precision.path=manifest", "precision.manifest=config/manifests/bf16.json"], "path = manifest would not"),
        (["model.activation_checkpointing=selective"], "selective would not be the same for all contestants; set"),
    ],
    largest: [
        (["--layers", "4,2"], "ascending"),
        (["--layers", "2", "model.confg.num_hidden_layers=3"], "model.confg"),
    ],
    data: [
        (["--megabytes", "100"], "--megabytes 100: data.path="),
        (["--json", "/nowhere/rows.json"], "--json /nowhere/rows.json: cannot be written"),
    ],
}
GIVEN = {
    command: ["--config", RECIPE, "--out"],
    largest: ["--config", RECIPE, "--layers", "2", "--out"],
    data: ["--path", str(REPOSITORY / "data"), "--json"],
}
"""Options of each; the last one names the output."""


@pytest.mark.parametrize(
    ("tool", "arguments", "said"), [(tool, *mistake) for tool, mistakes in MISTAKES.items() for mistake in mistakes]
)
def test_a_mistake_is_one_line_and_exit_code_2(tool, arguments, said, tmp_path, refusal) -> None:
    assert said in refusal(tool.main, [*GIVEN[tool], str(tmp_path / "out"), *arguments])


def test_a_loss_that_cannot_be_computed_is_a_row(capsys, monkeypatch) -> None:
    """One that nobody knows stands for one that has no memory."""
    context = forked.context()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    options = ["--vocabulary", "64", "--hidden", "8", "--tokens", "16", "--repeats", "0", "--json"]
    assert loss.main([*options, "--ways", "of nobody", "chunked"]) == 3
    failed, chunked = map(json.loads, capsys.readouterr().out.splitlines())
    assert failed["way"] == "of nobody" and "of nobody" in failed["failed"]
    assert "failed" not in chunked and 3 < chunked["loss"] < 6


def test_a_benchmark_of_a_run_that_saves_into_a_store_leaves_the_store_alone(tmp_path) -> None:
    store = ["checkpoint.dir=s3://bucket/runs", "checkpoint.storage_options={anon: true}"]
    options = command.read_options(["--config", RECIPE, "--out", str(tmp_path), *store])
    assert command.resolve(options, 1)[0].config.checkpoint.dir is None


def test_rates_are_those_of_all_timed_tokens_where_steps_have_unequal_ones(tmp_path, monkeypatch) -> None:
    """Rows are padded, and the first steps are slow."""
    tokens, seconds = np.cumsum([500, 500, 500, 300, 100, 200]).tolist(), [9.0, 9.0, 9.0, 1.0, 4.0, 1.0]
    steps = [
        {"event": "step", "tokens": n, "step_seconds": each, "loss": 2.0, "applied": True, "memory_bytes": 1}
        for n, each in zip(tokens, seconds, strict=True)
    ]
    events = [{"event": "run_start", "parameters": 1, "attention": "sdpa"}, *steps]
    assert trained(events)["tokens/s"] == 100
    monkeypatch.setattr(largest, "train", lambda *_, **__: (0, tmp_path, events[:1] + events[3:]))
    found = largest.run_depth([], tmp_path, "one", processes=1, limit=math.inf)
    assert (found["step_seconds"], found["tokens_per_second"]) == (1.0, 100)


@pytest.mark.slow
def test_a_job_that_takes_too_much_is_ended_and_the_one_before_is_the_largest(tmp_path, capsys) -> None:
    """One block of width 512 beside 600, whose weights alone are 4 GB. Other children of this process stay."""
    bystander = subprocess.Popen([sys.executable, "-c", "held = bytearray(2**30); input()"], stdin=subprocess.PIPE)
    widths = "model.config={hidden_size: 512, intermediate_size: 512, num_attention_heads: 2, vocab_size: 300}"
    overrides = [*SMALL, widths, f"data.cache_dir={tmp_path}/cache", "batch.global_size=2"]
    options = ["--layers", "1,600", "--steps", "2", "--host-gib", "1.3", "--processes", "1", "--out", str(tmp_path)]
    code = largest.main(["--config", RECIPE, *options, *overrides])
    found = json.loads((tmp_path / "largest.json").read_text())
    first, second = found["depths"]["1"], found["depths"]["600"]
    alive = bystander.poll() is None
    bystander.kill()
    bystander.wait()
    assert alive and code == 0 and found["largest"] == 1
    assert first["failed"] is None and first["parameters"] == 2 * 512 * 300 + 4 * 512**2 + 3 * 512**2 + 3 * 512
    assert first["tokens_per_second"] == pytest.approx(64 / first["step_seconds"])
    assert 0.2e9 < first["host_bytes"] < 1.3 * 2**30 < second["host_bytes"]
    assert second["failed"] == "took more than 1.3 GiB of this machine's memory"
    assert "| 1 | 2,143,744 |" in capsys.readouterr().out and "| 600 | - |" in (tmp_path / "largest.md").read_text()


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    generator = random.Random(0)
    for number in range(40):
        (folder / f"{number:02d}.txt").write_text("".join(generator.choices("aä🙂 \n", k=2000)))
    return folder


@pytest.mark.parametrize("megabytes", [0.00001, 0.03, 0.1])
def test_the_text_is_as_long_as_was_asked(texts: Path, tmp_path: Path, megabytes: float) -> None:
    source = DataSection(source="text", path=str(texts))
    out = tmp_path / "out"
    out.mkdir()
    data.write_documents(source, megabytes, out)
    written = "".join(path.read_text() for path in sorted(out.iterdir()))
    whole = "".join(path.read_text() for path in sorted(texts.iterdir()))
    assert whole.startswith(written)
    assert megabytes * 1e6 - 3 <= len(written.encode()) <= megabytes * 1e6


def drifting(ratio: float, *, pairs: int, noise: float) -> np.ndarray:
    """Seconds of two loops on a machine whose speed drifts by a half; `ratio` is that of their tokens/s."""
    generator = np.random.default_rng(3)
    speed = 1.0 + 0.5 * np.sin(np.linspace(0, 7, pairs))
    bare, guarded = (speed * generator.lognormal(0.0, noise, size=pairs) for _ in range(2))
    return np.stack([bare, guarded / ratio], axis=1)


@pytest.mark.parametrize("statistic", [median_ratio, ratio_of_sums])
@pytest.mark.parametrize("ratio", [0.97, 1.0, 1.05])
def test_an_interval_holds_the_true_ratio_and_tells_a_hundredth_where_pairs_are_many(ratio, statistic) -> None:
    found, low, high = estimate(statistic, drifting(ratio, pairs=400, noise=0.05))
    assert low < ratio < high and low < found < high and high - low < 0.025
    _, few_low, few_high = estimate(statistic, drifting(ratio, pairs=20, noise=0.05))
    assert few_high - few_low > 2 * (high - low)


@pytest.mark.parametrize(
    ("distance", "ratio", "at_least", "code", "said"),
    [
        (1e-8, 0.97, None, 0, ""),
        (1e-8, 0.97, 0.96, 0, ""),
        (1e-8, 0.97, 0.99, 3, "the median is below 0.99 for certain"),
        (2e-4, 1.0, None, 3, "losses differ by 2.0e-04, more than 0.0001"),
        (math.nan, 1.0, None, 3, "losses differ by nan"),
    ],
)
def test_the_exit_code_is_a_gate(distance, ratio, at_least, code, said, capsys) -> None:
    seconds = drifting(ratio, pairs=400, noise=0.02)
    assert report_ratio(seconds, distance, steps=1, compute="fp32", at_least=at_least) == code
    assert said in capsys.readouterr().err


LOADED = ("model.architecture=null", "model.config={}", "model.name_or_path=some/model", "data.tokenizer=some/model")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["deepspeed.config=ds_configs/zero3_fp32.json"], "ZeRO stage = 3"),
        (["model.activation_checkpointing=ops"], "model.activation_checkpointing = ops"),
        (["data.document_masking=true"], "data.document_masking = True"),
        (["task=sft", "data.source=hub", "data.path=some/rows", *LOADED], "task = sft"),
        (["adapter.kind=lora", *LOADED], "adapter.kind = lora"),
        (["model.architecture=mixtral", "model.balance_loss=0.01"], "model.balance_loss = 0.01"),
        (["model.architecture=mixtral", "model.router_z_loss=0.01"], "model.router_z_loss = 0.01"),
    ],
)
def test_what_the_plain_loop_does_not_have_is_refused(overrides, said) -> None:
    with pytest.raises(UserError, match=said):
        require_comparable(read_command_line(["--config", RECIPE, *overrides]))


def test_what_is_timed_is_done_in_every_second_block_and_nothing_else_is(solo) -> None:
    """Five warm-ups of a step each way, one of a block of two steps; the first step of a run is always observed."""
    [found] = solo.run(benchmark_cases.optional_work, pairs=2)
    same = {"seconds": (2, 2), "step": 14, "corruption": 0, "saves": 0}
    assert found == {
        "telemetry": same | {"telemetry": 7, "precision": 1},
        "adam": same | {"telemetry": 14, "precision": 1},
        "observation": same | {"telemetry": 0, "precision": 7},
        "save": same | {"step": 12, "telemetry": 0, "precision": 1, "saves": 3},
        "checks": same | {"step": 12, "telemetry": 0, "precision": 1},
    }


@pytest.mark.slow
def test_two_ranks_train_both_to_the_same_losses(tmp_path) -> None:
    port = free_port()
    launch = [part.format(port=port) for part in LAUNCHERS["torchrun"]]
    overrides = [*SMALL, f"data.cache_dir={tmp_path}", "schedule.warmup_steps=2", "tracking.wandb=disabled"]
    arguments = ["-m", "lab.benchmark.overhead", "--config", RECIPE, "--pairs", "3", "--steps", "2", *overrides]
    done = subprocess.run([BIN / launch[0], *launch[1:], *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    [distance] = re.findall(r"^losses +(\S+) apart at most", done.stdout, flags=re.MULTILINE)
    assert float(distance) < 1e-6 and "3 pairs of 2 steps" in done.stdout and "step 11/11" in done.stdout
