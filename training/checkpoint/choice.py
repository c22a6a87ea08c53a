"""Choice of the newest checkpoint of a folder, by sealed manifests (LATEST is only a hint for people), and the run that
a session's checkpoints belong to, which may have gone back to an older one."""

import contextlib
import os
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from config.errors import UserError
from training.checkpoint.manifest import NAME, Unusable, is_whole, read_manifest
from training.checkpoint.run_record import Order, Record, order_in, read_record, run_in

LATEST = "LATEST"


def step_of(path: Path) -> int:
    """The step in the name of a published checkpoint."""
    return int(path.name[5:])


def by_step(folder: Path) -> list[Path]:
    """Every published checkpoint in a checkpoints folder, complete or not, the highest step first. Raises UserError if
    the folder cannot be read: a run must not start from scratch because of that."""
    try:
        names = [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}); change its permissions") from error
    steps = sorted((int(match[1]) for match in map(NAME.fullmatch, names) if match), reverse=True)
    return [folder / f"step-{step}" for step in steps]


def candidates(folder: Path) -> list[Path]:
    """Checkpoints to resume from, the newest first; see `newest_first`."""
    found = {step_of(path): manifest_in(path) for path in by_step(folder)}
    named = NAME.fullmatch(latest_name(folder) or "")
    return [folder / f"step-{step}" for step in newest_first(found, named and int(named[1]), read_record(folder))]


def newest_first(found: Mapping[int, dict[str, Any] | None], named: int | None, record: Record | None) -> list[int]:
    """The steps in the order to try them: by how often the run had gone back, then by step; abandoned ones last. If all
    manifests are older and do not tell, LATEST's checkpoint comes first, provided it was also written last.

    found: manifests by step; None for one that cannot be read. named: the step in LATEST. record: from RUN.
    """
    known = [manifest for manifest in found.values() if manifest is not None]
    hint = found.get(named) if named is not None else None
    old = hint is not None and all("went_back" not in m and m["written"] <= hint["written"] for m in known)

    def place(step: int) -> tuple[bool, bool, Order]:
        order = _order(step, found[step])
        return old and step == named, record is None or not record.left(order), order

    return sorted(found, key=place, reverse=True)


def newest(folder: Path, beside: Collection[Path] = ()) -> Path | None:
    """The first complete one of `candidates` that is not in `beside`; None if there is none."""
    return next((path for path in candidates(folder) if path not in beside and is_whole(path)), None)


def latest_name(folder: Path) -> str | None:
    """The name in LATEST; None without the file, or if it holds no checkpoint's name."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        name = (folder / LATEST).read_text(encoding="ascii").strip()
        return name if NAME.fullmatch(name) else None
    return None


def choice_remark(chosen: Path, passed_over: Collection[Path]) -> str | None:
    """One line on why `chosen` is not LATEST's or not the highest step; None if it is both."""
    folder, name, why = chosen.parent, latest_name(chosen.parent), []
    there = {step_of(path): path for path in by_step(folder)}
    step = step_of(chosen)
    if name is None and os.path.lexists(folder / LATEST):
        why.append("LATEST names no checkpoint")
    elif name is not None and folder / name not in (*there.values(), *passed_over):
        why.append(f"LATEST names {name}, which is not there")
    elif name is not None and int(name[5:]) < step and folder / name not in passed_over:
        why.append(f"LATEST names {name}, an older one (run.resume={folder / name} goes back to it)")
    later = [path.name for other, path in there.items() if other > step and path not in passed_over]
    if later:
        why.append(f"{', '.join(later)}: from before the run went back")
    return f"took {chosen}, the newest complete checkpoint: {'; '.join(why)}" if why else None


def _order(step: int, manifest: dict[str, Any] | None) -> Order:
    """Order by the folder's name, not the manifest's step: a renamed folder is passed over when its turn comes."""
    return (order_in(manifest)[0] if manifest is not None else 0, step)


def manifest_in(path: Path) -> dict[str, Any] | None:
    """The manifest of the checkpoint at `path`; None if it cannot be read or used."""
    with contextlib.suppress(Unusable, OSError):
        return read_manifest(path)
    return None


class Lineage:
    """The run's identity, which every manifest of a session seals, and the file RUN beside the checkpoints. For the
    main process only."""

    def __init__(self, folder: Path, name: str) -> None:
        """folder: the checkpoints folder, with or without RUN yet. name: the run's, for messages."""
        self._folder = folder
        self._run = Record(uuid.uuid4().hex[:16], name)
        self._went_back = 0
        self._in_folder = False

    def continue_from(self, path: Path, in_store: Sequence[Order], *, record: bool) -> bool:
        """Continue the run from `path`: checkpoints that counted as newer no longer do; returns whether it lies in the
        folder. in_store: those in the object store. record: write it to RUN now, in case the run ends before its next
        save. Raises OSError."""
        manifest, found = read_manifest(path), read_record(self._folder)
        own = path.resolve().parent == self._folder.resolve()
        run = run_in(manifest)
        same = own or bool(found and run and run[0] == found.id)  # also a copy elsewhere
        order, run = (order_in(manifest), run) if same else ((0, -1), None)
        self._run = found or (Record(*run) if run else self._run)
        others = [*(_order(step_of(path), manifest_in(path)) for path in by_step(self._folder)), *in_store]
        ahead = [other for other in others if other > order and not self._run.left(other)]
        goes_back = bool(ahead) or self._run.left(order)
        before = max([order[0], self._run.went_back, *(other[0] for other in ahead)])
        self._went_back = before + goes_back
        if goes_back and record:
            self._run = replace(self._run, went_back=self._went_back, back_to=order[1])
            self._run.write(self._folder)
        return own

    def begin_save(self) -> None:
        """Write RUN before a checkpoint, so that none is published in a folder without it. Raises OSError."""
        if not self._in_folder:
            found = read_record(self._folder)
            self._run = found or self._run
            if found is None:
                self._run.write(self._folder)
            self._in_folder = True

    def fields(self) -> dict[str, Any]:
        """The fields for the manifest."""
        return {"run": {"id": self._run.id, "name": self._run.name}, "went_back": self._went_back}
