"""The time that Mantissa adds to a training step, measured beside steps without it in the same processes.

    deepspeed --num_gpus 2 --module lab.benchmark.overhead --config FILE [--pairs 300] [--steps 1] [--at-least 0.99]
        [--by-stage [--parameters 1e6,1e7,1e8] [--layers 2]] [--json FILE] [key.sub=value ...]

Blocks of `--steps` steps alternate (`lab.benchmark.harness`). What a job costs before and after them is not measured.

**Against a plain loop.** Two engines start from the same weights and train on the same batches with the same learning
rates: one by `deepspeed.initialize` and the loop of its documentation, the other Mantissa's with all that the config
asks for. Ratios are of tokens per second, Mantissa's over the plain loop's: the median of the pairs, and that of all
their seconds together, in which a step that is rarely slow counts. Exit code 3: losses differ by more than in
`lab.benchmark`, or the median's interval is below `--at-least`.

**By stage.** Guarded and bare steps alternate on Mantissa's own engine. A bare step is forward, backward, gradient
norm, clipping and optimizer step. What a guarded one adds is timed directly: health (the numbers of the step, gathered
from all ranks), guard (the verdict, with spike detection on), record (the step event, to every sink) and other Python.
`--parameters` measures Llamas of these sizes on 16 random tokens a rank, with `events.jsonl` as the only sink.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import deepspeed
import numpy as np
import torch

from config.batch import refuse_sharing
from config.cli import entry_point
from config.command_line import read_command_line
from config.deepspeed.document import initializable
from config.errors import UserError
from config.options import comma_separated, positive_int, positive_number
from config.resolved import Resolved
from data.batches.loader import Batches
from data.corpora.corpus import Corpus
from data.corpora.shards import TokenShards, open_shard, token_dtype, write_shard
from lab.benchmark.harness import SHARES, WARM_UP_STEPS, alternate, conclude, estimate, paired_options, seconds_of
from lab.benchmark.report import TOLERANCE
from lab.benchmark.split import Stages, time_calls
from modeling.activation_checkpointing import apply_activation_checkpointing
from modeling.build import build_model, count_parameters, model_config
from precision.guard import Verdict
from tracking.run_dir import RunDir
from training import distributed
from training.build import assemble
from training.distributed import World
from training.engine.optimizer import build_optimizer
from training.parts import Parts
from training.progress import Progress
from training.schedule import scheduled_rate
from training.session import Session, batch_shape, session
from training.sinks import open_record
from training.step import train_step

SEQUENCE = 16
"""[tokens] Length of the one sequence that a rank trains on in a step of a model of `--parameters`."""
MIN_PARAMETERS = 100_000
"""A model of two blocks and the narrowest width, 32, has 80,000."""


class PlainLoop:
    """`deepspeed.initialize`, then forward, backward, step, on batches of its own."""

    def __init__(self, resolved: Resolved, corpus: Corpus, world: World) -> None:
        config = resolved.config
        shape = model_config(config.model, vocab_size=corpus.vocab_size, sequence_length=config.data.sequence_length)
        model = build_model(config.model, shape, seed=config.run.seed, gather=lambda _: nullcontext(True)).train()
        mode: Any = config.model.activation_checkpointing
        reentrant, every = config.model.checkpointing_reentrant, config.model.checkpointing_every
        apply_activation_checkpointing(model, mode, reentrant=reentrant, every=every)
        optimizer = build_optimizer(model, config.optimizer, offload=resolved.offload != "none", device=world.device)
        peak = config.optimizer.learning_rate
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: scheduled_rate(config, n) / peak)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=rates, config=initializable(resolved.deepspeed)
        )
        self._device, self._share = world.device, 1.0 / resolved.batch.accumulation
        self.batches = Batches(corpus.train, seed=config.run.seed, **batch_shape(resolved, corpus))
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        """One optimizer step."""
        loss = torch.zeros((), device=self._device)
        for inputs, labels in self.batches.next_step().micro_batches(self._device):
            one = self._engine(**inputs, labels=labels, shift_labels=labels, use_cache=False).loss
            self._engine.backward(one)
            self._engine.step()
            loss += one.detach() * self._share
        self.losses.append(loss)


class GuardedLoop:
    """Mantissa's own steps, one after another."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self.progress = parts, Progress()
        self.losses: list[float] = []

    def use(self, parts: Parts) -> None:
        """Take the coming steps with these parts, of the same run."""
        self._parts = parts

    def step(self) -> None:
        """One optimizer step. Raises UserError when the guard refuses it: then it is none that could be compared."""
        self.progress, judgement, health = train_step(self._parts, self.progress)
        if judgement.verdict is not Verdict.STEP and not judgement.routine:
            raise UserError(f"the guard refused step {self.progress.step}, so the timing stops: {judgement.reason}")
        self.losses.append(health.loss)


