"""What Mantissa adds to a step, against the size of the model: what does not grow with it stays the same here.

    python -m training.benchmark.growth --config config/recipes/demo.yaml [--parameters 1e6,1e7,1e8] [--steps 10]
        [--blocks 2] [--json FILE] [key.sub=value ...]
    deepspeed --num_gpus 2 --module training.benchmark.growth --config ...

For each number of parameters a Llama is built, of two blocks and with four fifths of it in the embedding, under the
config's precision and ZeRO stage, and trained on 16 tokens of noise a rank, so that a step computes little. Blocks of
`--steps` bare and guarded steps take turns on one engine (training/benchmark/guard.py says what they are; here only
`events.jsonl` is recorded, and the guard's windows are full from the start). What is added is timed by itself instead
of taken as a difference of two steps, in which it would be lost:

    health  the numbers of the step, gathered from all ranks; the gradient norm is not in it, a bare step needs it, too
    guard   the verdict and what is remembered for the next one
    record  the step event
    other   the rest of a guarded step's own Python, less that of a bare one's

FP32 at ZeRO-0 needs 16 bytes a parameter on every rank; ZeRO-2 on one rank took 28 on a CPU. On a GPU every part is
waited for.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from config.cli import Arguments, entry_point
from config.command_line import read_command_line
from config.errors import UserError
from config.resolved import Resolved
from data.loader import Batches
from data.shards import TokenShards, open_shard, token_dtype, write_shard
from modeling.build import count_parameters, model_config
from precision.guard import Guard, Verdict
from tracking.jsonl import JsonlSink
from tracking.record import Record
from training import distributed
from training.benchmark.guard import bare_step
from training.benchmark.split import Stages, watch
from training.build import assemble
from training.checkpoint.checkpoints import Checkpoints
from training.checkpoint.retention import Retention
from training.distributed import Place
from training.engine import build_engine
from training.parts import Parts
from training.progress import Progress
from training.session import seed_everything
from training.step import train_step

SEQUENCE = 16
"""[tokens] Of the one sequence that a rank trains on in a step."""
FEWEST = 100_000
"""[parameters] A model of two blocks and the narrowest width, 32, has 80,000."""
WARM_UP = 3
BLOCKS = 4
"""Blocks of each kind of step."""


@dataclass(frozen=True)
class Row:
    """One size of model. Milliseconds of a step, each the median of all steps of its kind."""

    parameters: int
    tensors: int
    """That hold them."""
    bare: float
    """A whole bare step."""
    health: float
    guard: float
    record: float
    other: float

    @property
    def added(self) -> float:
        """What a guarded step has beyond a bare one."""
        return self.health + self.guard + self.record + self.other


def shape_for(parameters: float, *, blocks: int) -> dict[str, Any]:
    """model.config of a Llama of about so many parameters: at width h the embedding's 64 h^2 and 7 h^2 a block."""
    width = max(32, round((parameters / (64 + 7 * blocks)) ** 0.5 / 16) * 16)
    return {
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": blocks,
        "num_attention_heads": width // 16,
        "num_key_value_heads": width // 16,
        "vocab_size": 64 * width,
        "tie_word_embeddings": True,
    }


def resolve(arguments: Sequence[str], parameters: float, *, blocks: int = 2) -> Resolved:
    """The run config that `arguments` name, with the model and the batch of this benchmark in place of its own."""
    shape = ", ".join(f"{key}: {json.dumps(value)}" for key, value in shape_for(parameters, blocks=blocks).items())
    ours = ["model.name_or_path=null", "model.architecture=llama", f"model.config={{{shape}}}"]
    ours += ["model.activation_checkpointing=none", f"batch.global_size={os.environ.get('WORLD_SIZE', 1)}"]
    ours += [
        "batch.micro_size=1",
        f"data.sequence_length={SEQUENCE}",
        "optimizer.learning_rate=1.0e-8",
        "guard.spike_sigmas=6",
    ]
    return read_command_line([*arguments, *ours])


@contextmanager
def parts_of(resolved: Resolved, place: Place, folder: Path) -> Iterator[Parts]:
    """A run of one model on noise, with its events in `folder`."""
    config = resolved.config
    vocabulary = int(config.model.config["vocab_size"])
    seed_everything(config.run.seed + place.rank)
    shape = model_config(config.model, vocab_size=vocabulary, sequence_length=SEQUENCE)
    engine = build_engine(resolved, shape, place)
    noise = np.random.default_rng(place.rank).integers(vocabulary, size=4096).astype(token_dtype(vocabulary))
    path = folder / f"noise-{place.rank}.safetensors"
    shards = TokenShards([open_shard(path, write_shard(path, noise, {}), verify=True)])
    batches = Batches(
        shards,
        sequence_length=SEQUENCE,
        seed=config.run.seed,
        global_size=resolved.batch.global_size,
        micro_size=resolved.batch.micro_size,
        rank=place.rank,
        world_size=place.world_size,
    )
    record = Record([JsonlSink(folder / "events.jsonl")]) if place.is_main else Record.silent()
    checkpoints = Checkpoints(folder, keep=Retention(1), identity={}, place=place)
    parts, _ = assemble(resolved, engine, batches, record=record, checkpoints=checkpoints)
    _experienced(parts.guard, config.guard.spike_window)
    try:
        yield parts
    finally:
        parts.batches.close()
        parts.record.close()
        engine.close()


