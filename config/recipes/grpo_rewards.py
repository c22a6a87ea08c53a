"""The checker of grpo.yaml: what an answer is worth, by the columns of its row."""


def repeats(completions, letter, **_):
    """The share of the first six characters that are the row's letter."""
    pairs = zip(completions, letter, strict=True)
    return [sum(character == wanted for character in said[:6]) / 6 for said, wanted in pairs]
