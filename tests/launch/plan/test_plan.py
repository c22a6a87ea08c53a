"""The planner's command line, its traffic, time and speed, what it says fits, and the table of docs/parallel.md."""

import json
import math
import re
import shlex
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.launcher import as_launched, deepspeed_program
from launch.plan import command as plan
from launch.plan import text
from launch.plan.devices import DEVICES, GIB, find_device
from launch.plan.layout import Layout, layout_of
from launch.plan.memory import peak_memory
from launch.plan.model import Shape
from launch.plan.operations import Log, Operation, fused
from launch.plan.plan import Plan, Planner, communication_bound_from, make_plan
from launch.plan.speed import ring_bandwidth, speed
from launch.plan.stages import check_manifest, words_at
from launch.plan.timed import LIGER, LOSS_KERNEL, SOFTMAX_BYTES, kernels_of, levers, loss_operations, time_of
from modeling.linear_cross_entropy import Head, label_loss_sum, linear_cross_entropy
from tests.launch.plan import plan_cases
from tests.launch.plan.plan_cases import DEMO
from tests.support.marks import slow
from tests.support.models.small_run import changed_json
from tests.support.runs.compare_runs import start_fields, step_fields
from tracking.jsonl import encode

RECIPES = REPOSITORY / "config/recipes"
BIG = ["--config", str(RECIPES / "llama_8b_8gpu.yaml")]


@pytest.fixture(scope="module")
def big():
    """The shape of Llama-3.1-8B and its layout on 8 ranks."""
    return plan_cases.planned(BIG, world=8, on_cpu=False)


def planner_of(shape, device=DEVICES["h100"]) -> Planner:
    """The planner for 72 GiB of an H100 with nothing reserved."""
    return Planner(shape, 72 * GIB, 0.0, partial(speed, shape, device=device))


def planned(capsys, *arguments: str) -> dict:
    assert plan.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_ring_over_nodes_runs_at_the_speed_of_their_adapters(big) -> None:
    shape, layout = big
    device = replace(DEVICES["h100"], network=100e9)
    assert ring_bandwidth(device, 8) == device.link
    assert ring_bandwidth(device, 16) == 100e9
    layout = replace(layout, stage=0, accumulation=1, world=16)
    found = speed(shape, layout, device, efficiency=1.0, latency=0.0)
    assert found.communication_seconds == pytest.approx(2 * 15 / 16 * shape.parameters * layout.reduced / 100e9)
    slower = speed(shape, layout, device, efficiency=0.5, latency=0.0)
    assert slower.communication_seconds == pytest.approx(2 * found.communication_seconds)
    assert speed(shape, replace(layout, world=1), device).communication_seconds == 0


def plan_of(*arguments: str) -> Plan:
    options, words = plan._parse(arguments)
    return make_plan(options, words)


