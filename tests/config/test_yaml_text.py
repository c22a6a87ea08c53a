"""YAML 1.2 scalars, repeated keys, and errors of one line."""

from typing import Any

import pytest

from config import yaml_text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-2.", -2.0),
        ("1_000_000", 1_000_000),
        *((text, text) for text in ("off", "yes", "1:30", "007", "2024-01-01", "e5", "1e")),
        ("", None),
        ("~", None),
        ("True", True),
        ("'1'", "1"),
    ],
)
def test_scalars(text: str, value: Any) -> None:
    found = yaml_text.parse(text)
    assert (found, type(found)) == (value, type(value))


def test_a_repeated_key_is_an_error_and_a_merge_is_not() -> None:
    with pytest.raises(ValueError, match="line 2: the key a is a duplicate .first on line 1."):
        yaml_text.parse("a: 1\na: 2\n")
    assert yaml_text.parse("base: &b {x: 1, y: 2}\nmine: {<<: *b, y: 3}\n")["mine"] == {"x": 1, "y": 3}


@pytest.mark.parametrize("text", ["[1", "a: b: c", "\t- 1", "*nowhere", "{a: 1", '"open', "\x00"])
def test_bad_yaml_is_a_one_line_value_error(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        yaml_text.parse(text)
    assert "\n" not in str(caught.value)
