"""The manifest analysis: errors against plain torch, each task, exact histograms, no trace in training; the command."""

import copy
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.errors import UserError
from config.launcher import as_launched
from config.schema import LossScaleSection
from modeling.activation_checkpointing import apply_activation_checkpointing
from precision.manifest import find_regions, load_manifest
from tests.support.jobs.launches import SMALL
from tests.support.models.small_models import small_model
from tests.support.rows import labelled, seq2seq
from tests.support.rows.chats import SHAPE, write_base, write_chats
from tests.tools.analyze import analyze_cases
from tools.analyze import command as analyze
from tools.analyze.command import rejection_reason
from tools.analyze.proposal import Limits
from tools.analyze.ranges import OperandMeter, Ranges, Spread, gradients_counted

TREES = {
    "bf16": {"default": "bf16", "rules": []},
    "fp16": {"default": "fp16", "rules": []},
    "one": {"default": "fp32", "rules": [{"match": "*.layers.1.*.v_proj", "compute": "bf16", "reason": "a test"}]},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stage", [3, 0, 2, 1])
def test_gradient_errors_are_those_of_plain_torch(pair, tmp_path, stage):
    for result in pair.run(analyze_cases.errors, stage=stage, folder=str(tmp_path), trees=TREES):
        found = result["found"]
        assert found["fp32"] == (0.0, 0.0) and result["again"] == 0.0 and result["unchanged"]
        assert result["reference"] < 1e-5
        assert found["set by hand"] == pytest.approx(found["one 1"], rel=1e-6)  # the FP32 regions are back and work
        for name, expected in result["expected"].items():
            assert expected[0] > 1e-4 and expected[1] > 1e-4 and expected[0] != expected[1]
            cast = name.startswith("cast")
            tied_in_fp32 = cast and stage == 3  # where ZeRO-3 has a tied weight cast twice
            measured = found[name if cast else f"{name} 4096"]
            assert measured == pytest.approx(expected, rel=0.1 if tied_in_fp32 else 0.02), name
        assert found["bf16 1"] == pytest.approx(found["bf16 4096"], rel=1e-6)  # a scale is nothing to BF16
        assert found["fp16 1"][0] > 1.2 * found["fp16 4096"][0]  # and saves small gradients in FP16


def test_dropout_is_the_same_in_every_pass(pair, tmp_path):
    for result in pair.run(analyze_cases.repeated_with_dropout, folder=str(tmp_path)):
        assert result["without the random numbers"] > 0.01 and result["repeated"] == 0.0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_survey_measures_every_region_and_leaves_no_trace(pair, tmp_path, stage):
    results = pair.run(analyze_cases.surveyed, stage=stage, folder=str(tmp_path))
    for answer in results:
        result = answer["result"]
        assert result["losses"] == answer["plain"]
        assert result == results[0]["result"]
        names = {name for name in result["spreads"] if "norm" not in name}
        assert set(result["proposal"]["choices"]) == names and len(names) == 2 * 8 + 1
        for unit in result["units"]:
            assert 0 < unit["errors"]["fp16"] < unit["errors"]["bf16"] < 0.1, unit
        for name, kinds in result["spreads"].items():
            assert {"activations", "gradients"} <= set(kinds), name
        checked = result["validation"]
        assert 0 < checked["proposal"]["error"] < checked["uniform bf16"]["error"] / 3
        assert analyze.rejection_reason(result) is None
        # Both ranks' values, three stops, each counted once: the weight is seen whole at each.
        weight = result["spreads"]["lm_head"]["weights"]
        assert sum(weight["counts"]) + weight["zeros"] == 2 * 3 * 64 * 32
        # Independent roundings: the squares of the parts add up to that of all regions; the ambient dtype adds its own.
        for dtype, predicted in result["regions_alone"].items():
            measured = result["tried"][f"uniform {dtype}, FP32 ambient"]
            assert predicted == pytest.approx(measured, rel=0.35), dtype
            assert result["tried"][f"uniform {dtype}"] > measured


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("stage", "allowed"), [(2, 0.04), (3, 0.3)])
def test_layers_that_bear_fp8_get_it_within_the_error_that_is_allowed(pair, tmp_path, stage, allowed):
    """Some of them or all; the manifest computes what it says, and the head is never in it."""
    changes = {"limits": Limits(fp8=allowed), "steps": 1, "most_regions": 10}
    results = pair.run(analyze_cases.surveyed, stage=stage, folder=str(tmp_path), changes=changes)
    result = results[0]["result"]
    assert results[1]["result"] == result
    errors = {unit["names"][0]: unit["errors"] for unit in result["units"]}
    measured = {name for name, found in errors.items() if "fp8" in found}
    assert measured == {name for name in errors if name.endswith("_proj")}
    assert all(errors[name]["fp8"] > 4 * errors[name]["bf16"] for name in measured)
    assert analyze.rejection_reason(result) is None
    checked, share = result["validation"], result["proposal"]["fp8_share"]
    assert checked["uniform bf16"]["error"] < checked["proposal"]["error"] <= allowed
    assert any("at a gradient error of" in text for text in analyze.verdict(result))
    tree = result["proposal"]["manifest"]
    computed = pair.run(analyze_cases.computes_as_promised, folder=str(tmp_path), tree=tree)[0]
    assert computed["fp8"] == pytest.approx(share, abs=0.01)
    eight_bit = {name for name, choice in result["proposal"]["choices"].items() if choice["compute"] == "fp8"}
    assert eight_bit and (allowed < 0.1 or len(eight_bit) == 2 * 7)
    assert allowed > 0.1 or checked["proposal"]["error"] < checked["all in fp8"]["error"]