def test_the_smallest_that_fits_is_the_first_and_largest() -> None:
    """No lower stage fits with any micro-batch, and none with twice its micro-batch."""
    found = plan_of(*BIG, "--gpus", "8", "--memory", "72", "--reserve", "0")
    assert found.smallest is not None and found.smallest.fits
    chosen = found.smallest.layout
    assert 0 < chosen.stage < 3
    assert found.planner.largest_micro(found.layouts[chosen.stage - 1]) is None
    doubled = replace(chosen, micro=2 * chosen.micro, accumulation=chosen.accumulation // 2)
    assert not found.planner.option(doubled).fits
    assert [*found.stages] == [1, 2, 3]  # the config refuses BF16 without ZeRO


_OVERLAP = ("zero1_bf16", {"overlap_comm": True, "reduce_bucket_size": 1_000_000})
_OPTIMIZER = ("zero3_bf16", {"offload_optimizer": {"device": "cpu"}})
_EXPERTS = ["precision.compute=fp32", "deepspeed.stage=1", "parallel.expert=2", "data.tokenizer=bytes"]
_MIXTURE = (
    "num_hidden_layers: 1, hidden_size: 64, intermediate_size: 64, num_attention_heads: 1, num_key_value_heads: 1"
)
_EXPERTS += [f"model={{architecture: mixtral, config: {{{_MIXTURE}, num_local_experts: 8}}}}"]
_MANIFEST = ["precision.manifest=config/manifests/{}.json", "precision.compute=auto", "deepspeed.stage=1"]


@pytest.mark.parametrize(
    ("given", "own", "stages", "best"),
    [
        ([*BIG, "--gpus", "64", "--network", "25", "--memory", "50"], _OVERLAP, [1, 2, 3], 3),
        ([*BIG, "--gpus", "8", "deepspeed.stage=2", "deepspeed.offload=cpu"], None, [1, 2, 3], 3),
        ([*DEMO, "--gpus", "2"], _OPTIMIZER, [1, 2, 3], 2),
        ([*DEMO, "--gpus", "2", "deepspeed.stage=3", "deepspeed.offload=cpu"], None, [1, 2, 3], 2),
        ([*DEMO, "--gpus", "2", "deepspeed.stage=2", "model.compile=true"], None, [1, 2], 2),
        ([*DEMO, "--gpus", "2", *_EXPERTS], None, [1, 2, 3], 1),
        ([*DEMO, "--gpus", "2", _MANIFEST[0].format("bf16"), *_MANIFEST[1:]], None, [0, 1, 2, 3], 0),
        ([*DEMO, "--gpus", "2", _MANIFEST[0].format("FP16"), *_MANIFEST[1:]], None, [1, 2, 3], 1),
    ],
)
def test_a_plan_at_another_stage_is_that_of_the_config_at_it(tmp_path, given, own, stages, best) -> None:
    """Rows, levers and the command at the end: none is refused, and none gets another layout when it is planned."""
    fp16 = tmp_path / "fp16.json"
    fp16.write_text((REPOSITORY / "config/manifests/bf16.json").read_text().replace("bf16", "fp16"))
    given = [word.replace("config/manifests/FP16.json", str(fp16)) for word in given]
    found = plan_of(*given, *([changed_json(tmp_path, own[0], **own[1])] if own else []))
    assert [*found.stages] == stages

    def again(words: list[str]) -> Layout:
        resolved = read_command_line(words, as_launched(int(given[given.index("--gpus") + 1])))
        check_manifest(resolved)
        layout = layout_of(resolved, world=resolved.world_size, on_cpu=False)
        return replace(layout, config=found.configured.layout.config)

    words = shlex.split(found.resolved.command)
    words = words[words.index(next(word for word in words if word.startswith("--config"))) :]
    for stage, layout in found.layouts.items():
        if stage != found.configured.layout.stage:
            assert again(words_at(stage, words, found.resolved)) == layout
    last = shlex.split(str(text._command(found)[-1]))
    layout = again(last[last.index("--config") :])
    option = found.stages[layout.stage]
    assert layout.stage == best and option is not None and layout in (option.layout, found.configured.layout)


def test_scaling_keeps_the_global_batch_while_it_can(big) -> None:
    shape, layout = big
    options = planner_of(shape).scaling(layout)
    assert [item.layout.world for item in options] == [2**power for power in range(11)]
    batches = [item.layout.world * item.layout.micro * item.layout.accumulation for item in options]
    assert batches == [256] * 9 + [512, 1024]
    slow = planner_of(shape, replace(DEVICES["h100"], network=5e9))
    assert communication_bound_from(options) is None
    assert communication_bound_from(slow.scaling(layout)) == 16


def test_hours_and_cost_follow_from_the_throughput(capsys) -> None:
    found = planned(capsys, *BIG, "--gpus", "8", "--price", "2.5", "--tokens", "1e9")
    run = found["configured"]
    assert run["hours"] == pytest.approx(1e9 / run["tokens_per_second"] / 3600)
    assert run["cost"] == pytest.approx(run["hours"] * 8 * 2.5)
    assert found["memory"]["peak"] == pytest.approx(sum(found["memory"]["device"].values()))
    without = planned(capsys, *BIG, "--gpus", "8")
    assert without["configured"]["cost"] is None
    assert without["token_budget"] == 10_000 * 256 * 4096


def test_the_plan_says_what_tokens_cost_and_the_most_that_routers_make_of_it(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    mixture = "model={architecture: mixtral, config: {hidden_size: 1024, intermediate_size: 512, num_hidden_layers: 2, "
    arguments = [*DEMO, f"{mixture}num_attention_heads: 4, num_key_value_heads: 4, num_local_experts: 8}}}}"]
    arguments += ["data.sequence_length=4096", "batch.micro_size=4", "parallel.expert=4", "--gpus", "8"]
    arguments += ["batch.global_size=32"]
    moved = planned(capsys, *arguments)["traffic"]
    # 2 layers, three passes with the recomputed one, 16,384 tokens of 2 experts, BF16: 3 of 4 leave and are given back
    assert moved["tokens"] == pytest.approx(2 * 3 * 16384 * 2 * 2 * 1024 * 1.5, rel=1e-3)
    assert moved["tokens_at_most"] == pytest.approx(moved["tokens"] * 8 / 3, rel=1e-3)
    plan.main(arguments)
    line = (
        "Experts: 0.604 GB of it are tokens on their way to other ranks' experts and back, where all are used alike; "
    )
    assert f"{line}the busiest rank sends up to 1.61 GB where not." in capsys.readouterr().out
    plan.main([*arguments, "parallel.expert=1"])
    assert "Experts:" not in capsys.readouterr().out


def test_ranks_that_share_a_sequence_do_the_same_work_for_a_token() -> None:
    (whole, _), (shared, _) = (plan_cases.planned([f"parallel.sequence={ranks}"]) for ranks in (1, 2))
    assert (shared.counted.matmuls, shared.counted.attention_flops) == (
        whole.counted.matmuls,
        whole.counted.attention_flops,
    )
    assert whole.counted.block < shared.counted.block < 1.1 * whole.counted.block  # what is traded besides


@pytest.mark.parametrize(
    ("item", "settings", "advice"),
    [
        ("activations", ("none", {"micro": 1}), "model.activation_checkpointing=full lowers them"),
        (
            "activations",
            ("none", {"micro": 2}),
            "model.activation_checkpointing=full or a smaller batch.micro_size lowers them",
        ),
        ("activations", ("full", {"micro": 2}), "a smaller batch.micro_size lowers them"),
        ("activations", ("full", {"micro": 1}), "a larger parallel.sequence lowers them"),
        ("moments", ("none", {"stage": 0}), "ZeRO-1 divides them by the ranks"),
        ("moments", ("none", {"stage": 1}), "more ranks divide them"),
        ("gradients", ("none", {"stage": 1}), "ZeRO-2 divides them by the ranks"),
        ("parameters", ("none", {"stage": 2}), "ZeRO-3 divides them by the ranks"),
        ("parameters", ("none", {"stage": 2, "world": 1}), ""),
    ],
)
def test_no_advice_is_what_the_config_has_already(big, item, settings, advice) -> None:
    (kind, given), (_, layout) = settings, big
    config = replace(layout.config, model=replace(layout.config.model, activation_checkpointing=kind))
    assert text._advice(item, replace(layout, config=config, **given)) == advice


def test_a_plan_says_what_its_speed_leaves_out() -> None:
    found = plan_of(*DEMO)

    def said(task: Any, offload: str) -> list[str]:
        layout = found.configured.layout
        layout = replace(layout, config=replace(layout.config, task=task), offload=offload)
        lines = text._summary(replace(found, configured=replace(found.configured, layout=layout)))
        return [str(line) for line in lines if str(line).startswith("Not in this speed: ")]

    host, answers = "transfers to host memory and the update there", "sampling and scoring"
    assert said("sft", "none") == []
    assert said("sft", "optimizer") == [f"Not in this speed: {host}."]
    assert said("opd", "none") == [f"Not in this speed: {answers}."]
    assert said("grpo", "optimizer+param") == [f"Not in this speed: {host}, {answers}."]


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ([], "take more devices, deepspeed.offload=cpu or a shorter"),
        (["deepspeed.stage=3", "deepspeed.offload=cpu"], "take more devices or a shorter"),
        (["model.activation_checkpointing=none"], "model.activation_checkpointing=full, deepspeed.offload=cpu or"),
    ],
)
def test_what_fits_nowhere_gets_advice_that_it_has_not_taken(given, advice) -> None:
    (line,) = (str(one) for one in text._conclusions(plan_of(*BIG, "--memory", "1", *given)) if "Nothing" in str(one))
    assert advice in line


