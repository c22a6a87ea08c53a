"""Who looks at a step never changes it: losses, norms, masters and random generators are equal bit for bit."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from data.text.prepare import prepare
from tests.support.jobs.process_group import ProcessGroup
from tests.support.marks import slow
from tests.training import observer_cases as cases
from tracking.jsonl import read_events

PATHS = {
    **{f"{dtype} {stage}": cases.cast(dtype, stage) for dtype in ("bf16", "fp16", "fp32") for stage in range(4)},
    **{f"{name} {stage}": cases.manifest(name, stage) for name in ("mixed", "fp8") for stage in range(4)},
}
OBSERVERS = {
    "dtypes": ["precision.verify_every_steps=1"],
    "telemetry": ["telemetry.every_steps=1"],
    "corruption checks": ["guard.replica_checks=2", "guard.update_checks=64", "guard.reexecute=every 2"],
    "profile": ["profile={start: 2, steps: 1, ranks: [0, 1]}"],
    "tracing": ["tracking.otlp_endpoint=http://127.0.0.1:9"],
    "probe": ["telemetry.every_steps=1", "telemetry.probe=true"],
}
EVERYONE = [override for name in list(OBSERVERS)[:-1] for override in OBSERVERS[name]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of real width with heavy-tailed weights, a text, and manifests."""
    folder = tmp_path_factory.mktemp("observers")
    cases.heavy_tailed(folder)
    cases.write_text(folder)
    for name, rules in cases.MANIFESTS.items():
        (folder / f"{name}.json").write_text(json.dumps(rules))
    prepare(cases.resolve(str(folder), "prepared", PATHS["fp32 2"]).config.data, progress=False)
    return folder


def require_same(pair: ProcessGroup, folder: Path, setting: Sequence[str], observers: Sequence[str], **how: Any) -> Any:
    """Run a job that nobody looks at, and again with the observers, to the same bits; the second's events."""
    how |= {"folder": str(folder), "seconds": 600.0}
    name = f"{len(list((folder / 'runs').glob('*')))}" if (folder / "runs").exists() else "0"
    alone = pair.once(cases.job, name=f"{name}-alone", overrides=[*setting], observed=False, **how)
    seen = pair.run(cases.job, name=f"{name}-seen", overrides=[*setting, *observers], **how)
    assert len(alone[0]["steps"]) == cases.STEPS and any(row["applied"] for row in alone[0]["steps"])
    assert alone[0]["chunked"] == ("model.loss=full" not in setting)
    assert seen == alone
    return read_events(folder / "runs" / f"{name}-seen" / "events.jsonl")


@pytest.mark.parametrize("path", [p if p in ("bf16 2", "mixed 3") else slow(p) for p in PATHS])
def test_a_step_that_everyone_looks_at_is_the_same_step(pair: ProcessGroup, folder: Path, path: str) -> None:
    setting = [override.format(folder=folder) for override in PATHS[path]]
    events = list(require_same(pair, folder, setting, EVERYONE))
    counts = {kind: sum(event["event"] == kind for event in events) for kind in ("precision", "telemetry")}
    assert counts == {"precision": cases.STEPS, "telemetry": cases.STEPS}
