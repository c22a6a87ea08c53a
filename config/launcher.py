"""The environment that a launcher sets: rank and world size, and the settings of `accelerate launch`.

Accelerate passes its config to the processes in ACCELERATE_* variables (utils/launch.py of Accelerate 1.15), which an
`Accelerator` object applies. There is none here, so each setting is either used or checked.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.cli import REPOSITORY
from config.errors import UserError
from config.machine.processes import DEEPSPEED_NODE, Launcher

DEFAULT_PORT = "29500"
"""MASTER_PORT of `deepspeed` and `accelerate launch` by default."""


@dataclass(frozen=True)
class RankEnv:
    rank: int
    world_size: int
    local_rank: int


def read_rank_env(environment: Mapping[str, str], local_rank_option: int | None) -> RankEnv:
    """The variables that launchers set; none: a single process. The option may replace LOCAL_RANK. Raises UserError."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    values = {name: _number(name, environment[name]) for name in names if name in environment}
    if local_rank_option is not None:
        local_rank = values.setdefault("LOCAL_RANK", local_rank_option)
        if local_rank != local_rank_option:
            problem = f"disagrees with LOCAL_RANK = {local_rank} in the environment; remove one of them"
            raise UserError(f"command line: --local_rank = {local_rank_option} {problem}")
    if not {"RANK", "WORLD_SIZE"} & values.keys() and values.get("LOCAL_RANK", 0) == 0:
        tasks = environment.get("SLURM_STEP_NUM_TASKS") or "1"
        if tasks != "1":
            raise UserError(
                f"environment: Slurm started {tasks} tasks and RANK is not set, so each would train alone in one run "
                "folder; submit launch/slurm/train.sbatch, or start with torchrun"
            )
        return RankEnv(rank=0, world_size=1, local_rank=0)
    missing = [name for name in names if name not in values]
    if missing:
        given = ", ".join(f"{name} = {value}" for name, value in values.items())
        raise UserError(
            f"environment: {' and '.join(missing)} not set while {given}; "
            "start with deepspeed, torchrun or accelerate launch, or unset all three"
        )
    env = RankEnv(values["RANK"], values["WORLD_SIZE"], values["LOCAL_RANK"])
    if not (env.rank < env.world_size and env.local_rank <= env.rank):
        raise UserError(
            f"environment: RANK = {env.rank}, WORLD_SIZE = {env.world_size} and LOCAL_RANK = {env.local_rank} "
            "contradict each other; the rank must be below the world size and the local rank at most the rank"
        )
    return env


def as_launched(processes: int) -> dict[str, str]:
    """The variables that a launcher of this many processes on one machine sets for rank 0."""
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}


