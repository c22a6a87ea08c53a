"""The real wandb client against a stand-in for its server: one run, alerts, models, a view, no secrets."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from config import yaml_text
from config.cli import REPOSITORY
from tests.support.jobs.launches import wait_until
from tests.support.runs.report_runs import session
from tests.support.servers.wandb_server import StandIn, end_children, stand_in
from tracking.run_dir import RunDir
from tracking.wandb import sync as wandb_sync
from tracking.wandb import view as wandb_view
from tracking.wandb.models import checkpoint_facts
from tracking.wandb.sink import WandbSink

API_KEY = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "run": {
        "run": {"name": "demo", "hypothesis": "it falls"},
        "precision": {"compute": "fp16", "manifest": None},
        "tracking": {"project": "p", "log_every_steps": 1},
    },
    "deepspeed": {"zero_optimization": {"stage": 2}},
    "environment": {"git": {"commit": "abc123"}, "data": {"fingerprint": "f00"}},
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandIn]:
    """A stand-in that the environment leads wandb to."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    with stand_in() as running:
        monkeypatch.setenv("WANDB_BASE_URL", running.url)
        monkeypatch.setenv("WANDB_API_KEY", API_KEY)
        yield running


def _session(run_dir: RunDir, mode: str, first: int, last: int, *, status="done", code=0, **config: Any) -> None:
    sink = WandbSink(run_dir, CONFIG | config, mode=mode)
    with session(run_dir.path, sink, step=first - 1, time=time.time()) as run:  # an old incident raises no alert
        for step in range(first, last + 1):
            run.steps(1)
            if step == 3:
                for _ in range(3):
                    run.incident("SKIP", reason=f"nan, key {os.environ.get('WANDB_API_KEY')}", modules=["lm_head"])
        run.save(f"runs/demo/checkpoints/{_checkpoint(run_dir, last).name}")  # relative to where training started
        run.end(status, code)


def _checkpoint(run_dir: RunDir, step: int) -> Path:
    path = run_dir.checkpoints / f"step-{step}"
    path.mkdir(exist_ok=True)
    (path / "manifest.json").write_text(json.dumps({"step": step}))
    return path


def _axis(server: StandIn) -> list[tuple[int, int]]:
    return [(row["attempt"], row["step"]) for row in server.history if "train/loss" in row]


def _models(server: StandIn) -> list[dict[str, Any]]:
    return [json.loads(item["metadata"]) for item in server.artifacts if item["artifactTypeName"] == "model"]


ONE_RUN = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 3), (6, 4), (7, 5)]


@pytest.mark.slow
def test_a_preempted_run_and_its_resumption_are_one_online_run(run_dir, server, capsys) -> None:
    _session(run_dir, "online", 1, 4, status="preempted", code=75)
    assert server.preempting and server.exit_codes == [75]
    _session(run_dir, "online", 3, 5, extra={"new": 1})
    assert capsys.readouterr().err == ""
    assert _axis(server) == ONE_RUN and server.exit_codes == [75, 0]
    assert server.run["name"] == (run_dir.path / "wandb_run_id").read_text() and server.run["notes"] == "it falls"
    config = {name: item["value"] for name, item in server.config.items()}
    assert config["environment"] == CONFIG["environment"] and config["extra"] == {"new": 1}
    assert config["session"]["world_size"] == 2
    assert json.loads(server.summary)["attempt"] == 7
    assert [(alert["title"], alert["severity"]) for alert in server.alerts] == [("SKIP in demo", "WARN")] * 2
    tables = [row for row in server.history if "tables/incident" in row]
    assert tables[-1]["tables/incident"]["nrows"] == 6, "of both sessions"
    checkpoints = _models(server)
    assert [facts["step"] for facts in checkpoints] == [4, 5]
    assert checkpoints[0]["zero_stage"] == 2 and checkpoints[0]["dtype"] == "fp32" and checkpoints[0]["verified"]
    assert len(checkpoints[0]["manifest_sha256"]) == 64
    references = [entry.get("ref") for manifest in server.manifests for entry in manifest["contents"].values()]
    assert (run_dir.checkpoints / "step-5" / "manifest.json").as_uri() in references, "a place, not the model"


