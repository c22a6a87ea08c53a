"""Prompts in a file, and the reward of their answers, which processes of rewards import without torch."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORDS = ("the", "a", "model", "loss", "rank", "step", "token", "mask", "weight", "value")


def divided(completion_ids: Sequence[Sequence[int]], scale: Sequence[float], **_: Any) -> list[float]:
    """A reward by token ids and a column."""
    return [sum(ids) % 7 / by for ids, by in zip(completion_ids, scale, strict=True)]


def even(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward that half of the groups of two have twice."""
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]


def write_prompts(path: Path, rows: int) -> Path:
    """Rows of a conversation to answer, and a column that the reward reads."""
    draw = random.Random(0)
    said = [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) for _ in range(rows)]
    lines = [
        json.dumps({"prompt": [{"role": "user", "content": text}], "scale": 1.0 + n % 3}) for n, text in enumerate(said)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
