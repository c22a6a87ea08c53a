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

_NAME = re.compile(r"step-(\d+)\.rank(\d+)\.json$")
_OF_RUN = ("world", "stage", "compute", "model", "model_config", "parameters", "optimizer", "clipping", "engine")
_OF_STEP = (
    "world",
    "step",
    "rank",
    "stride",
    "scale",
    "applied",
    "applied_before",
    "groups",
    "sums",
    "micros",
    "norm",
    "fp32",
)


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

    @property
    def places(self) -> list[tuple[int, int]]:
        """Rank and number of each micro-batch."""
        return [(rank, number) for rank, facts in enumerate(self.ranks) for number in range(len(facts["micros"]))]

    def named(self, kind: str) -> dict[str, torch.Tensor]:
        """Tensors of each parameter that rank 0 kept, FP32 on the CPU."""
        return _below(self.tensors[0], f"{kind}/")

    def inputs(self, rank: int, micro: int) -> list[dict[str, torch.Tensor]]:
        """The tensors of each call of the model in a micro-batch; last what the trainer had."""
        calls = range(len(self.ranks[rank]["micros"][micro]["calls"]))
        prefixes = [*(f"inputs/{micro}/{call}/" for call in calls), f"batch/{micro}/"]
        return [_below(self.tensors[rank], prefix) for prefix in prefixes]


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
        """One step, whose files are read now. Raises UserError."""
        ranks, tensors, world = [], [], self.facts["world"]
        for rank in range(world):
            path = self.folder / f"step-{number:06d}.rank{rank}.json"
            ranks.append(_facts(path, _OF_STEP))
            written = tuple(ranks[-1][key] for key in ("world", "step", "rank"))
            if written != (world, number, rank):
                is_of = "of {} ranks, step {} of rank {}".format(*written)
                told = f"{is_of}, where probe.json is of {world} ranks: two trainings wrote there"
                raise UserError(f"{path} is {told}; record each into its own folder")
            path = path.with_suffix(".pt")
            try:
                tensors.append(torch.load(path, weights_only=True, map_location="cpu"))
                tensors[-1]["rng/cpu"]
            except Exception as error:  # torch raises many kinds for a file that is cut short
                why = f"cannot be read ({type(error).__name__}); record again, or delete step {number}'s files"
                raise UserError(f"{path} {why}") from error
        step = Step(number, ranks, tensors)
        before, after = step.named("before"), step.named("after")
        for name, (shape, _, trained, _) in self.facts["parameters"].items():
            if trained and (name not in after or name not in before or list(before[name].shape) != shape):
                raise UserError(f"{self.folder}: step {number} lacks the masters of {name}; record again")
        if len({len(rank["micros"]) for rank in ranks}) > 1:
            raise UserError(f"{self.folder}: step {number} has other micro-batches on each rank; record again")
        return step


def read(folder: Path) -> Recorded:
    """Raises UserError where the folder is no probe's, or ranks are missing."""
    if not (folder / "probe.json").is_file():
        raise UserError(f"{folder} has no probe.json: give the folder that mantissa_probe.Probe wrote into")
    facts = _facts(folder / "probe.json", _OF_RUN)
    if facts.get("format") != 1 or not isinstance(facts["world"], int):
        raise UserError(f"{folder}/probe.json: format is {facts.get('format')!r}, and this audit reads 1; record again")
    seen: dict[int, set[int]] = {}
    for found in filter(None, (_NAME.search(path.name) for path in folder.iterdir())):
        seen.setdefault(int(found[1]), set()).add(int(found[2]))
    wanted = set(range(facts["world"]))
    for number, ranks in sorted(seen.items()):
        if ranks - wanted:
            extra = f"step {number} has a file of rank {max(ranks)}, and probe.json is of {facts['world']} ranks"
            raise UserError(f"{folder}: {extra}; record each training into a folder of its own")
    short = [number for number, ranks in seen.items() if ranks != wanted]
    if not seen or short and short != [max(seen)] or len(seen) == len(short):
        gone = sorted(wanted - seen[min(short)]) if short else []
        where = f"step {min(short)} lacks ranks {', '.join(map(str, gone))}" if short else "no step was recorded"
        raise UserError(f"{folder}: {where}; copy the files of every rank into one folder, or record again")
    trainer = _facts(folder / "trainer.json", ()) if (folder / "trainer.json").is_file() else {}
    return Recorded(folder, facts, trainer, _reported(folder), sorted(seen.keys() - set(short)), short)


def _facts(path: Path, wanted: tuple[str, ...]) -> dict[str, Any]:
    try:
        found = json_text.read_object(path, "probe's JSON")
    except UserError as error:
        raise UserError(f"{error}; record again") from error
    for key in wanted:
        if key not in found:
            raise UserError(f"{path} has no {key}: it is not as mantissa_probe wrote it; record again")
    return found


def _below(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


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
