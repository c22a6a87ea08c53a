"""Rank and world size from the launcher's environment, and every setting of Accelerate, or a clear refusal."""

import shlex
import sys
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from config.command_line import parse
from config.errors import UserError
from config.launcher import RankEnv, launch_command, read_rank_env, without_accelerate
from config.machine.processes import Launcher
from config.resolved import Resolved, resolve_run
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


FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"


@pytest.fixture
def run_config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {architecture: llama}\nbatch: {global_size: 8, micro_size: 2}\n"
        "deepspeed: {config: ds_configs/zero2_bf16.json}\n"
    )
    return path


def resolve(run_config: Path, environment: dict[str, str], *arguments: str) -> Resolved:
    return resolve_run(parse(["--config", str(run_config), *arguments]), environment)


@pytest.mark.parametrize(
    ("told", "typed", "expected"),
    [
        ("", [], "zero2_bf16"),
        ("ds_configs/zero3_bf16.json", [], "zero3_bf16"),
        ("ds_configs/zero3_bf16.json", ["deepspeed.config=ds_configs/zero1_fp16.json"], "zero1_fp16"),
        ("ds_configs/zero3_bf16.json", ["deepspeed={config: ds_configs/zero1_fp16.json}"], "zero1_fp16"),
        ("ds_configs/zero3_bf16.json", ["--deepspeed_config", "ds_configs/zero1_fp16.json"], "zero1_fp16"),
    ],
)
def test_what_is_typed_wins_over_accelerate_and_that_over_the_run_config(run_config, told, typed, expected):
    resolved = resolve(run_config, {FILE: told, "ACCELERATE_USE_DEEPSPEED": "true"}, *typed)
    assert resolved.config.deepspeed.config == f"ds_configs/{expected}.json"
    assert f"zero{resolved.zero_stage}_{resolved.compute}" == expected
    # and so does the run that its command starts, by whichever launcher
    arguments = shlex.split(resolved.command.partition("train.py ")[2])
    assert resolve_run(parse(arguments), {}).deepspeed == resolved.deepspeed


def test_the_working_folder_comes_first_as_it_does_for_accelerate(run_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.json").write_text('{"zero_optimization": {"stage": 1}}')
    assert resolve(run_config, {FILE: "mine.json"}).zero_stage == 1
    with pytest.raises(UserError, match="^accelerate's deepspeed_config_file: deepspeed.config = 'none.json' does not"):
        resolve(run_config, {FILE: "none.json"})


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"DEEPSPEED_ZERO_STAGE": "3"}, "zero_stage = 3, but by {run} with {json} it is 2;"),
        ({"MIXED_PRECISION": "fp16"}, "mixed_precision = fp16, but by {run} with {json} it is bf16;"),
        ({"MIXED_PRECISION": "fp8"}, "mixed_precision = fp8, but by {run} with {json} it is bf16;"),
        (
            {"MIXED_PRECISION": "no", "CONFIG_DS_FIELDS": "zero3_init_flag,mixed_precision"},
            "mixed_precision = no, but by {run} with {json} it is bf16;",
        ),
        ({"DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, "offload_optimizer_device = cpu, but by {run} with {json}"),
        ({"DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme"}, "offload_param_device = nvme, but by {run} with {json}"),
        ({"GRADIENT_ACCUMULATION_STEPS": "1"}, "gradient_accumulation_steps = 1, but by {run} with {json} it is 4;"),
        ({"GRADIENT_CLIPPING": "0.5"}, "gradient_clipping = 0.5, but by {run} with {json} it is 1.0;"),
        ({"USE_FSDP": "true"}, "distributed_type = FSDP is not what train.py does"),
        ({"USE_MEGATRON_LM": "true"}, "distributed_type = MEGATRON_LM is not what train.py does"),
    ],
)
def test_a_contradiction_is_refused_with_both_sides(run_config, variables, words):
    said = refused(resolve, run_config, {f"ACCELERATE_{name}": value for name, value in variables.items()})
    assert said.startswith("accelerate: " + words.format(run=run_config, json="ds_configs/zero2_bf16.json"))


def test_a_manifest_is_no_mixed_precision_of_accelerate(run_config):
    path = ["precision.path=manifest", "deepspeed.config=ds_configs/zero2_fp32.json"]
    path += ["precision.manifest=config/manifests/bf16.json"]
    with pytest.raises(UserError, match="mixed_precision = bf16, but by .* it is manifest;"):
        resolve(run_config, {"ACCELERATE_MIXED_PRECISION": "bf16"}, *path)


@pytest.mark.parametrize(
    "variables",
    [
        {"MIXED_PRECISION": "no", "CONFIG_DS_FIELDS": "zero3_init_flag"},
        {"MIXED_PRECISION": "bf16", "DEEPSPEED_ZERO_STAGE": "2"},
        {"GRADIENT_CLIPPING": "1", "GRADIENT_ACCUMULATION_STEPS": "4"},
        {"GRADIENT_CLIPPING": "auto", "GRADIENT_ACCUMULATION_STEPS": "auto", "DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none"},
        {"USE_FSDP": "false", "DEEPSPEED_ZERO3_INIT": "false"},
    ],
)
def test_what_agrees_or_says_nothing_is_fine(run_config, variables):
    environment = {f"ACCELERATE_{name}": value for name, value in variables.items()}
    assert resolve(run_config, environment).zero_stage == 2


def test_a_run_resolved_earlier_does_not_hear_of_accelerate_again(run_config):
    environment = {FILE: "ds_configs/zero3_bf16.json", "ACCELERATE_MIXED_PRECISION": "fp16", "RANK": "0"}
    kept = without_accelerate({**environment, "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    assert resolve(run_config, kept).zero_stage == 2
    assert without_accelerate(environment) == {"RANK": "0"}
