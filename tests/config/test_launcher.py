"""Rank and world size from the launcher's environment, or a clear refusal."""

import shlex
import sys
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from config.launcher import RankEnv, launch_command, read_rank_env
from config.machine.processes import Launcher
from tests.support.refusals import refused

SECOND_OF_TWO = {"LOCAL_WORLD_SIZE": 8, "GROUP_RANK": 1, "MASTER_ADDR": "a", "MASTER_PORT": 5}
NODES = "deepspeed --hostfile launch/deepspeed/hostfile --num_nodes"
ACCELERATE = "accelerate launch --use_deepspeed --num_processes"


@pytest.fixture(autouse=True)
def _path_without_a_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/work/.venv/bin/python")


def environment(**values: int | str) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def ranks(rank: int | str, world_size: int, local_rank: int) -> dict[str, int | str]:
    return {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank}


@pytest.mark.parametrize(
    ("variables", "option", "expected"),
    [
        ({}, None, RankEnv(0, 1, 0)),
        ({}, 0, RankEnv(0, 1, 0)),
        ({"LOCAL_RANK": 0}, None, RankEnv(0, 1, 0)),
        (ranks(5, 8, 1), None, RankEnv(5, 8, 1)),
        (ranks(5, 8, 1), 1, RankEnv(5, 8, 1)),
        ({"RANK": 5, "WORLD_SIZE": 8}, 1, RankEnv(5, 8, 1)),
    ],
)
def test_a_whole_environment(variables: dict[str, int], option: int | None, expected: RankEnv) -> None:
    assert read_rank_env(environment(**variables), option) == expected


@pytest.mark.parametrize(
    ("variables", "option", "expected"),
    [
        ({"RANK": 1}, None, "environment: WORLD_SIZE and LOCAL_RANK not set while RANK = 1"),
        ({"WORLD_SIZE": 2}, None, "environment: RANK and LOCAL_RANK not set while WORLD_SIZE = 2"),
        ({"LOCAL_RANK": 1}, None, "environment: RANK and WORLD_SIZE not set while LOCAL_RANK = 1"),
        ({"RANK": 0, "WORLD_SIZE": 2}, None, "environment: LOCAL_RANK not set while RANK = 0, WORLD_SIZE = 2"),
        ({}, 1, "environment: RANK and WORLD_SIZE not set while LOCAL_RANK = 1"),
        (ranks("x", 2, 0), None, "environment: RANK = 'x' is not a whole number"),
        (ranks(0, 0, 0), None, "environment: WORLD_SIZE = '0' is not a positive whole"),
        (ranks("", 1, 0), None, "environment: RANK = '' is not a whole number"),
        (ranks(2, 2, 0), None, "environment: RANK = 2, WORLD_SIZE = 2 and LOCAL_RANK = 0"),
        (ranks(0, 2, 1), None, "environment: RANK = 0, WORLD_SIZE = 2 and LOCAL_RANK = 1"),
        (ranks(1, 2, 1), 0, "command line: --local_rank = 0 disagrees with LOCAL_RANK = 1"),
    ],
)
def test_a_partial_or_contradictory_environment(variables: dict[str, int], option: int | None, expected: str) -> None:
    assert refused(read_rank_env, environment(**variables), option).startswith(expected)


def test_tasks_of_slurm_without_ranks_do_not_train_alone_side_by_side() -> None:
    said = refused(read_rank_env, environment(SLURM_STEP_NUM_TASKS=2), None)
    assert "Slurm started 2 tasks and RANK is not set" in said
    ranked = environment(SLURM_STEP_NUM_TASKS=2, **ranks(1, 2, 0))
    assert read_rank_env(ranked, None) == RankEnv(1, 2, 0)
    assert read_rank_env(environment(SLURM_STEP_NUM_TASKS=1), None) == RankEnv(0, 1, 0)


