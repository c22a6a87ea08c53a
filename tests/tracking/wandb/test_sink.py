"""The real wandb, offline: one run over sessions, its charts, and no way for it to hold up or end training."""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from config import yaml_text
from config.cli import REPOSITORY
from tests.support.jobs.launches import wait_until
from tests.support.runs.compare_runs import SCALE, step_fields
from tests.support.runs.heat_runs import modules, telemetry
from tests.support.runs.report_runs import session
from tests.support.servers.wandb_files import config as stored_config
from tests.support.servers.wandb_files import records, rows, sessions
from tracking.run_dir import RunDir
from tracking.trackers.delivery import VERDICT
from tracking.wandb.charts import Rows, chart_values, histograms
from tracking.wandb.sink import WandbSink, run_id
from tracking.wandb.upload import ALERT_EVERY_S, MAX_ROWS, STALE_S, Alerts, Tables
from tracking.wandb.view import DEFINITION, build


def _sink(run_dir: RunDir, mode: str = "offline", *, every: int = 2, **options: Any) -> WandbSink:
    run = {"run": {"name": "demo", "hypothesis": "falls", "steps": 3}, "optimizer": {"learning_rate": 1e-3}}
    run["tracking"] = {"project": "p", "log_every_steps": every, "group": "seeds", "tags": ["small", "fp16"]}
    run["tracking"]["job_type"] = "sweep"
    config = {"run": run, "deepspeed": {"zero": 2}, "environment": {"hostname": "node7", "hub_token": "hunter2hunter2"}}
    return WandbSink(run_dir, config, mode=mode, **{"init_timeout_s": 15.0, **options})


def _session(run_dir: RunDir, sink: WandbSink, first: int, last: int) -> None:
    with session(run_dir.path, sink, step=first - 1) as run:
        for step in range(first, last + 1):
            run.steps(1, loss=math.nan if step == 3 else None)
        run.evaluate(2.5)
        run.end("done")


def _steps(run_dir: RunDir) -> list[int]:
    """The steps that the files of all sessions hold, in their order."""
    return [row["step"] for row in rows(run_dir.wandb) if "train/loss" in row]


def _exit_codes(folder: Path) -> list[int]:
    return [record.exit.exit_code for record in records(folder) if record.WhichOneof("record_type") == "exit"]


def _summary(folder: Path) -> list[Any]:
    """The updates of the summary in their order."""
    found = [record.summary for record in records(folder) if record.WhichOneof("record_type") == "summary"]
    return [item for summary in found for item in summary.update]


