"""Where libraries keep their caches when the home folder is missing or may not be written.

Containers often run as a user without a home, or with one that is read-only. Libraries then fail in as many ways as
there are libraries; here they are all given this user's folder among the temporary files. What Mantissa itself keeps,
prepared data, is found by data/cache_folder.py.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from config.errors import UserError, one_line
from config.files import temporary_folder, why_not_writable

_IN_CACHE = {
    "XDG_CACHE_HOME": "",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TRITON_CACHE_DIR": "triton",
    "MPLCONFIGDIR": "matplotlib",
    "HF_HUB_CACHE": "huggingface/hub",
}
"""Variables to the folder inside the cache. None of them moves where a library looks for credentials in the home."""


def use_writable_caches(environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Set what is not set of the variables above, and HOME where there is none; a line about it, None without need.

    Raises UserError when there is no other folder either.
    """
    try:
        home = Path.home()
    except RuntimeError:  # no HOME, and a user without an entry in /etc/passwd
        home = Path("~")
    problem = why_not_writable(home / ".cache")
    if not problem:
        return None
    try:
        folder = temporary_folder()
    except OSError as error:
        raise UserError(f"HOME: {problem}, and {one_line(error)}; set HOME or TMPDIR to a folder of yours") from error
    for name, inside in _IN_CACHE.items():
        environment.setdefault(name, str(folder / inside))
    if home == Path("~"):
        environment["HOME"] = str(folder)
    return f"{problem}: libraries keep their caches in {folder}"
