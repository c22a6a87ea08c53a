"""A run that wandb holds is compared like its run folder: what the real wandb wrote, through its real client.

The server is a stand-in that answers what the client asks for; it is not wandb's server.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from config.cli import REPOSITORY
from tests.support.refusals import refused
from tests.support.runs.compare_runs import CONFIG as PLAIN_CONFIG
from tests.support.runs.compare_runs import ENVIRONMENT, merged
from tests.support.runs.report_runs import session
from tests.support.servers import wandb_files
from tests.support.servers.wandb_server import StandIn, stand_in
from tracking.compare.command import main
from tracking.compare.sources import read_runs
from tracking.compare.wandb_runs import as_events, read_wandb
from tracking.run_dir import RunDir
from tracking.run_facts import Collector
from tracking.wandb.sink import WandbSink

LONG = "falls " * 12_000  # more than two blocks of wandb's log
CONFIG = merged(PLAIN_CONFIG, {"run.hypothesis": LONG, "tracking.project": "p", "tracking.log_every_steps": 1})


class Serving(StandIn):
    """Answers what wandb's public API asks for about the one run team/p/abc."""

    def __init__(self, rows: list[dict[str, Any]], config: dict[str, Any]) -> None:
        super().__init__()
        self.rows, self.kept = rows, config

    def on_GetDefaultEntity(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"viewer": {"id": "u1", "entity": "team"}}

    def on_Run(self, variables: dict[str, Any]) -> dict[str, Any]:
        if variables["name"] != "abc":
            return {"project": {"run": None}}
        config = json.dumps({key: {"value": value} for key, value in self.kept.items()})
        run = {"id": "r1", "name": "abc", "state": "finished", "config": config, "projectId": 1, "tags": []}
        empty = {"systemMetrics": "{}", "summaryMetrics": "{}", "user": {"name": "me", "username": "me"}}
        return {"project": {"run": run | empty | {"historyKeys": self._keys()}}}

    def _keys(self) -> dict[str, Any]:
        return {"lastStep": self.rows[-1]["_step"], "keys": {}}

    def on_RunHistoryKeys(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"project": {"run": {"historyKeys": self._keys()}}}

    def on_RunParquetHistory(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"project": {"run": {"parquetHistory": {"parquetUrls": [], "liveData": self.rows}}}}

    def on_HistoryPage(self, variables: dict[str, Any]) -> dict[str, Any]:
        wanted = range(variables["minStep"], variables["maxStep"])
        return {"project": {"run": {"history": [json.dumps(row) for row in self.rows if row["_step"] in wanted]}}}


@pytest.fixture
def server(recorded: RunDir) -> Iterator[Serving]:
    """Up, with what the offline run holds; what is not finite as the words that wandb sends."""
    words, stored = {"nan": "NaN", "inf": "Infinity"}, wandb_files.rows(recorded.wandb)
    rows = [{key: words.get(str(value), value) for key, value in row.items()} for row in stored if "step" in row]
    with stand_in(Serving(rows, wandb_files.config(recorded.wandb))) as served:
        yield served


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run that wandb recorded offline: 6 steps, each logged, an overflow at step 3, a rollback from 5 to 4."""
    run_dir = RunDir.create(tmp_path_factory.mktemp("runs") / "x", "demo", fresh=False)
    run_dir.write_inputs(CONFIG, {}, ENVIRONMENT)
    config = {"run": CONFIG, "deepspeed": {}, "environment": ENVIRONMENT}
    with session(run_dir.path, WandbSink(run_dir, config, mode="offline")) as run:
        run.steps(2)
        run.overflow(loss=math.nan)
        run.steps(2)
        run.step = 4
        run.steps(2)
        run.evaluate(2.5)
        run.end("done")
    return run_dir


def test_the_columns_of_what_wandb_holds_are_those_of_the_run_folder(recorded: RunDir, server: Serving) -> None:
    (local,) = read_runs([str(recorded.path)])
    collector = Collector()
    for event in as_events(wandb_files.rows(recorded.wandb), server.kept):
        collector.add(event)
    kept = collector.facts("x", "wandb:x", None)
    assert kept.columns.step.tolist() == local.columns.step.tolist() == [1, 2, 3, 4, 5, 6]
    for name in ("loss", "grad_norm", "lr", "loss_scale", "tokens", "applied", "memory_bytes"):
        a, b = (getattr(run.columns, name).tolist() for run in (local, kept))
        assert a == pytest.approx(b, nan_ok=True), name
    assert kept.abandoned == local.abandoned == 1
    assert [event["loss"] for event in kept.rare_events["eval"]] == [2.5]
    assert [(event["from"], event["to"]) for event in kept.rare_events["scale"]] == [(1024.0, 512.0)]


def test_the_server_s_run_is_its_run_folder(recorded: RunDir, server: Serving, tmp_path: Path) -> None:
    """The test runs in a process of its own, which holds the only login."""
    variables = {**os.environ, "HOME": str(tmp_path), "WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": server.url}
    variables |= {"WANDB_CACHE_DIR": str(tmp_path / "cache"), "WANDB_ERROR_REPORTING": "false"}
    command = [sys.executable, "-m", "tracking.compare", str(recorded.path)]
    options: dict[str, Any] = {"cwd": REPOSITORY, "env": variables, "capture_output": True, "text": True}
    done = subprocess.run([*command, "wandb:team/p/abc", "--json", "--tolerance", "0"], **options)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["partings"][0]["step"] is None and printed["partings"][0]["identical_to"] == 6
    assert {run["verdict"]["word"] for run in printed["runs"]} == {"healthy"} and printed["differences"] == []
    missing = subprocess.run([*command, "wandb:team/p/other"], **options)
    assert missing.returncode == 2 and missing.stderr.startswith("error: wandb:team/p/other: cannot be read")


def test_what_cannot_be_read_is_printed_in_one_line(tmp_path, monkeypatch, capsys) -> None:
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for source, why in (("wandb:me/p/abc", "wandb login"), (f"wandb:{tmp_path}", "run folder")):
        assert main([source]) == 2
        printed = capsys.readouterr().err.strip().splitlines()
        assert len(printed) == 1 and printed[0].startswith("error: wandb:") and why in printed[0]
    assert "entity/project/run" in refused(read_wandb, "me/p", "x")