def test_two_offline_sessions_become_one_run_by_wandb_sync(run_dir: RunDir, server: StandIn) -> None:
    _session(run_dir, "offline", 1, 4)
    _session(run_dir, "offline", 3, 5)
    assert not server.history and not server.alerts
    _sync(run_dir)
    assert _axis(server) == ONE_RUN
    assert [facts["step"] for facts in _models(server)] == [4, 5]
    _session(run_dir, "offline", 6, 6)
    _sync(run_dir)
    assert _axis(server) == [*ONE_RUN, (8, 6)], "also when the first are with the server already"
    assert not server.alerts, "an alert that comes with an upload days later helps nobody"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_helper_that_was_ended_leaves_no_hole_and_no_double_after_sync(run_dir, server, how, capsys) -> None:
    run_dir.config.write_text(yaml_text.dump(CONFIG["run"]))
    sink = WandbSink(run_dir, CONFIG, mode="offline")
    with session(run_dir.path, sink) as run:
        run.steps(150)
        wait_until(lambda: bool(list(run_dir.wandb.glob("offline-run-*/*.wandb"))))
        time.sleep(1.0)
        assert sink._process is not None
        end_children(sink._process.pid, how)
        run.steps(150)
        run.end("done")
    if "python -m tracking.wandb.sync" in capsys.readouterr().err:  # on a busy machine it is too late to start again
        assert wandb_sync.main([str(run_dir.path)]) == 0
    _sync(run_dir)
    assert _axis(server) == [(step, step) for step in range(1, 301)]


def test_what_a_power_cut_tore_is_delivered_by_the_command(run_dir: RunDir, server: StandIn, capsys) -> None:
    _finished(run_dir)
    sink = WandbSink(run_dir, CONFIG, mode="offline")
    assert sink._process is not None
    wait_until(lambda: any(path.stat().st_size for path in run_dir.wandb.glob("offline-run-*/*.wandb")))
    end_children(sink._process.pid, signal.SIGKILL)
    sink._process.kill()
    sink._process.wait()
    for new in (9, 0):
        assert wandb_sync.main([str(run_dir.path)]) == 0
        out, err = capsys.readouterr()
        assert err == "" and out.startswith(
            f"{run_dir.path}: wrote {new} new events, offline; upload them: wandb sync /"
        )
    _sync(run_dir)
    assert _axis(server) == [(1, 1), (2, 2), (3, 3)]
    assert [row["incident/total"] for row in server.history if "incident/total" in row] == [1, 2, 3]


def _sync(run_dir: RunDir) -> None:
    command = [str(Path(sys.executable).with_name("wandb")), "sync", "--yes", str(run_dir.wandb)]
    subprocess.run(command, check=True, capture_output=True, timeout=60, cwd=run_dir.path)


