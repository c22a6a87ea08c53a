"""One key is enough: the DeepSpeed JSON follows it; combinations are verified or refused, without contradictions."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.cli import REPOSITORY
from config.command_line import read_command_line, render_config
from config.deepspeed.combinations import (
    COMPUTES,
    OFFLOADS,
    SETTINGS,
    UPSTREAM,
    Combination,
    combinations,
    refusal,
    refuse_combination,
    refuse_settings,
)
from config.deepspeed.document import read_document
from config.deepspeed.keys import SECTIONS
from config.deepspeed.resolve import resolve_json
from config.errors import UserError
from config.load import load_config, to_yaml
from config.resolved import Resolved
from tests.config.deepspeed.test_resolve import error_of, make

DEMO = REPOSITORY / "config/recipes/demo.yaml"
MANIFEST = "precision.manifest=config/manifests/llama_mixed.json"
MODEL = "model: {architecture: llama}\n"
OFFLOADED = "optimizer+param"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def resolve(config: Path, *arguments: str) -> Resolved:
    return read_command_line(["--config", str(config), *arguments], {})


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(MODEL + text)
        return path

    return write


CHOSEN = [
    ([], "zero2_bf16"),
    (["precision.compute=fp16"], "zero2_fp16"),
    (["precision.compute=fp32"], "zero2_fp32"),
    (["deepspeed.stage=3"], "zero3_bf16"),
    (["deepspeed.offload=cpu"], "zero2_bf16_offload"),
    (["deepspeed.stage=3", "deepspeed.offload=cpu", "precision.compute=fp16"], "zero3_fp16_offload"),
    (["deepspeed={stage: 1, offload: cpu}"], "zero1_bf16_offload"),
    ([MANIFEST], "zero2_fp32"),
    ([MANIFEST, "deepspeed.stage=3"], "zero3_fp32"),
    ([MANIFEST, "precision.compute=fp32"], "zero2_fp32"),
    # both, as it had to be written before
    (["precision.compute=fp16", "deepspeed.config=ds_configs/zero1_fp16.json"], "zero1_fp16"),
    (["--deepspeed_config", "ds_configs/zero3_bf16.json"], "zero3_bf16"),
    (["precision.path=manifest", MANIFEST, "precision.compute=auto", "deepspeed.stage=1"], "zero1_fp32"),
]


@pytest.mark.parametrize(("arguments", "expected"), CHOSEN)
@pytest.mark.parametrize("start", ["demo", "nothing", "keys"])
def test_one_key_is_enough(write, start, arguments, expected):
    """Whether the run config names both keys, as the demo does, or none, or the new ones."""
    texts = {"nothing": "", "keys": "precision: {compute: bf16}\ndeepspeed: {stage: 2, offload: none}\n"}
    resolved = resolve(DEMO if start == "demo" else write(texts[start]), *arguments)
    assert resolved.deepspeed_path.resolve() == REPOSITORY / f"ds_configs/{expected}.json"
    stage, compute, *offload = expected.removeprefix("zero").split("_")
    assert (resolved.zero_stage, resolved.compute) == (int(stage), compute)
    assert resolved.offload == ("none" if not offload else OFFLOADED if stage == "3" else "optimizer")
    assert resolved.config.precision.path == ("manifest" if MANIFEST in arguments else "cast")


@pytest.mark.parametrize(("arguments", "expected"), CHOSEN)
def test_what_was_chosen_is_shown_and_saved_and_starts_the_same_run(tmp_path, arguments, expected):
    resolved = resolve(DEMO, *arguments)
    shown = render_config(resolved)
    assert (
        f"  config: ds_configs/{expected}.json  # default: null\n" in shown
        and f"ds_configs/{expected}.json\n{{" in shown
    )
    saved = tmp_path / "config.yaml"
    saved.write_text(to_yaml(resolved.config))
    again = resolve(saved)
    assert again.config == resolved.config and again.deepspeed == resolved.deepspeed
    # and another stage, dtype, JSON or path needs one key there as well
    assert resolve(saved, "deepspeed.stage=1").zero_stage == 1
    assert resolve(saved, f"deepspeed.config=ds_configs/zero1_{resolved.compute}.json").zero_stage == 1
    if MANIFEST not in arguments:
        assert resolve(saved, "precision.compute=fp32").compute == "fp32"
        assert resolve(saved, MANIFEST).config.precision.path == "manifest"
    else:
        assert resolve(saved, "precision.manifest=null").config.precision.path == "cast"


OWN = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
OPEN = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
MINE, ZERO_2 = "deepspeed: {config: mine.json}\n", "deepspeed: {config: ds_configs/zero2_bf16.json"
REFUSED = [
    (MINE, OWN, ["precision.compute=fp16"], "mine.json: enables bf16, but precision.compute = fp16 in the run config"),
    (MINE, OWN, ["deepspeed.stage=2"], "mine.json: zero_optimization.stage = 1, but deepspeed.stage = 2 in the run"),
    (MINE, OWN, ["deepspeed.offload=cpu"], "mine.json: offloads none, but deepspeed.offload = cpu in the run config"),
    (MINE, OWN, [MANIFEST], "mine.json: enables bf16, but precision.path = manifest keeps parameters in FP32; remove"),
    (MINE, OPEN, [], 'mine.json: bf16.enabled = "auto" and precision.compute = auto leave the dtype open'),
    # two keys of one place
    ("precision: {compute: fp16}\n" + ZERO_2 + "}\n", OWN, [], "enables bf16, but precision.compute = fp16 in the run"),
    (ZERO_2 + ", stage: 3}\n", OWN, [], "zero2_bf16.json: zero_optimization.stage = 2, but deepspeed.stage = 3 in the"),
    ("", OWN, ["deepspeed={config: ds_configs/zero3_bf16.json, offload: cpu}"], "offloads none, but deepspeed.offload"),
    (
        "precision: {compute: bf16}\n",
        OWN,
        ["deepspeed.config=ds_configs/zero2_fp16.json"],
        "zero2_fp16.json: enables fp16, but precision.compute = bf16 in the run config; remove deepspeed.config",
    ),
    ("precision: {compute: bf16, manifest: m.json}\n", OWN, [], "precision.compute = bf16 cannot be combined with"),
]


@pytest.mark.parametrize(("text", "document", "arguments", "words"), REFUSED)
def test_what_disagrees_is_refused_naming_both(write, refusal, text, document, arguments, words):
    path = write(text)
    (path.parent / "mine.json").write_text(json.dumps(document))
    assert words in refusal(lambda given: resolve(path, *given), arguments)


@pytest.mark.parametrize(
    ("document", "arguments", "mine"),
    [
        (OWN, ["deepspeed.stage=1", "deepspeed.offload=none", "precision.compute=bf16"], True),
        (OPEN, ["precision.compute=fp16"], True),
        (OPEN, ["deepspeed.config=null", "precision.compute=fp16"], False),
    ],
)
def test_a_json_of_the_users_own_is_never_replaced_in_silence(write, document, arguments, mine):
    path = write(MINE)
    (path.parent / "mine.json").write_text(json.dumps(document))
    expected = path.parent / "mine.json" if mine else REPOSITORY / "ds_configs/zero2_fp16.json"
    assert resolve(path, *arguments).deepspeed_path.resolve() == expected


def test_the_command_line_says_how_to_shard_whatever_the_file_says(write):
    path = write("deepspeed: {stage: 2, offload: cpu}\n")
    resolved = resolve(path, "deepspeed.config=ds_configs/zero3_bf16.json")
    assert (resolved.zero_stage, resolved.offload) == (3, "none")


__all__ = ["make"]

REFUSED_SETTINGS = [row for row in SETTINGS if row.refused]


def document(stage: int, compute: str, offload: str = "none") -> dict[str, Any]:
    offloaded = {f"offload_{part}": {"device": "cpu"} for part in offload.split("+") if part != "none"}
    sections = {} if compute == "fp32" else {compute: {"enabled": True}}
    return {"zero_optimization": {"stage": stage, **offloaded}, **sections}


def test_the_table_has_every_path_dtype_stage_and_offload_once() -> None:
    rows = list(combinations())
    assert len(rows) == len(set(rows)) == 8 * sum(len(offloads) for offloads in OFFLOADS.values())
    assert {(row.path, row.compute) for row in rows} == {(p, c) for p, computes in COMPUTES.items() for c in computes}


def test_every_row_of_upstream_names_combinations_of_the_table() -> None:
    for row in UPSTREAM:
        covered = [combination for combination in combinations() if row.covers(combination)]
        assert {combination.stage for combination in covered} == set(row.stages)
        assert {combination.compute for combination in covered} == set(row.computes)
        assert row.clipping is None or not row.refused


@pytest.mark.parametrize("combination", [c for c in combinations() if c.path == "cast"], ids=str)
def test_a_json_resolves_where_the_table_verifies_and_is_refused_where_it_refuses(make, combination):
    given, row = document(*combination[2:0:-1], combination.offload), refusal(combination)
    if row is None:
        resolved = resolve_json(make(), Path("my.json"), given, world_size=2)
        assert resolved["zero_optimization"]["stage"] == combination.stage
    else:
        message = error_of(make(), given)
        assert message.startswith(f"{combination.compute.upper()} with ZeRO-{combination.stage} is refused: ")
        assert message.endswith(row.instead)


def test_what_a_refusal_proposes_resolves(make: Any) -> None:
    for row in [row for row in UPSTREAM if row.refused]:
        path = REPOSITORY / next(word for word in row.instead.split() if "ds_configs/" in word)
        found = resolve_json(make(), path, read_document(path), world_size=2)
        assert f"zero{found['zero_optimization']['stage']}" in path.name


@pytest.mark.parametrize("compute", COMPUTES["manifest"])
def test_a_manifest_is_refused_where_nothing_scales_its_loss(compute: str) -> None:
    refuse_combination("m.json", Combination("manifest", compute, 1))
    if compute not in ("fp16", "mixed"):
        refuse_combination("m.json", Combination("manifest", compute, 0))
        return
    with pytest.raises(UserError, match=f"^m.json: {compute.upper()} regions with ZeRO-0 is refused: .*use ZeRO-1"):
        refuse_combination("m.json", Combination("manifest", compute, 0))


def test_what_the_matrix_has_no_cells_for_is_refused() -> None:
    with pytest.raises(UserError, match="has no row for it"):
        refuse_combination("my.json", Combination("cast", "bf16", 2, "optimizer+param"))


@pytest.mark.parametrize("row", SETTINGS, ids=str)
def test_a_setting_is_one_that_exists_and_is_measured_or_refused(row: Any) -> None:
    section, _, key = row.key.rpartition(".")
    if row.in_json:
        assert key in SECTIONS[section]
    else:
        load_config(REPOSITORY / "config/recipes/demo.yaml", [f"{row.key}={row.other}"], None)
    assert bool(row.combinations) is not bool(row.refused)


@pytest.mark.parametrize("row", REFUSED_SETTINGS, ids=str)
def test_a_refused_setting_is_refused_on_its_stages_and_its_base_is_not(row: Any) -> None:
    value = row.other if row.other is not None else 0.5
    for stage in row.stages:
        with pytest.raises(UserError, match=f"^my.json: {row.key} = .* is refused at ZeRO-{stage}: "):
            refuse_settings("my.json", {row.key: value}, stage)
        refuse_settings("my.json", {row.key: row.base}, stage)
        refuse_settings("my.json", {}, stage)


def test_a_setting_that_is_measured_is_not_refused() -> None:
    for row in [row for row in SETTINGS if not row.refused and row.in_json]:
        for stage in row.stages:
            refuse_settings("my.json", {row.key: row.other}, stage)


def test_the_config_refuses_an_offload_that_was_not_measured(make: Any) -> None:
    given = document(3, "bf16")
    given["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": "/tmp"}
    assert "zero_optimization.offload_optimizer.device = nvme is refused" in error_of(make(), given)
