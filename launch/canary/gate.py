"""The canary: `tools.parity` runs and judges the first steps of the whole run, and leaves their final state."""

import math
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

from config import json_text
from config.cli import CONFIG_ERROR, DIVERGED, DONE, PREEMPTED
from launch.canary.plan import Plan
from launch.canary.record import Journal
from launch.job import Job


def run_gate(plan: Plan, journal: Journal) -> int:
    """Run the canary beside its FP32 twin. Returns DONE if they agree and its checkpoint exists, else the exit code."""
    section, folder = plan.section, plan.folder / "gate"
    (folder / "parity.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "tools.parity", *plan.arguments, "--report", str(folder)]
    command += ["--processes", str(plan.ranks), "--keep-checkpoints"]
    if plan.launcher and section.ranks is None:
        command += ["--launch", shlex.join(plan.launcher)]
    started, job = time.monotonic(), Job([*command, *plan.first_steps, "checkpoint.at_end=true", *plan.bounds])
    left = math.inf if section.device_hours is None else max(0.0, section.device_hours - journal.spent())
    timer = threading.Timer(min(3600 * left / plan.ranks, threading.TIMEOUT_MAX), job.kill)
    timer.daemon = True
    timer.start()
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        job.kill()

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, stop)
    code = job.wait()
    timer.cancel()
    hours = (time.monotonic() - started) * plan.ranks / 3600
    found = json_text.object_in(folder / "parity.json")
    further: dict[str, Any] = {"device_hours": hours, "report": str(folder / "parity.md")}
    if stopped:
        text = f"{signal.Signals(stopped[0]).name}: the canary was ended without a verdict; nothing started"
        journal.add("gate", 0, text, verdict="none", device_hours=hours)
        return PREEMPTED
    if code < 0 and hours >= left:
        text = f"the canary took more than canary.device_hours = {section.device_hours:g}: no verdict, nothing started"
        journal.add("gate", 0, text, verdict="none", **further)
        return DIVERGED
    if not found:
        journal.add("gate", 0, f"the canary could not be judged (exit code {code}); nothing started", **further)
        return code if code > 0 else 1
    said, fields = shares(plan, found["conditions"])
    checks = f"{len(found['checks'])} checks against FP32 over {plan.steps} steps ({said}), {hours:.4f} device hours"
    further |= fields
    if found["failed"]:
        text = f"no parity: {', '.join(found['failed'])}; {checks}; nothing started, see {folder / 'parity.md'}"
        journal.add("gate", plan.steps, text, verdict="no parity", failed=found["failed"], **further)
        return DIVERGED
    if not (plan.first_checkpoint / "manifest.json").is_file():
        journal.add("gate", plan.steps, f"{plan.first_checkpoint} was not saved; nothing started", **further)
        return CONFIG_ERROR
    for other in plan.first_checkpoint.parent.glob("step-*"):
        if other != plan.first_checkpoint:
            shutil.rmtree(other, ignore_errors=True)
    where = {"judged": str(plan.first_checkpoint), **further}
    journal.add("gate", plan.steps, f"parity: {checks}", verdict="parity", **where)
    return DONE


def shares(plan: Plan, conditions: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The canary's share of the run and of an epoch: (text, fields of its event)."""
    share, tokens, epoch = plan.steps / plan.resolved.config.run.steps, conditions["tokens"], conditions["epoch_tokens"]
    of_epoch = tokens / epoch if epoch else None
    said = f"{100 * share:.3g}% of the run's, {tokens:,} tokens"
    said += "" if of_epoch is None else f", {100 * of_epoch:.3g}% of an epoch"
    return said, {"tokens": tokens, "share_of_run": share, "share_of_epoch": of_epoch}
