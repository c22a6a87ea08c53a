"""Every `python -m` tool ends the same way, and answers to its old name: a mistake is one line and exit code 2."""

import ast
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from config import errors
from config.cli import REPOSITORY, entry_point
from config.errors import UserError
from config.moved import MOVED, new_name

PARTS_OF_TOOLS = {
    "tracking.trackers.clients",
    "launch.kubernetes.retryable",  # launch.supervise with other exit codes
    "tracking.wandb.worker",
    "lab.benchmark.peak",
    "tools.parity.alternatives",  # train.py from moved weights
    "lab.benchmark.peers.accelerate_loop",
    "lab.benchmark.peers.bare_loop",
    "lab.benchmark.peers.titan_loop",
    "lab.benchmark.peers.trainer_loop",
    "lab.benchmark.peers.trl_loop",
    "lab.gpu_check.machine",
}
LOAD_DEEPSPEED = {"tools.analyze.survey", "lab.benchmark.overhead", "tools.parity.steps"}


def tools() -> dict[str, Path]:
    """Name for `python -m` to the file with `main`, of every tool that people start."""
    found = {}
    for folder in ("config", "data", "lab", "launch", "modeling", "precision", "tools", "tracking", "training"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            text = path.read_text()
            if 'if __name__ == "__main__":' in text:
                package = path.parent if path.name == "__main__.py" else path.with_suffix("")
                name = ".".join(package.relative_to(REPOSITORY).parts)
                if path.name == "__main__.py":
                    for source in filter(is_import_of_main, ast.parse(text).body):
                        path = (REPOSITORY / source.module.replace(".", "/")).with_suffix(".py")
                found[name] = path
    return {name: path for name, path in found.items() if name not in PARTS_OF_TOOLS}


def is_import_of_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and [item.name for item in node.names] == ["main"]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)


@pytest.mark.parametrize("name", tools())
def test_every_tool_ends_through_the_entry_point(name: str) -> None:
    tree = ast.parse(tools()[name].read_text())
    [main] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    assert ["entry_point" in ast.unparse(decorator) for decorator in main.decorator_list] == [True]


@pytest.mark.parametrize("name", sorted(tools().keys() - LOAD_DEEPSPEED))
def test_a_mistyped_option_is_one_line_and_exit_code_2(name: str, refusal: Any) -> None:
    refusal(importlib.import_module(module_of(tools()[name])).main, ["--no-such-option"], quiet=True)


def test_the_tools_of_launch_and_tracking_start_without_torch() -> None:
    modules = [module_of(path) for name, path in tools().items() if name.startswith(("launch.", "tracking."))]
    code = (
        f"import sys, {', '.join(modules)}\n"
        "print({'torch', 'deepspeed', 'transformers', 'wandb'} & sys.modules.keys())"
    )
    done = in_a_process(code)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_ranks_other_than_0_are_silent_where_a_launcher_started_them(monkeypatch, capsys):
    def main() -> int:
        raise UserError("no such folder")

    monkeypatch.setenv("RANK", "1")
    assert entry_point(launched=True)(main)() == 2
    assert capsys.readouterr().err == ""
    assert entry_point()(main)() == 2  # a cluster may set RANK for one process a machine as well
    monkeypatch.setenv("RANK", "0")
    assert entry_point(launched=True)(main)() == 2
    assert capsys.readouterr().err == "error: no such folder\n" * 2


@pytest.mark.parametrize(("lines", "options", "code"), [(10**5, "", 1), (10**5, "closed_pipe=0", 0), (1, "", 3)])
def test_a_reader_that_leaves_early_gets_no_traceback(lines: int, options: str, code: int) -> None:
    """The exit code that main returned stays where it got so far."""
    done = in_a_process(
        f"import sys\nfrom config.cli import entry_point\n@entry_point({options})\n"
        f"def main() -> int:\n    for _ in range({lines}):\n        print('a line')\n    return 3\nsys.exit(main())",
        into="true",
    )
    assert (done.returncode, done.stderr) == (code, "")


def test_another_broken_pipe_is_not_taken_for_stdout() -> None:
    @entry_point()
    def main() -> int:
        raise BrokenPipeError

    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stdout, os.fdopen(reader), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        with pytest.raises(BrokenPipeError):
            main()


def in_a_process(code: str, into: str = "cat") -> subprocess.CompletedProcess[str]:
    """Run `code` with its stdout piped into a program; the exit code is that of `code`."""
    command = ["bash", "-c", f'set -o pipefail; "$0" -c "$1" | {into}', sys.executable, code]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        command, cwd=REPOSITORY, env=buffered, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("rank", "reported", "said", "waits"),
    [
        (0, None, "error: no such folder\n", False),
        (1, None, "error: no such folder (rank 1)\n", True),  # rank 0's line ends the others before that
        (1, False, "error: no such folder (rank 1)\n", False),
        (1, True, "", False),
    ],
)
def test_a_rank_tells_of_a_mistake_that_no_other_has_told(capsys, monkeypatch, rank, reported, said, waits) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    error = errors.UserError("no such folder")
    error.reported = reported
    errors.report_error(error, rank)
    assert capsys.readouterr().err == said
    assert waited == [errors.WAIT_SECONDS] * waits


@pytest.mark.parametrize("name", MOVED)
def test_the_new_name_can_be_run(name: str) -> None:
    new = new_name(f"training.{name}")
    place = REPOSITORY / new.replace(".", "/")
    assert (place / "__main__.py").is_file() or place.with_suffix(".py").is_file()
    assert not list((REPOSITORY / "training").glob(f"{name}*/*.py"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("training.parity.steps", "tools.parity.steps"),
        ("training.benchmark.overhead", "lab.benchmark.overhead"),
        ("training.parity.defects", "lab.detection.gate"),
        ("tracking.wandb.deliver", "tracking.wandb.sync"),
    ],
)
def test_an_old_name_is_answered_in_one_line(old: str, new: str) -> None:
    command = [sys.executable, "-u", "-m", old, "--config", "x.yaml"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: python -m {old} has moved: use python -m {new}\n"


@pytest.mark.parametrize("name", ["training.checkpoint", "training.profile", "training", "tools.parity", "parity", ""])
def test_what_has_not_moved_has_no_other_name(name: str) -> None:
    assert new_name(name) is None