def test_what_does_not_fit_as_configured_gets_a_way_that_does(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert plan.main([*BIG, "--gpus", "8", "batch.micro_size=32"]) == 0
    said = capsys.readouterr().out
    assert "DOES NOT FIT" in said and "As configured it does not fit" in said
    command = said.splitlines()[-1]
    start = shlex.join([*deepspeed_program(), "--num_gpus", "8"])
    assert command.startswith(f"use this: {start} ") and "batch.micro_size=32" not in command
    words = shlex.split(command.partition("train.py ")[2])
    resolved = read_command_line(words, as_launched(8))
    assert resolved.zero_stage == 3 and resolved.batch.micro_size == 16


@pytest.mark.one_in(3)
@pytest.mark.parametrize("named", ["--deepspeed_config JSON", "deepspeed.config=JSON", "in the config"])
def test_another_stage_replaces_a_json_that_was_named(tmp_path, capsys, named: str) -> None:
    mine = tmp_path / "mine.json"
    shutil.copy(REPOSITORY / "ds_configs/zero2_bf16.json", mine)
    arguments = [*BIG, "--gpus", "8", "batch.micro_size=32", *named.replace("JSON", str(mine)).split()]
    if named == "in the config":
        changed = yaml.safe_load(Path(BIG[1]).read_text()) | {"deepspeed": {"config": str(mine)}}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(changed))
        arguments = ["--config", str(tmp_path / "run.yaml"), *BIG[2:], "--gpus", "8", "batch.micro_size=32"]
    assert plan.main(arguments) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1].partition("train.py ")[2])
    resolved = read_command_line(words, as_launched(8))
    assert resolved.zero_stage == 3 and resolved.batch.micro_size == 16


