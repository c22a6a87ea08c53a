"""The counters that an exact resume needs."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Self


@dataclass(frozen=True)
class Progress:
    """Counters of a run, equal on all ranks."""

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

    def state_dict(self) -> dict[str, int]:
        """Plain integers, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Self:
        """The inverse of `state_dict`."""
        return cls(**state)


START = Progress()
