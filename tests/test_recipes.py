"""Every recipe says how it is started and what to expect, and loads through the real command line."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from config.cli import REPOSITORY
from config.schema import ModelSection
from modeling.build import count_parameters, empty_model

RECIPES = sorted((REPOSITORY / "config" / "recipes").glob("*.yaml"))

recipes = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def header(path: Path) -> list[str]:
    """The comment lines that open a file, without their #."""
    lines = path.read_text(encoding="utf-8").splitlines()
    opening = lines[: next(index for index, line in enumerate(lines) if not line.startswith("#"))]
    return [line.removeprefix("#").strip() for line in opening]


def world_size_of(command: list[str]) -> int:
    """Processes that a `deepspeed`, `torchrun`, `accelerate launch` or `python` command starts."""

    def number(*names: str) -> int:
        return next((int(value) for name, value in zip(command, command[1:], strict=False) if name in names), 1)

    if command[0] == "accelerate":
        return number("--num_processes")
    return number("--num_gpus", "--nproc_per_node", "--nproc-per-node") * number("--num_nodes", "--nnodes")


def show_config(path: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """The resolved run config and DeepSpeed JSON of a recipe's own command, and its world size."""
    command = shlex.split(header(path)[0])
    world_size = world_size_of(command)
    arguments = command[command.index("train.py") + 1 :]
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "train.py", *arguments, "--show-config"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    config, deepspeed = yaml.safe_load_all(done.stdout)
    return config, deepspeed, world_size


def test_there_are_recipes_for_cpu_and_for_1_8_and_64_gpus() -> None:
    cpu, gpu = {"demo", "demo_fp16", "demo_fp8"}, {"llama_1b_1gpu", "llama_1b_fp8_1gpu", "llama_8b_8gpu"}
    assert cpu | gpu | {"llama_8b_64gpu", "llama_70b_64gpu"} <= {path.stem for path in RECIPES}


@recipes
def test_it_opens_with_its_exact_command(path: Path) -> None:
    command = shlex.split(header(path)[0])
    assert command[0] in ("deepspeed", "torchrun", "accelerate", "python")
    assert command[command.index("--config") + 1] == path.relative_to(REPOSITORY).as_posix()


@recipes
def test_it_says_what_time_and_loss_to_expect(path: Path) -> None:
    """A `Time:` line with a number and its unit and a `Loss:` line with a number, or `unmeasured`."""
    text = "\n".join(header(path))
    if re.search(r"^Time and loss: unmeasured", text, re.MULTILINE):
        return
    assert re.search(r"^Time: (unmeasured|.*\d ?(s|min|h|seconds?|minutes?|hours?)\b)", text, re.MULTILINE)
    assert re.search(r"^Loss: (unmeasured|.*\d\.\d)", text, re.MULTILINE)


@recipes
def test_it_loads_through_the_real_command_line(path: Path) -> None:
    config, deepspeed, world_size = show_config(path)
    assert config["precision"]["compute"] in ("fp32", "bf16", "fp16")
    assert '"auto"' not in str(deepspeed)
    slices = config["batch"]["global_size"] * config["parallel"]["sequence"]
    assert deepspeed["train_batch_size"] == slices
    micro, accumulation = deepspeed["train_micro_batch_size_per_gpu"], deepspeed["gradient_accumulation_steps"]
    assert micro * accumulation * world_size == slices


@pytest.mark.parametrize(("name", "like"), [("demo_fp8", "demo"), ("llama_1b_fp8_1gpu", "llama_1b_1gpu")])
def test_the_fp8_recipes_are_their_namesakes_in_another_precision(name: str, like: str) -> None:
    ours, theirs = (
        yaml.safe_load((REPOSITORY / f"config/recipes/{each}.yaml").read_text(encoding="utf-8"))
        for each in (name, like)
    )
    assert (ours.pop("precision"), theirs.pop("precision")) == (
        {"manifest": "config/manifests/fp8.json"},
        {"compute": "bf16"},
    )
    for tree in (ours, theirs):
        tree["run"] = {key: value for key, value in tree["run"].items() if key not in ("name", "hypothesis")}
    assert ours == theirs


@pytest.mark.parametrize(
    ("name", "billions", "processes"),
    [
        ("llama_1b_1gpu", 1.24, 1),
        ("llama_8b_8gpu", 8.03, 8),
        ("llama_8b_64gpu", 8.03, 64),
        ("llama_70b_64gpu", 70.55, 64),
    ],
)
def test_the_gpu_recipes_have_the_size_they_claim(name: str, billions: float, processes: int) -> None:
    config, deepspeed, world_size = show_config(REPOSITORY / "config" / "recipes" / f"{name}.yaml")
    shape = AutoConfig.for_model("llama", **config["model"]["config"] | {"vocab_size": 128256})
    assert count_parameters(empty_model(ModelSection(), shape)) / 1e9 == pytest.approx(billions, abs=0.01)
    assert world_size == processes
    assert "bf16" in deepspeed
    assert config["model"]["activation_checkpointing"] == ("none" if processes == 1 else "full")
    opening = "\n".join(header(REPOSITORY / "config" / "recipes" / f"{name}.yaml"))
    tokens = config["batch"]["global_size"] * config["data"]["sequence_length"] * config["run"]["steps"] / 1e9
    stated = re.search(r"([\d.]+) B tokens in all", opening)
    assert stated
    assert float(stated[1]) == pytest.approx(tokens, rel=0.02)