def test_what_bears_no_fp8_is_rejected():
    checked = {"proposal": {"error": 0.03}, "uniform bf16": {"error": 0.01}}
    tree: dict[str, Any] = {"uniform": None, "limits": {"fp8": 0.05}, "validation": checked}
    tree["proposal"] = {"low_precision_share": 1.0, "fp8_share": 0.5}
    assert analyze.rejection_reason(tree) is None
    none = {"proposal": {"low_precision_share": 1, "fp8_share": 0}}
    assert "no module tolerates FP8" in analyze.rejection_reason(tree | none)
    assert "beyond --fp8 0.02" in analyze.rejection_reason(tree | {"limits": {"fp8": 0.02}})


@pytest.mark.slow
def test_the_table_shows_the_error_that_was_decided_by():
    units = [
        {"names": ["layers.0.q"], "flops": 6, "errors": {"bf16": 0.03, "fp8": 0.3}},
        {"names": ["layers.1.q"], "flops": 6, "errors": {"bf16": 0.01, "fp8": 0.4}},
        {"names": ["head"], "flops": 8, "errors": {"bf16": 0.0}},
    ]
    choices = {
        "layers.0.q": {"compute": "fp8", "sensitivity": 0.9},
        "layers.1.q": {"compute": "bf16", "sensitivity": 0.1},
    }
    proposal = {"choices": choices | {"head": {"compute": "bf16", "sensitivity": 0.0}}}
    result = {"proposal": proposal, "units": units, "other_flops": 0, "limits": {"fp8": 0.5}}
    table = analyze.regions_table(result)
    assert table.head[3] == "of FP8's squared error"
    assert [(row[0], *row[2:]) for row, *_ in table.rows] == [
        ("layers.1.q", "bf16", "64.0%", "30.0%"),
        ("layers.0.q", "fp8", "36.0%", "30.0%"),
        ("head", "bf16", "-", "40.0%"),
    ]
    table = analyze.regions_table({**result, "limits": {"fp8": 0.0}})
    assert table.head[3] == "of BF16's squared error"
    assert [row[3] for row, *_ in table.rows] == ["90.0%", "10.0%", "0.0%"]


def test_patterns_stand_for_their_layers_when_there_are_too_many_regions(pair, tmp_path):
    changes = {"most_regions": 10, "steps": 1}
    result = pair.run(analyze_cases.surveyed, stage=1, folder=str(tmp_path), changes=changes)[0]["result"]
    assert len(result["units"]) == 8 + 1
    together = next(unit for unit in result["units"] if unit["names"][0].endswith("v_proj"))
    assert together["names"] == ("model.layers.0.self_attn.v_proj", "model.layers.1.self_attn.v_proj")
    assert len(result["proposal"]["choices"]) == 2 * 8 + 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "config/recipes/demo.yaml"], "--out"),
        (["--config", "config/recipes/demo.yaml", "--out", "/dev/null/none/m.json"], "--out /dev/null/none/m.json: "),
        (["--config", "config/recipes/none.yaml", "--out", "{folder}/m.json"], "none.yaml"),
        (["--config", "config/recipes/demo.yaml", "--out", "{folder}/m.json", "batch.sise=3"], "batch.sise: no such"),
        (["--config", "config/recipes/demo.yaml", "--out", "{folder}/m.json", "--floor", "2"], "between 0 and 1"),
        (["--config", "config/recipes/demo.yaml", "--out", "{folder}/m.json", "--processes", "3"], "batch.global_size"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path, refusal, arguments, words):
    assert words in refusal(analyze.main, [part.format(folder=tmp_path) for part in arguments])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("policy", ["deepspeed", "adaptive"])
