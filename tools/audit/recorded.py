"""Reads and checks the files of a probe."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from config.errors import UserError

_NAME = re.compile(r"step-(\d+)\.rank(\d+)\.json$")


@dataclass
class Step:
    """One recorded step: each rank's facts, and its tensors by name."""

    number: int
    ranks: list[dict[str, Any]]
    tensors: list[dict[str, torch.Tensor]]

    @property
    def facts(self) -> dict[str, Any]:
        """Rank 0's."""
        return self.ranks[0]

    def named(self, kind: str) -> dict[str, torch.Tensor]:
        """Tensors of each parameter that rank 0 kept, FP32 on the CPU."""
        found = self.tensors[0].items()
        return {name.removeprefix(f"{kind}/"): value for name, value in found if name.startswith(f"{kind}/")}

    def inputs(self, rank: int, micro: int) -> list[dict[str, torch.Tensor]]:
        """The tensors of each call of the model in a micro-batch; last what the trainer had."""
        calls = range(len(self.ranks[rank]["micros"][micro]["calls"]))
        prefixes = [*(f"inputs/{micro}/{call}/" for call in calls), f"batch/{micro}/"]
        held = self.tensors[rank].items()
        return [{key.removeprefix(start): value for key, value in held if key.startswith(start)} for start in prefixes]


@dataclass
class Recorded:
    """A probe's folder. `incomplete` names steps that a crash cut short."""

    folder: Path
    facts: dict[str, Any]
    trainer: dict[str, Any]
    reported: dict[int, float]
    numbers: list[int]
    incomplete: list[int]

    def step(self, number: int) -> Step:
        """One step, whose files are read now."""
        ranks, tensors = [], []
        for rank in range(self.facts["world"]):
            stem = self.folder / f"step-{number:06d}.rank{rank}"
            ranks.append(_json(stem.with_name(f"{stem.name}.json")))
            path = stem.with_name(f"{stem.name}.pt")
            try:
                tensors.append(torch.load(path, weights_only=True, map_location="cpu"))
            except Exception as error:  # torch raises many kinds for a file that is cut short
                raise UserError(
                    f"{path} cannot be read ({type(error).__name__}); record again, or delete step {number}'s files"
                ) from error
            if ranks[-1].get("world") != self.facts["world"]:
                world = ranks[-1].get("world")
                raise UserError(
                    f"{stem.name}.json in {self.folder} is of {world} ranks and probe.json of {self.facts['world']}: "
                    "two trainings wrote into it; record each into a folder of its own"
                )
        if len({len(rank["micros"]) for rank in ranks}) > 1:
            raise UserError(
                f"{self.folder}: step {number} has another number of micro-batches on each rank; record it again"
            )
        return Step(number, ranks, tensors)


def read(folder: Path) -> Recorded:
    """Raises UserError where the folder is no probe's, or ranks are missing."""
    if not (folder / "probe.json").is_file():
        raise UserError(f"{folder} has no probe.json: give the folder that mantissa_probe.Probe wrote into")
    facts = _json(folder / "probe.json")
    if facts.get("format") != 1 or not isinstance(facts.get("world"), int):
        raise UserError(f"{folder}/probe.json: format is {facts.get('format')!r}, and this audit reads 1; record again")
    seen: dict[int, set[int]] = {}
    for path in folder.iterdir():
        if match := _NAME.search(path.name):
            seen.setdefault(int(match[1]), set()).add(int(match[2]))
    wanted = set(range(facts["world"]))
    for number, ranks in sorted(seen.items()):
        if ranks - wanted:
            extra = f"step {number} has a file of rank {max(ranks)}, and probe.json is of {facts['world']} ranks"
            raise UserError(f"{folder}: {extra}; record each training into a folder of its own")
    last = max(seen, default=0)
    short = [number for number, ranks in seen.items() if ranks != wanted]
    if not seen or short and short != [last] or len(seen) == len(short):
        gone = sorted(wanted - seen[min(short)]) if short else sorted(wanted)
        where = f"step {min(short)} lacks ranks {', '.join(map(str, gone))}" if short else "no step was recorded"
        raise UserError(f"{folder}: {where}; copy the files of every rank into one folder, or record again")
    trainer = _json(folder / "trainer.json") if (folder / "trainer.json").is_file() else {}
    return Recorded(folder, facts, trainer, _reported(folder), sorted(seen.keys() - set(short)), short)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({type(error).__name__}); record again") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is no JSON object; record again")
    return found


def _reported(folder: Path) -> dict[int, float]:
    """Losses by step, of those whose neighbours were reported, too: others may be means over several steps."""
    path, found, last = folder / "reported.jsonl", {}, 0
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # cut short by a crash
        if entry["step"] == last + 1:
            found[entry["step"]] = entry["loss"]
        last = entry["step"]
    return found
