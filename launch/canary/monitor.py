"""Run the whole run after its canary, compare its checkpoints with FP32 while it continues, and undo failures.

A check hard-links a checkpoint as soon as it is published, so that the run may delete it meanwhile, and starts
`tools.parity.steps` on it: the next two applied steps from its masters, module by module, against plain FP32. A failed
check stops the run, sets aside what was saved since the last checkpoint that passed, and restarts the run from there
with the next fallback of `canary.fallback`. A run ended by its guard (exit code 3) is treated the same way.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from config import json_text
from config.cli import CONFIG_ERROR, DIVERGED, DONE
from config.errors import UserError
from launch.canary.plan import Plan, in_fp32, promoted
from launch.canary.record import Journal, log
from launch.job import error_line_of, kill, start, with_project

POLL_SECONDS = 0.3
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Breach:
    """A reason why the run must not continue as it is."""

    step: int
    text: str
    modules: list[str] = field(default_factory=list)


@dataclass
class Check:
    """One checkpoint that is being compared with FP32."""

    step: int
    path: Path
    job: subprocess.Popen[bytes]
    out: Path
    log: Path
    started: float


class RunMonitor:
    def __init__(self, plan: Plan, journal: Journal) -> None:
        """journal: must contain a gate that passed."""
        self._plan, self._journal = plan, journal
        self._run: subprocess.Popen[bytes] | None = None
        self._stop_requested = False
        good = next(event for event in reversed(journal.events) if "judged" in event)
        self._good, self._good_step = Path(good["judged"]), int(good["step"])
        self._unchecked: set[int] = set()
        """Steps that could not be checked."""

    def run(self) -> int:
        """Run to the end; returns the run's exit code, or 3 if no fallback is left."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._stop)
        fallback = self._journal.last("fallback")
        overrides = list(fallback["overrides"]) if fallback else []
        saved = [step for step in self._published() if step >= self._good_step]
        resume = "auto" if saved else str(self._good)
        while True:
            code, breach = self._session(overrides, resume)
            if code == CONFIG_ERROR and overrides:
                breach = Breach(self._good_step, "the fallback could not be started: exit code 2")
            if breach is None or self._stop_requested:
                return self._end(code)
            self._go_back(breach)
            chosen = self._fall_back(breach)
            if chosen is None:
                return self._end(DIVERGED)
            overrides, resume = chosen, str(self._good)

    def _session(self, overrides: Sequence[str], resume: str) -> tuple[int, Breach | None]:
        """Start the run once and check it until it ends; returns its exit code, and the breach if there was one."""
        command = self._plan.whole_command(overrides, resume)
        supervised = [sys.executable, "-m", "launch.supervise", "--", *command]
        # In its own session, so that Ctrl-C does not reach it twice.
        self._run = subprocess.Popen(supervised, cwd=Path.cwd(), env=with_project(os.environ), start_new_session=True)
        where = "its newest checkpoint" if resume == "auto" else f"step {self._good_step}: {resume}"
        self._journal.add("started", self._good_step, f"the whole run starts from {where}", resume=resume)
        if self._stop_requested:
            self._stop(signal.SIGTERM, None)
        check: Check | None = None
        while True:
            ended = self._run.poll()
            if check is None and not self._stop_requested:
                check = self._start_check(last=ended is not None)
            if check is not None and check.job.poll() is not None:
                breach, check = self._finish_check(check), None
                if breach is not None:
                    self._stop_run()
                    return self._run.wait(), breach
            if check is not None and self._stop_requested:
                kill(check.job, signal.SIGTERM)
                check = None
            if ended is not None and check is None and (self._stop_requested or self._newest(last=True) is None):
                return ended, self._diverged() if ended == DIVERGED else None
            time.sleep(POLL_SECONDS)

    def _newest(self, *, last: bool) -> int | None:
        """Step of the newest checkpoint due for a check, if any. last: whether the run has ended."""
        every = 0 if last else self._plan.section.check_every
        after = self._good_step + max(every, 1)
        due = [step for step in self._published() if step >= after and step not in self._unchecked]
        limit = self._plan.section.device_hours
        if limit is None or self._journal.spent() < limit:
            return max(due, default=None)
        if self._journal.last("budget") is None:
            text = f"canary.device_hours = {limit:g} is used up: the run goes on without further checks"
            self._journal.add("budget", self._good_step, text)
        return None

    def _checkpoints(self) -> list[tuple[int, Path]]:
        """(step, path) of the run's checkpoint folders, without those set aside."""
        paths = self._plan.run_folder.glob("checkpoints/step-*")
        return [(int(found[1]), path) for path in paths if (found := _NAME.fullmatch(path.name))]

    def _published(self) -> list[int]:
        """Steps of the complete checkpoints."""
        return [step for step, path in self._checkpoints() if (path / "manifest.json").is_file()]

    def _start_check(self, *, last: bool) -> Check | None:
        step = self._newest(last=last)
        pinned = None if step is None else self._pin(step)
        if step is None or pinned is None:
            if step is not None and last:  # not deleted by the run, which has ended: trying again would go on forever
                self._unchecked.add(step)
                text = f"step {step} could not be compared with FP32: it cannot be copied to {self._plan.folder}/checks"
                self._journal.add("check", step, text, held=None, device_hours=0.0)
            return None
        folder = pinned.parent.parent
        out, output = folder / f"step-{step}.json", folder / f"step-{step}.log"
        out.unlink(missing_ok=True)
        program = ["-m", "tools.parity.steps", str(folder), "--out", str(out), "--points", str(step), "--judge"]
        plan = self._plan
        job = start(
            [*program, *plan.bounds], processes=plan.ranks, log=output, launcher=plan.check_launcher, own_session=True
        )
        return Check(step, pinned, job, out, output, time.monotonic())

    def _pin(self, step: int) -> Path | None:
        """Link a checkpoint into the canary's folder, where the run cannot delete it; None if it just did, or if the
        disk is full."""
        source, folder = self._plan.run_folder, self._plan.folder / "checks"
        target = folder / "checkpoints" / f"step-{step}"
        shutil.rmtree(target, ignore_errors=True)
        try:
            shutil.copytree(source / "checkpoints" / target.name, target, copy_function=_link)
            shutil.copy2(source / "config.yaml", folder / "config.yaml")
        except (shutil.Error, OSError):
            shutil.rmtree(target, ignore_errors=True)
            return None
        return target

    def _finish_check(self, check: Check) -> Breach | None:
        hours = (time.monotonic() - check.started) * self._plan.ranks / 3600
        found = json_text.object_in(check.out)
        if not found:
            self._unchecked.add(check.step)
            why = error_line_of(check.log)
            text = f"step {check.step} could not be compared with FP32: {why}; see {check.log}"
            self._journal.add("check", check.step, text, held=None, device_hours=hours)
            return None
        if found["failed"]:
            failed, modules = found["failed"], found["modules"]
            where = f" in {', '.join(modules)}" if modules else ""
            text = f"the steps after step {check.step} do not match FP32: {', '.join(failed)}{where}"
            self._journal.add("check", check.step, text, held=False, failed=failed, modules=modules, device_hours=hours)
            shutil.rmtree(check.path, ignore_errors=True)
            return Breach(check.step, text, modules)
        resumed = {event["resume"] for event in self._journal.events if event["event"] == "started"}
        for other in check.path.parent.glob("step-*"):
            if other != check.path and str(other) not in resumed:  # keep checkpoints that the run's config refers to
                shutil.rmtree(other, ignore_errors=True)
        self._good, self._good_step = check.path, check.step
        text = f"the steps after step {check.step} match FP32: {len(found['checks'])} checks pass"
        self._journal.add("check", check.step, text, held=True, judged=str(check.path), device_hours=hours)
        return None

    def _diverged(self) -> Breach:
        """The breach for which the run's own guard ended it."""
        from tracking.jsonl import Follower  # imports orjson, which is not needed to start

        incidents = list(Follower(self._plan.run_folder / "events.jsonl").events("incident"))
        if not incidents:
            return Breach(self._good_step, "the run ended with exit code 3")
        last = incidents[-1]
        text = f"the run's guard ended it at step {last['step']}: {last['reason']}"
        return Breach(int(last["step"]), text, list(last["modules"]))

    def _go_back(self, breach: Breach) -> None:
        """Set aside the checkpoints saved after the last one that passed."""
        self._journal.add("breach", breach.step, f"breach: {breach.text}", modules=breach.modules)
        later = [path for step, path in self._checkpoints() if step > self._good_step]
        rollbacks = sum(event["event"] == "rolled_back" for event in self._journal.events)
        aside = self._plan.folder / "left" / str(rollbacks + 1)
        aside.mkdir(parents=True, exist_ok=True)
        for path in later:
            path.rename(aside / path.name)
        names = f"; set aside: {len(later)} later checkpoints, {aside}" if later else ""
        text = f"back to step {self._good_step}, the last that passed: {self._good}{names}"
        self._journal.add("rolled_back", self._good_step, text)
        self._unchecked.clear()

    def _fall_back(self, breach: Breach) -> list[str] | None:
        """Overrides of the next fallback; None if none is left."""
        tried = [event["to"] for event in self._journal.events if event["event"] in ("fallback", "refused")]
        for kind in self._plan.section.fallback:
            if kind in tried or (kind == "promote" and ("fp32" in tried or not breach.modules)):
                continue
            resolved, folder = self._plan.resolved, self._plan.folder
            overrides, names = in_fp32(resolved, folder), ["all of the model"]
            try:
                if kind == "promote":
                    overrides, names = promoted(resolved, breach.modules, folder)
                refusal = self._plan.refusal(overrides)
            except UserError as error:
                refusal = str(error)
            if refusal is not None:
                text = f"no fallback to {kind}: {refusal}"
                self._journal.add("refused", self._good_step, text, to=kind)
                continue
            text = f"fallback: {', '.join(names)} in FP32 from here on"
            self._journal.add("fallback", self._good_step, text, to=kind, overrides=overrides)
            return overrides
        return None

    def _end(self, code: int) -> int:
        fallback = self._journal.last("fallback")
        under = f" under the fallback to {fallback['to']}" if fallback else ""
        held = f"; the last checkpoint that passed is of step {self._good_step}: {self._good}"
        text = f"done{under}" if code == DONE else f"ended with exit code {code}{under}"
        if code == DONE and self._good_step != self._plan.resolved.config.run.steps:
            text += "; its last checkpoint was not checked"
        self._journal.add("end", self._good_step, text + held, exit_code=code)
        return code

    def _stop_run(self) -> None:
        assert self._run is not None
        with suppress(ProcessLookupError):
            self._run.send_signal(signal.SIGUSR1)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stop_requested = True
        if self._run is not None and self._run.poll() is None:
            log(f"{signal.Signals(number).name}: the run saves and ends; a second signal kills it")
            self._stop_run()


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another file system
        shutil.copy2(source, target)
