"""Reading a suite's output, and the pages about what was tested."""

import subprocess
from pathlib import Path

import pytest

from config.cli import CRASH, DONE, REPOSITORY
from lab import suites
from lab.suites import SUITES, Result
from tests.support.refusals import refused

FAILED = """
FAILED tests/a.py::test_b[one of two] - AssertionError
ERROR tests/c.py - ImportError
= 1 failed, 1913 passed, 14 skipped, 46 warnings, 1 error in 545.45s (0:09:05) =
"""


@pytest.mark.parametrize(
    ("text", "code", "result"),
    [
        (FAILED, 1, Result(1913, 2, 14, failures=["tests/a.py::test_b[one of two]", "tests/c.py"])),
        ("= 62 passed, 3 deselected in 9.1s =", 0, Result(62)),
        ("3 passed in 0.1s", 0, Result(3)),
        ("= 5 passed, 2 skipped in 1.0s =\npython -m pytest\n= 3 passed, 1 skipped in 2.0s =", 0, Result(8, 0, 3)),
        ("done after 450 steps", 0, Result(1)),
        ("make: *** [x] Error 2", 2, Result(0, 1, failures=["exit code 2"])),
        ("= 3 passed in 1.0s =\nmake: *** Error 1", 1, Result(3, 1, failures=["exit code 1"])),
    ],
)
def test_the_result_of_a_suite_is_what_its_summary_says(text: str, code: int, result: Result) -> None:
    assert suites.read(text, code) == result


def test_suites_are_targets_of_make() -> None:
    targets = (REPOSITORY / "Makefile").read_text()
    assert [name for name in SUITES if f"\n{name.split()[0]}: " not in targets] == []


def test_every_file_of_tests_is_in_one_part_of_the_long_ones() -> None:
    parts = [name.partition("ARGS=")[2].split() for name in SUITES if name.startswith("test-long ")]
    for path in (REPOSITORY / "tests").rglob("test_*.py"):
        name = str(path.relative_to(REPOSITORY))
        without = [{word for word in part if name.startswith(word.removeprefix("--ignore="))} for part in parts]
        chosen = [
            all(word in found for word in part if not word.startswith("-"))
            and not any(word.startswith("-") for word in found)
            for part, found in zip(parts, without, strict=True)
        ]
        assert sum(chosen) == 1, name


@pytest.mark.parametrize("folder", ["repository/docs", "elsewhere"])
def test_a_suite_is_run_once_a_commit_never_without_one_and_the_page_names_what_failed(
    folder: str, tmp_path, monkeypatch
) -> None:
    ran: list[str] = []

    def run(command: list[str], log: Path) -> Result:
        ran.append(command[1])
        return Result(5, 1, 2, 60.0, ["tests/a.py::test_b"]) if command[1] == "chaos" else Result(7)

    clean = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(suites, "run", run)
    facts = {
        "git": None,
        "cpu": {"usable_cores": 2, "model": "A"},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0", "deepspeed": "0.19.8"},
    }
    monkeypatch.setattr(suites, "environment", lambda extra: facts)
    monkeypatch.setattr(suites.subprocess, "run", lambda *words, **options: clean)
    monkeypatch.setattr(suites, "REPOSITORY", tmp_path / "repository")
    page = tmp_path / folder / "tested.md"
    assert "commit" in refused(suites.run_suites, tmp_path, page, None, again=False)
    facts["git"] = {"commit": "0123456789abcdef"}
    assert suites.run_suites(tmp_path, page, "test", again=False) == DONE
    assert (
        ran == ["test"]
        and "| `make chaos` | saves killed at every phase | not run | - | - | - | - |" in page.read_text()
    )
    facts["git"] = {"commit": "fedcba9876543210"}
    assert suites.run_suites(tmp_path, page, "chaos", again=False) == CRASH
    assert "| 5 passed, 1 failed, 2 skipped (tests/a.py::test_b) | 1 min | fedcba987654 |" in page.read_text()
    assert suites.run_suites(tmp_path, page, None, again=False) == CRASH
    assert ran == ["test", "chaos", *(name.split()[0] for name in SUITES if name != "chaos")]
    assert suites.run_suites(tmp_path, page, "chaos", again=True) == CRASH
    assert "| 7 passed, 0 failed | 0 min | fedcba987654 |" in page.read_text() and "not run" not in page.read_text()