def _experienced(guard: Guard, window: int) -> None:
    """Give it windows as full as they get, of values beside which no step of this benchmark is a spike."""
    values = {"values": [1e3 + number % 7 for number in range(window)]}
    guard.load_state_dict(guard.state_dict() | {"loss": values, "log_norm": values})


def split(parts: Parts, step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of one step by part."""
    engine = parts.engine
    watched: list[tuple[Any, str, str]] = [
        (parts.batches, "next_step", "data"),
        (engine.loss_path, "loss_sum", "forward"),
        (engine, "backward", "backward"),
        (engine.gradients, "norm", "norm"),
        (engine.gradients, "apply", "step"),
        (engine, "health", "health"),
        (parts.guard, "judge", "guard"),
        (parts.guard, "note", "guard"),
        (parts.record, "event", "record"),
    ]
    stages = Stages(engine.place.device, warm_up=0, steps=1)
    for owner, name, stage in watched:
        watch(stages, owner, name, stage)
    step()
    stages.step_done()
    for owner, name, _ in watched:
        delattr(owner, name)  # the instance's, which hid the class's
    found = {stage: 0.0 for _, _, stage in watched} | stages.result()["seconds"]
    return {stage: 1e3 * seconds for stage, seconds in found.items()}


def measure(parts: Parts, *, steps: int) -> Row:
    """Bare and guarded steps in turn on one engine. A collective."""
    progress = Progress()

    def guarded() -> None:
        nonlocal progress
        progress, judgement, _ = train_step(parts, progress)
        if judgement.verdict is not Verdict.STEP and not judgement.routine:
            raise RuntimeError(f"a step on noise was refused: {judgement.reason}")

    for _ in range(WARM_UP):
        guarded()
        bare_step(parts)
    kinds: list[Callable[[], None]] = [lambda: bare_step(parts), guarded]
    taken: list[list[dict[str, float]]] = [[], []]
    for number in range(BLOCKS):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            taken[which] += [split(parts, kinds[which]) for _ in range(steps)]
    bare, own = ({part: median(step[part] for step in kind) for part in kind[0]} for kind in taken)
    return Row(
        parameters=count_parameters(parts.engine.model),
        tensors=sum(1 for _ in parts.engine.model.parameters()),
        bare=median(sum(step.values()) for step in taken[0]),
        health=own["health"],
        guard=own["guard"],
        record=own["record"],
        other=own["other"] - bare["other"],
    )


def line(row: Row) -> str:
    """A row of the table."""
    parts = "".join(f"{value:>9.3f}" for value in (row.health, row.guard, row.record, row.other, row.added))
    return f"{row.parameters:>13,} {row.tensors:>8} {row.bare:>11.1f} {parts} {row.added / row.bare:>8.2%}"


HEADER = "   parameters  tensors  bare, ms    health    guard   record    other    added    share"


def read_options(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and what of it is the run config's. Raises UserError."""
    parser = Arguments(
        prog="python -m training.benchmark.growth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parameters", default="1e6,1e7,1e8", help="sizes of the models")
    parser.add_argument("--steps", type=int, default=10, help=f"steps in a block; there are {BLOCKS} of each kind")
    parser.add_argument("--blocks", type=int, default=2, help="of each model")
    parser.add_argument("--json", type=Path, help="file for the rows as JSON")
    options, rest = parser.parse_known_args(arguments)
    text = options.parameters
    try:
        options.parameters = [float(item) for item in text.split(",")]
    except ValueError:
        options.parameters = [0.0]
    if min(options.parameters) < FEWEST:
        raise UserError(f"--parameters {text}: has to be numbers from {FEWEST:,}, separated by commas")
    for name in ("steps", "blocks"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} {getattr(options, name)}: has to be 1 or more")
    return options, rest


@entry_point(launched=True)
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    options, rest = read_options(arguments)
    runs = [resolve(rest, parameters, blocks=options.blocks) for parameters in options.parameters]
    place = distributed.join(runs[0])
    rows = []
    if place.is_main:
        print(HEADER, flush=True)
    for resolved in runs:
        with tempfile.TemporaryDirectory() as folder, parts_of(resolved, place, Path(folder)) as parts:
            rows.append(measure(parts, steps=options.steps))
        gc.collect()  # DeepSpeed's engine holds on to itself
        if place.is_main:
            print(line(rows[-1]), flush=True)
    distributed.stop()
    if options.json and place.is_main:
        options.json.write_text(json.dumps([{**asdict(row), "added": row.added} for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
