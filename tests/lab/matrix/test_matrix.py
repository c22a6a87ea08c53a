"""The precision matrix: a pairwise-covering part of it comes out as the table says, and broken engines do not pass."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from config.cli import REPOSITORY
from config.deepspeed.combinations import FP8, OFFLOADS, SETTINGS, UPSTREAM, combinations, refusal
from config.optimizers import OPTIMIZERS
from lab.detection.made_of import made_of
from lab.matrix import command
from lab.matrix.cells import ACCUMULATIONS, CHECKPOINTINGS, Cell, all_cells
from lab.matrix.command import main
from lab.matrix.page import by_scripts, expected_upstream, page, unexpected
from lab.results import keep_result
from tests.lab.matrix import matrix_cases

PAGE = REPOSITORY / "docs" / "precision-matrix.md"


def covering(cells: Sequence[Cell]) -> list[Cell]:
    """A small subset of `cells`, greedily chosen, with every pair of values that occurs in any cell."""
    left = set().union(*(pairs(cell) for cell in cells))
    chosen = []
    while left:
        best = max(cells, key=lambda cell: len(pairs(cell) & left))
        chosen.append(best)
        left -= pairs(best)
    return chosen


def pairs(cell: Cell) -> frozenset[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Every pair of (dimension, value) of a cell without a setting."""
    combination = cell.combination
    values = {
        "precision": (combination.path, combination.compute),
        "stage": combination.stage,
        "offload": combination.offload,
        "accumulation": cell.accumulation,
        "clipping": cell.clipping,
        "checkpointing": cell.checkpointing,
    }
    return frozenset(itertools.combinations(values.items(), 2))


CELLS = list(all_cells())
PLAIN = [cell for cell in CELLS if cell.plain]
OF_OPTIMIZERS = [cell for cell in CELLS if cell.optimizer != "adamw"]
IN_FP8 = [cell for cell in CELLS if cell.fp8]
IN_16_OR_32_BITS = [combination for combination in combinations() if combination.compute not in FP8]
COVERING = covering(PLAIN)


def test_the_matrix_is_the_product_of_its_dimensions_and_the_settings() -> None:
    assert len(CELLS) == len({cell.name for cell in CELLS})
    assert len(PLAIN) == len(IN_16_OR_32_BITS) * len(ACCUMULATIONS) * 2 * len(CHECKPOINTINGS)
    every = len(FP8) * sum(map(len, OFFLOADS.values())) * len(ACCUMULATIONS) * 2 * len(CHECKPOINTINGS)
    assert len(IN_FP8) == every + len(FP8) * len(OFFLOADS) * len(ACCUMULATIONS) * 2
    assert {cell.setting for cell in CELLS if cell.setting} == {row for row in SETTINGS if not row.refused}
    assert {cell.optimizer for cell in CELLS} == OPTIMIZERS.keys()
    for optimizer, computes in (("muon", 3), ("lamb", 3), ("lion", 1)):
        places = {(c.combination, c.clipping) for c in OF_OPTIMIZERS if c.optimizer == optimizer}
        assert len(places) == 2 * (4 + 3 * (computes - 1))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("half", [0, 1])
def test_it_comes_out_as_the_table_says(pair, half) -> None:
    cells = sorted(COVERING, key=lambda cell: cell.name)[half::2]
    for results in pair.run(matrix_cases.measure, cells=cells, upstream=False):
        assert unexpected(cells, results) == []


