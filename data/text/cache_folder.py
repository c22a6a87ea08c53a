"""Where prepared data is kept: data.cache_dir, or beside the temporary files where HOME cannot be written."""

from __future__ import annotations

from pathlib import Path

from config.errors import UserError, one_line
from config.files import temporary_folder, why_not_writable
from config.schema import DataSection
from data.corpora.corpus import is_prepared


def cache_folder(data: DataSection, fingerprint: str, *, say: bool) -> Path:
    """The folder of a corpus that exists or will be prepared. say: print it if it is not the config's.

    Services often have no writable HOME: the default then becomes a folder of this user beside the temporary files.
    Raises UserError.
    """
    default = data.cache_dir == DataSection.cache_dir
    key = f"data.cache_dir={data.cache_dir}"
    try:
        cache = Path(data.cache_dir).expanduser()
    except RuntimeError as error:  # there is no HOME, and this user has no name
        problem = one_line(error)
        if not default:
            raise UserError(f"{key}: {problem}. Set HOME or another folder.") from error
    else:
        problem = "" if not default or is_prepared(cache / fingerprint) else why_not_writable(cache)
        if not problem:
            return cache / fingerprint
    try:
        cache = temporary_folder()
    except OSError as error:
        raise UserError(f"{key}: {problem}, and {one_line(error)}. Set another folder.") from error
    if say:
        print(f"data: {problem}; prepared data is kept in {cache}; data.cache_dir changes that", flush=True)
    return cache / fingerprint