@pytest.mark.parametrize("scale", [None, 1, 2**21, 2**40])
def test_a_run_starts_at_the_loss_scale_of_its_manifest(tmp_path, policy, scale):
    """It may be above what the policy allows; a config that sets one starts there."""
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({"default": "fp16"} | ({} if scale is None else {"loss_scale": scale})))
    given = ["--config", "config/recipes/demo.yaml", f"precision.manifest={path}"]

    def started(*more: str) -> LossScaleSection:
        words = [*given, f"precision.loss_scale.policy={policy}", *more]
        return read_command_line(words, as_launched(2)).config.precision.loss_scale

    section = LossScaleSection(policy=policy)
    expected = section.initial_scale if scale is None else min(scale, section.largest_scale)
    assert started().initial_scale == expected
    assert started("precision.loss_scale.initial=8").initial_scale == 8
    load_manifest(path)


def test_a_loss_scale_that_is_no_power_of_two_is_refused(tmp_path):
    path = tmp_path / "manifest.json"
    for scale, problem in ((3, "not a power of two"), (0, "not a power of two"), (-2, "not a power"), (0.5, "integer")):
        path.write_text(json.dumps({"default": "fp16", "loss_scale": scale}))
        with pytest.raises(UserError, match=rf"loss_scale = {scale}.*{problem}"):
            load_manifest(path)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The command's files for a small model, and its output."""
    folder = tmp_path_factory.mktemp("analysis") / "made"
    options = f"--out {folder}/manifest.json --steps 2 --sequences 1 --held-out 1 --parity-steps 3 --processes 2"
    command = [sys.executable, "-m", "tools.analyze", "--config", "config/recipes/demo.yaml", *options.split()]
    command += [*SMALL, f"data.cache_dir={folder}/cache", "batch.micro_size=2"]
    job = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert job.returncode == 0, job.stdout + job.stderr
    return folder, job.stdout


@pytest.mark.slow
def test_the_command_writes_a_manifest_that_does_what_it_says(written, pair, tmp_path):
    folder, printed = written
    manifest = load_manifest(folder / "manifest.json")
    analysis = json.loads((folder / "manifest.analysis.json").read_text())
    tree = json.loads((folder / "manifest.json").read_text())
    assert tree == analysis["proposal"]["manifest"] and all(rule.reason for rule in manifest.rules)
    assert (folder / "manifest.png").read_bytes().startswith(b"\x89PNG")
    assert analysis["parity"]["verdict"] == "parity" and (folder / "manifest.parity" / "parity.md").is_file()
    assert analysis["objection"] is None and len(analysis["losses"]) == 2
    assert "largest value" in printed and "largest gradient" in printed
    assert "lm_head" in printed and "against uniform BF16: parity error" in printed and "FLOPs in 16 bits" in printed
    share = pair.run(analyze_cases.computes_as_promised, folder=str(tmp_path), tree=tree)[0]
    assert share.get("fp16", 0) + share.get("bf16", 0) > 0.85


@pytest.mark.slow
def test_what_is_not_better_is_rejected(written, tmp_path, capsys):
    analysis = json.loads((written[0] / "manifest.analysis.json").read_text())
    uniform = copy.deepcopy(analysis) | {"uniform": "fp16"}
    assert analyze._publish(tmp_path / "m.json", uniform) == analyze.PROPOSED
    assert not (tmp_path / "m.json").exists() and (tmp_path / "m.analysis.json").is_file()
    scale = f"{analysis['uniform_fp16_scale']:.0f}"
    assert f"precision.compute=fp16 precision.loss_scale.initial={scale}\n" in capsys.readouterr().out
    worse = copy.deepcopy(analysis)
    worse["validation"]["proposal"]["error"] = math.inf
    assert analyze._publish(tmp_path / "m.json", worse) == analyze.REJECTED
    assert not (tmp_path / "m.json").exists() and (tmp_path / "m.rejected.json").is_file()
    assert "not finite" in json.loads((tmp_path / "m.analysis.json").read_text())["objection"]
    assert "rejected: " in capsys.readouterr().out
    for change, words in (
        (lambda tree: tree["parity"].update(failed=["gradient_error"]), "tools.parity: gradient_error"),
        (lambda tree: tree["proposal"].update(low_precision_share=0.0), "in 16 bits"),
    ):
        worse = copy.deepcopy(analysis)
        change(worse)
        assert words in str(analyze.rejection_reason(worse))


TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama(checkpointing: str = "none", attention: str = "sdpa") -> torch.nn.Module:
    model = small_model("llama", attention, vocab_size=40, tie_word_embeddings=True, **TINY)
    if checkpointing != "none":
        apply_activation_checkpointing(model, "full", reentrant=checkpointing == "reentrant")
    return model.train()


def tokens(seed: int = 1) -> torch.Tensor:
    return torch.randint(40, (3, 12), generator=torch.Generator().manual_seed(seed))


def counted(values: torch.Tensor) -> Ranges:
    ranges = Ranges(["it"], torch.device("cpu"))
    ranges.add("it", "weights", values)
    return ranges


def spread_of(values: torch.Tensor) -> Spread:
    return counted(values).spreads()["it"]["weights"]


def test_adding_up_is_counting_all_values_at_once():
    first, second = torch.randn(100) * 1e-8, torch.randn(50) * 1e5
    ranges = counted(torch.empty(0))
    assert ranges.spreads() == {"it": {}}
    ranges.add_all(counted(first))
    assert ranges.spreads()["it"]["weights"] == spread_of(first)
    ranges.add_all(counted(second))
    assert ranges.spreads()["it"]["weights"] == spread_of(torch.cat([first, second]))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_operands_are_booked_under_their_region(attention):
    model, ids = llama(attention=attention), tokens()
    kinds = find_regions(model)
    ranges = Ranges(kinds, torch.device("cpu"))
    inputs: dict[str, list[torch.Tensor]] = {}
    outputs: dict[str, torch.Tensor] = {}
    modules = dict(model.named_modules())
    for name in ("model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj", "lm_head"):

        def keep(module, args, output, name=name):
            inputs[name], outputs[name] = list(args), output

        modules[name].register_forward_hook(keep)
    with torch.no_grad(), OperandMeter(model, kinds, ranges) as meter:
        model(input_ids=ids, use_cache=False)
    found = ranges.spreads()
    for name, output in outputs.items():
        expected = spread_of(torch.cat([inputs[name][0].flatten(), output.flatten()]))
        assert found[name]["activations"] == expected, name
        assert found[name]["weights"] == spread_of(modules[name].weight), name
    assert found["model.norm"]["weights"].counts and found["model.norm"]["activations"].values == 2 * 3 * 12 * 16
    # Queries, keys, values and the product: each (batch, sequence, hidden); eager attention adds scores and shares.
    core = found["model.layers.0.self_attn"]["activations"]
    assert core.values + core.zeros >= 4 * 3 * 12 * 16
    assert "weights" not in found["model.layers.0.self_attn"]
    assert meter.region_flops["lm_head"] == 2 * 3 * 12 * 16 * 40
    assert meter.region_flops["model.layers.0.mlp.up_proj"] == 2 * 3 * 12 * 16 * 24
    assert sum(meter.region_flops.values()) == sum(meter.flops.values())


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_gradients_are_seen_once_and_whole(checkpointing):
    model, ids = llama(checkpointing), tokens(2)
    kinds = find_regions(model)
    ranges = Ranges(kinds, torch.device("cpu"))
    with gradients_counted(model, kinds, ranges):
        logits = model(input_ids=ids, use_cache=False).logits
        logits.retain_grad()
        logits.square().mean().backward()
    found = ranges.spreads()
    for name, module in model.named_modules():
        if name in kinds and kinds[name] != "attention":
            assert found[name]["weight_gradients"] == spread_of(module.weight.grad), name
    # Of lm_head: its output's gradient and its input's.
    assert found["lm_head"]["gradients"].maximum >= float(logits.grad.abs().max())
    seen = found["lm_head"]["gradients"]
    assert seen.values + seen.zeros == logits.numel() + 3 * 12 * 16
    inside = found["model.layers.1.self_attn"]["gradients"]  # its own input and output, and those of four projections
    assert inside.values + inside.zeros == (2 + 4 * 2) * 3 * 12 * 16
    for name in ("q_proj", "v_proj", "o_proj"):
        own = found[f"model.layers.1.self_attn.{name}"]["gradients"]
        assert own.values + own.zeros == 2 * 3 * 12 * 16
        assert own.maximum <= inside.maximum


