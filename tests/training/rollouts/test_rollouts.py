"""The answers of a step: in one order whatever ranks sampled them, and in a file that is whole or none."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from training.rollouts.rollouts import Rollouts, interleaved, padded, path_of, read, write

GROUP, WIDTH = 2, 12


def rollouts_of(samples: list[int]) -> Rollouts:
    """For each prompt number n, n + 1 tokens and answers of n + 1 and n + 2 tokens that count up from n times 10."""
    answers = [10 * n + np.arange(n + 1 + k) for n in samples for k in range(GROUP)]
    tokens = padded(answers, WIDTH).reshape(-1, GROUP, WIDTH)
    return Rollouts(
        samples=np.array(samples, dtype=np.int64),
        prompts=padded([np.full(n + 1, n) for n in samples], WIDTH),
        prompt_lengths=np.array([n + 1 for n in samples], dtype=np.int64),
        answers=tokens,
        lengths=np.array([len(ids) for ids in answers], dtype=np.int64).reshape(-1, GROUP),
        ended=np.array([n % 2 == 0 for n in samples for _ in range(GROUP)], dtype=bool).reshape(-1, GROUP),
        sampler=-tokens.astype(np.float32),
        old=-tokens.astype(np.float32) - 0.5,
        rewards=np.array([[n, np.nan] for n in samples for _ in range(GROUP)]).reshape(-1, GROUP, 2),
        version="v",
        facts={"reward": 1.5},
        sources={"here:one": "0a"},
    )


def require_equal(one: Rollouts, other: Rollouts) -> None:
    for name, value in vars(one).items():
        np.testing.assert_equal(value, getattr(other, name))


def test_the_order_is_that_of_the_global_batch() -> None:
    whole, ranks = rollouts_of([4, 2, 0, 7, 1]), [rollouts_of([4, 0, 1]), rollouts_of([2, 7])]
    trimmed = {"prompts": 8, "answers": 9, "sampler": 9, "old": 9}  # to the longest
    cut = {name: getattr(whole, name)[..., :width] for name, width in trimmed.items()}
    require_equal(interleaved(ranks), replace(whole, **cut))
    assert not whole.answers[..., 9:].any() and not whole.prompts[:, 8:].any()
    require_equal(whole.of([0, 2, 4]), ranks[0])
    assert interleaved([rollouts_of([4]), rollouts_of([])]).samples.tolist() == [4]
    whole.put([1, 3], ranks[1])
    require_equal(whole, rollouts_of([4, 2, 0, 7, 1]))


def test_a_file_is_read_back_or_is_none(tmp_path: Path) -> None:
    path, written = path_of(tmp_path / "rollouts", 12), rollouts_of([3, 1])
    assert path.name == "step-000012.safetensors" and read(path) is None
    write(path, written, sampler="one 1.0")
    found = read(path)
    assert found is not None
    require_equal(found, written)
    content = path.read_bytes()
    for damaged in (content[:-9], content[:-1] + b"\1", content.replace(b"1.5", b"9.5")):
        path.write_bytes(damaged)
        assert read(path) is None
