"""Metrics of predictions from their definitions, example by example."""

import math
from typing import Any


def expected_metrics(kind: str, predicted: list[Any], there: list[Any]) -> dict[str, float]:
    """The metrics of a classify.kind, for more than two labels."""
    pairs, count = list(zip(predicted, there, strict=True)), len(there)
    if kind == "regression":
        x, y = (sum(values) / count for values in (predicted, there))
        product = sum((a - x) * (b - y) for a, b in pairs)
        spread = sum((a - x) ** 2 for a in predicted) * sum((b - y) ** 2 for b in there)
        return {"pearson": product / math.sqrt(spread), "rmse": math.sqrt(sum((a - b) ** 2 for a, b in pairs) / count)}
    scores = []
    for label in sorted({*predicted, *there}):
        right, guessed, real = (
            sum(test) for test in zip(*((a == b == label, a == label, b == label) for a, b in pairs), strict=True)
        )
        precision, recall = right / guessed if guessed else 0.0, right / real if real else 0.0
        scores.append(2 * precision * recall / (precision + recall) if right else 0.0)
    return {
        "accuracy": sum(a == b for a, b in pairs) / count,
        "macro_f1": sum(scores) / len(scores),
        "matthews": matthews(pairs),
    }


def matthews(pairs: list[tuple[int, int]]) -> float:
    """The correlation of the two sides' indicator vectors, Gorodkin's equations (3) and (8)."""
    labels, count = sorted({label for pair in pairs for label in pair}), len(pairs)

    def covariance(left: int, right: int) -> float:
        total = 0.0
        for label in labels:
            means = [sum(pair[side] == label for pair in pairs) / count for side in (left, right)]
            total += sum(((p[left] == label) - means[0]) * ((p[right] == label) - means[1]) for p in pairs)
        return total

    spread = covariance(0, 0) * covariance(1, 1)
    return covariance(0, 1) / math.sqrt(spread) if spread else 0.0
