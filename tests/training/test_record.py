"""An incident in the record names its run folder so that a shell finds it."""

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from config.command_line import read_command_line
from config.launcher import as_launched
from precision.guard import Judgement, Verdict
from training.record import record_incident


def test_an_incident_names_the_run_s_folder_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    given = ["--config", "config/recipes/demo.yaml", "run.dir=~/my runs", "run.name=demo"]
    recorded: dict[str, Any] = {}
    record = SimpleNamespace(event=lambda kind, **fields: recorded.update(fields))
    parts: Any = SimpleNamespace(resolved=read_command_line(given, as_launched(1)), record=record)
    at: Any = SimpleNamespace(step=7, tokens=9)
    record_incident(parts, at, Judgement(Verdict.ABORT, "it broke"), [], {})
    words = ["python", "-m", "tools.replay", f"{tmp_path}/my runs/demo", "--step", "7"]
    assert shlex.split(recorded["replay"]) == words