def bare_step(parts: Parts) -> None:
    """Gradients, norm, clipping, optimizer step: nothing judged, nothing recorded."""
    batch = parts.batches.next_step()
    parts.engine.forward_backward(batch, step=batch.position + 1)
    parts.engine.gradients.norm()
    parts.engine.gradients.apply()


@contextmanager
def open_parts(opened: Session) -> Iterator[Parts]:
    """The parts of a run of the session's config: a temporary run folder, nothing restored, nothing to be saved."""
    resolved, engine = opened.resolved, opened.engine
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir.create(Path(folder), resolved.config.run.name, fresh=False)
        record = open_record(resolved, opened.corpus, engine, run_dir, opened.world)
        checkpoints = opened.saved_checkpoints(run_dir.checkpoints)
        parts, _ = assemble(resolved, engine, opened.batches, record=record, checkpoints=checkpoints)
        yield parts
        record.close()


# --- against a plain loop


def time_pairs(parts: Parts, plain: PlainLoop, *, pairs: int, steps: int) -> tuple[np.ndarray, float]:
    """Time blocks of both loops in turn. A collective.

    Returns (pairs, 2) float64 seconds a step, of the plain loop and of Mantissa's, and the largest relative difference
    of two losses of the same step.
    """
    guarded, world = GuardedLoop(parts), parts.engine.world
    alternate(plain.step, guarded.step, pairs=WARM_UP_STEPS)
    blocks = (partial(seconds_of, step, world.device, times=steps) for step in (plain.step, guarded.step))
    seconds = np.array(alternate(*blocks, pairs=pairs)) / steps
    # every rank's equal share of label tokens: the mean of the ranks' means is that of the global batch
    losses = world.gather(torch.stack(plain.losses).double()).mean(dim=0).cpu().numpy()
    return seconds, float(np.max(np.abs(losses / np.array(guarded.losses) - 1.0)))


def median_ratio(seconds: np.ndarray) -> np.ndarray:
    """Tokens per second of the second kind over the first's: the median of the pairs. seconds: (..., pairs, 2)."""
    return np.median(seconds[..., 0] / seconds[..., 1], axis=-1)


def ratio_of_sums(seconds: np.ndarray) -> np.ndarray:
    """Tokens per second of the second kind over the first's, over all seconds together. seconds: (..., pairs, 2)."""
    return seconds[..., 0].sum(-1) / seconds[..., 1].sum(-1)


def require_comparable(resolved: Resolved) -> None:
    """Raises UserError for settings that the plain loop does not have, or two engines in one process cannot."""
    model, data = resolved.config.model, resolved.config.data
    refuse_sharing(resolved.batch, but=("tensor",), why="the plain loop has {what} on each rank")
    for key, value, allowed in (
        ("ZeRO stage", resolved.zero_stage, (0, 1, 2)),
        ("precision.path", resolved.config.precision.path, ("cast",)),
        ("model.activation_checkpointing", model.activation_checkpointing, ("none", "full", "selective")),
        ("data.document_masking", data.document_masking, (False,)),
        ("model.compile", model.compile, (False,)),
    ):
        if value not in allowed:
            wanted = ", ".join(map(str, allowed))
            raise UserError(f"{key} = {value}: the plain loop has {wanted} only; use --by-stage or lab.benchmark")


def report(
    seconds: np.ndarray, distance: float, *, steps: int, compute: str, at_least: float | None, file: Path | None = None
) -> int:
    """Print what was measured, and write it into a file; the exit code. As `time_pairs` returns it."""
    (bare, guarded), more = np.median(seconds, axis=0), np.median(seconds[:, 1] - seconds[:, 0])
    middle, total = (estimate(statistic, seconds) for statistic in (median_ratio, ratio_of_sums))
    lines = [
        f"{len(seconds)} pairs of {steps} steps; ratios of tokens/s, Mantissa's over bare [95% of resamples]",
        f"bare      {bare * 1e3:9.2f} ms a step (median)",
        f"mantissa  {guarded * 1e3:9.2f} ms a step, {more * 1e3:+.2f} (median of pairs)",
        "median    {:9.4f} [{:.4f} to {:.4f}]".format(*middle),
        "all       {:9.4f} [{:.4f} to {:.4f}]".format(*total),
        f"losses    {distance:9.1e} apart at most",
    ]
    found = {"pairs": len(seconds), "steps": steps, "median": middle, "all": total}
    found |= {"bare_seconds": bare, "mantissa_seconds": guarded, "loss_difference": distance}
    wrong = None
    if not distance <= TOLERANCE[compute]:
        wrong = f"losses differ by {distance:.1e}, more than {TOLERANCE[compute]:g}"
    elif at_least is not None and middle[2] < at_least:
        wrong = f"the median is below {at_least:g} for certain: at most {middle[2]:.4f}"
    return conclude(lines, found, file, wrong=wrong)


