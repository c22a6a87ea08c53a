"""Replay accepts as the recorded step the same bits or, where sums have no fixed order, nearly the same sums."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs.launches import finish
from tools.replay import repeat

STEP: dict[str, Any] = {
    "step": 3,
    "loss": 2.5,
    "grad_norm": 1.25,
    "loss_scale": 1.0,
    "lr": 0.001,
    "applied": True,
    "sample_ids_sha256": "ab",
}


@pytest.mark.parametrize(
    ("changed", "allowed", "same"),
    [
        ({}, 0.0, True),
        ({"loss": 2.5000001}, 0.0, False),
        ({"loss": 2.5000001, "grad_norm": 1.26}, 0.01, True),
        ({"grad_norm": 1.3}, 0.01, False),
        ({"loss": float("nan")}, 0.01, False),
        ({"sample_ids_sha256": "cd"}, 0.01, False),
        ({"lr": 0.0010001}, 0.01, False),
    ],
)
def test_sums_alone_may_differ_where_they_have_no_order(changed: dict[str, Any], allowed: float, same: bool) -> None:
    said: list[str] = []
    bounds = dict.fromkeys(("loss", "grad_norm"), allowed) if allowed else {}
    assert repeat._compare(STEP | changed, STEP, said.append, allowed=bounds) is same
    assert ("two repeats" in said[0]) is (same and bool(changed))
    assert ("to the bit as recorded" in said[0]) is not bool(changed)


def test_a_replay_whose_sums_have_no_fixed_order_is_held_to_what_repeats_differ_by(
    finished: Path, tmp_path: Path
) -> None:
    """Rounded otherwise in each run, a step is nearly the recorded one, and a loss that is a tenth larger is not."""

    def noisy(run: Path, exit_code: int) -> str:
        job = ["python", "-m", "tests.support.jobs.noisy_replay", str(run), "--step", "6"]
        return finish(job, ranks=2, exit_code=exit_code)

    said = noisy(finished / "runs/it", 0)
    assert 1 <= said.count("once more, to see how far two repeats differ") <= 3
    assert said.count("10 times what two repeats differ by") == 2 and said.rstrip().endswith("\nreproduced"), said
    shutil.copytree(finished / "runs/it", tmp_path / "it")
    text = (tmp_path / "it/events.jsonl").read_text()
    [line] = [line for line in text.splitlines() if '"event":"step"' in line and '"step":5,' in line]
    loss = float(line.partition('"loss":')[2].partition(",")[0])
    other = line.replace(f'"loss":{loss!r}', f'"loss":{1.1 * loss!r}')
    (tmp_path / "it/events.jsonl").write_text(text.replace(line, other))
    said = noisy(tmp_path / "it", 3)
    assert said.count("once more") == 3
    assert f"recorded: loss {1.1 * loss!r}" in said and said.count("; recorded: ") == 1, said
    assert said.rstrip().endswith("not reproduced: see the steps marked above")
