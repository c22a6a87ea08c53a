"""Read the runs that `python -m tracking.compare` is given: run folders, globs of them, and wandb runs."""

from collections.abc import Sequence
from glob import has_magic
from pathlib import Path

from config.errors import UserError
from tracking.compare.groups import shortest_ends
from tracking.report.files import matching
from tracking.run_dir import RunDir
from tracking.run_facts import RunFacts
from tracking.summary import read_run_folder

WANDB = "wandb:"


def read_runs(arguments: Sequence[str]) -> list[RunFacts]:
    """The runs that `arguments` name, in order and without duplicates, with the shortest distinct labels.

    Raises UserError when an argument names no run.
    """
    sources = list(dict.fromkeys(source for argument in arguments for source in _expanded(argument)))
    runs = []
    for source, label in zip(sources, labels(sources), strict=True):
        if source.startswith(WANDB):
            from tracking.compare.wandb_runs import read_wandb

            runs.append(read_wandb(source.removeprefix(WANDB), label))
        else:
            runs.append(read_run_folder(RunDir(Path(source)), label))
    return runs


def _expanded(argument: str) -> list[str]:
    """Run folders that one argument names; for a glob, the matches with events, sorted by name."""
    if argument.startswith(WANDB):
        return [argument]
    path = Path(argument).expanduser()
    if not has_magic(argument) or path.exists():
        return [str(_folder(path))]
    found = sorted(str(_folder(match)) for match in matching(argument))
    runs = [folder for folder in dict.fromkeys(found) if RunDir(Path(folder)).events.exists()]
    if not runs:
        raise UserError(f"{argument}: no folder with an events.jsonl matches; give run folders such as 'runs/*'")
    return runs


def _folder(path: Path) -> Path:
    """The run folder, given its path or that of its events.jsonl."""
    return path.parent if path.name == "events.jsonl" else path


def labels(sources: Sequence[str]) -> list[str]:
    """A label for each source: its shortest path suffix that no other source shares."""
    parts = [
        source.removeprefix(WANDB).split("/") if source.startswith(WANDB) else list(Path(source).resolve().parts)
        for source in sources
    ]
    return ["/".join(end) for end in shortest_ends(parts)]
