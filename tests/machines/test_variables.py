"""Effects of the environment: locale, terminal, threads, other modules, wandb, hubs, proxies, secrets."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs.launches import on_a_terminal
from tests.support.machines.strange import STEPS, Place, demo, lives, look_at, programs, same_names, start, starts
from tracking.run_dir import RunDir

pytestmark = pytest.mark.machines

LOCALES: dict[str, dict[str, str | None]] = {
    "lang_c": {"LANG": "C", "LC_ALL": None},
    "lc_all_c": {"LC_ALL": "C"},
    "lc_all_unknown": {"LC_ALL": "xx_YY.UTF-8"},
    "latin_1": {"PYTHONIOENCODING": "latin-1"},
    "ascii": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}
TERMINALS: dict[str, dict[str, str | None]] = {
    "dumb": {"TERM": "dumb"},
    "no_term": {"TERM": None},
    "no_color": {"NO_COLOR": "1"},
    "narrow": {"COLUMNS": "40", "LINES": "5"},
    "forced": {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "COLUMNS": "1"},
}
HUBS: dict[str, dict[str, str | None]] = {
    "offline": {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
    "unwritable": {"HF_HOME": "/proc/hf", "HF_HUB_CACHE": "/proc/hf/hub", "XDG_CACHE_HOME": "/proc/cache"},
    "token": {"HF_TOKEN": "hf_" + "q" * 34, "HF_ENDPOINT": "http://127.0.0.1:9"},
}
PROXIES = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "ALL_PROXY"), "http://user:pw@127.0.0.1:9")
CI = {"CI": "true", "GITHUB_ACTIONS": "true", "JENKINS_URL": "http://127.0.0.1:9", "KUBERNETES_SERVICE_HOST": "1.2.3.4"}
WANDB: dict[str, dict[str, str | None]] = {
    "mode_disabled": {"WANDB_MODE": "disabled", "WANDB_DISABLED": "true"},
    "mode_online": {"WANDB_MODE": "online"},
    "nonsense": {"WANDB_MODE": "sometimes", "WANDB_CONSOLE": "blue"},
    "elsewhere": {"WANDB_DIR": "/proc/wandb", "WANDB_CACHE_DIR": "/proc/cache", "WANDB_CONFIG_DIR": "/proc/config"},
    "data_elsewhere": {"WANDB_DATA_DIR": "/proc/data", "WANDB_ARTIFACT_DIR": "/proc/artifacts"},
    "names": {"WANDB_PROJECT": "theirs", "WANDB_NAME": "theirs", "WANDB_ENTITY": "they", "WANDB_RUN_ID": "theirs"},
    "group": {"WANDB_RUN_GROUP": "g", "WANDB_JOB_TYPE": "t", "WANDB_TAGS": "a,b", "WANDB_NOTES": "n"},
    "silent": {"WANDB_SILENT": "true", "WANDB_QUIET": "true", "WANDB_RESUME": "must"},
    "server": {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40},
    "bad_key": {"WANDB_API_KEY": "short"},
}
ORDINARY_WORDS = {
    "MY_TOKEN": "gpt2",
    "DB_PASSWORD": "training",
    "APP_SECRET": "demo",
    "API_KEY": "hidden_size",
    "OLD_PWD_PASSWORD": "/tmp",
    "LONG_PASSWORD": "config/recipes/demo.yaml",
    "LONG_TOKEN": "num_hidden_layers",
}


@pytest.mark.parametrize("variables", LOCALES.values(), ids=LOCALES)
def test_a_locale(ground: Path, losses, variables: dict[str, str | None], request) -> None:
    if request.node.callspec.id == "ascii" and not sys.prefix.isascii():
        pytest.skip("torch cannot be imported from a path that the locale's encoding lacks")
    lives(Place(ground / request.node.callspec.id, variables=variables), losses)


@pytest.mark.parametrize("variables", TERMINALS.values(), ids=TERMINALS)
def test_a_terminal(ground: Path, losses, variables: dict[str, str | None], request) -> None:
    starts(Place(ground / request.node.callspec.id, variables=variables), losses)


def test_a_terminal_of_40_columns(ground: Path, losses) -> None:
    """A real one, with the live line."""
    place = Place(ground / "terminal", variables={"COLUMNS": "40", "TERM": "xterm"})
    place.folder.mkdir()
    code, output = on_a_terminal(place.command(f"run.steps={STEPS}"), env=place.environment, cwd=place.code)
    assert code == 0, output
    look_at(place.run, output, losses[:STEPS])


def test_nobody_reads_the_output(ground: Path, losses) -> None:
    """`make demo | head -1`."""
    place = Place(ground / "closed pipe")
    job = start(place, f"run.steps={STEPS}")
    assert job.stdout is not None
    job.stdout.close()
    job.wait(240)
    look_at(place.run, "", losses[:STEPS])


@pytest.mark.parametrize("threads", [None, "1", "64"])
def test_a_number_of_threads(ground: Path, losses, threads: str | None) -> None:
    lives(Place(ground / f"threads {threads}", variables={"OMP_NUM_THREADS": threads}), losses)


@pytest.mark.parametrize("threads", ["all", "0", "-3", "", "4,2"])
def test_threads_that_are_no_number(ground: Path, losses, threads: str) -> None:
    starts(Place(ground / f"threads {threads!r}", variables={"OMP_NUM_THREADS": threads}), losses)


def test_nothing_in_the_environment_but_a_path(ground: Path, losses) -> None:
    lives(Place(ground / "bare", bare=True), losses)


def test_no_git_no_compiler_no_ninja(ground: Path, losses) -> None:
    variables = {"PATH": str(programs(ground / "few programs")), "TORCH_EXTENSIONS_DIR": str(ground / "ops")}
    lives(Place(ground / "no compiler", variables=variables), losses)
    assert not (ground / "ops").exists()


def test_other_modules_of_the_same_names(ground: Path, losses) -> None:
    folder = same_names(ground / "same names")
    lives(Place(ground / "beside others", variables={"PYTHONPATH": str(folder)}, cwd=folder), losses)


def test_asserts_are_left_out(ground: Path, losses) -> None:
    lives(Place(ground / "python -O", variables={"PYTHONOPTIMIZE": "1"}), losses)


@pytest.mark.parametrize("variables", WANDB.values(), ids=WANDB)
def test_variables_of_wandb(ground: Path, losses, variables: dict[str, str | None], request) -> None:
    starts(Place(ground / f"wandb {request.node.callspec.id}", variables=variables), losses)


@pytest.mark.parametrize("variables", HUBS.values(), ids=HUBS)
def test_variables_of_the_hub(ground: Path, losses, variables: dict[str, str | None], request) -> None:
    place = Place(ground / f"hub {request.node.callspec.id}", variables=variables)
    starts(place, losses)
    token = variables.get("HF_TOKEN")
    assert token is None or not holds(place.run, token)


def test_a_proxy_and_the_variables_of_ci(ground: Path, losses) -> None:
    place = Place(ground / "ci", variables={**PROXIES, **CI})
    starts(place, losses)
    assert not holds(place.run, "user:pw@")


def test_secrets_that_are_ordinary_words(ground: Path, losses) -> None:
    """Another program's secret must not blank values of our config, nor the paths in it."""
    place = Place(ground / "words", variables=ORDINARY_WORDS)
    starts(place, losses)
    run_dir = RunDir(place.run)
    assert "***" not in run_dir.config.read_text(encoding="utf-8")
    assert "***" not in run_dir.deepspeed_config.read_text(encoding="utf-8")
    environment = json.loads(run_dir.environment.read_text(encoding="utf-8"))
    assert environment["working_folder"] == str(place.code)


