"""Costs between the ranks of a large run, on one machine: heartbeats, a checkpoint's manifest, its resume.

    python -m lab.benchmark.ranks [--ranks 1024,4096] [--parameters 723] [--seconds 20]

A real store in a process of its own, to which a few processes send the messages of all ranks, and what rank 0 does with
what the others send it, ranks having written at ZeRO-3 as DeepSpeed does.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from config.cli import Arguments, entry_point
from config.machine.members import Member
from training.checkpoint.commit import seal_folder
from training.checkpoint.manifest import FORMAT, Tensors, Written, find_problem, layout_of, read_manifest, shares_of
from training.checkpoint.save import agree_on_files
from training.distributed import World
from training.watchdog.heartbeats import Heartbeats
from training.watchdog.watch import BEAT_SECONDS, SILENCE_SECONDS

CLIENTS = 4
RANKS_OF_A_MACHINE = 8


class ManyRanks(World):
    """Rank 0 of a world whose other ranks are only what they send; `received` are the bytes of that."""

    parameters = 0
    received = 0

    def to_main(self, value: Any) -> list[Any]:
        """The files of all ranks, as if each had written its own."""
        everyone = [(files_of(rank, self.parameters)[0], None, True) for rank in range(self.world_size)]
        type(self).received += sum(len(pickle.dumps(one)) for one in everyone)
        return everyone

    def main_receives(self, value: Any, rank: int) -> Any:
        """The layout of an optimizer file, in which alone ranks differ."""
        layout = [*files_of(rank, self.parameters)[1].values()][1]
        type(self).received += len(pickle.dumps(layout))
        return layout

    def on_main(self, act: Callable[[], Any], catch: Any = ()) -> Any:
        """Rank 0's own result."""
        return act()


@cache
def _layouts(parameters: int, masters: int) -> dict[str, Tensors]:
    tables: list[Tensors] = [
        {f"module/model.layers.{i}.self_attn.q_proj.weight": ("bfloat16", [0]) for i in range(parameters)},
        {f"optimizer_state_dict/fp32_flat_groups/{i}": ("float32", [masters]) for i in range(2)},
        {"torch": ("uint8", [5056])},
    ]
    return {layout_of(table): table for table in tables}


def files_of(rank: int, parameters: int) -> tuple[dict[str, Written], dict[str, Tensors]]:
    """A rank's files and their layouts: names of all parameters, then masters, fewer on the first ranks."""
    names = [f"deepspeed/zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt" for kind in ("model", "optim")]
    layouts = _layouts(parameters, 10**6 - (rank < 5))
    files = zip([*names, f"rng-rank-{rank}.pt"], layouts, strict=True)
    return {name: Written("0" * 64, 1, rank, layout) for name, layout in files}, dict(layouts)


def manifest_of(ranks: int, parameters: int) -> tuple[dict[str, Any], int]:
    """The lists of a manifest, and the bytes that rank 0 received for them."""
    ManyRanks.parameters, ManyRanks.received = parameters, 0
    written, layouts = files_of(0, parameters)
    own: Any = SimpleNamespace(written=written, layouts=layouts, error=None, finite=True)
    world = ManyRanks(0, ranks, 0, torch.device("cpu"))
    files, layouts = agree_on_files(world, own, Path("step-1"))
    files["state.json"] = Written("0" * 64, 1, 0)
    listed = {name: dict(file.__dict__) for name, file in files.items()}
    empty: dict[str, Any] = {name: {} for name in ("precision", "data", "versions")}
    about = {"format": FORMAT, "step": 1, "written": "", "world_size": ranks, "zero_stage": 3, **empty}
    return {**about, "layouts": layouts, "files": listed}, ManyRanks.received


def _serve(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while pipe.recv():
        pipe.send(time.process_time())


class _Beating(World):
    """A rank of which only the heartbeats are real."""

    store: Any = None

    def from_main(self, value: Any) -> Any:
        """Through the store."""
        if self.is_main:
            _Beating.store.set("from main", value)
        return _Beating.store.get("from main").decode()


def _beat(client: int, port: int, ranks: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(minutes=1))
    _Beating.store = store
    members = [Member(r, f"host{r // RANKS_OF_A_MACHINE}", 0, 0, f"{r // RANKS_OF_A_MACHINE}") for r in range(ranks)]
    seconds = {"beat_seconds": BEAT_SECONDS, "silence_seconds": SILENCE_SECONDS}
    own = range(client, ranks, CLIENTS)
    worlds = [_Beating(rank, ranks, 0, torch.device("cpu")) for rank in own]
    beating = [Heartbeats(world, members, store, lambda member: None, **seconds) for world in worlds]
    store.set(f"ready/{client}", "")
    starts = time.time()
    for number in count(1):
        for place, beats in enumerate(beating):
            time.sleep(max(0.0, starts + BEAT_SECONDS * (number + place / len(beating)) - time.time()))
            beats.write(number, "in training/step.py:101 train_step")
            beats.read()


def server_share(ranks: int, seconds: float) -> float:
    """The share of a core that the store's server takes for the heartbeats of this many ranks."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    port = mine.recv()
    clients = [context.Process(target=_beat, args=(i, port, ranks), daemon=True) for i in range(CLIENTS)]
    for client in clients:
        client.start()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.wait([f"ready/{i}" for i in range(CLIENTS)], timedelta(minutes=5))
    time.sleep(2 * BEAT_SECONDS)
    samples = []
    for wait in (seconds, 0.0):
        mine.send(True)
        samples.append((time.time(), mine.recv()))
        time.sleep(wait)
    for process in (*clients, server):
        process.kill()
        process.join()
    (began, before), (ended, after) = samples
    return float(after - before) / (ended - began)


@entry_point()
def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = Arguments("python -m lab.benchmark.ranks", __doc__)
    parser.add_argument("--ranks", default="1024,4096", help="how many, several by commas")
    parser.add_argument("--parameters", type=int, default=723, help="parameters of the model")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which heartbeats are measured")
    options = parser.parse_args(arguments)
    for ranks in map(int, options.ranks.split(",")):
        print(f"{ranks:,} ranks: heartbeats take {server_share(ranks, options.seconds):.2%} of a core of the store")
        started = time.perf_counter()
        manifest, received = manifest_of(ranks, options.parameters)
        agreed = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            (path / "deepspeed").mkdir()
            for name in manifest["files"]:
                (path / name).write_bytes(b".")
            begun = time.perf_counter()
            size = seal_folder(path, manifest)
            written = time.perf_counter()
            problem = find_problem(path, of_any_run=True)
            shares_of(read_manifest(path), ranks)
            read = time.perf_counter()
        assert problem is None, problem
        print(
            f"  manifest of {len(manifest['files']):,} files: rank 0 receives {received / 1e6:.2f} MB "
            f"in {agreed - started:.2f} s, writes {size / 1e6:.2f} MB in {written - begun:.2f} s\n"
            f"  resume: rank 0 reads it, looks for each file and shares them out in {read - written:.2f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
