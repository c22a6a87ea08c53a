"""What looks on while steps are made: spans and the profiler, either of them, or mostly neither.

The loop says once that it may be watched. The parts of a step are seen by replacing methods on the instance, so that
where nobody looks nothing is in the way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.parts import Parts
    from training.progress import Progress

Stage = tuple[Any, str, Callable[[], AbstractContextManager[Any]] | None, Callable[[Any], None] | None]
"""An object, the name of its method, what is entered around each call, and what is told the result."""


_NOBODY = nullcontext()


def watching(parts: Parts, progress: Progress) -> AbstractContextManager[Any]:
    """Around one attempted step; progress: before it."""
    if parts.tracing is None and parts.profiling is None:
        return _NOBODY
    stack = ExitStack()
    if parts.profiling is not None:
        stack.enter_context(parts.profiling.step(progress.step + 1))
    if parts.tracing is not None:
        stack.enter_context(parts.tracing.step(progress))
    return stack


def stop_watching(parts: Parts) -> None:
    """Write what there is of a profile and send the last spans, for at most a few seconds."""
    if parts.profiling is not None:
        parts.profiling.close()
    if parts.tracing is not None:
        parts.tracing.close()


def follow(stages: Sequence[Stage]) -> Callable[[], None]:
    """Replace the methods; the function that is returned puts the old ones back."""
    before = [(target, name, vars(target).get(name)) for target, name, _, _ in stages]
    for target, name, around, after in stages:
        setattr(target, name, _followed(getattr(target, name), around, after))

    def undo() -> None:
        for target, name, own in reversed(before):
            if own is None:
                delattr(target, name)
            else:
                setattr(target, name, own)

    return undo


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
