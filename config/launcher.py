"""Rank and world size as the launcher told this process, checked before anything trusts them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from config.errors import UserError


@dataclass(frozen=True)
class Place:
    """Which process this is."""

    rank: int
    world_size: int
    local_rank: int


def read_place(environment: Mapping[str, str], local_rank_option: int | None) -> Place:
    """RANK, WORLD_SIZE and LOCAL_RANK, which `deepspeed`, `torchrun` and `accelerate launch` all set.

    Without any of them this is one process on its own. `--local_rank`, which older launchers pass, may stand in for
    LOCAL_RANK and must agree with it.

    Raises:
        UserError: some are set and some are not, one is not a number, or they contradict each other.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    values = {name: _number(name, environment[name]) for name in names if name in environment}
    if local_rank_option is not None:
        told = values.setdefault("LOCAL_RANK", local_rank_option)
        if told != local_rank_option:
            problem = f"disagrees with LOCAL_RANK = {told} in the environment; remove one of them"
            raise UserError(f"command line: --local_rank = {local_rank_option} {problem}")
    if not {"RANK", "WORLD_SIZE"} & values.keys() and values.get("LOCAL_RANK", 0) == 0:
        tasks = environment.get("SLURM_STEP_NUM_TASKS") or "1"
        if tasks != "1":
            raise UserError(
                f"environment: Slurm started {tasks} tasks and RANK is not set, so each would train alone in one run "
                "folder; submit launch/slurm/train.sbatch, or start with torchrun"
            )
        return Place(rank=0, world_size=1, local_rank=0)
    missing = [name for name in names if name not in values]
    if missing:
        given = ", ".join(f"{name} = {value}" for name, value in values.items())
        raise UserError(
            f"environment: {' and '.join(missing)} not set while {given}; "
            "start with deepspeed, torchrun or accelerate launch, or unset all three"
        )
    place = Place(values["RANK"], values["WORLD_SIZE"], values["LOCAL_RANK"])
    if not (place.rank < place.world_size and place.local_rank <= place.rank):
        raise UserError(
            f"environment: RANK = {place.rank}, WORLD_SIZE = {place.world_size} and LOCAL_RANK = {place.local_rank} "
            "contradict each other; the rank must be below the world size and the local rank at most the rank"
        )
    return place


def as_launched(processes: int) -> dict[str, str]:
    """What a launcher of so many processes on one machine tells the first of them."""
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}


def launch_command(place: Place, environment: Mapping[str, str], arguments: Sequence[str]) -> str:
    """The command line that starts this run again, by the launcher that started it.

    Of several machines it is this one's, and takes the hostfile to be where launch/deepspeed/ wants it: the deepspeed
    launcher does not tell its processes, and given --num_nodes it refuses a hostfile that is not there. Who starts
    train.py by other means, such as launch/slurm/train.sbatch, says in MANTISSA_START what comes before the arguments.
    """
    if environment.get("MANTISSA_START"):
        return f"{environment['MANTISSA_START']} {shlex.join(arguments)}"
    world = place.world_size
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
        parts = ["deepspeed", *hosts, "--num_gpus", str(local)]
    else:
        parts = ["python"]
    return shlex.join([*parts, "train.py", *arguments])


def _number(name: str, text: str) -> int:
    if text.isdecimal() and (name != "WORLD_SIZE" or int(text) > 0):
        return int(text)
    expected = "a positive whole number" if name == "WORLD_SIZE" else "a whole number"
    raise UserError(f"environment: {name} = '{text}' is not {expected}; set it right or unset it")
