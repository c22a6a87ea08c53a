"""Rows of task classify (docs/data.md): one or two texts, or words, and their targets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from config.schema import DataSection
from data.sources.row_formats import BadRow, list_of, text_of

TASK_FORMATS = ("labelled", "tagged", "scored")


@dataclass(frozen=True)
class LabelledRow:
    """A row in the common form."""

    texts: tuple[str, ...]
    """One or two texts; for words, one text of words joined by spaces."""
    words: tuple[tuple[int, int], ...]
    """Character span (start, end) of each word of a tagged row; end is exclusive."""
    target: str | float | tuple[str, ...]
    """The label, the number, or the label of each word."""


def read_labelled(row: Mapping[str, Any], data: DataSection) -> LabelledRow:
    """A row in the common form, by data.format. Raises BadRow."""
    if data.format == "tagged":
        return _tagged(row, data)
    names = [data.text_field, *([data.text_pair_field] if data.text_pair_field is not None else [])]
    texts = tuple(text_of(row, name) for name in names)
    value = row.get(data.label_field)
    if value is None:
        raise BadRow(data.label_field, f"is missing or null; the row's fields are {', '.join(sorted(row))}")
    if data.format == "scored":
        return LabelledRow(texts, (), _number(value, data.label_field))
    return LabelledRow(texts, (), _label(value, data.label_field))


def _tagged(row: Mapping[str, Any], data: DataSection) -> LabelledRow:
    words, tags = (list_of(row, name) for name in (data.tokens_field, data.tags_field))
    if len(words) != len(tags):
        problem = f"has {len(tags)} labels for {len(words)} words in {data.tokens_field}; give one for each"
        raise BadRow(data.tags_field, problem)
    spans, start = [], 0
    for index, word in enumerate(words):
        if not isinstance(word, str) or not word.strip():
            raise BadRow(f"{data.tokens_field}[{index}]", "is empty" if word == "" else "is not a word")
        spans.append((start, start + len(word)))
        start += len(word) + 1
    labels = tuple(_label(tag, f"{data.tags_field}[{index}]") for index, tag in enumerate(tags))
    return LabelledRow((" ".join(words),), tuple(spans), labels)


def _label(value: Any, name: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) or (isinstance(value, str) and value):
        return str(value)
    fix = "; for numbers set classify.kind=regression" if isinstance(value, float) else ""
    raise BadRow(name, f"is {value!r:.40}, not a label: text, a whole number, or true or false{fix}")


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRow(name, f"is {value!r:.40}, not a finite number")
    return float(value)
