"""The table of verified and refused combinations: complete, without contradictions, and the config refuses from it."""

from pathlib import Path
from typing import Any

import pytest

from config.cli import REPOSITORY
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
from config.load import load_config
from tests.config.deepspeed.test_resolve import error_of, make

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
