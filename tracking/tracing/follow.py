"""Run code around methods by replacing them on an instance or a class; methods not followed cost nothing."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

Stage = tuple[Any, str, Callable[[], AbstractContextManager[Any]] | None, Callable[[Any], None] | None]
"""An object or class, the name of its method, a context manager for each call, and a callback with its result."""


def follow(stages: Sequence[Stage]) -> Callable[[], None]:
    """Replace the methods. Returns a function that restores them."""
    with ExitStack() as stack:
        for target, name, around, after in stages:
            stack.enter_context(patch.object(target, name, _followed(getattr(target, name), around, after)))
        return stack.pop_all().close


def _followed(
    method: Callable[..., Any],
    around: Callable[[], AbstractContextManager[Any]] | None,
    after: Callable[[Any], None] | None,
) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with around() if around is not None else nullcontext():
            result = method(*args, **kwargs)
        if after is not None:
            after(result)
        return result

    return call
