"""Reward functions: those that ship, and what fails in one's own gives no reward, is counted, and ends nothing."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config.errors import UserError
from config.schema import GrpoSection
from training.rollouts.rewards import SHIPPED, Rewards, digest

OWN = """
import multiprocessing, os, sys, time

def share(completions, letter, **_):
    print("not an answer")
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join()
    return [said.count(wanted) / len(said) for said, wanted in zip(completions, letter)]

def fails(completions, **_):
    raise RuntimeError("broken checker")

def hangs(completions, letter, **_):
    time.sleep(60 if letter[0] == "b" else 0)
    return [1.0] * len(completions)

def dies(completions, **_):
    os._exit(3)

def odd(completions, **_):
    return [None, float("nan"), 2]

def short(completions, **_):
    return [1.0]
"""
GROUPS = [
    {"completions": ["aab", "bbb", "a"], "completion_ids": [[1] * 8, [1] * 9, [1] * 20], "letter": ["a"] * 3},
    {"completions": ["aab", "bbb", "b"], "completion_ids": [[2], [3], [4]], "letter": ["b"] * 3},
]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN, encoding="utf-8")
    return path


@pytest.fixture
def opened() -> Iterator[list[Rewards]]:
    found: list[Rewards] = []
    yield found
    for rewards in found:
        rewards.close()


def rewards_of(opened: list[Rewards], *names: str, **options: Any) -> Rewards:
    opened.append(Rewards(GrpoSection(rewards=names, **{"reward_seconds": 5.0, **options})))
    return opened[-1]


def values_of(rewards: Rewards, groups: list[dict[str, Any]]) -> np.ndarray:
    """(answers, functions)"""
    return np.array([[value for value, _ in own] for own in rewards.of(groups)]).T


def test_each_answer_is_rewarded_by_its_own_row(own: Path, opened: list[Rewards]) -> None:
    rewards = rewards_of(opened, f"{own}:share", "exact_match", reward_weights=(1.0, 2.0))
    groups = [group | {"answer": ["b"] * 3} for group in GROUPS]
    given = rewards.of(groups)
    rows = [digest({"letter": letter, "answer": "b"}) for letter in "aaabbb"]
    said = [pair for group in groups for pair in zip(group["completion_ids"], group["completions"], strict=True)]
    for name, by_answer in zip(rewards.names, given, strict=True):
        assert [saw for _, saw in by_answer] == [
            (name, row, digest(pair)) for row, pair in zip(rows, said, strict=True)
        ]
    found = values_of(rewards, groups)
    assert found.T.tolist() == [pytest.approx([2 / 3, 0, 1, 1 / 3, 1, 1]), [0, 0, 0, 0, 0, 1]]
    assert rewards.total(found).tolist() == pytest.approx([2 / 3, 0, 1, 1 / 3, 1, 3])
    assert not rewards.problems and len(rewards.sources[f"{own}:share"]) == 64
    other = rewards_of(opened, f"{own}:share", reward_options={"letter": "b"})
    assert other.sources[f"{own}:share"] != rewards.sources[f"{own}:share"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("fails", "RuntimeError: broken checker"),
        ("dies", "a worker process ended with exit code 3"),
        ("short", "ValueError: returned 1 rewards for 3 completions"),
    ],
)
def test_a_function_that_fails_gives_no_reward(own: Path, opened: list[Rewards], name: str, problem: str) -> None:
    rewards = rewards_of(opened, f"{own}:{name}")
    [given] = rewards.of(GROUPS)
    assert len(given) == 6 and all(math.isnan(value) and saw is None for value, saw in given)
    assert np.isnan(rewards.total(np.full((6, 1), np.nan))).all()
    assert rewards.problems == {f"{own}:{name}: {problem}": 2}


def test_a_function_that_hangs_costs_its_group_and_its_time_alone(own: Path, opened: list[Rewards]) -> None:
    rewards, started = rewards_of(opened, f"{own}:hangs", reward_seconds=1.0), time.monotonic()
    for _ in range(2):
        found = values_of(rewards, GROUPS)[:, 0]
        assert found[:3].tolist() == [1.0] * 3 and np.isnan(found[3:]).all()
    assert time.monotonic() - started < 30
    assert rewards.problems == {f"{own}:hangs: no answer in time": 2}


def test_values_that_are_no_finite_numbers_are_none(own: Path, opened: list[Rewards]) -> None:
    rewards = rewards_of(opened, f"{own}:odd", "length", reward_options={})
    found = values_of(rewards, [{**GROUPS[0], "longest": [10] * 3, "slack": [2] * 3}])
    assert found[:, 1].tolist() == [0.0, -0.5, -1.0]
    assert [math.isnan(value) for value in found[:, 0]] == [True, True, False]
    assert rewards.total(found).tolist() == [0.0, -0.5, 1.0]  # of the functions that gave one


@pytest.mark.parametrize("name", ["nowhere", "no_module:here", "json:no_function"])
def test_a_function_that_cannot_be_loaded_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(UserError, match=f"grpo.rewards = {name}: cannot be loaded"):
        Rewards(GrpoSection(rewards=(name,)))


def test_the_functions_that_ship() -> None:
    chat = [[{"role": "assistant", "content": " 42\n"}]]
    assert SHIPPED["exact_match"](completions=[" 42 ", "43"], answer=[42, "42"]) == [1.0, 0.0]
    assert SHIPPED["exact_match"](completions=chat, answer=["42"], other=[1]) == [1.0]
    assert SHIPPED["regex"](completions=["a1", "a", "b"], regex=[r"\d$", r"\d$", None]) == [1.0, 0.0, None]
    schema = {"type": "object", "required": ["x"], "properties": {"x": {"type": "integer"}}}
    said = ['{"x": 1}', '{"x": "1"}', "{x}", "{}"]
    assert SHIPPED["json_schema"](completions=said, schema=[schema] * 4) == [1.0, 0.0, 0.0, 0.0]
