"""Rewards of answers, by functions that run in processes of their own, group by group, each with a time limit.

An exception, a time-out, a value that is no finite number or a process that dies gives no reward (NaN), and is counted:
no function ends the run, or makes it wait for longer than `grpo.reward_seconds`.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from threading import Timer
from typing import Any

import numpy as np

from config.cli import REPOSITORY
from config.errors import UserError
from config.schema import GrpoSection

_START_SECONDS = 60.0
"""Time for a new process to import the module of a function."""


class _Worker:
    """A process of reward_worker.py, started anew when it did not answer."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a request; {"error": why} where there is none in time."""
        if self._process is None:
            command, pipe = [sys.executable, str(REPOSITORY / "training/rollouts/reward_worker.py")], subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
            found = self.ask({"function": request["function"]}, _START_SECONDS)  # its import is not on the clock
            if self._process is None:
                return found
        process, started = self._process, time.monotonic()
        assert process.stdin is not None and process.stdout is not None
        timer = Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(process.stdout.readline())
            return answer
        except (OSError, ValueError):
            late = time.monotonic() - started >= seconds
            timer.cancel()
            self.close()
            return {"error": "no answer in time" if late else f"the process ended with code {process.returncode}"}
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the process and whatever its functions started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None


class Rewards:
    """The functions of `grpo.rewards`."""

    def __init__(self, section: GrpoSection) -> None:
        """Raises UserError for a function that cannot be loaded."""
        self._section = section
        self.names = section.rewards
        self.weights = np.array(section.reward_weights or [1.0] * len(self.names))
        self.problems: Counter[str] = Counter()
        """Why answers got no reward, how often."""
        self._workers: SimpleQueue[_Worker] = SimpleQueue()
        for _ in range(section.reward_workers):
            self._workers.put(_Worker())
        self._pool = ThreadPoolExecutor(section.reward_workers, thread_name_prefix="rewards")
        self.sources = {name: self._loaded(name) for name in self.names}
        """sha256 of the file of each function."""

    def _loaded(self, name: str) -> str:
        found = self._asked({"function": name}, _START_SECONDS)
        if "error" in found:
            self.close()
            fix = "give module:function, or exact_match, regex, json_schema or length"
            raise UserError(f"grpo.rewards = {name}: cannot be loaded ({found['error']}); {fix}")
        return str(found["sha256"])

    def of(self, groups: Sequence[dict[str, Any]]) -> tuple[np.ndarray, list[Any]]:
        """(answers, functions) float64, NaN for none; and what each function was given with each answer, as
        `reward_worker.seen` in its process has it, or None. groups: the arguments for the answers to each prompt."""
        asked = [(name, group) for name in self.names for group in groups]
        found = [pair for part in self._pool.map(self._of_group, asked) for pair in part]
        count = sum(len(group["completions"]) for group in groups)
        values = np.array([value for value, _ in found], dtype=np.float64).reshape(len(self.names), count)
        return values.T, [given for _, given in found]

    def total(self, rewards: np.ndarray) -> np.ndarray:
        """(..., functions) -> (...): weighted sum over the functions that gave one; NaN where none did."""
        found = np.nansum(rewards * self.weights, axis=-1)
        return np.where(np.isnan(rewards).all(-1), np.nan, found)

    def _of_group(self, asked: tuple[str, dict[str, Any]]) -> list[tuple[float, Any]]:
        name, arguments = asked
        found = self._asked({"function": name, "arguments": arguments}, self._section.reward_seconds)
        if "error" in found:
            self.problems[f"{name}: {found['error']}"] += 1
            return [(math.nan, None)] * len(arguments["completions"])
        values = (math.nan if value is None or not math.isfinite(value) else value for value in found["rewards"])
        return list(zip(values, found["seen"], strict=True))

    def _asked(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        worker = self._workers.get()
        try:
            return worker.ask(request, seconds)
        finally:
            self._workers.put(worker)

    def close(self) -> None:
        """End all processes."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        while not self._workers.empty():
            with suppress(OSError):
                self._workers.get().close()