def test_no_file_and_no_request_holds_a_secret(run_dir, server, monkeypatch, tmp_path) -> None:
    secrets = {"AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "HF_TOKEN": "hf_" + "q" * 30}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    options = {"secret": "under-a-secret-name", "note": f"and {secrets['AWS_SECRET_ACCESS_KEY']} elsewhere"}
    for mode in ("online", "offline"):
        _session(run_dir, mode, 1, 3, checkpoint={"storage_options": options})
    models = [checkpoint_facts(_REMOTE, {})]
    WandbSink(run_dir, CONFIG, mode="online", models=models).close()
    assert json.loads(server.artifacts[-1]["metadata"])["reference"] == "s3://***@bucket/step-3"
    events = run_dir.events.read_bytes()
    assert API_KEY.encode() not in events and b"nan, key ***" in events
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"elsewhere" in kept and b"nan, key ***" in kept
    sent = b"".join(server.bodies)
    assert b"elsewhere" in sent and b"nan, key ***" in sent
    for value in (API_KEY, "hunter2hunter2", options["secret"], *secrets.values()):
        assert value.encode() not in kept and value.encode() not in sent


_REMOTE = {"path": "s3://me:hunter2hunter2@bucket/step-3", "step": 3, "tokens": 1, "bytes": 1, "verified": False}


def _finished(run_dir: RunDir) -> None:
    run_dir.config.write_text(yaml_text.dump(CONFIG["run"]))
    _session(run_dir, "disabled", 1, 3)


@pytest.mark.slow
def test_what_was_disabled_can_be_delivered_later_with_models(run_dir, server, tmp_path, capsys) -> None:
    _finished(run_dir)
    parity, out = tmp_path / "parity.json", tmp_path / "out"
    checks = [{"name": "loss_gap", "passed": True}, {"name": "weight_drift", "passed": False}]
    parity.write_text(json.dumps({"verdict": "no parity", "checks": checks}))
    out.mkdir()
    (out / "SHA256SUMS").write_text("sums")
    export = {"dtype": "bf16", "files": {"model.safetensors": "ab"}}
    facts = {"run": "demo", "training": {"step": 3}, "export": export}
    facts |= {"precision": {"manifest": None, "compute": "bf16", "ZeRO stage": 2}}
    facts |= {"parity": {"verdict": "parity", "checks": [], "differences": ["data was a there and is b here"]}}
    (out / "mantissa.json").write_text(json.dumps(facts))
    shutil.rmtree(run_dir.checkpoints / "step-3")
    checkpoint = _checkpoint(run_dir, 2)
    arguments = [str(run_dir.path), "--online", "--checkpoint", str(checkpoint), "--parity", str(parity)]
    assert wandb_sync.main([*arguments, "--export", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert re.search(r": sent \d+ new events to http://\S+, with 2 models\n$", printed.out)
    assert _axis(server) == [(1, 1), (2, 2), (3, 3)]
    found = {item["artifactCollectionName"]: item for item in server.artifacts}
    judged = json.loads(found["demo-checkpoint"]["metadata"])
    assert judged["step"] == 2 and judged["parity"]["verdict"] == "no parity"
    assert judged["parity"]["failed"] == ["weight_drift"] and len(judged["parity"]["report_sha256"]) == 64
    exported = json.loads(found["demo-export"]["metadata"])
    assert (exported["dtype"], exported["parity"]["verdict"]) == ("bf16", "parity")
    assert exported["files"] == {"model.safetensors": "ab"} and found["demo-export"]["artifactTypeName"] == "model"
    rows = len(server.history)
    assert wandb_sync.main([str(run_dir.path), "--online"]) == 0
    assert ": sent 0 new events to " in capsys.readouterr().out
    assert len(server.history) == rows, "nothing is given twice"
    assert server.exit_codes == [0, 0], "a run that ended well stays one"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["{empty}"], "config.yaml"),
        (["{run}", "--export", "{empty}"], "--export"),
        (["{run}", "--checkpoint", "{empty}"], "--checkpoint"),
        (["{run}", "--parity", "{empty}/x.json"], "--parity"),
        (["{run}", "--parity", "{parity}"], "--checkpoint"),
    ],
)
def test_what_cannot_be_delivered_costs_one_line(run_dir, tmp_path, arguments, word, refusal) -> None:
    _finished(run_dir)
    (tmp_path / "empty").mkdir()
    parity = tmp_path / "parity.json"
    parity.write_text(json.dumps({"verdict": "parity", "checks": []}))
    places = {"run": run_dir.path, "empty": tmp_path / "empty", "parity": parity}
    assert word in refusal(wandb_sync.main, [argument.format(**places) for argument in arguments])


@pytest.mark.filterwarnings("ignore:Pydantic")  # wandb-workspaces has old decorators
def test_one_command_makes_the_saved_view(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert wandb_view.main(["team/p", "--show"]) == 0
    assert json.loads(capsys.readouterr().out)["displayName"] == "Mantissa" and not server.views
    assert wandb_view.main(["team"]) == 2
    assert "ENTITY/PROJECT" in capsys.readouterr().err
    command = [sys.executable, "-m", "tracking.wandb.view", "team/p"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    (view,) = server.views
    assert (view["entityName"], view["projectName"], view["displayName"]) == ("team", "p", "Mantissa")
    assert done.stdout.startswith(server.url) and '"train/loss"' in view["spec"] and '"tables/incident"' in view["spec"]
