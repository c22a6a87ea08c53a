"""The checks for silent corruption of one run: their numbers for each step's gather, and the reaction to bad ones."""

import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch

from config.resolved import Resolved
from data.batches.loader import Batch
from precision.corruption import Corruption, Flip, Reexecution
from precision.step_health import Health
from training.corruption.copies import Copies
from training.corruption.rerun import LocalGradients, answer, run_again
from training.corruption.updates import UpdateCheck
from training.engine import Engine
from training.engine.health import Outcome, Update

_DRAIN_AFTER = 3
"""Transient faults of one rank in a session after which draining its host is advised."""
_MOST_PARAMETERS = 5


Events = list[tuple[str, dict[str, Any]]]
"""(event, its fields), for the record."""


class Checks:
    def __init__(self, engine: Engine, resolved: Resolved) -> None:
        """A collective: the ranks exchange their hosts' names."""
        config, guard = resolved.config, resolved.config.guard
        self._engine = engine
        self._hosts: list[str] = engine.world.gather_objects(socket.gethostname())
        self._copies = Copies(engine, every=guard.replica_checks) if guard.replica_checks else None
        self._updates = UpdateCheck(engine, config.optimizer, values=guard.update_checks, seed=config.run.seed)
        self.before_update, self.forget = self._updates.before_update, self._updates.forget
        """Call right before a step is applied, and after a checkpoint was loaded."""
        self.reexecutes = guard.reexecute != "never"
        kind, _, steps = guard.reexecute.partition(" ")
        self._every = int(steps) if kind == "every" else 0
        self._local: LocalGradients | None = None
        self._transient: Counter[int] = Counter()

    def signing(self, step: int) -> AbstractContextManager[None]:
        """Context of a step's passes, in which gradients are checksummed if the step is due to run again."""
        self._local = LocalGradients(self._engine) if self._due(step) else None
        return self._local.signed() if self._local else nullcontext()

    def numbers(self, step: int) -> torch.Tensor:
        """(4,) float64 for the step's gather, between its backward pass and its update. No device sync."""
        device = self._engine.world.device
        copies = self._copies.sums(step) if self._copies else torch.zeros(3, dtype=torch.float64, device=device)
        return torch.cat([copies, self._updates.wrong()[None]])

    def examine(
        self,
        batch: Batch,
        outcome: Outcome,
        health: Health,
        *,
        again: Callable[[Outcome], Health],
        suspicion: Callable[[Health], str | None],
    ) -> tuple[Outcome, Health, Events]:
        """The step to judge: the one given, or a rerun of it if corruption was found or is suspected. again: measures a
        rerun's health. suspicion: the reason to rerun a step with this health, or None. A collective."""
        flips = self._find(health.checks)
        events: Events = [("corruption", self._fields(flip)) for flip in flips]
        broken = next((flip for flip in flips if not flip.repaired), None)
        if broken is not None:
            what = f"silent corruption: {broken.text} ({', '.join(self._hosts_of(broken.ranks))})"
            corruption = Corruption(what, self._advice(broken.ranks), state_is_good=False)
            return outcome, replace(health, corruption=corruption), events
        reason = suspicion(health) if self.reexecutes else None
        if not (flips or reason or self._due(health.step)):
            return outcome, health, []
        started = time.perf_counter()
        first = answer(self._engine, outcome, self._local)
        run = run_again(self._engine, batch, outcome, first)
        last = again(run.outcome)
        found = run.judge(suspicious=reason is not None, healthy=suspicion(last) is None)
        if last.disagreement:
            found = Reexecution("persistent", (), last.disagreement)
        elif found.kind == "persistent" and not any(run.changed):
            # only the other rank's results differed, and that may have been a transient fault, too
            twice = run_again(self._engine, batch, run.outcome, run.last)
            if twice.judge(suspicious=False, healthy=True).kind == "none":
                found = Reexecution("transient", found.ranks, "a different answer the second time, on another rank")
            run, last = replace(twice, parameters=run.parameters), again(twice.outcome)
        if flips:
            found = self._after_repair(flips, found)
        fields: dict[str, Any] = {
            "outcome": found.kind,
            "ranks": list(found.ranks),
            "hosts": self._hosts_of(found.ranks),
            "why": found.why,
            "suspicion": reason or (flips[0].text if flips else ""),
            "modules": run.parameters[:_MOST_PARAMETERS],
            "seconds": time.perf_counter() - started,
        }
        if found.kind == "transient":
            self._transient.update(found.ranks)
            fields["drain"] = any(self._transient[rank] >= _DRAIN_AFTER for rank in found.ranks)
        if found.kind == "persistent":
            fields["drain"] = True
            what = f"{self._who(found.ranks)} computed step {health.step} wrongly: {found.why}"
            last = replace(last, corruption=Corruption(what, self._advice(found.ranks), state_is_good=True))
        if found.kind != "none":
            events.append(("reexecution", fields))
        return run.outcome, last, events

    def after_update(self, health: Health, update: Update, *, applied: int) -> None:
        """Call right after a step was applied. applied: updates so far, this one included."""
        self._updates.after_update(norm=health.grad_norm, scale=update.loss_scale, lr=update.lr, step=applied)

    def _due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def _find(self, checks: Sequence[Sequence[float]]) -> list[Flip]:
        """checks: `numbers` of each rank."""
        differ = any(row[:2] != checks[0][:2] or row[2] for row in checks)
        flips = self._copies.examine() if self._copies is not None and differ else []
        if any(row[3] for row in checks):
            flips += self._updates.examine()
        return flips

    def _after_repair(self, flips: Sequence[Flip], found: Reexecution) -> Reexecution:
        """The outcome of a rerun that followed the repair of copies."""
        assert self._copies is not None
        ranks = tuple(sorted({rank for flip in flips for rank in flip.ranks}))
        if self._copies.examine():
            return Reexecution("persistent", ranks, "the values that were repaired changed again")
        if found.kind == "persistent":
            return found
        return Reexecution("transient", ranks, "the copies were repaired, and hold")

    def _fields(self, flip: Flip) -> dict[str, Any]:
        fields = asdict(flip) | {"module": flip.parameter, "hosts": self._hosts_of(flip.ranks), "text": flip.text}
        del fields["parameter"]
        return fields | {"ranks": list(flip.ranks), "bits": list(flip.bits)}

    def _hosts_of(self, ranks: Sequence[int]) -> list[str]:
        return list(dict.fromkeys(self._hosts[rank] for rank in ranks))

    def _who(self, ranks: Sequence[int]) -> str:
        if not ranks:
            return "a rank that cannot be named"
        listed = ", ".join(f"rank {rank} on {self._hosts[rank]}" for rank in ranks)
        return listed if len(ranks) == 1 else f"one of {listed}"

    def _advice(self, ranks: Sequence[int]) -> str:
        return f"drain {' or '.join(self._hosts_of(ranks)) or 'the hosts one by one'}, then resume with run.resume=auto"
