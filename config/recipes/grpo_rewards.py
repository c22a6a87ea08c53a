"""Reward function of grpo.yaml: scores an answer by the columns of its row."""


def repeats(completions, letter, **_):
    """Fraction of the first six characters that equal the row's letter."""
    pairs = zip(completions, letter, strict=True)
    return [sum(character == wanted for character in said[:6]) / 6 for said, wanted in pairs]