@pytest.mark.parametrize(
    ("variables", "notices"), [({"DS_ACCELERATOR": "cpu"}, 0), ({}, 2)], ids=["make demo", "by hand"]
)
def test_a_clean_start_prints_no_warning_of_the_libraries(ground: Path, variables, notices: int) -> None:
    """Started by hand without a GPU, each of the launcher's two processes prints one before any code of ours."""
    output = demo(Place(ground / f"clean {notices}", variables=variables), f"run.steps={STEPS}")
    words = ("warn", "deprecat", "[info]", "setting accelerator")
    noise = [line for line in output.splitlines() if any(word in line.lower() for word in words)]
    own = [line for line in noise if "Setting accelerator to CPU" in line]
    assert noise == own and (len(own) == notices or Path("/dev/nvidia0").exists()), output
    assert output.splitlines()[len(own)].startswith(("data: ", "cores: ", "  parameters")), output


def holds(run: Path, text: str) -> bool:
    """Whether a file of the run folder holds it."""
    return any(text.encode() in path.read_bytes() for path in run.rglob("*") if path.is_file())


@pytest.mark.parametrize("version", ["3.12", "3.13", "3.14"])
def test_another_python(ground: Path, losses, version: str) -> None:
    """An interpreter that is installed here with what Mantissa needs; none is made."""
    python = shutil.which(f"python{version}")
    check = [str(python), "-c", "import torch, deepspeed, transformers, wandb"]
    if python is None or subprocess.run(check, check=False, capture_output=True).returncode:
        pytest.skip(f"no python{version} on the PATH has torch, deepspeed, transformers and wandb")
    starts(Place(ground / f"python {version}", python=python), losses)
