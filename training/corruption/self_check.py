"""Comparison of steps with plain torch while the run trains: when it is due, and its verdict.

A step that is not checked pays for a comparison of integers. A checked one is the same step bit for bit: hooks copy
what passes by (passes.py), and what is computed again is computed beside it (plain.py, updates.py, copies.py).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from config.optimizers import OPTIMIZERS
from config.resolved import Resolved
from data.batches.loader import Batch
from precision.step_health import Health
from training.corruption.copies import Copies
from training.corruption.passes import Passes, Row
from training.corruption.updates import UpdateCheck
from training.early_warnings import EarlyWarning
from training.engine import Engine
from training.engine.tensors import local_gradient, own_shards
from training.schedule import scheduled_rate

SIGNAL = "self_check"
_VALUES = 32
"""Values of each parameter whose update is compared."""
_NORM = 1e-4
"""[fraction] Tolerated error of the gradient norm: FP32 sums in two orders, 8.8e-8 apart in a sound run."""
_WORDS = {
    "modules": "its output is further from FP32 than plain torch's in its dtype",
    "gradients": "its reduced gradient does not follow from its inputs and outputs over all ranks and micro-batches",
    "loss": "the loss's gradient is not that of the mean cross-entropy over labels",
    "norm": "the gradient norm is not that of the reduced gradients",
    "updates": "the update is not the result of the optimizer's rule",
    "copies": "its values differ between ranks, or from its rounded master",
}
_OF_ALL = ("gradients", "norm")
"""Checks of sums over ranks, which blame none of them."""


class SelfCheck:
    """The checked steps of one run. Between `watching` and `finish` its methods come in the order of a step."""

    def __init__(self, engine: Engine, resolved: Resolved) -> None:
        self._engine, self._resolved = engine, resolved
        self._every, self._gradients = resolved.config.guard.self_check_every, resolved.config.guard.gradient_checks
        self._whole = False
        self._turn = 0
        self._passes: Passes | None = None
        self._updates: UpdateCheck | None = None
        self._rows: list[tuple[Row, int]] = []
        self._skipped: dict[str, str] = {}

    def due(self, step: int, first: int) -> bool:
        """Whether an attempted step, from 1, is checked. first: the session's.

        Of each `self_check_every` steps one is drawn: a fixed period would never meet what is wrong between.
        """
        if self._every:
            start = (step - 1) // self._every * self._every
            drawn = random.Random(f"{self._resolved.config.run.seed} {start}").randrange(self._every)
            self._whole = step == first or step == start + 1 + drawn
        return self._whole or bool(self._gradients and step % self._gradients == 0)

    def watching(self, batch: Batch) -> AbstractContextManager[None]:
        """Around forward and backward of a step that is due."""
        self._rows, self._skipped = [], {}
        self._passes = Passes(self._engine, self._resolved, batch, turn=self._turn, whole=self._whole)
        return self._passes.watching()

    def after_passes(self, health: Health) -> list[EarlyWarning]:
        """Judge the passes before the step is judged. A collective."""
        assert self._passes is not None
        passes, self._passes = self._passes, None
        if not health.finite:
            self._skipped["passes"] = "the step is not finite"
            return []
        rows = [*passes.compared(), self._norm(health)]
        self._skipped |= passes.skipped
        return self._judge(rows, health.step)

    def before_update(self) -> None:
        """Right before the step is applied."""
        config, self._updates = self._resolved.config, None
        if not self._whole:
            return
        name = config.optimizer.name
        if self._resolved.offload != "none":
            self._skipped["updates"] = "masters are offloaded"
            return
        if not OPTIMIZERS[name].by_value:
            self._skipped["updates"] = f"{name}'s step depends on whole parameters: what does not is compared"
        seed = config.run.seed + self._turn
        self._updates = UpdateCheck(self._engine, config.optimizer, values=_VALUES, seed=seed, of_each=True)
        self._updates.before_update()

    def after_update(self, health: Health, *, scale: float, applied: int, factor: float) -> list[EarlyWarning]:
        """Right after it was applied. applied: updates before it. factor: the guard's, on the rate. A collective."""
        rows: list[Row] = []
        if not self._whole:
            return []
        if self._updates is not None:
            rate = scheduled_rate(self._resolved.config, applied) * factor
            self._updates.after_update(norm=health.grad_norm, scale=scale, lr=rate, step=applied + 1)
            done = self._updates.compared
            worst = torch.stack([item.excess.max() for item in done]).tolist() if done else []
            rows = [Row("updates", item.slice.name, error, 1.0) for item, error in zip(done, worst, strict=True)]
        if self._engine.world.experts is None:
            rows += self._copies(health.step)
        else:
            self._skipped["copies"] = "ranks have experts of their own"
        return self._judge(rows, health.step)

    def finish(self) -> dict[str, Any]:
        """Fields of the step's `self_check` event; the next turn begins."""
        self._turn += 1
        worst: dict[str, dict[str, Any]] = {}
        for check in dict.fromkeys(row.check for row, _ in self._rows):
            found = [item for item in self._rows if item[0].check == check]
            (row, rank), breaches = max(found, key=_excess), sum(_excess(item) > 1 for item in found)
            fields = {"where": row.where, "rank": rank, "error": row.error, "bound": row.bound}
            worst[check] = {"compared": len(found), "breaches": breaches, **fields}
        if self._whole and "copies" not in worst:
            self._skipped.setdefault("updates", "the step was not applied")
        return {"checks": worst, "skipped": self._skipped}

    def _judge(self, mine: Sequence[Row], step: int) -> list[EarlyWarning]:
        """One warning for each check that some rank fails, the same on all ranks. A collective."""
        ranks = self._engine.world.gather_objects((mine, self._skipped))
        found: dict[tuple[str, str], tuple[Row, int]] = {}
        for rank, (rows, skipped) in enumerate(ranks):
            self._skipped = skipped | self._skipped
            for row in rows:
                item = row, rank
                found[row.check, row.where] = max(found.get((row.check, row.where), item), item, key=_excess)
        self._rows += found.values()
        warnings = []
        for check in dict.fromkeys(check for check, _ in found):
            broken = [item for item in found.values() if item[0].check == check and _excess(item) > 1]
            broken.sort(key=_excess, reverse=True)
            if broken:
                (row, rank), names = broken[0], tuple(row.where for row, _ in broken)
                others = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
                who = "all ranks together" if check in _OF_ALL else f"rank {rank}"
                reason = (
                    f"{row.where}{others}, {who}, step {step}: {_WORDS[check]} (error {row.error:.3g}, "
                    f"bound {row.bound:.3g}); run python -m tools.parity on this config"
                )
                warnings.append(EarlyWarning(SIGNAL, row.where, row.error, row.bound, names, reason))
        return warnings

    @torch.no_grad()
    def _norm(self, health: Health) -> Row:
        """The recorded norm against that of the reduced gradients. A collective."""
        engine = self._engine
        total = torch.zeros((), dtype=torch.float64, device=engine.world.device)
        for _, parameter, shard in own_shards(engine):
            gradient = local_gradient(parameter, shard, engine.stage)
            if gradient is not None:
                total += torch.linalg.vector_norm(gradient, dtype=torch.float64).square().to(total.device)
        norm = float(engine.world.sum(total) if engine.stage else total) ** 0.5 / engine.loss_scale
        return Row("norm", "gradient", abs(health.grad_norm - norm) / max(norm, 1e-30), _NORM)

    def _copies(self, step: int) -> list[Row]:
        """Weights and buffers that differ between ranks, or are not their masters rounded. A collective."""
        copies = Copies(self._engine, every=1)
        sums = self._engine.world.gather(copies.sums(step)).tolist()
        wrong = any(row[:2] != sums[0][:2] or row[2] for row in sums)
        flips = copies.examine(repair=False) if wrong else []
        own = [flip for flip in flips if self._engine.world.rank == flip.ranks[0]]
        return [Row("copies", flip.parameter, 1.0, 0.0) for flip in own] or [Row("copies", "all values", 0.0, 1.0)]


def _excess(item: tuple[Row, int]) -> float:
    row, _ = item
    return row.error / row.bound if row.bound else float("inf") if row.error else 0.0
