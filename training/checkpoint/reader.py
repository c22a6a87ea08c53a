"""Read a checkpoint's .pt files: decrypted if they are encrypted, and without running code in them."""

import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16 import loss_scaler as deepspeed_scaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from config.errors import UserError, one_line
from config.schema import CheckpointSection
from precision.loss_scale import POLICIES
from training.checkpoint import encryption
from training.checkpoint.key import Key
from training.checkpoint.manifest import Damaged
from training.loss_scaler import LossScaler

ALLOWED: list[Callable | tuple[Callable, str]] = [
    ZeroStageEnum,
    fragment_address,
    LossScaler,
    *POLICIES,
    deepspeed_scaler.LossScaler,
    deepspeed_scaler.DynamicLossScaler,
]
"""Classes that a checkpoint's pickles may name, besides tensors and plain types."""


@dataclass(frozen=True)
class Opener:
    """The key to open files with, and whether plain files are accepted in spite of it."""

    key: Key | None = None
    accept_plain: bool = False

    @classmethod
    def of(cls, section: CheckpointSection) -> Self:
        """The opener for a run's config. Raises UserError if the configured place holds no key."""
        key = Key.from_setting(section.encryption_key) if section.encryption_key is not None else None
        return cls(key, section.accept_plain)

    def read(self, path: Path, *, map_location: Any = "cpu", mmap: bool = False) -> Any:
        """The content of a file. mmap: memory-map its tensors if there is no key. Raises UserError when it is missing,
        damaged, has another key, or refers to code that is not allowed."""
        try:
            with torch.serialization.safe_globals(ALLOWED):
                if mmap and self.key is None and encryption.key_id_of(path) is None:
                    return torch.load(path, map_location=map_location, mmap=True, weights_only=True)
                options = {"map_location": map_location, "weights_only": True}
                return encryption.load(path, self.key, plain=self.accept_plain, **options)
        except FileNotFoundError as error:
            raise UserError(f"{path}: is missing; the checkpoint is not complete") from error
        except Damaged as error:
            raise UserError(f"{path.parent}: {error}; use another checkpoint") from error
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            reason = f"cannot be read ({one_line(error, 120)}); use another checkpoint"
            if global_name := re.search(r"GLOBAL ([\w.]+)", str(error)):
                reason = f"refers to code that is not allowed in a checkpoint ({global_name[1]}); do not load it"
            raise UserError(f"{path}: {reason}") from error


PLAIN = Opener()


class Reader(TorchCheckpointEngine):
    """Replaces DeepSpeed's reader, which runs any code that a file names; installed only while loading."""

    def __init__(self, opener: Opener) -> None:
        super().__init__()
        self.name, self._opener = "Mantissa", opener

    def load(self, path: str, map_location: Any = None) -> Any:
        return self._opener.read(Path(path), map_location=map_location)