def test_the_last_line_starts_the_run_as_configured_where_no_other_setting_is_faster(capsys) -> None:
    assert plan.main([*BIG, "--gpus", "16", "--device", "a100", "batch.micro_size=16", "run.seed=3"]) == 0
    start = f"{shlex.join(deepspeed_program())} --hostfile launch/deepspeed/hostfile --num_nodes 2 --num_gpus 8"
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"use this: {start} ") and last.endswith(" batch.micro_size=16 run.seed=3")


@pytest.mark.parametrize("columns", [80, slow(120)])
def test_a_plan_fits_the_terminal_but_for_the_command(capsys, monkeypatch, columns: int) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", str(columns))
    assert plan.main([*BIG, "--gpus", "1", "--price", "2"]) == 3
    assert plan.main([*BIG, "--gpus", "8", "--price", "2"]) == 0
    said = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    *lines, last = said.splitlines()
    assert last.startswith("use this: ") and max(map(len, lines)) <= columns
    assert "1024" in said and "does not fit" in said.partition("devices")[2]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--device", "h1000"], "--device h1000: not in the table"),
        (["--gpus", "0"], "--gpus"),
        (["--mfu", "1.5"], "--mfu"),
        (["--mfu", "0"], "--mfu"),
        (["--efficiency", "0"], "--efficiency"),
        (["--reached", "0", ".3", ".8"], "--reached"),
        (["--reserve", "1"], "--reserve"),
        (["--measured", "/nowhere"], "--measured /nowhere"),
        (["data.tokenizer=nobody/nothing"], "model.config.vocab_size=N"),
        (["model.architecture=lama"], "lama"),
    ],
)
def test_a_mistake_is_one_line(refusal, arguments, problem) -> None:
    assert problem in refusal(plan.main, [*DEMO, *arguments])


@pytest.mark.parametrize("fill", [1.0, 0.25])
def test_a_measured_run_gives_its_speed(tmp_path, capsys, fill: float) -> None:
    """A run folder of one rank on a device of a known peak; the first steps are left out. Padding takes no time."""
    shape, layout = plan_cases.planned([], world=1)
    rate = 0.25 * find_device("cpu").peak / (shape.flops_per_token(layout.sequence) * 4 / 3)
    seconds = fill * layout.tokens * layout.accumulation / rate
    fields = [step_fields(1, tokens_per_second=speed, step_seconds=seconds) for speed in (1.0, *[rate] * 5)]
    steps = [("step", values) for values in fields]
    events = [
        {"event": kind, "step": step, "time": 1.0, **fields}
        for step, (kind, fields) in enumerate([("run_start", start_fields(world_size=1)), *steps])
    ]
    (tmp_path / "events.jsonl").write_bytes(b"".join(map(encode, events)))
    (tmp_path / "config.yaml").write_text((RECIPES / "demo.yaml").read_text())
    found = planned(capsys, *DEMO, "--device", "cpu", "--measured", str(tmp_path))
    assert math.isclose(found["mfu"]["measured"], 0.25, rel_tol=1e-6)
    assert math.isclose(found["configured"]["step_seconds"], seconds, rel_tol=1e-6)
    hours = layout.config.run.steps * seconds / 3600
    assert math.isclose(found["configured"]["hours"], hours, rel_tol=1e-6)