def test_two_sessions_are_one_offline_run_on_one_axis(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    _session(run_dir, _sink(run_dir), 1, 4)
    _session(run_dir, _sink(run_dir), 3, 6)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", ""), "wandb is not heard"
    folders = sessions(run_dir.wandb)
    assert len(folders) == 2 and all(folder.name.endswith(run_id(run_dir)) for folder in folders)
    stored = rows(run_dir.wandb)
    attempts = [row["attempt"] for row in stored]
    assert attempts == sorted(attempts) and attempts[-1] == 8, "the axis goes on where step goes back"
    assert _steps(run_dir) == [2, 4, 4, 6], "every second step, of both sessions"
    assert [row["eval/loss"] for row in stored if "eval/loss" in row] == [2.5, 2.5]
    opened_on = ("loss", "gradient norm", "learning rate", "loss scale")  # wandb's first section, Charts
    first = next(row for row in stored if "train/loss" in row)
    assert [first[name] for name in opened_on] == [
        first[f"train/{n}"] for n in ("loss", "grad_norm", "lr", "loss_scale")
    ]
    assert [row["validation loss"] for row in stored if "eval/loss" in row] == [2.5, 2.5]
    counters = [row["_step"] for row in stored]
    assert counters == sorted(set(counters)), "wandb's own counter never goes back, so wandb drops nothing"
    content = b"".join(path.read_bytes() for path in run_dir.path.rglob("*") if path.is_file())
    assert b"node7" in content and b"hunter2hunter2" not in content
    run = next(record.run for record in records(folders[0]) if record.WhichOneof("record_type") == "run")
    assert (run.run_group, list(run.tags), run.job_type) == ("seeds", ["small", "fp16"], "sweep")
    known = stored_config(run_dir.wandb)
    assert known["run"]["steps"] == 3 and known["optimizer"] == {"learning_rate": 1e-3}, "keys are not doubled"
    assert known["ds_config"] == {"zero": 2} and "deepspeed" not in known


def test_training_that_is_killed_outright_is_delivered_and_marked_as_failed(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path; from tests.support.runs.report_runs import session\n"
        "from tracking.run_dir import RunDir; from tests.tracking.wandb.test_sink import _sink\n"
        "run_dir = RunDir.create(Path(sys.argv[1]), 'demo', fresh=False)\n"
        "with session(run_dir.path, _sink(run_dir, every=1)) as run:\n"
        "    run.steps(3)\n"
        "    if os.fork() == 0: time.sleep(12); os._exit(0)  # a data worker, which keeps the pipe to wandb open\n"
        "    time.sleep(0.3); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path), str(REPOSITORY)], check=False).returncode == -9
    wait_until(lambda: any(map(_exit_codes, (tmp_path / "demo" / "wandb").glob("offline-run-*"))))
    (folder,) = (tmp_path / "demo" / "wandb").glob("offline-run-*")
    assert _exit_codes(folder) == [1]
    assert _steps(RunDir(tmp_path / "demo")) == [1, 2, 3]
    said = [json.loads(item.value_json) for item in _summary(folder) if item.key == "verdict"]
    assert said == ["running", "killed"], "the server may have that of an earlier session"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: there is nothing to bind")
def test_the_worker_may_use_the_cores_that_training_does_not(tmp_path: Path) -> None:
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path; from config.machine.binding import Binding, apply_binding\n"
        "from tracking.run_dir import RunDir; from tests.tracking.wandb.test_sink import _sink\n"
        "allowed = os.sched_getaffinity(0)\n"
        "assert apply_binding(Binding(1, frozenset([min(allowed)]), 'one', True)) == 'cores: bound to one'\n"
        "run_dir = RunDir.create(Path(sys.argv[1]), 'demo', fresh=False)\n"
        "sink = _sink(run_dir, every=1)\n"
        "assert os.sched_getaffinity(0) == {min(allowed)} != allowed\n"
        "assert os.sched_getaffinity(sink._process.pid) == allowed\n"
        "sink._process.kill()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path), str(REPOSITORY)], check=True)


def test_a_wandb_that_cannot_be_started_costs_one_line(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir.path / "wandb.log").mkdir()
    _session(run_dir, _sink(run_dir), 1, 2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "could not be started" in lines[0]


def test_an_unreachable_server_costs_one_line(run_dir, monkeypatch, capsys) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    begin = time.monotonic()
    sink = _sink(run_dir, mode="online", init_timeout_s=3.0, finish_timeout_s=60.0)
    _session(run_dir, sink, 1, 2)
    assert time.monotonic() - begin < 75.0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "offline" in lines[0]
    assert len(list(run_dir.wandb.glob("offline-run-*"))) == 1


def test_a_worker_that_dies_costs_one_line_and_the_sink(run_dir, monkeypatch, capsys) -> None:
    """Here wandb cannot even be imported: a folder named wandb that holds something else comes first."""
    broken = run_dir.path / "path" / "wandb"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('broken\\ninstallation')")
    with monkeypatch.context() as at_its_start:
        at_its_start.setenv("PYTHONPATH", str(broken.parent))
        sink = _sink(run_dir)
    assert sink._process is not None
    sink._process.wait(20)
    _session(run_dir, sink, 1, 2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "broken installation" in lines[0] and "training continues" in lines[0]
    assert '"note"' in run_dir.events.read_text() and "Traceback" in (run_dir.path / "wandb.log").read_text()


def test_what_a_dead_wandb_missed_comes_with_the_next_session(run_dir, capsys) -> None:
    sink = _sink(run_dir, every=1)
    assert sink._process is not None
    sink._process.kill()
    sink._process.wait()
    _session(run_dir, sink, 1, 4)
    assert "tracking.wandb.sync" in capsys.readouterr().err
    _session(run_dir, _sink(run_dir, every=1), 5, 6)
    assert _steps(run_dir) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("full", "words"), [("before", "no space left"), ("meanwhile", "disk")])
def test_a_full_disk_costs_one_line_and_no_event(run_dir, capsys, full, words) -> None:
    """wandb's own folder is on a small disk of its own, which something else fills."""
    run_dir.wandb.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(run_dir.wandb)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can mount a small disk")
    try:
        if full == "before":
            _fill(run_dir.wandb, leave=3 << 20)
        with session(run_dir.path, _sink(run_dir, every=1)) as run:
            if full == "meanwhile":
                wait_until(lambda: bool(list(run_dir.wandb.glob("offline-run-*/*.wandb"))))
                _fill(run_dir.wandb, leave=0)
            run.steps(300)
            run.end("done")
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and words in lines[0]
        (run_dir.wandb / "taken").unlink()
        _session(run_dir, _sink(run_dir, every=1), 301, 301)
        assert _steps(run_dir) == list(range(1, 302))
    finally:
        subprocess.run(["umount", "-l", str(run_dir.wandb)], check=False)


def _fill(folder: Path, *, leave: int) -> None:
    with (folder / "taken").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while shutil.disk_usage(folder).free > leave:
            file.write(bytes(4096))


def test_two_processes_never_feed_one_run(run_dir: RunDir) -> None:
    first = _sink(run_dir)
    time.sleep(1.0)
    second = _sink(run_dir, finish_timeout_s=0.5)
    with pytest.raises(RuntimeError, match="already"):
        second.close()
    first.close()


def test_a_stuck_worker_is_ended_in_time(run_dir: RunDir) -> None:
    sink = _sink(run_dir, init_timeout_s=0.0, finish_timeout_s=0.0)
    sink._limit = 0.2  # stands for the seconds that the time limits add up to
    with pytest.raises(RuntimeError, match="did not finish"):
        sink.close()
    sink.close()


def test_disabled_starts_nothing(run_dir: RunDir) -> None:
    _session(run_dir, _sink(run_dir, mode="disabled"), 1, 2)
    assert not run_dir.wandb.exists() and not (run_dir.path / "wandb_run_id").exists()


def test_training_never_imports_wandb() -> None:
    code = (
        "import sys, tracking.wandb.sink, tracking.report, tracking.console\n"
        "print([name for name in ('wandb', 'torch', 'deepspeed', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("variables", "taken"), [({"WANDB_SWEEP_ID": "s1"}, True), ({}, False)])
def test_a_run_of_a_wandb_sweep_has_the_id_of_its_agent(tmp_path, monkeypatch, variables, taken) -> None:
    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)
    for name, value in {"WANDB_RUN_ID": "ab12cd34", **variables}.items():
        monkeypatch.setenv(name, value)
    run_dir = RunDir.create(tmp_path, "run", fresh=False)
    chosen = run_id(run_dir)
    assert (chosen == "ab12cd34") == taken
    monkeypatch.delenv("WANDB_RUN_ID")
    assert run_id(run_dir) == chosen


_SCALE: dict[str, Any] = {"from": 4.0, "to": 2.0, "reason": "overflow", **SCALE}
_INCIDENT: dict[str, Any] = {"verdict": "SKIP", "reason": "nan", "modules": ["lm_head"], "replay": "again"}
_NONFINITE: dict[str, Any] = {"rank": 0, "module": "lm_head", "tensor": "gradient", "kind": "nan", "count": 3}
_TELEMETRY: dict[str, Any] = {"activation_max": {"lm_head": 7.0}, "drift": {"maximum": 0.0, "rms": 0.0}}
_TELEMETRY |= {"gradients": {"lm_head": {"norm": 0.5, "flushed": 0.25}}, "update_ratio": 0.001}
_TELEMETRY |= {"probe": {"lm_head.weight": {"cosine": 0.99}}}
_TELEMETRY |= {"gradient_exponents": {"lowest": -30, "counts": [1, 4, 2]}}
_CHECKPOINT: dict[str, Any] = {"path": "step-3", "seconds": 1.0, "stall_seconds": 0.1, "bytes": 10, "verified": True}


def _event(event: str, step: int = 3, **fields: Any) -> dict[str, Any]:
    return {"event": event, "step": step, "tokens": 10 * step, "time": 1.0, **fields}


def _step(step: int, **changes: Any) -> dict[str, Any]:
    return _event("step", step, **step_fields(step, **changes))


def test_the_axis_goes_on_where_a_rollback_takes_steps_back() -> None:
    rows = Rows()
    history = [_step(1), _step(2, applied=False, skipped_total=1), _step(3, skipped_total=1), _step(2), _step(3)]
    drawn = [rows.row(event) for event in history]
    assert [row["attempt"] for row in drawn] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in drawn] == [1, 2, 3, 2, 3]
    assert [row["applied"] for row in drawn] == [1, 1, 2, 2, 3]
    late = rows.row(_event("checkpoint", 1, **_CHECKPOINT))
    assert (late["attempt"], late["step"]) == (5, 1), "a save that ends late is drawn where it ended"


def test_the_lowest_validation_loss_is_that_of_all_sessions() -> None:
    rows = Rows()
    assert "eval/lowest_loss" not in rows.row(_event("eval", loss=math.nan, perplexity=1.0))
    rows.row(_event("eval", loss=2.0, perplexity=1.0))
    events = [_event("eval", loss=loss, perplexity=1.0) for loss in (3.0, math.nan, 1.5)]
    assert [rows.row(event)["eval/lowest_loss"] for event in events] == [2.0, 2.0, 1.5]


def test_charts_keep_what_is_not_finite_and_leave_out_what_was_not_recorded() -> None:
    values = chart_values(_step(3, loss=math.inf, clip_coefficient=None))
    assert values["train/loss"] == math.inf and "train/clip_coefficient" not in values and values["step"] == 3
    by_source = {"labels_by_source": {"code": 7, "chat": 0}, "loss_by_source": {"code": 1.5}}
    drawn = {name: value for name, value in chart_values(_step(3) | by_source).items() if "_source/" in name}
    assert drawn == {
        "train/labels_by_source/code": 7,
        "train/labels_by_source/chat": 0,
        "train/loss_by_source/code": 1.5,
    }
    held_out = chart_values(_event("eval", loss=1.0, perplexity=2.0, by_source={"code": 1.5}))
    assert held_out["eval/loss_by_source/code"] == 1.5
    values = chart_values(_event("scale", **_SCALE))
    assert values["scale/from"] == 4.0 and values["scale/reason"] == "overflow" and "scale/momentum_norm" not in values


def test_telemetry_becomes_as_many_panels_for_a_large_model_as_for_a_small_one() -> None:
    event = _event("telemetry", 5, **_TELEMETRY)
    values = chart_values(event)
    assert values["telemetry/largest_activation"] == 7.0 and values["telemetry/update_ratio"] == 0.001
    assert values["telemetry/smallest_probe_cosine"] == 0.99
    for order in ((math.nan, 7.0), (7.0, math.nan)):
        broken = {"activation_max": dict(zip("ab", order, strict=True))}
        assert math.isnan(chart_values(event | broken)["telemetry/largest_activation"])
    panels = [
        {*chart_values(event), *histograms(event)}
        for layers in (1, 32)
        for event in [_event("telemetry", 5, **telemetry(5, layers))]
    ]
    assert panels[0] == panels[1] and len(panels[0]) < 20
    spread = histograms(_event("telemetry", 5, **telemetry(5, 32)))["telemetry/modules/log10_activation"]
    assert sum(spread[0]) == len(modules(32))
    counts, edges = histograms(event)["telemetry/log2_gradient"]
    assert list(counts) == [1, 4, 2] and list(edges) == [-30, -29, -28, -27]
    assert histograms({"event": "step"}) == {}


def test_tables_hold_all_sessions_and_are_logged_when_they_changed() -> None:
    tables = Tables()
    tables.add(_event("nonfinite", **_NONFINITE, largest_finite=math.inf), 3, delivered=True)
    assert not tables.due(1000.0), "wandb has these"
    tables.add(_event("nonfinite", 4, **_NONFINITE), 7, delivered=False)
    tables.add(_step(4), 8, delivered=False)
    assert tables.due(1000.0)
    (table,) = tables.take(1000.0).values()
    assert [row[:2] for row in table.data] == [[3, 3], [7, 4]]
    assert table.data[0][table.columns.index("largest_finite")] == "inf"
    assert not tables.due(2000.0)
    tables.add(_event("incident", **_INCIDENT), 9, delivered=False)
    assert not tables.due(1001.0) and tables.due(2000.0)
    for attempt in range(MAX_ROWS + 5):
        tables.add(_event("incident", **_INCIDENT), attempt, delivered=False)
    data = tables.take(2000.0)["tables/incident"].data
    assert len(data) == MAX_ROWS and data[-1][0] == MAX_ROWS + 4 and data[0][0] == 5


def test_alerts_name_the_cause_and_do_not_flood() -> None:
    alerts = Alerts()
    event = _event("incident", **_INCIDENT)
    first = alerts.alert(event, "demo", now=10.0)
    assert first is not None and first["level"] == "WARN"
    assert all(word in first["text"] for word in ("SKIP", "step 3", "demo", "nan", "lm_head", "again"))
    assert [alerts.alert(event, "demo", now=10.0 + n) for n in (1, 2)] == [None, None]
    rollback = alerts.alert(event | {"verdict": "ROLLBACK"}, "demo", now=13.0)
    assert rollback is not None and rollback["level"] == "ERROR", "another verdict is sent at once"
    later = alerts.alert(event, "demo", now=10.0 + ALERT_EVERY_S)
    assert later is not None and "2 more" in later["text"]
    assert alerts.alert(event, "demo", now=STALE_S + 2.0 + ALERT_EVERY_S) is None, "long over"
    assert alerts.alert(_step(3), "demo", now=10.0) is None
    named = alerts.alert(event | {"verdict": "ABORT"}, "x" * 200, now=20.0)
    assert named is not None and len(named["title"]) < 64, "wandb takes no longer title"


@pytest.mark.filterwarnings("ignore:Pydantic")  # wandb-workspaces has old decorators
def test_every_metric_of_the_saved_view_is_one_that_is_logged(run_dir: RunDir) -> None:
    rows = Rows()
    events = [
        _step(3, clip_coefficient=0.5),
        _event("scale", **_SCALE),
        _event("eval", loss=2.0, perplexity=math.exp(2.0)),
        _event("incident", **_INCIDENT),
        _event("nonfinite", **_NONFINITE),
        _event("checkpoint", **_CHECKPOINT),
        _event("telemetry", **_TELEMETRY),
    ]
    logged = set().union(*(rows.row(event) for event in events))
    definition = yaml_text.parse(DEFINITION.read_text())
    panels = [panel for section in definition["sections"] for panel in section["panels"]]
    drawn = {name for panel in panels if "y" in panel for name in [panel["x"], *panel["y"]]}
    assert drawn | set(definition["columns"]) <= logged | set(VERDICT)
    tables = Tables()
    for event in events:
        tables.add(event, 1, delivered=False)
    assert {panel["table"] for panel in panels if panel.get("panel") == "table"} == set(tables.take(1.0))
    spec = build("team", "p", definition)._to_model().model_dump_json(by_alias=True)
    assert all(f'"{name}"' in spec for name in drawn - {"tokens"})