@pytest.mark.one_in(len(OF_OPTIMIZERS) // 2)
@pytest.mark.parametrize("cell", OF_OPTIMIZERS, ids=lambda cell: cell.name)
def test_an_optimizer_comes_out_as_its_rule_in_fp64(pair, cell) -> None:
    for results in pair.run(matrix_cases.measure, cells=[cell], upstream=False):
        assert unexpected([cell], results) == []


@pytest.mark.one_in(len(IN_FP8) // 3)
@pytest.mark.parametrize("cell", IN_FP8, ids=lambda cell: cell.name)
def test_fp8_comes_out_as_its_definition(pair, solo, cell) -> None:
    """One process gives the same: the step does not depend on how its batch is cut."""
    for results in (solo if cell.ranks else pair).run(matrix_cases.measure, cells=[cell], upstream=False):
        assert unexpected([cell], results) == []


@pytest.mark.one_in(3)
@pytest.mark.parametrize("row", [row for row in UPSTREAM if row.path == "cast"], ids=lambda row: row.problem[:60])
def test_bare_deepspeed_is_wrong_where_the_table_says(pair, row) -> None:
    cell = next(cell for cell in PLAIN if row.covers(cell.combination, clipping=cell.clipping))
    for results in pair.run(matrix_cases.measure, cells=[cell], upstream=True):
        assert results[cell.name]["upstream"]["verdict"] == "wrong"
        assert unexpected([cell], results) == []


@pytest.mark.slow
def test_a_setting_comes_out_as_the_table_says(pair) -> None:
    first = {}
    for cell in CELLS:
        if cell.setting and cell.combination.compute == cell.setting.computes[-2:][0]:
            first.setdefault(cell.setting, cell)
    cells = list(first.values())
    assert first.keys() == {row for row in SETTINGS if not row.refused}
    for results in pair.run(matrix_cases.measure, cells=cells, upstream=False):
        assert unexpected(cells, results) == []


@pytest.mark.parametrize("stage", [2, 3])
def test_a_scale_that_grows_in_the_middle_of_the_step_is_found(pair, stage) -> None:
    for result in pair.run(matrix_cases.scale_grows_at_once, stage=stage):
        assert result["verdict"] == "wrong"
        assert result["errors"]["masters"] > 0.1


@pytest.mark.parametrize(
    ("path", "compute"), [("cast", "fp32"), ("cast", "bf16"), ("manifest", "mixed"), ("manifest", "fp8")]
)
def test_a_lost_micro_batch_is_found(pair, path, compute) -> None:
    for result in pair.run(matrix_cases.loses_a_micro_batch, path=path, compute=compute):
        assert result["verdict"] == "wrong"
        assert "masters" in result["reason"]


def test_a_rank_that_raises_is_a_result(pair) -> None:
    for result in pair.run(matrix_cases.raises):
        assert (result["verdict"], result["reason"]) == ("raised", "ValueError: only here")


@pytest.mark.parametrize("only", ["ZeRO-4", "parallel.tensor"])
def test_a_cell_that_is_not_named_or_has_too_few_processes_is_one_line(capsys, tmp_path, only) -> None:
    assert main(["--only", only, "--processes", "1", "--folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: --only {only}: no cell has this in its name and runs on 1 ")


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_every_cell_of_a_number_of_processes_is_a_config(monkeypatch, tmp_path, processes) -> None:
    for name, value in (("WORLD_SIZE", processes), ("RANK", 0), ("LOCAL_RANK", 0)):
        monkeypatch.setenv(name, str(value))
    cells = [cell for cell in CELLS if cell.fits(processes)]
    assert (cells == CELLS) == (processes == 2)
    for cell in (cell for cell in cells if cell.setting):
        cell.resolve(tmp_path)


def test_a_matrix_goes_on_after_a_line_that_was_cut_short(tmp_path: Path) -> None:
    path, now = tmp_path / "results.jsonl", {"steps": 6}
    first, other, second = (
        {"cell": cell, "verdict": "verified", "conditions": conditions}
        for cell, conditions in (("a", now), ("b", {"steps": 7}), ("c", now))
    )
    for result in (first, other, second):
        keep_result(path, result)
    path.write_text(path.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    assert command.results(path, now) == {"a": first}
    keep_result(path, second)
    assert command.results(path, now) == {"a": first, "c": second}


def test_results_of_another_device_are_not_used_and_the_page_names_a_gpu(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    without, code = command.conditions(2, 6), made_of()
    keep_result(tmp_path / "results.jsonl", {"cell": "a", "conditions": without})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "NVIDIA H200")
    on_gpu = command.conditions(2, 6)
    assert command.results(tmp_path / "results.jsonl", on_gpu) == {}
    assert made_of() != code
    assert "there are no streams" in page(CELLS, made_up(), without) and "H200" not in page(CELLS, made_up(), without)
    assert "there are no streams" not in page(CELLS, made_up(), on_gpu) and "H200" in page(CELLS, made_up(), on_gpu)


def rows_of(text: str) -> list[list[str]]:
    """The cells of every table row of a page."""
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("|")]


def made_up(**changes: Any) -> dict[str, dict[str, Any]]:
    """A result for every cell: verified, and bare DeepSpeed as the table says, but for `changes` (name to verdict)."""
    good = {"verdict": "verified", "reason": "", "errors": {"start": 0.0, "loss": 1e-9, "norm": 1e-9, "masters": 1e-9}}
    found = {}
    for cell in CELLS:
        beside = {"upstream": {**good, "verdict": expected_upstream(cell)}} if cell.bare else {}
        found[cell.name] = {**good, **beside, "seconds": 1.0, **changes.get(cell.name, {})}
    return found


def test_the_committed_page_and_the_table_agree() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = rows_of(text)
    for combination in IN_16_OR_32_BITS:
        corners = [row for row in rows if row[0] == str(combination)]
        wanted = itertools.product(("off", "on"), map(str, ACCUMULATIONS))
        assert [tuple(row[1:3]) for row in corners] == list(wanted), combination
    refused = {combination for combination in combinations() if refusal(combination)}
    on_page = {row[0] for row in rows if len(row) > 3 and row[1] in ("on", "off") and row[3] == "refused"}
    assert on_page == {str(combination) for combination in refused}
    assert {row[1] for row in rows} >= {row.problem for row in UPSTREAM}
    assert len([row for row in rows if row[3:] and re.match("refused: |repaired: ", row[3])]) == len(UPSTREAM)
    refused_settings = {f"`{row}`": row.refused for row in SETTINGS if row.refused}
    measured = {f"`{row}`, {compute.upper()}" for row in SETTINGS if not row.refused for compute in row.computes}
    settings = rows_of(text[text.index("## Other settings") : text.index("## Other optimizers")])
    assert {row[0] for row in settings if row[0].startswith("`")} == refused_settings.keys() | measured
    assert {row[0]: row[2] for row in rows if row[0] in refused_settings} == refused_settings
    for combination in [combination for combination in combinations() if combination.compute in FP8]:
        ranks = ("2",) if combination.offload != "none" else ("1", "2")
        corners = [tuple(row[1:3]) for row in rows if row[0] == str(combination)]
        assert corners == list(itertools.product(ranks, map(str, ACCUMULATIONS))), combination
    verdicts = [bool(refusal(cell.combination)) for cell in CELLS]
    bare = [expected_upstream(cell) for cell in CELLS if cell.bare]
    counted = f"{len(CELLS)} cells: {verdicts.count(False)} verified, {verdicts.count(True)} refused."
    compared = f"Bare DeepSpeed, compared in {len(bare)} of them, is wrong in {bare.count('wrong')}."
    assert f"\n{counted} {compared}\n" in text
    assert f"\n{by_scripts()}\n" in text, "docs/upstream/README.md has other rows"
    places = {(row[0], row[1].lower(), row[2], row[3]) for row in rows if row[0] in OPTIMIZERS}
    assert places == {
        (c.optimizer, c.combination.compute, str(c.combination.stage), "on" if c.clipping else "off")
        for c in OF_OPTIMIZERS
    }
    assert "WRONG" not in text
    assert "RAISED" not in text


def test_what_is_not_as_the_table_says_stands_out() -> None:
    conditions = command.conditions(2, 6)
    cell = next(cell for cell in PLAIN if str(cell.combination) == "BF16, ZeRO-2" and cell.clipping)
    results = made_up(**{cell.name: {"verdict": "wrong", "reason": "masters 3.0e-01"}})
    assert "**WRONG**" in page(CELLS, results, conditions)
    assert f"{cell.name}: wrong, not verified: masters 3.0e-01" in unexpected(CELLS, results)
