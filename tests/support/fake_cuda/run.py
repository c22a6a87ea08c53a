"""Runs a few steps of each case on the fake device: `python -m tests.support.fake_cuda.run CASES.json RESULTS.json`.

A case is a list of arguments of `train.py` and a number of ranks. The session, the build and the step are train.py's.
"""

import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.fake_cuda.hooks import load_hooks

load_hooks()  # torch asks once whether there is CUDA

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from tests.support.fake_cuda.counts import Counts, Device  # noqa: E402
from tests.support.fake_cuda.device import install  # noqa: E402


class _Fake(FakeTensorMode):
    avoid_device_init = True
    """Real values, such as those of a batch, are not copied to a device that is not there."""


COUNTS, PINNED = Counts(), dict[int, Any]()


def take_steps(arguments: list[str], ranks: int, extras: list[str], bare: bool = False) -> dict[str, Any]:
    """The device operations of the fifth step. The first is observed, the third has telemetry, both have a self-check,
    and the steps after them look whether masters changed since.

    extras: what a run does beside them, by name in `_take_extra`. bare: also count the fifth step of DeepSpeed's own
    loop on the same model.
    """
    from config.command_line import read_command_line
    from lab.benchmark.overhead import PlainLoop
    from training.build import build
    from training.distributed import World
    from training.session import locked_run_dir, session
    from training.step import train_step
    from training.tasks.task import prepare

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_PORT="0")
    resolved = read_command_line(arguments)
    corpus = prepare(resolved.config, progress=False)
    shares = ("sequence", "tensor", "expert")
    with (
        _Fake(allow_non_fake_inputs=True),
        Device(COUNTS, PINNED.keys()),
        patch.object(World, "on_own_group", lambda world, **_: world),  # gloo connects to ranks that are not there
        session(resolved, corpus=corpus, shares=shares) as opened,
        locked_run_dir(resolved, opened.world),
    ):
        parts, progress = build(opened)
        for _ in range(5):
            with COUNTS.counting():
                progress, judgement, _ = train_step(parts, progress)
        found = {
            "micro_batches": resolved.batch.accumulation,
            "optimizer": type(parts.engine.deepspeed.optimizer).__name__,
            "devices": sorted({str(p.device) for p in parts.engine.model.parameters()}),
            "verdict": str(judgement.verdict),
            "applied": progress.applied,
            "notes": parts.engine.notes,
            "waits": dict(COUNTS.waits),
            "collectives": dict(COUNTS.collectives),
            "bytes": dict(COUNTS.bytes),
            "operators": dict(COUNTS.operators),
        }
        if bare:
            plain = PlainLoop(resolved, corpus, opened.world)
            for _ in range(5):
                with COUNTS.counting():
                    plain.step()
            found["bare"] = {"operators": dict(COUNTS.operators), "waits": dict(COUNTS.waits)}
        for name in extras:
            _take_extra(name, parts, progress)
        parts.record.close()
    return found


def _take_extra(name: str, parts: Any, progress: Any) -> None:
    """Take what a run does beside ordinary steps."""
    from training.attribution import attribute
    from training.engine.tensors import checksums_of, momentum_norm
    from training.loop import evaluate

    engine = parts.engine
    if name in ("attribute", "discard"):
        batch = parts.batches.next_step()
        outcome = engine.forward_backward(batch, step=batch.position + 1)
        health = engine.health(outcome, progress)
    match name:
        case "attribute":
            attribute(engine, batch, outcome, step=batch.position + 1)
            engine.discard_gradients()
        case "discard":
            engine.step(health, 1e-3, apply=False)
        case "evaluate":
            evaluate(parts, progress)
        case "checksums":
            checksums_of(engine)
        case "momentum":
            momentum_norm(engine)


def main(cases: Path, results: Path) -> None:
    torch.set_num_threads(1)
    install(COUNTS, PINNED)
    with results.open("w") as lines:
        for name, case in json.loads(cases.read_text()).items():
            started = time.process_time()
            try:
                found = take_steps(**case)
            except BaseException:
                found = {"error": traceback.format_exc()}
            PINNED.clear()
            gc.collect()
            print(json.dumps({"name": name, "seconds": time.process_time() - started, **found}), file=lines, flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
    os._exit(0)
