"""Reads and checks the files of a probe."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from config import json_text
from config.errors import UserError
from tracking.compare.surviving import read_events

Tensors = dict[str, torch.Tensor]
"""By the parameter's name, or by that of an input."""
_NAME = re.compile(r"step-(\d+)\.rank(\d+)\.pt$")
_OF_RUN = "training world stage compute model model_config parameters optimizer clipping engine trainer"
_OF_STEP = "training step rank stride scale applied applied_before groups weights micros norm fp32 before after"


@dataclass
class Step:
    """One recorded step, as each rank wrote it."""

    number: int
    ranks: list[dict[str, Any]]

    @property
    def facts(self) -> dict[str, Any]:
        """Rank 0's."""
        return self.ranks[0]

    @property
    def micros(self) -> dict[tuple[int, int], dict[str, Any]]:
        """Each micro-batch, by its rank and number."""
        return {(rank, at): micro for rank, facts in enumerate(self.ranks) for at, micro in enumerate(facts["micros"])}

    def named(self, kind: str) -> Tensors:
        """Tensors of each parameter that rank 0 kept, FP32."""
        return {name: value.float() for name, value in self.facts.get(kind, {}).items()}


@dataclass
class Recorded:
    """A probe's folder. `reported`: losses by step; `incomplete`: steps that a crash cut short."""

    folder: Path
    facts: dict[str, Any]
    reported: dict[int, float]
    numbers: list[int]
    incomplete: list[int]

    def step(self, number: int) -> Step:
        """One step, whose files are read now. Raises UserError."""
        ranks = []
        for rank in range(self.facts["world"]):
            path = self.folder / f"step-{number:06d}.rank{rank}.pt"
            try:
                ranks.append(torch.load(path, weights_only=True, map_location="cpu"))
                training, *place = [ranks[-1][key] for key in _OF_STEP.split()][:3]
            except Exception as error:  # torch raises many kinds for a file that is cut short
                why = f"cannot be read ({type(error).__name__}); record again, or delete step {number}'s files"
                raise UserError(f"{path} {why}") from error
            if training != self.facts["training"] or place != [number, rank]:
                told = f"is not of step {number} of rank {rank} of the training that probe.json is of"
                raise UserError(f"{path} {told}; record each training into its own folder")
        return Step(number, ranks)


def read(folder: Path) -> Recorded:
    """Raises UserError where the folder is no probe's, or ranks are missing."""
    path = folder / "probe.json"
    if not path.is_file():
        raise UserError(f"{folder} has no probe.json: give the folder that mantissa_probe.Probe wrote into")
    facts = json_text.read_object(path, "probe's JSON")
    if missing := [key for key in _OF_RUN.split() if key not in facts]:
        raise UserError(f"{path} has no {missing[0]}: it is not as mantissa_probe wrote it; record again")
    seen: dict[int, set[int]] = {}
    for found in filter(None, (_NAME.search(path.name) for path in folder.iterdir())):
        seen.setdefault(int(found[1]), set()).add(int(found[2]))
    wanted = set(range(facts["world"]))
    whole, odd = (sorted(number for number in seen if (seen[number] == wanted) is same) for same in (True, False))
    if not whole or any(seen[number] - wanted or number < max(whole) for number in odd):
        where = "no step was recorded"
        if odd:
            ranks = ", ".join(map(str, sorted(seen[odd[0]])))
            where = f"step {odd[0]} has files of rank {ranks}, and probe.json is of {len(wanted)} ranks"
        raise UserError(f"{folder}: {where}; copy the files of every rank of one training there, or record again")
    path, reported = folder / "reported.jsonl", {}
    for entry in read_events(path) if path.is_file() else ():
        if not all(isinstance(entry.get(key), int | float) for key in ("step", "loss")):
            raise UserError(f"{path}: {entry} has no step and loss; remove that line")
        reported[entry["step"]] = entry["loss"]
    return Recorded(folder, facts, reported, whole, odd)
