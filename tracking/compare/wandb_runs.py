"""Read a run from wandb's server. Nothing is uploaded.

wandb gets every `tracking.log_every_steps`-th step, so such a run has fewer steps than the run folder it came from.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from config.errors import UserError, one_line
from tracking.events import REQUIRED_FIELDS, Event
from tracking.run_dir import setting
from tracking.run_facts import Collector, RunFacts

_DEFAULTS: dict[str, dict[str, Any]] = {
    "incident": {"verdict": "?", "reason": "", "modules": [], "replay": ""},
    "nonfinite": {"rank": 0, "module": "?", "tensor": "?", "kind": "?", "count": 0},
    "scale": {"from": 0.0, "to": 0.0, "reason": "?"},
    "eval": {"loss": None},
    "checkpoint": {"path": "?"},
    "warning": {"signal": "?", "reason": "?"},
    "corruption": {"text": "?", "hosts": [], "repaired": False},
    "reexecution": {"outcome": "numeric", "ranks": [], "hosts": [], "why": "?"},
    "note": {"text": "a checkpoint could not be saved"},  # the only one with a field
}


def read_wandb(path: str, label: str) -> RunFacts:
    """The run at `path` (entity/project/run) on the server.

    Raises UserError, in one line, if there is no such run or it cannot be reached.
    """
    if path.count("/") != 2 or Path(path).is_dir():
        raise UserError(f"wandb:{path}: is not entity/project/run; of an offline run give the run folder")
    import wandb

    try:
        run = wandb.Api(timeout=20).run(path)
        rows = sorted(run.scan_history(), key=lambda row: row.get("_step", 0))
        config, state = dict(run.config), run.state
    except Exception as error:  # no login, no network, no such run: the client raises a different class for each
        advice = "check the name, `wandb login` and the network"
        raise UserError(f"wandb:{path}: cannot be read ({one_line(error, 200)}); {advice}") from None
    collector = Collector()
    for event in as_events(rows, config):
        collector.add(event)
    if state in ("finished", "crashed", "failed", "killed", "preempted"):
        collector.add(event | {"event": "run_end", "status": "done" if state == "finished" else state})
    return replace(collector.facts(label, f"wandb:{path}", None), **_sections(config))


_BESIDE = ("ds_config", "environment", "manifest", "session", "_wandb")


def _sections(config: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a wandb run, as by `read_inputs`; before 0.2 the run config was stored under `run`."""
    run, deepspeed = config.get("run"), config.get("deepspeed")
    if "ds_config" in config:
        run, deepspeed = {name: config[name] for name in config if name not in _BESIDE}, config["ds_config"]
    return {"config": run or {}, "deepspeed": deepspeed or {}, "environment": config.get("environment") or {}}


def as_events(rows: Iterable[dict[str, Any]], config: dict[str, Any]) -> Iterator[Event]:
    """Reconstruct the events behind wandb's history rows."""
    inputs, rows = _sections(config), [row for row in rows if row.get("step") is not None]
    start = {
        "world_size": inputs["environment"].get("world_size") or 1,
        "compute": setting(inputs["config"], "precision.compute"),
    }
    for row in rows or [{"step": 0, "session/run_start": 1}]:
        where = {"step": row["step"], "tokens": row.get("tokens", 0), "time": row.get("_timestamp", 0.0)}
        groups = _groups(row)
        session = groups.get("session", {})
        if "run_start" in session:
            resumed_from = f"step {row['step']:.0f}" if row["step"] else None
            yield {"event": "run_start", **where, **start, "resumed_from": resumed_from}
        if "train" in groups:
            fields = groups["train"]
            applied = bool(fields.get("applied", True))
            yield {"event": "step", **where, **fields, "applied": applied, "metrics": _metrics("step", fields)}
        for kind, usual in _DEFAULTS.items():
            if kind in groups or (kind in session and kind != "note"):  # 0.2 sent warnings as `session/warning` alone
                fields = groups.get(kind, {})
                metrics = {"metrics": _metrics(kind, fields)} if kind == "eval" else {}
                yield {"event": kind, **where, **usual, **fields, **metrics}
        if "run_end" in session:  # of the newest session the run's state says more
            yield {"event": "run_end", **where, "status": "preempted"}


def _metrics(kind: str, fields: dict[str, Any]) -> dict[str, float]:
    """The task's metrics among the `fields` of a step or an evaluation, which wandb holds side by side."""
    own = (*REQUIRED_FIELDS[kind], "lowest_loss")
    named = ((name, value) for name, value in fields.items() if name not in own and "_by_source/" not in name)
    return {name: value for name, value in named if not isinstance(value, str)}


def _groups(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Nest `train/loss: 3` as {"train": {"loss": 3}}, with strings for non-finite numbers converted to floats."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in row.items():
        group, slash, name = key.partition("/")
        if slash and value is not None:
            found.setdefault(group, {})[name] = _NON_FINITE.get(value, value) if isinstance(value, str) else value
    return found


_NON_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
