"""`python -m training.checkpoint`: inspect checkpoints without loading them.

verify PATH            hash every file, then compare its tensors with the manifest; exit code 3 when anything differs.
                       The tensors of an encrypted one are compared with --key env:NAME or file:PATH
list RUN               the contents of a run's checkpoints folder
inspect PATH           the contents of a checkpoint: dtype by dtype, rank by rank
prune RUN --keep N     delete all but the newest N complete ones, and damaged ones and those set aside

PATH is a checkpoint, or a run or checkpoints folder for all of them (verify) or the newest (inspect). Code in a
checkpoint is never run. Exit codes: 0, 2 when the command line is wrong, 3 when a checkpoint changed since its save.
"""

import argparse
import math
import pickle
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from config.cli import Arguments, entry_point
from config.errors import UserError, one_line
from tracking.pages.markdown import Table
from training.checkpoint.choice import by_step, candidates, latest_name, newest
from training.checkpoint.commit import drop, name_latest
from training.checkpoint.key import Key
from training.checkpoint.manifest import (
    MANIFEST,
    STATE,
    Damaged,
    Tensors,
    check_hashes,
    find_problem,
    read_manifest,
    read_state,
)
from training.checkpoint.retention import loss_in, read_lock

WHOLE, DAMAGED = 0, 3

Say = Callable[[str], None]