# --- by stage

ADDED = ("health", "guard", "record", "other")
HEADER = "   parameters  tensors  bare, ms    health    guard   record    other    added    share"


def time_stages(parts: Parts, *, pairs: int, steps: int) -> dict[str, Any]:
    """Time bare and guarded steps in turn, stage by stage, on one engine. A collective.

    Returns the size of the model, and milliseconds of a step, each the median of all steps of its kind: `bare` is a
    whole bare step, `ADDED` what a guarded one has beyond it.
    """
    # Full windows from the start, of values far above every loss and norm, so that no step is a spike.
    window = {"values": [1e3 + number % 7 for number in range(parts.resolved.config.guard.spike_window)]}
    parts.guard.load_state_dict(parts.guard.state_dict() | {"loss": window, "log_norm": window})
    loop = GuardedLoop(parts)
    alternate(loop.step, lambda: bare_step(parts), pairs=WARM_UP_STEPS)
    blocks = alternate(
        lambda: [stage_milliseconds(parts, lambda: bare_step(parts)) for _ in range(steps)],
        lambda: [stage_milliseconds(parts, loop.step) for _ in range(steps)],
        pairs=pairs,
    )
    bare, guarded = ([step for pair in blocks for step in pair[kind]] for kind in (0, 1))
    own = {stage: median(step[stage] for step in guarded) for stage in ADDED}
    return {
        "parameters": count_parameters(parts.engine.model),
        "tensors": sum(1 for _ in parts.engine.model.parameters()),
        "bare": median(sum(step.values()) for step in bare),
        **own,
        "other": own["other"] - median(step["other"] for step in bare),
    }


def format_row(row: dict[str, Any]) -> str:
    """A row of the table, under `HEADER`."""
    added = sum(row[stage] for stage in ADDED)
    stages = "".join(f"{value:>9.3f}" for value in (*(row[stage] for stage in ADDED), added))
    return f"{row['parameters']:>13,} {row['tensors']:>8} {row['bare']:>11.1f} {stages} {added / row['bare']:>8.2%}"