def launch_command(
    env: RankEnv,
    environment: Mapping[str, str],
    arguments: Sequence[str],
    *,
    script: str = "train.py",
    above: Sequence[Launcher] = (),
) -> str:
    """The command line that starts this run again, by the launcher that started it.

    If that launcher is among `above`, on this machine, its own command line is used; else the environment, and the
    hostfile of launch/deepspeed/. launch/slurm/train.sbatch sets MANTISSA_START to what comes before the arguments.
    """
    if environment.get("MANTISSA_START"):
        return f"{environment['MANTISSA_START']} {shlex.join(arguments)}"
    for launcher in reversed(above):
        if launcher.program != DEEPSPEED_NODE and script in launcher.words:
            return shlex.join([*launcher.words[: launcher.words.index(script) + 1], *arguments])
    world = env.world_size
    local = int(environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or world)
    nodes = max(1, world // local)
    node = environment.get("GROUP_RANK", "0")
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if any(name.startswith("ACCELERATE_") for name in environment):
        by_deepspeed = environment.get("ACCELERATE_USE_DEEPSPEED") == "true"
        parts = ["accelerate", "launch", *(["--use_deepspeed"] if by_deepspeed else []), "--num_processes", str(world)]
        if nodes > 1:
            parts += ["--deepspeed_multinode_launcher", "standard"] if by_deepspeed else []
            parts += ["--num_machines", str(nodes), "--machine_rank", node]
            parts += ["--main_process_ip", address, "--main_process_port", port, "--rdzv_backend", "static"]
    elif "TORCHELASTIC_RUN_ID" in environment:
        parts = ["torchrun"]
        if nodes > 1:
            parts += ["--nnodes", str(nodes), "--node_rank", node, "--master_addr", address, "--master_port", port]
        parts += ["--nproc_per_node", str(local)]
    elif world > 1 or "LOCAL_SIZE" in environment:
        hosts = ["--hostfile", "launch/deepspeed/hostfile", "--num_nodes", str(nodes)] if nodes > 1 else []
        own_port = ["--master_port", port] if port not in ("", DEFAULT_PORT) else []
        parts = [*deepspeed_program(), *hosts, "--num_gpus", str(local), *own_port]
    else:
        parts = ["python"]
    program = "train.py" if Path.cwd() == REPOSITORY else str(REPOSITORY / "train.py")
    return shlex.join([*parts, program, *arguments])


def deepspeed_program() -> list[str]:
    """The words that start the deepspeed launcher in a shell, even if the Python environment's path has a space."""
    return ["deepspeed"] if " " not in sys.executable else [sys.executable, "-m", "deepspeed.launcher.runner"]


def _number(name: str, text: str) -> int:
    if text.isdecimal() and (name != "WORLD_SIZE" or int(text) > 0):
        return int(text)
    expected = "a positive whole number" if name == "WORLD_SIZE" else "a whole number"
    raise UserError(f"environment: {name} = '{text}' is not {expected}; set it right or unset it")


_OTHER_BACKENDS = {
    "ACCELERATE_USE_FSDP": "distributed_type = FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "distributed_type = MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}


def without_accelerate(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a run whose config is already resolved, with Accelerate's settings applied."""
    return {name: value for name, value in environment.items() if not name.startswith("ACCELERATE_")}


def check_agreement(environment: Mapping[str, str], source: str, deepspeed: Mapping[str, Any], precision: str) -> None:
    """Raise UserError for a run that contradicts Accelerate's config. source: the files that decided the run's own."""
    for name, what in _OTHER_BACKENDS.items():
        if environment.get(name) == "true":
            problem = "is not what train.py does: it trains with DeepSpeed's ZeRO"
            raise UserError(f"accelerate: {what} {problem}; use a file of launch/accelerate/")
    zero = deepspeed.get("zero_optimization", {})
    resolved = {
        "MIXED_PRECISION": "no" if precision == "fp32" else precision,
        "DEEPSPEED_ZERO_STAGE": zero.get("stage", 0),
        "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": zero.get("offload_optimizer", {}).get("device", "none"),
        "DEEPSPEED_OFFLOAD_PARAM_DEVICE": zero.get("offload_param", {}).get("device", "none"),
        "GRADIENT_ACCUMULATION_STEPS": deepspeed["gradient_accumulation_steps"],
        "GRADIENT_CLIPPING": deepspeed["gradient_clipping"],
    }
    given = {name: environment.get(f"ACCELERATE_{name}", "auto") for name in resolved}
    listed = environment.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    if given["MIXED_PRECISION"] == "no" and "mixed_precision" not in listed:
        given["MIXED_PRECISION"] = "auto"  # `no` is also the default; one from a config file is listed among its fields
    for name, value in resolved.items():
        if given[name] not in ("auto", str(value)) and not _same_number(given[name], str(value)):
            key = name.removeprefix("DEEPSPEED_").lower()
            problem = f"{key} = {given[name]}, but by {source} it is {value}"
            raise UserError(f"accelerate: {problem}; remove {key} from Accelerate's config or make them agree")


def _same_number(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return False
