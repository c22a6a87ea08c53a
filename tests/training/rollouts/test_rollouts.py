"""The answers of a step, their rewards, whose failures end nothing, and the distance of sampler and trainer."""

import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from config.errors import UserError
from config.json_text import json_sha256
from config.schema import DataSection, GrpoSection
from data.array_file import read_arrays, write_arrays
from data.corpora.rollouts import Rollouts, interleaved, padded, path_of, read, write
from data.rows.rewards import SHIPPED, Rewards
from precision.sampler_gap import FLOOR, measure
from training.rollouts.batches import RolloutBatches

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
    written.old[~written.mask] = 0.0
    write(path, written, sampler="one 1.0")
    found = read(path)
    assert found is not None
    require_equal(found, interleaved([written]))  # without what is padding in all rows
    tokens, asked = int(written.lengths.sum()), int(written.prompt_lengths.sum())
    held = {name: values.nbytes for name, values in (read_arrays(path) or ({}, {}))[0].items()}
    assert held["answers"] == held["sampler"] == held["old"] == 4 * tokens and held["prompts"] == 4 * asked
    older = {name: values for name, values in vars(written).items() if isinstance(values, np.ndarray)}
    write_arrays(
        tmp_path / "older", older, {"version": "v", "facts": '{"reward": 1.5}', "rewards": '{"here:one": "0a"}'}
    )
    assert (padded_then := read(tmp_path / "older")) is not None
    require_equal(padded_then, written)
    content = path.read_bytes()
    for damaged in (content[:-9], content[:-1] + b"\1", content.replace(b"1.5", b"9.5")):
        path.write_bytes(damaged)
        assert read(path) is None


def test_old_answers_are_deleted_unless_a_resume_repeats_their_step(tmp_path: Path) -> None:
    """Checkpoints that `checkpoint.keep_every` holds for ever, and those beyond a step that a run went back to, keep
    none."""
    batches: Any = RolloutBatches.__new__(RolloutBatches)
    batches._checkpoints = 2

    def kept(step: int, *checkpoints: int, newest: int = 3, updates: int = 1) -> list[int]:
        shutil.rmtree(tmp_path, ignore_errors=True)
        (tmp_path / "rollouts").mkdir(parents=True)
        for at in range(1, step, updates):
            path_of(tmp_path / "rollouts", at).touch()
        for at in checkpoints:
            (tmp_path / f"checkpoints/step-{at}").mkdir(parents=True)
        batches._section = GrpoSection(keep_rollouts=newest, updates=updates)
        batches._prune(tmp_path / "rollouts", step)
        found = sorted(int(path.stem[5:]) for path in (tmp_path / "rollouts").iterdir())
        assert [at for at in found if at <= 10] == list(range(1, 11, updates))
        return [at for at in found if at > 10]

    every = list(range(11, 40))
    assert kept(40) == every, "the seed is the only thing to start from"
    assert kept(40, 15, 20, 30, 35) == list(range(30, 40)), "the answers before those of step 31 tell the usual gap"
    assert kept(40, 15, 20, 30, 35, newest=15) == list(range(26, 40))
    assert kept(40, 15, 20, 30, 35, newest=0) == every
    assert kept(40, 20, 30, 45, 50) == list(range(20, 40))
    assert kept(41, 15, 30, 34, updates=4) == [25, 29, 33, 37], "step 31 is the third of those from 29 on"


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

async def waits(completions, **_):
    return [float(len(said)) for said in completions]
