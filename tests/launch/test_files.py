"""The files of launch/accelerate, read by the program that they are for."""

import argparse
import re
import shlex
from pathlib import Path

import pytest
from accelerate.commands import launch as accelerate_launch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils.launch import prepare_deepspeed_cmd_env

from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.resolved import Resolved

ACCELERATE = sorted((REPOSITORY / "launch/accelerate").glob("*.yaml"))
NAMES = {
    f"{place}_zero{stage}" for place in ("one_machine_cpu", "one_machine_gpu", "several_machines") for stage in "23"
}


@pytest.fixture(autouse=True)
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder where users start, with no launcher around."""
    monkeypatch.chdir(REPOSITORY)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(accelerate_launch, "default_config_file", "none")  # of whoever runs the tests


def stage_of(path: Path) -> int:
    return int(path.stem[-1])


def by_accelerate(command: list[str]) -> tuple[dict[str, str], argparse.Namespace]:
    """`accelerate launch` without the start: the environment that it gives to processes, and what torchrun is told."""
    arguments = accelerate_launch.launch_command_parser().parse_args(command)
    arguments, defaults, precision_said = accelerate_launch._validate_launch_command(arguments)
    assert arguments.use_deepspeed
    fields = [*(defaults.deepspeed_config if defaults else []), *(["mixed_precision"] if precision_said else [])]
    arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
    own_launcher, environment = prepare_deepspeed_cmd_env(arguments)
    assert own_launcher is None  # torchrun, in this process; with pdsh it would be a deepspeed command line
    return environment, arguments


def resolve(environment: dict[str, str], *arguments: str, world: int = 2) -> Resolved:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world)}
    return read_command_line(["--config", "config/recipes/demo.yaml", *arguments], environment | place)


def opening_command(path: Path) -> list[str]:
    """The command in a file's first comment, on one line, its arguments in capitals filled in."""
    text = " ".join(line.lstrip("#").strip() for line in path.read_text().splitlines() if line.startswith("#"))
    command = re.search(r"accelerate launch .*? --config \S+", text)
    assert command, path
    filled = command[0].replace("\\ ", "").replace("FILE", "config/recipes/demo.yaml")
    return shlex.split(filled.replace(" RANK ", " 1 ").replace(" HOST ", " node-0 "))


def test_all_six_are_there():
    assert {path.stem for path in ACCELERATE} == NAMES


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_the_command_in_a_file_trains_what_the_name_of_the_file_says(path):
    words = opening_command(path)
    at = words.index("train.py")
    assert words[words.index("--config_file") + 1] == path.relative_to(REPOSITORY).as_posix()
    environment, torchrun = by_accelerate(words[2:])
    resolved = resolve(environment, *words[at + 3 :])
    assert (resolved.zero_stage, resolved.compute) == (stage_of(path), "bf16")
    assert torchrun.training_script == "train.py"
    assert load_config_from_file(str(path)).mixed_precision is None
    if "several" in path.stem:
        assert (torchrun.nnodes, torchrun.node_rank, torchrun.nproc_per_node) == ("2", 1, "8")
        assert (torchrun.rdzv_endpoint, torchrun.rdzv_backend) == ("node-0:29500", "static")
    else:
        assert torchrun.nproc_per_node == ("2" if "cpu" in path.stem else "8")


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (None, "--use_deepspeed --num_processes 2 --zero_stage 2", ""),
        (None, "--use_deepspeed --num_processes 2 --zero_stage 3", "zero_stage = 3, but by"),
        ("mixed_precision: bf16", "--config_file FILE", ""),
        ("mixed_precision: fp16", "--config_file FILE", "mixed_precision = fp16, but by"),
        ('mixed_precision: "no"', "--config_file FILE", "mixed_precision = no, but by"),
    ],
)
def test_what_accelerate_is_told_must_be_what_the_run_does(tmp_path, refusal, text, options, said):
    """Told by options without a file, or by the file."""
    file = tmp_path / "mine.yaml"
    file.write_text((REPOSITORY / "launch/accelerate/one_machine_cpu_zero3.yaml").read_text() + f"{text or ''}\n")
    told, _ = by_accelerate([*options.replace("FILE", str(file)).split(), "train.py"])
    if not said:
        assert resolve(told).zero_stage == (2 if text is None else 3)
        return
    assert said in refusal(resolve, told)
