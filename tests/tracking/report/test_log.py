"""The last lines of logs: text alone, found where runs and sweeps keep them, and nothing outside a served folder."""

from pathlib import Path

import pytest

from tests.support.runs.compare_runs import write_run
from tests.support.servers.serving import served
from tracking.report.log import last_lines, log_files, newest_events
from tracking.run_dir import RunDir
from tracking.summary import read_run_folder


def test_a_log_is_text_without_colours_movements_and_secrets(tmp_path: Path) -> None:
    secret = f"hf_{'a1B2' * 8}"
    lines = [f"line {number}" for number in range(100)]
    lines += ["\x1b[31mred\x1b[0m \x1b]0;title\x07<b>", "10%\r50%\r100% done\r", "", f"token={secret}", "\u202eltr"]
    (tmp_path / "a.log").write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    found = last_lines(tmp_path / "a.log").split("\n")
    assert found[:2] == ["line 85", "line 86"] and len(found) == 20
    assert found[15:17] == ["red <b>", "100% done"] and found[18] == "\\u202eltr" and secret not in "".join(found)
    assert last_lines(tmp_path / "absent.log") == ""


def test_logs_of_a_run_a_sweep_and_a_tool_are_found(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "tool" / "runs" / "sweep-003")
    paths = [run_dir.path / "train.log", run_dir.path / "logs" / "rank0.log"]
    paths += [tmp_path / "tool" / "logs" / "sweep-003.log", tmp_path / "tool" / "runs" / "logs" / "003.log"]
    for path in [*paths, tmp_path / "tool" / "runs" / "logs" / "004.log"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    assert sorted(log_files(run_dir)) == sorted(paths)


@pytest.mark.parametrize("inside", [True, False])
def test_a_log_outside_of_the_served_folder_is_not_shown(tmp_path: Path, inside: bool) -> None:
    write_run(tmp_path / "runs", "mine")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "mine.log").write_text("printed by the run")
    with served(tmp_path if inside else tmp_path / "runs") as client:
        page = client.page("/run/sections", key="runs/mine" if inside else "mine")
    assert ("printed by the run" in page) is inside


def test_the_newest_events_are_sentences(tmp_path: Path) -> None:
    incident = {"event": "incident", "verdict": "SKIP", "reason": "the loss is nan", "modules": [], "replay": ""}
    check = {"event": "self_check", "checks": {}, "skipped": []}
    run_dir = write_run(tmp_path, "a", after={20: [incident, check]})
    found = [(event["step"], text) for event, text in newest_events(read_run_folder(run_dir, "a"))]
    assert (20, "SKIP: the loss is nan") in found and not any("{" in text for _, text in found)
    assert found[-1][0] == 40 and found[-1][1].startswith("done")
