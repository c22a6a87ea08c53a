"""Prompts in a file, and the reward of their answers, which processes of rewards import without torch."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.rows.jsonl import write_jsonl

WORDS = ("the", "a", "model", "loss", "rank", "step", "token", "mask", "weight", "value")


def divided(completion_ids: Sequence[Sequence[int]], scale: Sequence[float], **_: Any) -> list[float]:
    """A reward by token ids and a column."""
    return [sum(ids) % 7 / by for ids, by in zip(completion_ids, scale, strict=True)]


def even(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward that half of the groups of two have twice."""
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]


def even_alone(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
    """No reward for what `even` gives 0."""
    return [1.0 if sum(ids) % 2 == 0 else None for ids in completion_ids]


def write_prompts(path: Path, rows: int) -> Path:
    """Rows of a conversation to answer, and a column that the reward reads."""
    draw = random.Random(0)
    said = [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) for _ in range(rows)]
    asked = [[{"role": "user", "content": text}] for text in said]
    return write_jsonl(path, ({"prompt": prompt, "scale": 1.0 + n % 3} for n, prompt in enumerate(asked)))
