"""Where caches go when the home folder is missing or may not be written. The standard library only.

Containers often run as a user without a home, or with one that is read-only. Python's libraries then fail in as many
ways as there are libraries; here they are all given one folder of this user's among the temporary files.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from config.errors import UserError

_IN_CACHE = {
    "XDG_CACHE_HOME": "",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TRITON_CACHE_DIR": "triton",
    "MPLCONFIGDIR": "matplotlib",
    "HF_HUB_CACHE": "huggingface/hub",
    "HF_DATASETS_CACHE": "huggingface/datasets",
    "WANDB_CACHE_DIR": "wandb",
    "WANDB_CONFIG_DIR": "wandb-config",
}
"""Variables to the folder inside the cache. None of them moves where a library looks for credentials in the home."""


def use_writable_caches(environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Set what is not set of the variables above, and HOME where there is none; a line about it, None without need.

    Raises UserError when there is no other folder either.
    """
    home = _home()
    if home is not None and _may_write(home / ".cache"):
        return None
    folder = _own_temporary_folder()
    for name, inside in _IN_CACHE.items():
        environment.setdefault(name, str(folder / inside))
    if home is None:
        environment["HOME"] = str(folder)
        return f"there is no home folder (HOME is not set): caches and prepared data go to {folder}"
    return f"{home / '.cache'} cannot be written: caches and prepared data go to {folder}"


def expand(path: str) -> Path:
    """`path` with ~ expanded; what would be in a ~/.cache that cannot be written is in the other folder."""
    parts = Path(path).parts
    home = _home()
    if parts[:2] == ("~", ".cache") and (home is None or not _may_write(home / ".cache")):
        return _own_temporary_folder().joinpath(*parts[2:])
    return Path(path).expanduser()


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:  # no HOME, and a user without an entry in /etc/passwd
        return None


def _may_write(folder: Path) -> bool:
    """Whether files can be made in it, or it itself where it is not there yet."""
    for place in (folder, *folder.parents):
        try:
            place.stat()
        except FileNotFoundError:
            continue
        except OSError:
            return False
        return os.access(place, os.W_OK | os.X_OK) and place.is_dir()
    return False


def _own_temporary_folder() -> Path:
    """Of this user alone: one that somebody else has made in its place is refused."""
    try:
        folder = Path(tempfile.gettempdir()) / f"mantissa-cache-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise UserError(f"TMPDIR: no folder for caches can be made there ({error}); set HOME or TMPDIR") from error
    if found.st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink():
        raise UserError(f"{folder}: is not this user's own folder; set HOME or TMPDIR to one that may be written")
    return folder