"""
ASKED = [{"role": "user", "content": "2+2?"}]
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
    rows = [json_sha256({"letter": letter, "answer": "b"}) for letter in "aaabbb"]
    said = [pair for group in groups for pair in zip(group["completion_ids"], group["completions"], strict=True)]
    for name, by_answer in zip(rewards.names, given, strict=True):
        assert [saw for _, saw in by_answer] == [
            (name, row, json_sha256(pair)) for row, pair in zip(rows, said, strict=True)
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
    assert rewards.problems == {f"{own}:{name}: {problem}"}
    assert rewards.of([]) == [[]] and not rewards.problems  # the texts, which may quote answers, are not kept


def test_a_function_that_hangs_costs_its_group_and_its_time_alone(own: Path, opened: list[Rewards]) -> None:
    rewards, started = rewards_of(opened, f"{own}:hangs", reward_seconds=1.0), time.monotonic()
    for _ in range(2):
        found = values_of(rewards, GROUPS)[:, 0]
        assert found[:3].tolist() == [1.0] * 3 and np.isnan(found[3:]).all()
    assert time.monotonic() - started < 30
    assert rewards.problems == {f"{own}:hangs: no answer in time"}


def test_values_that_are_no_finite_numbers_are_none(own: Path, opened: list[Rewards]) -> None:
    rewards = rewards_of(opened, f"{own}:odd", "length", reward_options={})
    found = values_of(rewards, [{**GROUPS[0], "longest": [10] * 3, "slack": [2] * 3}])
    assert found[:, 1].tolist() == [0.0, -0.5, -1.0]
    assert [math.isnan(value) for value in found[:, 0]] == [True, True, False]
    assert rewards.total(found).tolist() == [0.0, -0.5, 1.0]  # of the functions that gave one


def test_functions_of_one_name_are_told_apart_by_their_modules(own: Path, opened: list[Rewards]) -> None:
    other = own.with_name("other.py")
    other.write_text(OWN, encoding="utf-8")
    rewards = rewards_of(opened, f"{own}:share", f"{other}:share", f"{own}:waits", "length")
    assert rewards.labels == ["own.share", "other.share", "waits", "length"]


def test_a_coroutine_is_waited_for(own: Path, opened: list[Rewards]) -> None:
    assert values_of(rewards_of(opened, f"{own}:waits"), GROUPS)[:, 0].tolist() == [3.0, 3.0, 1.0] * 2


def test_another_file_of_the_same_name_is_refused(own: Path, opened: list[Rewards], tmp_path: Path) -> None:
    other = tmp_path / "further" / own.name
    other.parent.mkdir()
    other.write_text("def share(completions, **_):\n    return [7.0] * len(completions)\n", encoding="utf-8")
    assert values_of(rewards_of(opened, f"{other}:share"), GROUPS)[:, 0].tolist() == [7.0] * 6
    with pytest.raises(UserError, match=f"cannot be loaded .*{own} is a module of the same name; rename the file"):
        rewards_of(opened, f"{own}:share", f"{other}:share")


@pytest.mark.parametrize(
    ("row", "prompts"),
    [
        ({"prompt": "a", "completion": "b", "completions": ["c"], "completion_ids": [1]}, "a"),
        ({"prompt": ASKED}, ASKED),
        ({"messages": [*ASKED, {"role": "assistant", "content": "4"}]}, ASKED),
        ({"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}, ASKED),
    ],
)
def test_a_function_gets_the_prompt_that_the_model_gets(row: dict[str, Any], prompts: Any) -> None:
    """Without the answer that is no part of it, and without columns of the names that answers have."""
    batches: Any = SimpleNamespace(_section=GrpoSection(reward_options={"of all": 1}), _data=DataSection())
    kept = {name: row[name] for name in row.keys() & {"messages", "conversations"}}
    assert RolloutBatches._columns(batches, {**row, "answer": 4}) == {
        **kept,
        "of all": 1,
        "answer": 4,
        "prompts": prompts,
    }


@pytest.mark.parametrize(
    ("gap", "made_by", "head", "outdated"),
    [
        (1.5, "ab12", " lm_head fp32", True),  # also those that a resumed run finds in a file
        (0.5, "ab12", " lm_head fp32", False),
        (1.5, "ab12 lm_head fp32", " lm_head fp32", False),  # or each update would sample anew
        (1.5, "ab12", "", False),
        (0.5, "ab12 lm_head fp32", "", False),  # after a demotion
    ],
)
def test_answers_with_a_gap_are_replaced_after_a_promotion(gap: float, made_by: str, head: str, outdated: bool) -> None:
    batches: Any = SimpleNamespace(_remedies=SimpleNamespace(head=head))
    found: Any = SimpleNamespace(facts={"gap/of_bound": gap}, version=made_by)
    assert RolloutBatches._outdated(batches, found) is outdated


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
    odd = ["0.5", "NaN", "-Infinity", "[" * 10_000, "1e999"]
    assert SHIPPED["json_schema"](completions=odd, schema=[{"multipleOf": 0.5}] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]


PROMPTS, TOKENS = 16, 96


def gap_of(apart: np.ndarray, own: np.ndarray, before: dict[str, float] | None = None) -> dict[str, float]:
    """The gap over a step's prompts (PROMPTS, TOKENS), beside the trainer's distance from itself."""
    mask = np.ones((len(apart), 1, apart.shape[1]), bool)
    return measure(apart[:, None], mask, [[own * 0.5, own, own]], 3.0, before or {})


def test_the_estimates_are_those_of_the_definition() -> None:
    apart = np.random.default_rng(0).normal(0.01, 0.1, (PROMPTS, TOKENS))
    found = gap_of(apart, apart[0] * 2)
    assert found["gap/k1"] == pytest.approx(-apart.mean())
    assert found["gap/k3"] == pytest.approx((np.exp(apart) - 1 - apart).mean())
    assert found["gap/largest"] == pytest.approx(np.abs(apart).max())
    assert found["gap/one_sided"] == pytest.approx(abs(apart.mean()) / np.abs(apart).mean())
    assert found["gap/outside"] == pytest.approx((np.abs(np.exp(apart) - 1) > 0.1).mean())
    wide = 2 * apart[0]
    assert found["gap/self_k3"] == pytest.approx((np.exp(wide) - 1 - wide).mean())


@pytest.mark.parametrize("size", [1e-7, 1e-5, 3e-3, 0.04])
def test_two_hundred_sound_steps_of_any_dtype_are_within_the_bounds(size: float) -> None:
    """Tokens of a prompt are alike, as of a tiny model: their differences are drawn once for 8 of them."""
    draw, found, largest = np.random.default_rng(1), dict[str, float](), 0.0
    for _ in range(200):
        apart = draw.normal(0, size, (PROMPTS, TOKENS // 8)).repeat(8, axis=1)
        own = draw.normal(0, size, 64)
        found = gap_of(apart, own, found)
        largest = max(largest, found["gap/of_bound"])
    assert largest < 1


@pytest.mark.parametrize("prompts", [1, PROMPTS])
def test_a_distance_whose_square_is_not_finite_is_beyond(prompts: int) -> None:
    apart = np.zeros((prompts, TOKENS))
    apart[0, :2] = 800.0, -800.0
    assert gap_of(apart, np.full(64, 0.01))["gap/of_bound"] > 1e3


def test_a_larger_distance_and_one_that_is_one_sided_are_beyond() -> None:
    draw = np.random.default_rng(2)
    own, apart = draw.normal(0, 0.04, 64), draw.normal(0, 0.04, (PROMPTS, TOKENS))
    assert gap_of(2.2 * apart, own)["gap/of_bound"] > 1
    assert gap_of(np.abs(apart), own)["gap/of_bound"] > 1
    assert gap_of(-np.abs(apart), own)["gap/of_bound"] > 1


def test_few_prompts_that_lean_to_one_side_by_chance_are_within_the_bounds() -> None:
    """Tokens of a prompt are alike: their differences are drawn once for each of 4, as in a step of 64 answers."""
    draw, own = np.random.default_rng(4), np.random.default_rng(5).normal(0, 0.08, 64)
    found = [gap_of(draw.normal(0, 0.04, (4, 1)).repeat(16, axis=1), own)["gap/of_bound"] for _ in range(2000)]
    assert np.mean(np.array(found) > 1) < 0.003
    assert gap_of(draw.normal(-0.1, 0.01, (4, 16)), own)["gap/of_bound"] > 1
    assert gap_of(draw.normal(-0.04, 0.0, (1, 16)), own)["gap/one_sided"] == 1 and gap_of(own[None], own)


def test_noise_in_the_trainer_alone_does_not_hide_itself() -> None:
    """Dropout in its log-probabilities puts the trainer as far from itself as from the sampler."""
    draw = np.random.default_rng(3)
    noise, rounding = draw.normal(0, 0.04, 64), draw.normal(0, 0.001, 64)
    apart = draw.normal(0, 0.04, (PROMPTS, 1, TOKENS))
    found = measure(apart, np.ones_like(apart, bool), [[noise, noise, rounding]], 3.0, {})
    assert found["gap/of_bound"] > 1


def test_exact_agreement_is_none() -> None:
    found = gap_of(np.zeros((PROMPTS, TOKENS)), np.zeros(8))
    assert found["gap/of_bound"] == found["gap/one_sided"] == 0 and found["gap/self_k3"] == FLOOR


def test_quarters_are_those_of_each_answer() -> None:
    apart = np.array([[[0.0, 0.0, 0.1, 0.2], [0.1, 9.0, 9.0, 9.0]]])
    mask = np.arange(4) < np.array([[[4], [1]]])
    found = measure(apart, mask, [[apart[0, 0]] * 3], 3.0, {})
    k3 = [np.expm1(d) - d for d in (0.1, 0.1, 0.2)]
    quarters = [found[f"gap/k3_quarter_{number}"] for number in range(1, 5)]
    assert quarters == pytest.approx([k3[0] / 2, 0.0, k3[1], k3[2]])
