"""The counters that an exact resume needs."""

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True)
class Progress:
    """Counters of a run, equal on all ranks; checkpoints have them as a dictionary."""

    step: int = 0
    """Optimizer steps attempted."""
    applied: int = 0
    """Steps that changed the weights. The learning rate follows these."""
    skipped: int = 0
    consecutive_skips: int = 0
    """Skipped steps since the last applied one."""
    tokens: int = 0
    """Tokens of all attempted steps, over all ranks."""
    position: int = 0
    """Global batches taken from the data order."""

    def after(self, *, tokens: int, applied: bool) -> Self:
        """The counters after one more attempted step on `tokens` global tokens."""
        return replace(
            self,
            step=self.step + 1,
            applied=self.applied + applied,
            skipped=self.skipped + (not applied),
            consecutive_skips=0 if applied else self.consecutive_skips + 1,
            tokens=self.tokens + tokens,
            position=self.position + 1,
        )


START = Progress()
