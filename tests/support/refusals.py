"""Calls that must not take what they are given."""

from collections.abc import Callable
from typing import Any

import pytest

from config.errors import UserError


def refused(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The one line of the UserError that a call ends with."""
    with pytest.raises(UserError) as caught:
        function(*arguments, **options)
    said = str(caught.value)
    assert "\n" not in said
    return said