_TOKENS = {"4k": 2**12, "32k": 2**15, "128k": 2**17, "512k": 2**19}
_SHAPES = {"1B": "llama_1b_1gpu", "8B": "llama_8b_8gpu", "70B": "llama_70b_64gpu"}
_USED = 72
"""[GiB] Of a GPU, as the page says."""


def _cells() -> list[tuple[int, str, str, str, int]]:
    """(GPUs, size, length, setting, GiB) of each cell with a number; a cell that adds to its left one in full."""
    found = []
    for line in (REPOSITORY / "docs/parallel.md").read_text(encoding="utf-8").splitlines():
        row = re.match(r"\| (\d+) GPUs?, (\w+) \|(.*)\|$", line)
        setting = ""
        for length, cell in zip(_TOKENS, row[3].split("|") if row else [], strict=False):
            number = re.search(r"\((\d+)(?: GiB)?\)", cell)
            if number is None:
                continue
            setting = cell if "`stage" in cell else f"{setting} {cell}"
            found.append((int(row[1]), row[2], length, setting, int(number[1])))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", _SHAPES)
def test_every_number_of_the_table_is_the_planners(size, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cells = [cell for cell in _cells() if cell[1] == size]
    assert len(cells) >= 7
    said, planned = {}, {}
    for gpus, _, length, setting, gib in cells:
        arguments = [f"data.sequence_length={_TOKENS[length]}", "model.config.vocab_size=128256"]
        arguments += ["batch.micro_size=1", f"batch.global_size={gpus}"]
        arguments += [f"deepspeed.stage={n}" for n in re.findall(r"`stage: (\d)`", setting)]
        arguments += ["deepspeed.offload=cpu"] if "`offload: cpu`" in setting else []
        arguments += [f"model.activation_checkpointing={'full' if '`full`' in setting else 'none'}"]
        arguments += [f"parallel.sequence={n}" for n in re.findall(r"`sequence: (\d)`", setting)[-1:]]
        recipe = ["--config", str(RECIPES / f"{_SHAPES[size]}.yaml")]
        memory = peak_memory(*plan_cases.planned([*recipe, *arguments], world=gpus, on_cpu=False))
        said[gpus, length], planned[gpus, length] = gib, round(memory.total / GIB)
    assert said == planned
    assert max(planned.values()) <= _USED


H100 = DEVICES["h100"]


@pytest.fixture(scope="module")
def modelled() -> tuple[Shape, Layout]:
    """Two blocks of the 1B recipe on one GPU."""
    recipe = ["--config", str(RECIPES / "benchmark_1b.yaml"), "model.config.num_hidden_layers=2"]
    return plan_cases.planned(recipe, world=1, on_cpu=False)


def test_flops_are_those_of_the_formula(modelled: tuple[Shape, Layout]) -> None:
    shape, layout = modelled
    operations = [*shape.counted.operations, *loss_operations(shape, layout, fused_softmax=True)]
    matmuls = sum(one.flops for one in operations if one.kind == "matmul") / layout.tokens
    assert matmuls == pytest.approx(6 * shape.matmul_parameters, rel=0.01)
    # the forward pass's, of which a causal kernel leaves half out, three times over
    attention = 3 * 2 * sum(one.flops for one in operations if one.kind == "attention" and not one.backward)
    found = matmuls + attention / layout.tokens
    assert found == pytest.approx(shape.flops_per_token(layout.sequence), rel=0.01)


def test_a_side_as_long_as_the_vocabulary_is_no_head() -> None:
    """The demo's micro-batch has as many tokens as its vocabulary."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 64}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    settings = [f"model.config={sizes}", "data.sequence_length=64", "batch.micro_size=1", "batch.global_size=2"]
    shape, layout = plan_cases.planned(settings, world=1, on_cpu=False)
    operations = [*shape.counted.operations, *loss_operations(shape, layout, fused_softmax=True)]
    matmuls = sum(one.flops for one in operations if one.kind == "matmul") / layout.tokens
    assert matmuls == pytest.approx(6 * shape.matmul_parameters, rel=0.01)


def test_every_part_of_a_block_is_counted_in_both_passes(modelled: tuple[Shape, Layout]) -> None:
    shape, layout = modelled
    size = 2 * shape.hidden * layout.tokens  # one tensor of the residual stream, in bytes
    scopes = {(one.scope, one.backward): 0.0 for one in shape.counted.operations}
    for one in shape.counted.operations:
        if one.kind == "other":
            scopes[one.scope, one.backward] += one.bytes / size
    # two sums of the residual stream a block, three tensors each
    assert scopes["block", False] == pytest.approx(2 * 2 * 3, rel=0.01)
    # SiLU and the product, which read three tensors and write two that are four times as wide
    assert scopes["MLP", False] == pytest.approx(2 * 5 * 4, rel=0.01)
    assert scopes["Norm", True] > scopes["Norm", False] > 5 * 13  # five norms in FP32
    liger = kernels_of(shape.counted.operations, layout, "llama")
    norms = [one.bytes / size for one in liger if (one.scope, one.backward) == ("Norm", False)]
    # read once and written once, but for the last one, which the head reads
    assert norms == pytest.approx([2.0] * 4 + [1.0], rel=0.01)


def operation(reads: str, writes: str, kind: str = "other", *, backward: bool = False) -> Operation:
    return Operation(kind, "block", backward, 0.0, {ord(one): 1.0 for one in reads}, {ord(one): 1.0 for one in writes})


def test_one_kernel_reads_its_inputs_once_and_writes_what_is_read_later() -> None:
    chain = [operation("ab", "c"), operation("ca", "d"), operation("d", "e"), operation("de", "f", "matmul")]
    back = [operation("f", "g"), operation("gc", "h", backward=True), operation("h", "i", "matmul", backward=True)]
    found = fused([*chain, *back], lambda one: "all")
    # c is read by the backward pass alone, which computes it again from a and b
    assert names(found) == ["ab>de", "de>f", "f>", "fab>h", "h>i"]
    # a kernel of its own, outside of what is compiled, needs it
    assert names(fused([*chain, *back], lambda one: None if one.backward else "all"))[0] == "ab>cde"
    assert fused([*chain, *back], lambda one: None) == [*chain, *back]


def names(operations: list[Operation]) -> list[str]:
    return ["".join(map(chr, one.reads)) + ">" + "".join(map(chr, one.writes)) for one in operations]


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.log = Log()

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), options: Any = None) -> Any:
        result = function(*given, **(options or {}))
        self.log.add(function, given, options or {}, result)
        return result


@pytest.mark.parametrize("way", ["operators", "full"])
def test_a_logit_moves_as_many_bytes_as_its_operators_do(way: str) -> None:
    tokens, vocabulary, hidden = 64, 4096, 2
    states = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,))
    with Counting() as counting:
        if way == "full":
            label_loss_sum((states @ weight.t()).unsqueeze(0), labels.unsqueeze(0)).backward()
        else:
            linear_cross_entropy(states, Head(weight, None), labels, chunk_tokens=tokens)[0].backward()
    others = sum(one.bytes for one in counting.log.operations if one.kind == "other")
    assert others / tokens / vocabulary == pytest.approx(SOFTMAX_BYTES[way], rel=0.05)


def test_what_a_lever_changes(modelled: tuple[Shape, Layout]) -> None:
    shape, layout = modelled
    layout = replace(layout, stage=1)

    def seconds(layout: Layout, *without: str) -> float:
        found = time_of(shape, layout, H100, communication=0.0, without=without)
        assert found is not None
        return found.seconds

    now = seconds(layout)
    found = {lever.name: seconds(lever.layout, *lever.without) / now for lever in levers(shape, layout)}
    assert found["model.compile=true"] < 1 < min(found["without the loss's kernel"], found["without liger-kernel"])
    assert 1 < found["model.activation_checkpointing=attention"] < found["model.activation_checkpointing=full"] < 4 / 3
    assert seconds(layout, LIGER, LOSS_KERNEL) > max(seconds(layout, LIGER), seconds(layout, LOSS_KERNEL))
    two = time_of(shape, replace(layout, world=2), H100, communication=0.5)
    assert two is not None and two.step["communication, exposed"] == 0.5
    hidden = time_of(shape, replace(layout, world=2, overlap=True), H100, communication=0.5)
    assert hidden is not None and hidden.step["communication, exposed"] < 0.5
    slow = time_of(shape, layout, replace(H100, reached=replace(H100.reached, launch=1e-3)), communication=0.0)
    assert slow is not None and slow.micro["host, exposed"] > 0