def test_nothing_stays_behind():
    model, ids = llama(), tokens()
    kinds = find_regions(model)
    ranges = Ranges(kinds, torch.device("cpu"))
    with torch.no_grad(), OperandMeter(model, kinds, ranges):
        model(input_ids=ids)
    with gradients_counted(model, kinds, ranges):
        model(input_ids=ids).logits.sum().backward()
    before = ranges.counts.clone()
    model(input_ids=ids).logits.sum().backward()
    assert torch.equal(ranges.counts, before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(parameter._backward_hooks for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_spread_counts_exponents_as_log2_does(dtype, monkeypatch):
    monkeypatch.setattr("tools.analyze.ranges._PIECE", 70)  # several pieces
    info = torch.finfo(dtype)
    values = torch.exp2(torch.linspace(-20, 12, 500, dtype=torch.float64)) * torch.tensor([1.0, -1.0]).repeat(250)
    values = torch.cat([values.to(dtype), torch.tensor([0.0, 1.0, -2.0, math.inf, math.nan]).to(dtype)])
    ends = [info.max, info.smallest_normal, info.smallest_normal * info.eps, info.smallest_normal * info.eps * 3]
    values = torch.cat([values, torch.tensor(ends, dtype=torch.float64).to(dtype)])
    expected = Counter(math.frexp(x)[1] - 1 for x in values.double().tolist() if x and math.isfinite(x))
    found = spread_of(values)
    assert {found.lowest + i: count for i, count in enumerate(found.counts) if count} == expected
    assert (found.zeros, found.nonfinite, found.maximum) == (1, 2, info.max)
    assert found.counts[0] and found.counts[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of each task, and encoders for the first."""
    made = tmp_path_factory.mktemp("analyzed")
    labelled.write_rows(made / "sequence.jsonl", "sequence", 60)
    seq2seq.write_rows(made / "rows.jsonl", 60)
    write_chats(made / "chats.jsonl", 60)
    labelled.write_encoder(made / "bert")
    labelled.write_encoder(made / "modernbert", "modernbert")
    seq2seq.write_model(made / "t5")
    return made


CASTS: dict[str, tuple[str, tuple[str, ...], set[str]]] = {
    # torch has no fused kernel on a CPU for dropout, nor for a bias that is trained
    "t5": ("seq2seq", (), {"SelfAttention"}),
    "bert with dropout": ("classify", ("model.config={attention_probs_dropout_prob: 0.1}",), {"self"}),
    "bert, eager": ("classify", ("model.config={attention_probs_dropout_prob: 0.1}", "model.attention=eager"), set()),
    "modernbert": ("classify", ("model.name_or_path={folder}/modernbert",), set()),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASTS)
def test_attention_that_computes_in_fp32_anyway_is_not_promised_16_bits(solo, folder, case) -> None:
    """The manifest that is proposed holds in a training step, which `verify` has judged."""
    task, overrides, casting = CASTS[case]
    given = tuple(item.replace("{folder}", str(folder)) for item in overrides)
    [found] = solo.run(analyze_cases.surveyed_task, folder=folder, task=task, overrides=given)
    result = found["result"]
    assert {name.rpartition(".")[2] for name in result["casts"]} >= casting
    assert bool(result["casts"]) == bool(casting)
    for name, by_dtype in result["casts"].items():
        assert by_dtype == {"bf16": "fp32", "fp16": "fp32"}
        choice = result["proposal"]["choices"][name]
        assert choice["compute"] == "fp32" and "computed in FP32: its module or kernel casts" in choice["reason"]
    assert found["finite"] and found["share"].get("fp16", 0) + found["share"].get("bf16", 0) > 0.5
    assert rejection_reason(result) is None


TRAPS: dict[str, tuple[str, str, float]] = {
    # the second linear layer of T5's blocks; the same of Gemma and Qwen, whose inputs are what grows
    "t5": ("decoder.block.1.layer.2.DenseReluDense.wo.weight", "decoder.block.1.layer.2.DenseReluDense.wo", 1e6),
    "gemma": ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj", 1e8),
    "qwen3": ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj", 1e8),
}


def changed(base: Path, weight: str, change: Callable[[torch.Tensor], object]) -> Path:
    """The saved model, of which a weight is changed in place."""
    tensors = load_file(base / "model.safetensors")
    change(tensors[weight])
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    return base


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", TRAPS)
def test_activations_beyond_fp16_are_found_before_training(solo, folder, tmp_path, family) -> None:
    """A saved model whose feed-forward layers give values beyond 65,504, as pretrained ones of these families do.

    In FP16 it is not finite; the layer is proposed another dtype, and so is what lies between regions.
    """
    (weight, region, factor), task = TRAPS[family], "seq2seq" if family == "t5" else "sft"
    base = seq2seq.write_model(tmp_path / family) if family == "t5" else write_base(tmp_path / family, family)
    given = (f"model.name_or_path={changed(base, weight, lambda values: values.mul_(factor))}",)
    [found] = solo.run(analyze_cases.surveyed_task, folder=folder, task=task, overrides=given)
    result: dict[str, Any] = found["result"]
    assert result["spreads"][region]["activations"]["maximum"] > 65504
    choice, manifest = result["proposal"]["choices"][region], result["proposal"]["manifest"]
    # FP32 where it is sensitive
    reasons = {"bf16": "leave no 16x headroom in FP16", "fp32": "of the FLOPs when in BF16"}
    assert reasons[choice["compute"]] in choice["reason"]
    assert manifest["default"] in ("bf16", "fp32")
    assert math.isinf(result["validation"]["uniform fp16"]["error"])
    assert math.isfinite(result["validation"]["proposal"]["error"]) and found["finite"]


EMBEDDINGS = dict.fromkeys(("llama", "gemma"), "model.embed_tokens.weight") | {"gpt2": "transformer.wte.weight"}
BEGIN = SHAPE.special[0]
PLANTED = (1.0, 2e4, 2e5)
"""The largest value of one token in the residual stream: of no account, without headroom in FP16, and beyond it."""


def planted(folder: Path, family: str, largest: float) -> Path:
    """A saved model in which the tokens that begin a turn have one large value in the residual stream."""
    base = write_base(folder / f"{family}-{largest:g}", family)
    token = PreTrainedTokenizerFast.from_pretrained(base).convert_tokens_to_ids(BEGIN)
    scale = 32**0.5 if family == "gemma" else 1.0
    return changed(base, EMBEDDINGS[family], lambda values: values[token, 0].fill_(largest / scale))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", EMBEDDINGS)
@pytest.mark.parametrize("value", PLANTED)
def test_no_proposal_is_worse_than_a_uniform_dtype(solo, folder, tmp_path, family, value) -> None:
    """FP16 competes only where all that it stores has headroom."""
    overrides = (f"model.name_or_path={planted(tmp_path, family, value)}",)
    [found] = solo.run(analyze_cases.surveyed_task, folder=folder, task="sft", overrides=overrides)
    result: dict[str, Any] = found["result"]
    peak = max(result["stored"]["activations"].values(), key=lambda peak: peak["value"])
    checked, uniform = result["validation"], result["uniform"]
    if value > 1.0:
        assert peak["value"] == pytest.approx(value, rel=0.01) and peak["token"] == BEGIN
        first = result["stored"]["activations"][EMBEDDINGS[family].removesuffix(".weight")]
        assert (first["token"], first["position"]) == (BEGIN, 0)  # blocks may add a little to another turn's
        assert uniform != "fp16"
    assert (checked["uniform fp16"]["error"] == math.inf) == (value > 65504)
    assert (checked["uniform fp16"]["finite"] < 1) == (value > 65504)
    bearing = ["uniform bf16", *(["uniform fp16"] if peak["value"] * 16 <= 65504 else [])]
    chosen = checked[f"uniform {uniform}" if uniform else "proposal"]
    assert chosen["error"] <= min(checked[name]["error"] for name in bearing)
    assert uniform or chosen["error"] < 0.95 * min(checked[name]["error"] for name in bearing)
    manifest = result["proposal"]["manifest"]
    sixteen = {manifest["default"], *(rule["compute"] for rule in manifest["rules"])}
    assert ("loss_scale" in manifest) == ("fp16" in sixteen)


def test_fp16_that_no_loss_scale_helps_is_refused_with_its_layer(solo, folder, tmp_path) -> None:
    overrides = (f"model.name_or_path={planted(tmp_path, 'llama', 2e5)}",)
    given = {"folder": folder, "task": "sft", "overrides": overrides, "compute": "fp16"}
    [found] = solo.run(analyze_cases.surveyed_task, **given)
    assert found["hopeless"] == (
        f"precision.compute = fp16 cannot work: 200,000 at model.embed_tokens, token {BEGIN!r}, position 0, is beyond "
        "FP16's 65,504 whatever the loss scale; set precision.compute=bf16"
    )
