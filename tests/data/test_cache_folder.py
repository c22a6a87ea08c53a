"""Prepared data goes beside the temporary files where HOME cannot be written, and only then."""

import os
import tempfile
from pathlib import Path

import pytest

from config.errors import UserError
from config.schema import DataSection
from data.corpora.corpus import INDEX
from data.text.cache_folder import cache_folder
from tests.support.refusals import refused


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize("home", ["/proc/none", "/etc/hostname"])
def test_a_home_that_cannot_be_written(temporary: Path, monkeypatch, capsys, home: str) -> None:
    monkeypatch.setenv("HOME", home)
    own = temporary / f"mantissa-{os.getuid()}"
    assert cache_folder(DataSection(), "f", say=True) == own / "f"
    assert own.stat().st_mode & 0o777 == 0o700
    (line,) = capsys.readouterr().out.splitlines()
    assert home in line and f"prepared data is kept in {own}" in line and "data.cache_dir" in line
    assert cache_folder(DataSection(), "f", say=False) == own / "f", "again, as another rank or a later run"
    assert capsys.readouterr().out == ""


def test_a_home_that_can_be_written_or_holds_the_data(temporary: Path, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "home/.cache/mantissa/f"
    assert cache_folder(DataSection(), "f", say=True) == folder
    folder.mkdir()
    (folder / INDEX).touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert cache_folder(DataSection(), "f", say=True) == folder
    assert cache_folder(DataSection(), "g", say=True).is_relative_to(temporary)
    assert capsys.readouterr().out.count("prepared data is kept in") == 1


def test_a_folder_that_was_asked_for_stays_that_folder(temporary: Path) -> None:
    assert cache_folder(DataSection(cache_dir="/proc/none"), "f", say=True) == Path("/proc/none/f")
    with pytest.raises(UserError, match="data.cache_dir=~nobody-of-this-name/c: "):
        cache_folder(DataSection(cache_dir="~nobody-of-this-name/c"), "f", say=True)


def test_nobody_elses_folder_is_taken(temporary: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/proc/none")
    (tmp_path / "theirs").mkdir()
    (temporary / f"mantissa-{os.getuid()}").symlink_to(tmp_path / "theirs")
    assert "not a folder of this user's" in refused(cache_folder, DataSection(), "f", say=True)


def test_nothing_that_can_be_written(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/proc/none")
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    assert "No such file or directory: '/proc/none/mantissa-" in refused(cache_folder, DataSection(), "f", say=True)
