"""Mantissa and a plain DeepSpeed loop in turn: what is made of the seconds, and two real ranks that train both."""

import math
import re
import subprocess

import numpy as np
import pytest

from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.errors import UserError
from config.machine.processes import free_port
from lab.benchmark.overhead import estimate, median_ratio, ratio_of_sums, report_ratio, require_comparable
from tests.lab.benchmark import benchmark_cases
from tests.lab.benchmark.benchmark_cases import RECIPE
from tests.support.jobs.launches import BIN, LAUNCHERS, SMALL


def drifting(ratio: float, *, pairs: int, noise: float) -> np.ndarray:
    """Seconds of two loops on a machine whose speed drifts by a half; `ratio` is that of their tokens/s."""
    generator = np.random.default_rng(3)
    speed = 1.0 + 0.5 * np.sin(np.linspace(0, 7, pairs))
    bare, guarded = (speed * generator.lognormal(0.0, noise, size=pairs) for _ in range(2))
    return np.stack([bare, guarded / ratio], axis=1)


@pytest.mark.parametrize("statistic", [median_ratio, ratio_of_sums])
@pytest.mark.parametrize("ratio", [0.97, 1.0, 1.05])
def test_an_interval_holds_the_true_ratio_and_tells_a_hundredth_where_pairs_are_many(ratio, statistic) -> None:
    found, low, high = estimate(statistic, drifting(ratio, pairs=400, noise=0.05))
    assert low < ratio < high and low < found < high and high - low < 0.025
    _, few_low, few_high = estimate(statistic, drifting(ratio, pairs=20, noise=0.05))
    assert few_high - few_low > 2 * (high - low)


@pytest.mark.parametrize(
    ("distance", "ratio", "at_least", "code", "said"),
    [
        (1e-8, 0.97, None, 0, ""),
        (1e-8, 0.97, 0.96, 0, ""),
        (1e-8, 0.97, 0.99, 3, "the median is below 0.99 for certain"),
        (2e-4, 1.0, None, 3, "losses differ by 2.0e-04, more than 0.0001"),
        (math.nan, 1.0, None, 3, "losses differ by nan"),
    ],
)
def test_the_exit_code_is_a_gate(distance, ratio, at_least, code, said, capsys) -> None:
    seconds = drifting(ratio, pairs=400, noise=0.02)
    assert report_ratio(seconds, distance, steps=1, compute="fp32", at_least=at_least) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("deepspeed.config=ds_configs/zero3_fp32.json", "ZeRO stage = 3"),
        ("model.activation_checkpointing=ops", "model.activation_checkpointing = ops"),
        ("data.document_masking=true", "data.document_masking = True"),
    ],
)
def test_what_the_plain_loop_does_not_have_is_refused(override, said) -> None:
    with pytest.raises(UserError, match=said):
        require_comparable(read_command_line(["--config", RECIPE, override]))


def test_what_is_timed_is_done_in_every_second_block_and_nothing_else_is(solo) -> None:
    """Five warm-ups of a step each way, one of a block of two steps; the first step of a run is always observed."""
    [found] = solo.run(benchmark_cases.optional_work, pairs=2)
    same = {"seconds": (2, 2), "step": 14, "corruption": 0, "saves": 0}
    assert found == {
        "telemetry": same | {"telemetry": 7, "precision": 1},
        "adam": same | {"telemetry": 14, "precision": 1},
        "observation": same | {"telemetry": 0, "precision": 7},
        "save": same | {"step": 12, "telemetry": 0, "precision": 1, "saves": 3},
        "checks": same | {"step": 12, "telemetry": 0, "precision": 1},
    }


@pytest.mark.slow
def test_two_ranks_train_both_to_the_same_losses(tmp_path) -> None:
    port = free_port()
    launch = [part.format(port=port) for part in LAUNCHERS["torchrun"]]
    overrides = [*SMALL, f"data.cache_dir={tmp_path}", "schedule.warmup_steps=2", "tracking.wandb=disabled"]
    arguments = ["-m", "lab.benchmark.overhead", "--config", RECIPE, "--pairs", "3", "--steps", "2", *overrides]
    done = subprocess.run([BIN / launch[0], *launch[1:], *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    [distance] = re.findall(r"^losses +(\S+) apart at most", done.stdout, flags=re.MULTILINE)
    assert float(distance) < 1e-6 and "3 pairs of 2 steps" in done.stdout and "step 11/11" in done.stdout