@pytest.mark.parametrize(
    ("place", "variables", "expected"),
    [
        (RankEnv(0, 1, 0), {}, "python"),
        (RankEnv(0, 2, 0), {"LOCAL_SIZE": 2}, "deepspeed --num_gpus 2"),
        (RankEnv(0, 1, 0), {"LOCAL_SIZE": 1}, "deepspeed --num_gpus 1"),
        (RankEnv(9, 64, 1), {"LOCAL_SIZE": 8}, f"{NODES} 8 --num_gpus 8"),
        (RankEnv(1, 2, 0), {"LOCAL_SIZE": 1, "MASTER_PORT": 29811}, f"{NODES} 2 --num_gpus 1 --master_port 29811"),
        (RankEnv(0, 2, 0), {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": 2}, "torchrun --nproc_per_node 2"),
        (
            RankEnv(0, 16, 0),
            {"TORCHELASTIC_RUN_ID": "x", **SECOND_OF_TWO},
            "torchrun --nnodes 2 --node_rank 1 --master_addr a --master_port 5 --nproc_per_node 8",
        ),
        (
            RankEnv(0, 2, 0),
            {"ACCELERATE_MIXED_PRECISION": "no", "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": 2},
            "accelerate launch --num_processes 2",
        ),
        (RankEnv(0, 2, 0), {"ACCELERATE_USE_DEEPSPEED": "true", "LOCAL_SIZE": 2}, f"{ACCELERATE} 2"),
        (
            RankEnv(8, 16, 0),
            {"ACCELERATE_USE_DEEPSPEED": "true", **SECOND_OF_TWO},
            f"{ACCELERATE} 16 --deepspeed_multinode_launcher standard "
            "--num_machines 2 --machine_rank 1 --main_process_ip a --main_process_port 5 --rdzv_backend static",
        ),
    ],
)
def test_the_command_that_starts_the_run_again(place: RankEnv, variables: dict[str, int], expected: str) -> None:
    arguments = ["--config", "a b.yaml", "faults=[{kind: inf_gradient, step: 3}]"]
    command = launch_command(place, environment(**variables), arguments)
    assert command.startswith(f"{expected} train.py ")
    assert shlex.split(command)[-3:] == arguments


def launcher(*words: str, program: str = "") -> Launcher:
    return Launcher(name="", program=program or words[0], pid=1, started=0, words=words)


@pytest.mark.parametrize(
    ("above", "expected"),
    [
        (
            [
                launcher("python", "-m", "x", "--world_info=abc", "train.py", program="deepspeed.launcher.launch"),
                launcher(
                    "deepspeed", "--num_gpus", "2", "--master_port", "29811", "train.py", "--config", "c", "a.b=1"
                ),
            ],
            "deepspeed --num_gpus 2 --master_port 29811 train.py --config c",
        ),
        (
            [
                launcher("torchrun", "--max-restarts", "1", "train.py", "--config", "c"),
                launcher("python", "-m", "launch.supervise", "--", "torchrun", "--max-restarts", "1", "train.py"),
            ],
            "python -m launch.supervise -- torchrun --max-restarts 1 train.py --config c",
        ),
        ([launcher("torchrun", "-m", "other")], "deepspeed --num_gpus 2 train.py --config c"),
    ],
)
def test_a_launcher_of_this_machine_is_called_again_as_it_was(above: list[Launcher], expected: str) -> None:
    given = environment(LOCAL_SIZE=2, MASTER_PORT=29500)
    assert launch_command(RankEnv(0, 2, 0), given, ["--config", "c"], above=above) == expected


def test_a_command_to_paste_says_how_and_where_train_py_is_started(monkeypatch, tmp_path: Path) -> None:
    slurm = environment(LOCAL_SIZE=2, MANTISSA_START="sbatch --nodes=2 launch/slurm/train.sbatch")
    command = launch_command(RankEnv(0, 2, 0), slurm, ["--config", "a b.yaml"])
    assert command == "sbatch --nodes=2 launch/slurm/train.sbatch --config 'a b.yaml'"
    assert launch_command(RankEnv(0, 2, 0), {}, ["a=1"]) == "deepspeed --num_gpus 2 train.py a=1"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/my work/.venv/bin/python")
        command = launch_command(RankEnv(0, 2, 0), {}, ["a=1"])
    assert command == "'/my work/.venv/bin/python' -m deepspeed.launcher.runner --num_gpus 2 train.py a=1"
    monkeypatch.chdir(tmp_path)
    expected = ["deepspeed", "--num_gpus", "2", f"{REPOSITORY}/train.py", "a=1"]
    assert shlex.split(launch_command(RankEnv(0, 2, 0), {}, ["a=1"])) == expected