def stage_milliseconds(parts: Parts, step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of one step by stage."""
    engine = parts.engine
    calls: list[tuple[Any, str, str]] = [
        (parts.batches, "next_step", "data"),
        (engine.loss_path, "score", "forward"),
        (engine, "backward", "backward"),
        (engine.gradients, "norm", "norm"),
        (engine.gradients, "apply", "step"),
        (engine, "health", "health"),
        (parts.guard, "judge", "guard"),
        (parts.guard, "note", "guard"),
        (parts.record, "event", "record"),
    ]
    stages = Stages(engine.world.device, warm_up=0, steps=1)
    undo = time_calls(stages, calls)
    step()
    stages.step_done()
    undo()
    found = {stage: 0.0 for _, _, stage in calls} | stages.result()["seconds"]
    return {stage: 1e3 * seconds for stage, seconds in found.items()}


def llama_shape(parameters: float, *, layers: int) -> dict[str, Any]:
    """model.config of a Llama with about this many parameters: at width h the embedding's 64 h^2 and 7 h^2 a block."""
    width = max(32, round((parameters / (64 + 7 * layers)) ** 0.5 / 16) * 16)
    sizes = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": layers, "vocab_size": 64 * width}
    heads = {"num_attention_heads": width // 16, "num_key_value_heads": width // 16}
    return {**sizes, **heads, "tie_word_embeddings": True}


def resolve_llama(arguments: Sequence[str], parameters: float, *, layers: int = 2) -> Resolved:
    """The run config that `arguments` name, with a Llama of this size, the smallest batch and silent tracking."""
    shape = ", ".join(f"{key}: {json.dumps(value)}" for key, value in llama_shape(parameters, layers=layers).items())
    model = ["model.name_or_path=null", "model.architecture=llama", f"model.config={{{shape}}}"]
    model += ["model.activation_checkpointing=none", "parallel.sequence=1", f"data.sequence_length={SEQUENCE}"]
    steps = [f"batch.global_size={os.environ.get('WORLD_SIZE', 1)}", "batch.micro_size=1"]
    steps += ["optimizer.learning_rate=1.0e-8", "guard.spike_sigmas=6"]
    silent = ["tracking.wandb=disabled", "tracking.prometheus_port=null", "tracking.log_every_steps=1000000"]
    return read_command_line([*arguments, *model, *steps, *silent])


def random_corpus(vocabulary: int, folder: Path, *, seed: int) -> Corpus:
    """4,096 random token ids below `vocabulary`, in `folder`, as training and validation data."""
    tokens = np.random.default_rng(seed).integers(vocabulary, size=4096).astype(token_dtype(vocabulary))
    path = folder / "random.safetensors"
    shards = TokenShards([open_shard(path, write_shard(path, tokens, {}), verify=True)])
    sizes = ("train_documents", "validation_documents", "train_bytes", "validation_bytes", "end_of_document")
    counts: dict[str, Any] = dict.fromkeys(sizes, 0)
    return Corpus(
        folder=folder,
        fingerprint="random",
        tokenizer_folder=folder,
        vocab_size=vocabulary,
        train=shards,
        validation=shards,
        skipped={},
        source="random tokens",
        revision=None,
        **counts,
    )


@contextmanager
def llama_parts(resolved: Resolved, world: World) -> Iterator[Parts]:
    """The parts of a run of `resolve_llama`'s config on random tokens; the process group stays."""
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = int(resolved.config.model.config["vocab_size"])
        corpus = random_corpus(vocabulary, Path(folder), seed=world.rank // resolved.batch.tensor)
        with session(resolved, corpus=corpus, world=world, shares=SHARES) as opened, open_parts(opened) as parts:
            yield parts
    gc.collect()  # DeepSpeed's engine is part of reference cycles


# --- the command


def read_options(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and its arguments for the run config. Raises UserError."""
    parser = paired_options("overhead", __doc__, pairs=100)
    parser.add_argument("--steps", type=positive_int, default=1, help="steps in a block")
    parser.add_argument("--at-least", type=float, help="exit code 3 where tokens/s over bare is surely below")
    parser.add_argument("--by-stage", action="store_true", help="time what is added, stage by stage, on one engine")
    parser.add_argument("--parameters", type=comma_separated(size), help="by stage, for Llamas of these sizes")
    parser.add_argument("--layers", type=positive_int, default=2, help="blocks of each of them")
    return parser.parse_known_args(arguments)


def size(text: str) -> float:
    """An argparse type: a number of parameters."""
    value = positive_number(text)
    if value < MIN_PARAMETERS:
        raise argparse.ArgumentTypeError(f"{text} is not a number from {MIN_PARAMETERS:,}")
    return value


def against_plain_loop(arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Time both loops and print what was measured, on rank 0; the exit code."""
    total = WARM_UP_STEPS + options.pairs * options.steps
    resolved = read_command_line([*arguments, f"run.steps={total}"])
    require_comparable(resolved)
    with session(resolved, shares=SHARES) as opened, open_parts(opened) as parts:
        plain = PlainLoop(resolved, opened.corpus, opened.world)
        seconds, distance = time_pairs(parts, plain, pairs=options.pairs, steps=options.steps)
        plain.batches.close()
    if resolved.rank != 0:
        return 0
    said = {"steps": options.steps, "compute": resolved.compute}
    return report(seconds, distance, **said, at_least=options.at_least, file=options.json)


def by_stage(arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Time the config's model, or the Llamas of `--parameters`, and print a table, on rank 0; the exit code."""
    counts = {"pairs": options.pairs, "steps": options.steps}
    if options.parameters is None:
        resolved = read_command_line([*arguments, "guard.spike_sigmas=6"])
        with session(resolved, shares=SHARES) as opened, open_parts(opened) as parts:
            rows = [time_stages(parts, **counts)]
    else:
        llamas = [resolve_llama(arguments, size, layers=options.layers) for size in options.parameters]
        resolved, rows = llamas[0], []
        world = distributed.join(resolved)
        for llama in llamas:
            with llama_parts(llama, world) as parts:
                rows.append(time_stages(parts, **counts))
        distributed.stop()
    return conclude([HEADER, *map(format_row, rows)], rows, options.json) if resolved.rank == 0 else 0


@entry_point(launched=True)
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    options, rest = read_options(arguments)
    return (by_stage if options.by_stage or options.parameters else against_plain_loop)(rest, options)


if __name__ == "__main__":
    sys.exit(main())
