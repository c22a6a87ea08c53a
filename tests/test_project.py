"""Facts in several files agree: version, license, packages, make, folders of tests, Pythons; sentences; UTF-8."""

import ast
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from config.cli import REPOSITORY
from config.version import VERSION
from tests.support.imports import module_name, source_files
from tests.support.jobs.launches import start

FRAGMENT = r"\s*(?:Of|That|What|Those|From)\b"
"""Openings of docstrings that have no main verb."""


def test_the_newest_entry_of_the_changelog_is_the_version() -> None:
    entries = re.findall(r"^## \[(.+?)\] - \d{4}-\d{2}-\d{2}$", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entries[0] == VERSION
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)


def test_the_citation_names_the_version() -> None:
    assert f"\nversion: {VERSION}\n" in (REPOSITORY / "CITATION.cff").read_text()


def test_the_license_is_apache_2_in_full() -> None:
    text = (REPOSITORY / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text and "9. Accepting Warranty" in text and text.endswith("the License.\n")


def pinned(name: str) -> dict[str, str]:
    """Package to version of a requirements file's own lines; every one of them has to be pinned."""
    lines = [line.split("#")[0].strip() for line in (REPOSITORY / name).read_text().splitlines()]
    pins = [
        re.fullmatch(r"([\w-]+)(?:\[\w+\])?==([\w.]+)", line) for line in lines if line and not line.startswith("-r ")
    ]
    assert all(pins), lines
    return {pin[1].lower().replace("_", "-"): pin[2] for pin in pins if pin}


def test_running_and_testing_are_pinned_apart() -> None:
    running, extras, testing = (pinned(f"requirements{part}.txt") for part in ("", "-extras", "-dev"))
    assert {"torch", "deepspeed", "transformers", "huggingface-hub"} <= running.keys()
    assert {"s3fs", "prometheus-client"} <= extras.keys() and {"pytest", "ruff", "mypy"} <= testing.keys()
    assert len(running.keys() | extras.keys() | testing.keys()) == len(running) + len(extras) + len(testing)
    assert "-r requirements.txt" in (REPOSITORY / "requirements-extras.txt").read_text().splitlines()
    assert "-r requirements-extras.txt" in (REPOSITORY / "requirements-dev.txt").read_text().splitlines()


def setup_commands(folder: Path, *arguments: str, target: str = "setup") -> list[str]:
    """The commands that `make TARGET` would run with an environment in `folder`."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key != "TORCH_INDEX"}
    command = ["make", "--dry-run", target, f"VENV={folder}", *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, env=clean, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_setup_takes_torch_alone_from_another_index_and_remembers_which(tmp_path: Path) -> None:
    installs = [line for line in setup_commands(tmp_path) if "pip install" in line and "-cuda" not in line]
    assert [line.rpartition(" -r ")[2] for line in installs[1:]] == ["requirements.txt", "requirements-dev.txt"]

    lines = setup_commands(tmp_path, "TORCH_INDEX=https://index.example/whl")
    installs = [line for line in lines if "pip install" in line and "-cuda" not in line]
    assert f"grep '^torch==' requirements.txt > {tmp_path}/torch.txt" in lines
    assert installs[1].endswith(f'--index-url "https://index.example/whl" -r {tmp_path}/torch.txt')
    assert installs[2].endswith("-r requirements.txt") and installs[3].endswith("-r requirements-dev.txt")

    (tmp_path / ".torch-index").write_text("https://index.example/whl\n")
    for stamp in (".running", ".requirements"):
        (tmp_path / stamp).touch()
    assert not [line for line in setup_commands(tmp_path) if "pip" in line]
    assert not [line for line in setup_commands(tmp_path, "TORCH_INDEX=https://index.example/whl") if "pip" in line]
    assert [
        line for line in setup_commands(tmp_path, "TORCH_INDEX=https://other.example") if "--force-reinstall" in line
    ]
    (tmp_path / ".running").unlink()
    assert [line for line in setup_commands(tmp_path) if '--index-url "https://index.example/whl"' in line]


def test_the_demo_installs_no_test_tool(tmp_path: Path) -> None:
    installs = [line for line in setup_commands(tmp_path, target="demo") if "pip install" in line]
    assert [line.rpartition(" -r ")[2] for line in installs[1:]] == ["requirements.txt", "requirements-cuda.txt; fi"]


def test_a_command_of_make_meets_no_folder_on_its_path_that_may_not_be_entered(tmp_path: Path) -> None:
    """`su` without a `-` leaves root's. To root, who may enter all, one that is not there stands for them."""
    print_path = ["make", "--silent", "--eval=print-path: ; @:$(info $(PATH))", "print-path"]
    spaced = tmp_path / "with a space"
    spaced.mkdir()
    variables = os.environ | {"PATH": os.pathsep.join([str(tmp_path / "gone"), os.environ["PATH"], str(spaced)])}
    printed = subprocess.run(print_path, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=True)
    folders = printed.stdout.strip().split(os.pathsep)
    assert folders[0] == str(REPOSITORY / ".venv/bin") and folders[-1] == str(spaced)
    assert str(tmp_path / "gone") not in folders and "" not in folders


def fragments(source: str) -> list[int]:
    """Lines of docstrings, of attributes too, that open as a fragment."""
    texts = ast.walk(ast.parse(source)) if re.search(f'"""{FRAGMENT}', source) else ()
    return [node.lineno for node in texts if isinstance(node, ast.Expr) and re.match(FRAGMENT, str(_text(node)))]


def _text(statement: ast.Expr) -> object:
    return statement.value.value if isinstance(statement.value, ast.Constant) else None


def test_no_docstring_opens_as_a_fragment() -> None:
    assert fragments('x = 1\n"""Of the first row."""\ndef f():\n    """\n    What it is."""\n') == [2, 4]
    files = [*source_files(REPOSITORY), *(REPOSITORY / "tests").rglob("*.py"), *(REPOSITORY / "docs").rglob("*.py")]
    found = {str(path): lines for path in files if (lines := fragments(path.read_text(encoding="utf-8")))}
    assert found == {}, "write a sentence, or a noun phrase that stands alone"


MODE_AT = {"open": 1, "Path.open": 0, "fdopen": 1}
"""Position of the mode among the arguments of each."""
NOT_FILES = ("os", "self", "archive")
"""Modules whose `open` opens no text file: a descriptor, a stream of documents, a member of a zip file in bytes."""


def by_locale(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that decode or encode text and do not name the encoding."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(word.arg in ("encoding", None) for word in node.keywords):
            continue
        given = {word.arg: word.value for word in node.keywords}
        match node.func:
            case ast.Attribute(attr="read_text") if not node.args:
                yield node
            case ast.Attribute(attr="write_text") if len(node.args) < 2:
                yield node
            case ast.Attribute(value=ast.Name(id="os"), attr="fdopen") if _is_text(node, MODE_AT["fdopen"]):
                yield node
            case ast.Name(id="open") if _is_text(node, MODE_AT["open"]):
                yield node
            case ast.Attribute(value=owner, attr="open") if ast.unparse(owner) not in NOT_FILES:
                if _is_text(node, MODE_AT["Path.open"]):
                    yield node
            case ast.Attribute(attr="run" | "Popen" | "check_output"):
                if any(_is_true(given.get(name)) for name in ("text", "universal_newlines")):
                    yield node


def _is_text(call: ast.Call, place: int) -> bool:
    given = [word.value for word in call.keywords if word.arg == "mode"] + call.args[place : place + 1]
    mode = given[0].value if given and isinstance(given[0], ast.Constant) else "r"
    return isinstance(mode, str) and "b" not in mode


def _is_true(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def test_every_file_and_every_pipe_of_text_names_its_encoding() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{call.lineno}: {ast.unparse(call)[:90]}"
        for path in source_files(REPOSITORY)
        for call in by_locale(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []


def test_what_names_none_is_found(tmp_path: Path) -> None:
    locale = "open(a)", "p.open()", "p.open('w')", "p.read_text()", "p.write_text(t)", "os.fdopen(1, 'w')"
    pipes = "subprocess.run(c, text=True)", "subprocess.Popen(c, universal_newlines=True)"
    fine = "open(a, 'rb')", "p.open('wb')", "p.open(encoding='utf-8')", "p.write_text(t, 'utf-8')", "os.open(a, 0)"
    for text in (*locale, *pipes):
        assert list(by_locale(ast.parse(text))), text
    for text in (*fine, "subprocess.run(c)", "store.open(**options)"):
        assert not list(by_locale(ast.parse(text))), text


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


SUPPORTED = ("3.11", "3.12", "3.13")
# Packages of this environment that run on every Python as they are: PyYAML and rich, and what rich imports.
PURE = ("yaml", "rich", "pygments", "markdown_it", "mdurl")

# Warnings are errors: what a newer Python deprecates in its syntax is to be known now.
COMPILE = """
import sys
from pathlib import Path
for name in sys.stdin.read().splitlines():
    compile(Path(name).read_text(encoding="utf-8"), name, "exec", dont_inherit=True)
"""
IMPORT = """
import importlib, sys
for name in sys.stdin.read().splitlines():
    importlib.import_module(name)
"""


def interpreter(version: str) -> str:
    """The Python of that version, on the PATH or of pyenv; skips the test where there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    installed = pyenv.glob(f"{version}.*/bin/python{version}") if os.access(pyenv, os.R_OK | os.X_OK) else ()
    paths = [shutil.which(f"python{version}"), *map(str, installed)]
    for path in filter(None, paths):
        # A shim of pyenv is there for versions, too, that are not chosen.
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.startswith(f"Python {version}."):
            return path
    pytest.skip(f"no python{version} on the PATH or under pyenv")


@pytest.fixture(params=SUPPORTED)
def python(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The command that starts one of them, with these packages and no other."""
    for name in PURE:
        (tmp_path / name).symlink_to(Path(yaml.__file__).parent.with_name(name))
    return [
        "env",
        f"PYTHONPATH={tmp_path}{os.pathsep}{REPOSITORY}",
        interpreter(request.param),
        "-S",
        "-B",
        "-W",
        "error",
    ]


def run(python: list[str], *arguments: str, typed: str = "") -> str:
    command = [*python, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, input=typed, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_sources_compile(python: list[str]) -> None:
    files = [*source_files(REPOSITORY), *(REPOSITORY / "tests").rglob("*.py"), *(REPOSITORY / "docs").rglob("*.py")]
    run(python, "-c", COMPILE, typed="\n".join(map(str, files)))


def needs_torch(name: str) -> bool:
    """Whether a module runs with torch alone: what the planner's command imports when it plans, and vLLM's worker."""
    own = name.startswith("launch.plan.") and name != "launch.plan.command"
    return own or name == "launch.rollouts.vllm_worker"


def test_what_needs_pure_python_only_runs(python: list[str]) -> None:
    names = [module_name(path, REPOSITORY) for path in source_files(REPOSITORY) if path.name != "__main__.py"]
    names = [name for name in names if name.startswith(("config", "launch")) and not needs_torch(name)]
    assert len(names) > 50
    run(python, "-c", IMPORT, typed="\n".join([*names, "training.checkpoint.tool", "training.watchdog.witness"]))
    assert run(python, "train.py", "--version") == f"mantissa {VERSION}\n"
    assert "run.steps: integer" in run(python, "train.py", "--help", "all")
    assert "name: demo" in run(python, "train.py", "--config", "config/recipes/demo.yaml", "--show-config")
    assert "usage" in run(python, "-m", "launch.plan", "--help")


def test_github_tests_every_one_of_them() -> None:
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/tests.yml").read_text())
    assert tuple(workflow["jobs"]["tests"]["strategy"]["matrix"]["python"]) == SUPPORTED
    targets = re.search(r'target-version = "(.+)"', (REPOSITORY / "pyproject.toml").read_text())
    assert targets and targets[1] == f"py{SUPPORTED[0].replace('.', '')}"
