"""Reads and checks the files of a probe."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from config import json_text
from config.errors import UserError
from tracking.jsonl import read_events

_NAME = re.compile(r"step-(\d+)\.rank(\d+)\.pt$")
_OF_RUN = "format training world stage compute model model_config parameters optimizer clipping engine trainer"
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

    def named(self, kind: str) -> dict[str, torch.Tensor]:
        """Tensors of each parameter that rank 0 kept, FP32."""
        return {name: value.float() for name, value in self.facts.get(kind, {}).items()}


@dataclass
class Recorded:
    """A probe's folder. `incomplete` names steps that a crash cut short."""

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
    if not (folder / "probe.json").is_file():
        raise UserError(f"{folder} has no probe.json: give the folder that mantissa_probe.Probe wrote into")
    try:
        facts = json_text.read_object(folder / "probe.json", "probe's JSON")
    except UserError as error:
        raise UserError(f"{error}; record again") from error
    if missing := next((key for key in _OF_RUN.split() if key not in facts), None):
        raise UserError(f"{folder}/probe.json has no {missing}: it is not as mantissa_probe wrote it; record again")
    if facts["format"] != 1 or not isinstance(facts["world"], int):
        raise UserError(f"{folder}/probe.json: format is {facts['format']!r}, and this audit reads 1; record again")
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
    return Recorded(folder, facts, _reported(folder), whole, odd)


def _reported(folder: Path) -> dict[int, float]:
    """Losses by step, of those whose neighbours were reported, too: others may be means over several steps."""
    path, found, last = folder / "reported.jsonl", {}, 0
    for entry in read_events(path) if path.is_file() else ():
        if not all(isinstance(entry.get(key), int | float) for key in ("step", "loss")):
            raise UserError(f"{path}: {entry} has no step and loss; remove that line")
        if entry["step"] == last + 1:
            found[last + 1] = entry["loss"]
        last = entry["step"]
    return found
