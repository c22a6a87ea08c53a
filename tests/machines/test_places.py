"""Locations of Mantissa and its runs: paths, links, the working folder, who may write, who runs it."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.machines.strange import (
    STEPS,
    USER,
    Place,
    copy_of_code,
    demo,
    lives,
    look_at,
    mounted,
    needs_mounts,
    umask,
)

pytestmark = pytest.mark.machines

PATHS = {
    "spaces": "my trained  models",
    "letters": "größe-模型-модель",
    "long": "/".join(["a" * 49] * 4),
    "signs": "it's (a) $HOME & c=d; %s ~",
}


@pytest.mark.parametrize("name", PATHS.values(), ids=PATHS)
def test_a_path(ground: Path, losses, name: str) -> None:
    folder = ground / "paths" / name
    lives(Place(folder / "out", code=copy_of_code(folder / "Mantissa")), losses)


def test_through_a_link(ground: Path, losses) -> None:
    copy_of_code(ground / "linked" / "real" / "Mantissa")
    (ground / "linked" / "link").symlink_to("real")
    lives(Place(ground / "linked" / "link" / "out", code=ground / "linked" / "link" / "Mantissa"), losses)


@needs_mounts
def test_a_source_tree_that_nobody_may_write(ground: Path, losses) -> None:
    code = copy_of_code(ground / "read only" / "Mantissa")
    before = sorted(code.rglob("*"))
    inside = mounted(f"mount --bind '{code}' '{code}'", f"mount -o remount,ro,bind '{code}'")
    lives(Place(ground / "read only" / "out", code=code, inside=inside), losses)
    assert sorted(code.rglob("*")) == before


def test_nothing_is_written_beside_the_code(ground: Path, losses) -> None:
    code = copy_of_code(ground / "untouched" / "Mantissa")
    before = sorted(code.rglob("*"))
    lives(Place(ground / "untouched" / "out", code=code), losses)
    assert [path for path in sorted(code.rglob("*")) if path not in before and "__pycache__" not in path.parts] == []


def test_another_working_folder_gets_the_runs(ground: Path, losses) -> None:
    """run.dir is the default, and the config is named from the other folder."""
    folder = ground / "elsewhere"
    folder.mkdir()
    place = Place(folder, cwd=folder, settings=("run.dir=runs", "data.cache_dir=cache"))
    lives(place, losses)
    assert {path.name for path in folder.iterdir()} <= {"runs", "cache"}


@needs_mounts
def test_a_plain_user_without_a_name_in_a_home_of_its_own(ground: Path, losses) -> None:
    """Everything where it goes unless set, the data in HOME too."""
    home = ground / "home"
    home.mkdir()
    os.chown(home, USER, USER)
    place = Place(ground / "plain user", variables={"HOME": str(home)}, plain_user=True)
    lives(replace(place, settings=("data.cache_dir=~/.cache/mantissa",)), losses)


@pytest.mark.parametrize("mask", ["077", "000"])
def test_an_umask(ground: Path, losses, mask: str) -> None:
    lives(Place(ground / f"umask {mask}", inside=umask(mask)), losses)


HOMES = {"missing": "/nonexistent/home", "read_only": "/proc", "not_set": None, "a_file": "/etc/hostname", "empty": ""}


@needs_mounts
@pytest.mark.parametrize("home", HOMES.values(), ids=HOMES)
def test_a_home_that_cannot_be_written(ground: Path, losses, home: str | None) -> None:
    lives(Place(ground / f"home {home}".replace("/", "_"), variables={"HOME": home}, plain_user=True), losses)


@needs_mounts
def test_prepared_data_goes_elsewhere_when_its_folder_cannot_be_written(ground: Path, losses) -> None:
    """data.cache_dir as it is unless set, and a HOME that only root may write."""
    place = Place(ground / "no cache", variables={"HOME": "/proc"}, plain_user=True)
    output = demo(replace(place, settings=("data.cache_dir=~/.cache/mantissa",)), f"run.steps={STEPS}")
    look_at(place.run, output, losses[:STEPS])
    assert "~/.cache/mantissa" in output or "/proc/.cache/mantissa" in output, "it is said"