@entry_point(closed_pipe=0)
def main(arguments: Sequence[str], say: Say = print) -> int:
    """Run one of the commands; returns the exit code."""
    parser = Arguments(
        prog="python -m training.checkpoint", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, act in (("verify", verify), ("list", list_run), ("inspect", inspect), ("prune", prune)):
        command = commands.add_parser(name, help=(act.__doc__ or "").splitlines()[0])
        command.add_argument("path", type=Path, metavar="RUN" if name in ("list", "prune") else "PATH")
        command.set_defaults(act=act)
        if name == "verify":
            command.add_argument("--key", metavar="env:NAME|file:PATH", help="of encrypted checkpoints")
        if name == "inspect":
            command.add_argument("--tensors", action="store_true", help="name every tensor")
        if name == "prune":
            command.add_argument("--keep", type=int, required=True, metavar="N", help="how many stay")
    given = parser.parse_args(arguments)
    return int(given.act(given, say))


def verify(given: argparse.Namespace, say: Say) -> int:
    """Hash every file and compare its tensors with the manifest."""
    worst, alone = WHOLE, _is_checkpoint(given.path)
    paths = [given.path] if alone else by_step(_folder(given.path))
    if not paths:
        raise UserError(f"{given.path}: no checkpoint there; give a checkpoints/step-N folder or a run's folder")
    key = None if given.key is None else Key.from_setting(given.key, "--key")
    for path in paths:
        check = partial(_check_everything, path, key=key)
        with read_lock(path):
            found = find_problem(path, check, of_any_run=alone)
        if found is None:
            manifest = read_manifest(path)
            needed = _encryption(manifest)
            tensors = f"{sum(len(_recorded(manifest, name)) for name in manifest['files'])} tensors"
            if needed and key is None:
                tensors = f"encrypted with the key {needed}: give it with --key to compare tensors as well"
            say(f"{path}: complete; {_size(manifest)} in {len(manifest['files'])} files, {tensors}")
        else:
            say(f"{path}: {found}")
            worst = DAMAGED
    return worst


def list_run(given: argparse.Namespace, say: Say) -> int:
    """List a run's checkpoints folder; sizes are checked, hashes are not."""
    folder = _folder(given.path)
    named, table = latest_name(folder), Table(("", "", "", ""))
    for path in by_step(folder):
        found, mark = find_problem(path), "  LATEST" if path.name == named else ""
        if found is not None:
            table.add(path.name, "", "", f"{found}{mark}")
            continue
        manifest = read_manifest(path)
        where = f"{manifest['world_size']} ranks, ZeRO-{manifest['zero_stage']}, {manifest['precision']['compute']}"
        loss = loss_in(manifest)
        evaluated = f", validation loss {loss:.4f}" if loss is not None else ""
        table.add(path.name, manifest["written"], _size(manifest), f"{where}{evaluated}{mark}")
    for path in sorted([*folder.glob(".step-*"), *folder.glob("step-*.damaged*")]):
        aside = "set aside as damaged" if ".damaged" in path.name else "under way, or left over from a kill"
        table.add(path.name, "", "", aside)
    for text in table.lines():
        say(text)
    return WHOLE


def inspect(given: argparse.Namespace, say: Say) -> int:
    """Describe a checkpoint's content by dtype and by rank."""
    path = given.path if _is_checkpoint(given.path) else newest(_folder(given.path))
    if path is None:
        raise UserError(f"{given.path}: no complete checkpoint there; `verify` says what is wrong with the others")
    found = find_problem(path, partial(_check_state, path), of_any_run=True)
    if found is not None:
        say(f"{path}: {found}")
        return DAMAGED
    manifest, state = read_manifest(path), read_state(path)
    regions = Counter((manifest["precision"]["regions"] or {}).values()).items()
    compute = manifest["precision"]["compute"] + "".join(f", {count} modules in {dtype}" for dtype, count in regions)
    say(f"{path}: step {manifest['step']}, written {manifest['written']}, {_size(manifest)}")
    say(f"  from {manifest['world_size']} ranks, ZeRO-{manifest['zero_stage']}, {compute}")
    if _encryption(manifest):
        say(f"  encrypted with the key {_encryption(manifest)}")
    say(f"  with {', '.join(f'{name} {version}' for name, version in manifest['versions'].items())}")
    say(f"  data position {manifest['data']['position']}, {manifest['data']['tokens']:,} tokens")
    for key, value in state["identity"].items():
        say(f"  {key} = {value}")
    import torch

    tensors, elements, ranks = Counter[str](), Counter[str](), Counter[int]()
    files = Table(("", "", ""))
    for name, file in manifest["files"].items():
        ranks[file["rank"]] += file["bytes"]
        files.add(file["sha256"][:12], _human(file["bytes"]), name)
        for tensor, (dtype, shape) in _recorded(manifest, name).items():
            tensors[dtype] += 1
            elements[dtype] += math.prod(shape)
            if given.tensors:
                files.add(dtype, shape, tensor)
    by_dtype = [
        (dtype, tensors[dtype], f"{count:,}", _human(count * getattr(torch, dtype).itemsize))
        for dtype, count in elements.most_common()
    ]
    by_rank = [(f"rank {rank}", _human(ranks[rank])) for rank in sorted(ranks)]
    dtypes = Table(("dtype", "tensors", "elements", "size"), by_dtype)
    for what, table in (("by dtype", dtypes), ("by rank", Table(("", ""), by_rank)), ("by file", files)):
        say(what)
        for text in table.lines():
            say(f"  {text}")
    return WHOLE


def prune(given: argparse.Namespace, say: Say) -> int:
    """Delete all but the newest N complete checkpoints, and damaged ones. Not while the run saves."""
    if given.keep < 1:
        raise UserError(f"--keep {given.keep}: at least 1 checkpoint has to stay")
    folder = _folder(given.path)
    problems = {path: find_problem(path) for path in candidates(folder)}
    whole = [path for path, problem in problems.items() if problem is None]
    if not whole:
        raise UserError(f"{folder}: no complete checkpoint there, so nothing is deleted; `verify` says what is wrong")
    stay = whole[: given.keep]
    for path in [*by_step(folder), *sorted(folder.glob("step-*.damaged*"))]:
        problem = problems.get(path)
        if problem is not None and not isinstance(problem, Damaged):
            say(f"{path}: left as it is: {problem}")
        elif path not in stay:
            drop(path)
            say(f"{path}: {'could not be deleted' if path.exists() else 'deleted'}")
    name_latest(stay[0])
    say(f"{len(stay)} stay, the newest is {stay[0].name}")
    return WHOLE


def _encryption(manifest: dict[str, Any]) -> str | None:
    return (manifest.get("encryption") or {}).get("key")


def _check_state(path: Path, manifest: dict[str, Any]) -> None:
    """Raises Damaged if the state was changed or cannot be used."""
    check_hashes(path, manifest, [STATE])
    read_state(path)


def _check_everything(path: Path, manifest: dict[str, Any], key: Key | None) -> None:
    """Raises Damaged for a file whose hash or tensors differ from the manifest's."""
    check_hashes(path, manifest, manifest["files"])
    read_state(path)
    encrypted = _encryption(manifest) is not None
    if encrypted and key is None:
        return
    for name in manifest["files"]:
        if not name.endswith(".pt"):
            continue
        recorded, found = _recorded(manifest, name), tensors_in(path / name, key if encrypted else None)
        for tensor in [*recorded, *found]:
            here, there = found.get(tensor), recorded.get(tensor)
            if here != there:
                raise Damaged(f"{name}: {tensor} holds {here}; the manifest says {there}")


def _recorded(manifest: dict[str, Any], name: str) -> Tensors:
    """The tensors of a file according to the manifest."""
    listed = manifest["layouts"].get(manifest["files"][name]["layout"], {})
    return {tensor: (dtype, list(shape)) for tensor, (dtype, shape) in listed.items()}


def tensors_in(path: Path, key: Key | None = None) -> Tensors:
    """The tensors of a .pt file, without loading values or running code. Raises Damaged."""
    import torch

    from training.checkpoint.encryption import open_file
    from training.checkpoint.inventory import tensors_of

    with open_file(path, key) as file:
        try:
            others = torch.serialization.get_unsafe_globals_in_checkpoint(file)
            file.seek(0)
            with torch.serialization.safe_globals([(_Placeholder, name) for name in others]):
                return tensors_of(torch.load(file, map_location="meta", weights_only=True))
        except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            damage = getattr(file, "damage", None)
            named = re.search(r"GLOBAL [\w.]+", str(error))
            why = f"names code, {named[0]}" if named else f"is not a file of torch.save: {one_line(error)}"
            raise damage or Damaged(f"{path.name} {why}") from None


class _Placeholder:
    """Replaces whatever a file names besides tensors and plain types, DeepSpeed's classes included."""

    def __init__(self, *arguments: Any) -> None:
        pass

    __setstate__ = __init__


def _is_checkpoint(path: Path) -> bool:
    return path.name.startswith("step-") or any((path / name).is_file() for name in (MANIFEST, STATE))


def _folder(path: Path) -> Path:
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not folder.is_dir():
        raise UserError(f"{path}: no such folder; give a run's folder, such as runs/demo")
    return folder


def _size(manifest: dict[str, Any]) -> str:
    return _human(sum(file["bytes"] for file in manifest["files"].values()))


def _human(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB" if size < 2**30 else f"{size / 2**30:,.2f} GiB"
