"""Machines on which many things are strange at once; every run of the tests has been on the first."""

import dataclasses
import os
from pathlib import Path

import pytest

from tests.support.machines.strange import (
    USER,
    Place,
    copy_of_code,
    lives,
    needs_mounts,
    programs,
    same_names,
    starts,
    umask,
)


@needs_mounts
@pytest.mark.parametrize("resumed", [False, pytest.param(True, marks=pytest.mark.machines)])
def test_a_plain_user_behind_a_link_to_a_strange_path_with_nothing_in_the_environment(ground, losses, resumed) -> None:
    """Spaces, letters beyond ASCII, 200 characters, a link, no user name, umask 077, LANG=C, no git, g++ or ninja."""
    ground = ground / f"resumed {resumed}"
    ground.mkdir()
    folder = ground / "für  Müller's" / ("a long name " * 16).strip()
    code = copy_of_code(folder / "Mantissa (copy)")
    link = ground / "link"
    link.symlink_to(folder)
    home = ground / "home of nobody"
    home.mkdir()
    os.chown(home, USER, USER)
    variables = {"PATH": str(programs(ground / "bin")), "HOME": str(home), "LANG": "C"}
    place = Place(link / "läuft", code=link / code.name, variables=variables, bare=True, inside=umask("077"))
    place = dataclasses.replace(place, plain_user=True)
    (lives if resumed else starts)(place, losses)


@pytest.mark.machines
def test_a_read_only_home_in_another_folder_beside_modules_of_the_same_names(ground: Path, losses) -> None:
    """HOME and the working folder belong to others, PYTHONPATH holds a `config`, a `data` ...; asserts are left out."""
    variables = {"HOME": "/proc/no-home", "PYTHONPATH": str(same_names(ground / "others")), "PYTHONOPTIMIZE": "1"}
    starts(Place(ground / "optimized", cwd=Path("/proc"), variables=variables), losses)
