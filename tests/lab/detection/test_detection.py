"""The table of planted defects: two cells of it, cut short, through its own code, and how the page is written."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from config.cli import REPOSITORY
from config.command_line import read_command_line
from lab.detection import command, gate, judge, run
from lab.detection.cells import Cell, all_cells, base, cell_of, defect_of, later_cells, wide_cells
from lab.detection.command import Cells, NoAnswer, main, prepare_data, results
from lab.detection.defects import DEFECTS, PATHS
from lab.detection.healthy import drawn
from lab.detection.made_of import hashed, is_only_shown
from lab.detection.page import by_kind, is_found, is_named, page, wide_alarms
from lab.detection.planted import is_no_twin
from lab.detection.planted import main as run_planted
from lab.detection.plants.bits import HIT
from lab.detection.plants.site import ATTENTION, BAD_RANK, on_engine, planted
from tests.support.imports import imported_names
from tests.support.jobs.process_group import ProcessGroup
from tests.support.models.architectures import CASES
from tools.parity.jobs import TWIN, References
from tools.parity.judge_steps import Check
from tracking.compare.surviving import read_events
from tracking.run_dir import RunDir
from training import session

SCALED = "attention of one layer times 1.01"
CONDITIONS = {
    "torch": "1",
    "deepspeed": "2",
    "transformers": "3",
    "machine": "4 cores",
    "commit": "abc",
    "minutes": 5.0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("detection")
    prepare_data(made)
    return made


def result(pair: ProcessGroup, folder: Path, cell: Cell) -> dict[str, Any]:
    return Cells(pair, folder, "this").result(replace(cell, steps=6))


def test_a_healthy_run_raises_no_alarm_and_a_planted_defect_is_named(pair: ProcessGroup, folder: Path) -> None:
    healthy = result(pair, folder, Cell(None, "bf16", 2))
    assert (healthy["found_by"], healthy["said"], healthy["oracle"], healthy["alone"]) == ([], [], "", [])
    found = result(pair, folder, Cell(SCALED, "bf16", 2))
    assert "unexplained" in found["found_by"]
    assert ATTENTION in found["modules"] and ATTENTION in found["alone"][0]
    assert is_found(found) and is_named(defect_of(SCALED), found)


def test_a_twin_that_other_code_or_other_arguments_made_is_made_again(pair: ProcessGroup, folder: Path) -> None:
    """Or everything would seem to be found."""
    cell = Cell(None, "bf16", 2, seed=7, steps=2)
    name = run.twin_name(cell)
    events = folder / "runs" / name / "events.jsonl"

    def made(cell: Cell, code: str) -> str:
        pair.run(run.twin, folder=str(folder), cell=cell, name=name, code=code)
        return events.read_text(encoding="utf-8")

    first = made(cell, "this")
    assert made(cell, "this") == first
    other = made(cell, "other")
    assert other != first
    assert made(replace(cell, steps=4), "other") != other
    assert max(event["step"] for event in read_events(events) if event["event"] == "step") == 4


def test_the_gates_twins_stay_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setattr(session, "build_engine", lambda resolved: resolved.config.run.name)
    plant = on_engine(lambda engine, size: found.append(str(engine)))
    with planted(plant, rank=0, wanted=is_no_twin):
        for name in (f"{TWIN}seed-0", "candidate-seed-0", "mine"):
            run: Any = SimpleNamespace(config=SimpleNamespace(run=SimpleNamespace(name=name)))
            session.build_engine(run)  # type: ignore[call-arg]
    assert found == ["candidate-seed-0", "mine"]


def test_a_second_table_of_the_gate_keeps_the_twin_that_it_has_just_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, twin = tmp_path / "nothing/parity.json", tmp_path / "nothing/runs/fp32-seed-0"
    report.parent.mkdir()
    report.write_text("{}")

    def train_references(*_: object) -> References:
        twin.mkdir(parents=True)
        return References((), ())

    def train_candidate(*_: object) -> None:
        assert twin.exists()
        raise InterruptedError

    monkeypatch.setattr(gate, "train_references", train_references)
    monkeypatch.setattr("tools.parity.gate.train_candidate", train_candidate)
    options = {"config": str(REPOSITORY / "config/recipes/demo.yaml"), "overrides": [], "norm": "", "linear": ""}
    with pytest.raises(InterruptedError):
        gate.run_all(Namespace(**options, report=tmp_path, steps=20, processes=2))


@pytest.mark.parametrize(
    ("ranks", "found_by"),
    [
        (
            ("config.errors.UserError: step-8: the checksum of masters differs", "did not answer within 600 s"),
            "UserError",
        ),
        (("training.engine.health.RanksDisagree: loss differs between ranks",) * 2, "RanksDisagree"),
        (("AssertionError: \ntensor([0.1], dtype=torch.float16) Cannot partition a param in flight",) * 2, None),
        (("RuntimeError: shape '[2, 3]' is invalid for input of size 5",) * 2, None),
        (("did not answer within 600 s",) * 2, None),
    ],
)
def test_a_run_that_crashes_is_no_defect_found_and_one_that_refuses_is(
    tmp_path: Path, ranks: tuple[str, str], found_by: str | None
) -> None:
    text = "\n".join(f"rank {rank}:\nTraceback (most recent call last):\n{line}" for rank, line in enumerate(ranks))

    def fail(function: object, **_: object) -> list[object]:
        if function is part:
            raise AssertionError(text)
        return [["its output is off"] if function is run.alone else {"found_by": ["unexplained"], "said": []}]

    cells, cell = Cells(SimpleNamespace(run=fail), tmp_path, "this"), Cell(SCALED, "bf16", 2)  # type: ignore[arg-type]
    for part in (run.run, run.alone):
        if found_by is None:
            with pytest.raises(NoAnswer):
                cells.result(cell)
            continue
        found = cells.result(cell)
        if part is run.run:
            assert found["found_by"] == [f"refused: {found_by}"] and found["said"] == [ranks[0].partition(": ")[2]]
            assert found["alone"] == ["its output is off"]
        else:
            assert found["found_by"] == ["unexplained"] and found["alone"] == [ranks[0]]


def test_a_check_that_had_no_step_to_compare_finds_no_defect_in_a_run_that_ended_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("judge_every_step", "by_rule"):
        monkeypatch.setattr(judge, name, lambda *_: Check("", 0.0, 0.0, passed=True))
    monkeypatch.setattr(judge, "outside", lambda *_: [])
    (tmp_path / "events.jsonl").touch()
    resolved: Any = SimpleNamespace(config=read_command_line(base(tmp_path, "plain")).config)
    options: dict[str, Any] = {"recomputed": 0, "points": None}
    ended, done = (
        judge.judged(RunDir(tmp_path), RunDir(tmp_path), [], resolved, [], code=code, **options) for code in (5, 0)
    )
    assert ended["found_by"] == ["finished_runs"] and "update_error" in done["found_by"]


@pytest.mark.parametrize("line", [["{kind: nope}", "train.py"], ["[1]", "train.py"], ["{kind: silent_skip}"], []])
def test_what_cannot_be_planted_is_refused_in_one_line(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_planted(line) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1


def test_results_of_other_code_and_lines_cut_short_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    lines = [{"cell": "a", "code": "old"}, {"cell": "a", "code": "this", "n": 1}, {"cell": "b"}, {"cell": "c"}]
    path.write_text("\n".join(map(json.dumps, lines))[:-3], encoding="utf-8")
    assert results(path, "this") == ({"a": lines[1]}, 2)
    assert results(tmp_path / "none", "this") == ({}, 0)


def test_a_result_knows_every_file_that_decides_what_is_planted_and_trained() -> None:
    """Files that start processes or show results decide nothing."""
    known = {*hashed()}
    for path in (path for path in known if path.is_relative_to(REPOSITORY / "lab") and path.suffix == ".py"):
        for _, name in imported_names(path.read_text(encoding="utf-8")):
            module = REPOSITORY / name.replace(".", "/")
            files = [each.with_suffix(".py") for each in (module, module.parent)]
            assert all(file in known or is_only_shown(file) for file in files if file.is_file()), f"{path}: {name}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "path", "stage", "by"),
    [
        ("second moment rounded to BF16", "bf16", 1, "corruption"),
        ("Adam's count lost at a load", "bf16", 2, "update_rounding"),
        ("both: learning rate one step late", "manifest", 3, "oracle: learning rate"),
        ("bit of a weight flipped on one rank", "fp16", 2, "corruption"),
        ("mean of micro-batches' means", "fp16", 3, "weighting_error"),
        ("both: mean of micro-batches' means", "bf16", 1, "weighting_error"),
        ("loss of micro-batches summed in FP16", "manifest", 2, "loss_error"),
        ("both: decay on norms and embeddings", "bf16", 3, "update_error"),
        ("moments lost at a load", "bf16", 2, "UserError"),
        ("rotary base of one layer 1% too large", "bf16", 1, "unexplained"),
        ("dropout while evaluated", "bf16", 1, "evaluation_error"),
        ("both: evaluated on rows of one rank", "bf16", 2, "oracle: validation loss"),
        ("queries and keys turned before their norms", "bf16", 2, "unexplained"),
    ],
)
def test_each_kind_of_check_has_its_defect(
    pair: ProcessGroup, folder: Path, name: str, path: str, stage: int, by: str
) -> None:
    cell = cell_of(defect_of(name), path, stage)
    found = Cells(pair, folder, "this").result(cell)
    refusals = [line.partition(":")[0].rpartition(".")[2] for line in found["alone"]]  # of the plain run
    assert by in [*found["found_by"], *refusals]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "path", "stage"),
    [
        ("attention of all layers times 1.01", 0.0, "bf16", 1),
        ("attention of all layers times 1.01", 0.0, "fp16", 3),
        ("scores of one attention capped at 50", 1e4, "bf16", 1),
        ("scores of one attention capped at 50", 1e4, "fp16", 2),
        ("one norm times 1.01", 0.0, "bf16", 3),
        ("one norm times 1.01", 0.0, "fp16", 2),
    ],
)
def test_code_that_a_defect_stands_in_is_sound_without_it(
    pair: ProcessGroup, folder: Path, name: str, size: float, path: str, stage: int
) -> None:
    found = Cells(pair, folder, "this").result(cell_of(defect_of(name), path, stage), size)
    assert (found["found_by"], found["alone"]) == ([], [])


def test_every_defect_has_a_run_on_each_of_its_paths_and_every_stage_sees_every_kind() -> None:
    cells = all_cells()
    assert len({cell.name for cell in cells}) == len(cells)
    assert sum(cell.planted is None for cell in cells) == 40
    for defect in DEFECTS:
        own = [cell for cell in cells if cell.planted == defect.name]
        assert {cell.path for cell in own} == set(defect.paths)
        assert len({cell.stage for cell in own}) == len(own)
    kinds = {(defect.group, cell.stage) for cell in cells if (defect := cell.defect) is not None}
    everywhere = {defect.group for defect in DEFECTS if len(defect.paths) == len(PATHS)}
    assert kinds >= {(group, stage) for group in everywhere for stage in (1, 2, 3)}


def test_the_healthy_set_ups_are_of_every_architecture_and_depth() -> None:
    cells = wide_cells()
    assert len({cell.name for cell in cells}) == len(cells) == 200
    assert {cell.variant.split()[1].rstrip(",") for cell in cells} == {case.architecture for case in CASES}
    for layers in (2, 24, 48):
        assert any(f", {layers} layers" in cell.variant for cell in cells)
    assert drawn(20, seed=1) == drawn(20, seed=1) != drawn(20, seed=2)
    shown = wide_alarms({cells[0].name: said(), cells[1].name: said("gradient_error")})
    assert "1 of 2 healthy set-ups raised an alarm: 50.0%, 95% interval 9.5% to 90.5%" in shown


def said(*found_by: str, modules: tuple[str, ...] = (), ranks: tuple[int, ...] = ()) -> dict[str, Any]:
    """A result as a cell leaves it."""
    return {"found_by": list(found_by), "modules": list(modules), "ranks": list(ranks), "said": [], "oracle": ""}


def test_the_page_says_what_was_found_named_missed_and_not_run() -> None:
    cells = all_cells()
    scaled = [cell.name for cell in cells if cell.planted == SCALED]
    bit = next(cell.name for cell in cells if cell.planted == "bit of a weight flipped on one rank")
    missed = next(cell.name for cell in cells if cell.planted == "labels smoothed by 1%")
    healthy = [cell.name for cell in cells if cell.planted is None]
    results = {name: said() for name in healthy}
    results[scaled[0]] = said("unexplained", modules=(ATTENTION,)) | {"alone": ["its output is off"]}
    results[scaled[1]] = said("oracle: loss")
    results[bit] = said("corruption", modules=(HIT,), ranks=(BAD_RANK,))
    results[missed] = said()
    text = page(cells, results, CONDITIONS)
    assert f"**3 of {len(DEFECTS)} defects were planted, in 4 runs;\n2 were found, in 3 runs." in text
    assert "named in\n2 of 3" in text
    assert "0 of 40 healthy runs raised an alarm" in text and "the rate is at most 7.2% at 95% confidence" in text
    assert "Not found: labels smoothed by 1%." in text
    who = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if " | " in line}
    assert who["Forward passes"] == "| Forward passes | 3 | 1 | 1 | 1 | 2 | 2 |"
    assert who["all planted"].startswith("| all planted | 4 | 1: 25% (5% to 70%) | 2: 50% (15% to 85%) |")
    row = next(line for line in text.splitlines() if line.startswith(f"| {SCALED}"))
    assert "`unexplained`, oracle: loss" in row and "1 of 2" in row
    results[healthy[0]] = {**said("module_error"), "said": ["module_error: 1"]}
    alarmed = page(cells, results, CONDITIONS)
    assert "1 of 40 healthy runs raised an alarm" in alarmed and f"- {healthy[0]}: module_error: 1" in alarmed


def test_a_check_that_a_healthy_run_fails_too_finds_no_later_defect() -> None:
    cells = later_cells()
    healthy = next(cell for cell in cells if cell.planted is None and cell.variant == "gemma2")
    planted = next(cell for cell in cells if cell.planted and (cell.variant, cell.path) == ("gemma2", healthy.path))
    reason = "{}, rank 0, step {}: it is wrong (error {}, bound 1); run python -m tools.parity on this config"
    results = {
        healthy.name: {**said("unexplained"), "alone": [reason.format("lm_head", 4, 2)]},
        planted.name: {**said("unexplained", "oracle: loss"), "alone": [reason.format(ATTENTION, 1, 3)]},
    }
    assert "| all planted | 1 | 0: 0% (0% to 79%) | 0: 0% (0% to 79%) | 1: 100% (21% to 100%) |" in by_kind(
        cells, results
    )


def test_the_committed_page_has_titles_that_are_written_and_no_part_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells, written = [*all_cells(), *wide_cells()], REPOSITORY / "docs/detection.md"
    out, found = tmp_path / "page.md", {cell.name: {**said(), "seconds": 1.0} for cell in cells}
    for name, fake in (("prepare_data", None), ("measure", None), ("results", (found, 0)), ("made_of", "this")):
        monkeypatch.setattr(command, name, lambda *_, fake=fake, **__: fake)
    assert main(["--out", str(out), "--folder", str(tmp_path)]) == 0
    titles = {line for line in out.read_text(encoding="utf-8").splitlines() if line.startswith("## ")}
    assert {line for line in written.read_text(encoding="utf-8").splitlines() if line.startswith("## ")} <= titles
    complete = out.read_text(encoding="utf-8")
    del found[cells[-1].name]
    assert main(["--out", str(out), "--folder", str(tmp_path)]) == 0
    assert out.read_text(encoding="utf-8") == complete != (tmp_path / "detection.md").read_text(encoding="utf-8")
