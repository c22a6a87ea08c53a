"""Read the folder of a finished, crashed or running run: its events as facts, and the files beside them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from config import json_text, yaml_text
from config.errors import UserError, one_line
from tracking.run_dir import RunDir
from tracking.run_facts import RunFacts, read_facts
from tracking.status import run_status


def read_run(folder: Path, now: float | None = None) -> RunFacts:
    """`read_run_folder`, labelled by the folder's name. Also raises UserError for a run that did not start."""
    run_dir = RunDir(folder)
    facts = read_run_folder(run_dir, run_dir.name, now)
    if not facts.start:
        raise UserError(f"{run_dir.events}: no run_start event; nothing was recorded in this run folder")
    return facts


def read_run_folder(run_dir: RunDir, label: str, now: float | None = None) -> RunFacts:
    """The facts of a run folder with its config, DeepSpeed JSON and environment, and its status at `now`.

    now: seconds since the epoch; None is the present. Raises UserError like `read_facts` and `read_inputs`.
    """
    inputs = read_inputs(run_dir)
    return replace(read_facts(run_dir.events, label), **inputs, checked=run_status(run_dir.path, now))


_SECTIONS = dict.fromkeys(("run", "model", "data", "batch", "precision", "tracking", "checkpoint"), dict)
_FACTS = dict.fromkeys(("data", "versions", "git", "accelerator", "cpu"), dict) | {"ledger": list, "command_line": list}


def read_inputs(run_dir: RunDir) -> dict[str, Any]:
    """The resolved `config`, the `deepspeed` JSON and the `environment` of a run; an absent file gives an empty dict.

    Raises UserError for a file that cannot be read or whose values have unexpected types.
    """
    return {
        "config": _load(run_dir.config, yaml_text.parse, _SECTIONS),
        "deepspeed": _load(run_dir.deepspeed_config, json_text.parse, {"zero_optimization": dict}),
        "environment": _load(run_dir.environment, json_text.parse, _FACTS),
    }


def _load(path: Path, parse: Any, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Load and check one file. kinds: required types of values that callers rely on."""
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error, 200)}); restore or remove it") from error
    if not isinstance(content, dict):
        return {}
    for name, kind in kinds.items():
        if content.get(name) is not None and not isinstance(content[name], kind):
            raise UserError(f"{path}: {name} is not a {kind.__name__}, as written; restore or remove the file")
    if not all(
        isinstance(row, dict) and row.keys() >= {"what", "dtype", "bytes"} for row in content.get("ledger") or ()
    ):
        raise UserError(f"{path}: ledger is not as written; restore or remove the file")
    return content
