"""The tests themselves: where they live, and what pytest is told."""

from pathlib import Path

from config.cli import REPOSITORY
from tests.support.jobs.launches import start

TESTS = REPOSITORY / "tests"


def test_every_folder_mirrors_one_of_the_code_and_helpers_are_in_support() -> None:
    files = [
        path for path in TESTS.rglob("*.py") if TESTS / "support" not in path.parents and path.name != "conftest.py"
    ]
    folders = {path.parent.relative_to(TESTS) for path in files}
    others = {folder for folder in folders if not (REPOSITORY / folder).is_dir()}
    assert others == {Path("machines"), Path("training/jobs")}
    assert [path for path in files if not (path.name.startswith("test_") or path.name.endswith("_cases.py"))] == []


def outcome(folder: Path, test: str, *options: str) -> str:
    """The output of pytest at the end of a session of one test, set up as all sessions are."""
    (folder / "test_it.py").write_text(f"import os, pytest\n\n{test}\n")
    words = ["-q", "-p", "no:cacheprovider", "-p", "tests.conftest", "-c", str(REPOSITORY / "pyproject.toml"), *options]
    return start(
        ["python", "-m", "pytest", *words, "--rootdir", str(folder), str(folder / "test_it.py")]
    ).communicate()[0]


def test_an_unknown_marker_is_refused(tmp_path: Path) -> None:
    assert "'slwo' not found in `markers`" in outcome(tmp_path, "@pytest.mark.slwo\ndef test_it(): pass")


def test_what_starts_a_process_is_skipped_on_request(tmp_path: Path) -> None:
    starts = "def test_it(): assert os.spawnlp(os.P_WAIT, 'true', 'true') == 0"
    found = outcome(tmp_path, f"{starts}\n\ndef test_other(): pass", "--no-processes")
    assert "1 passed, 1 skipped" in found
