"""The manifest analysis: errors against plain torch at every ZeRO stage, no trace in the training, and the command."""

import json
from typing import Any

import pytest

from config.command_line import read_command_line
from config.errors import UserError
from config.launcher import as_launched
from config.schema import LossScaleSection
from precision.manifest import load_manifest
from tests.tools.analyze import analyze_cases
from tools.analyze import command as analyze
from tools.analyze.proposal import Limits

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
    tree: dict[str, Any] = {
        "uniform": None,
        "limits": {"fp8": 0.05},
        "validation": checked,
        "proposal": {"low_precision_share": 1.0, "fp8_share": 0.5},
    }
    assert analyze.rejection_reason(tree) is None
    assert "no module tolerates FP8" in analyze.rejection_reason(
        tree | {"proposal": {"low_precision_share": 1, "fp8_share": 0}}
    )
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
    assert table.head[3] == "of BF16's squared error" and [row[3] for row, *_ in table.rows] == [
        "90.0%",
        "10.0%",
        "0.0%",
    ]


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
    """Also at one above what the policy allows; a config that sets one starts there."""
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
