"""Write one rank's files of a checkpoint: hashed while they are written, and flushed to disk.

DeepSpeed's own writer is replaced during a save. It writes through torch.save without flushing, and when one rank's
disk is full that rank raises while the others wait at a barrier. Here a rank reports its failure afterwards, and the
state can be copied first, so that training continues while it is written.
"""

import copy
import hashlib
import io
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from training.checkpoint.encryption import EncryptingStream, owner_only
from training.checkpoint.inventory import leaves, tensors_of
from training.checkpoint.key import Key
from training.checkpoint.manifest import Tensors, Written, layout_of

_PARALLEL_FROM = 1 << 20


class HashedFile(io.RawIOBase):
    """A new file whose SHA-256 is that of the bytes in memory, so that it also exposes a disk that wrote others.
    torch's archive writer cannot handle an exception, so an error is kept until `finish` and later writes do
    nothing."""

    def __init__(self, path: Path, reached: Callable[[str], None], *, private: bool = False) -> None:
        """reached: called with "write" before every write, "flush" after the last. private: only this user may read it.
        Raises OSError."""
        self._file = open(path, "wb", buffering=0, opener=owner_only if private else None)  # noqa: SIM115
        self._digest = hashlib.sha256()
        self._hasher = ThreadPoolExecutor(max_workers=1)
        self._reached = reached
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._reached("write")
        if self.error is None:
            try:
                if len(view) < _PARALLEL_FROM:
                    self._digest.update(view)
                    self._write_all(view)
                else:  # both release the GIL, so they run in parallel
                    hashed = self._hasher.submit(self._digest.update, view)
                    self._write_all(view)
                    hashed.result()
                self.size += len(view)
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes

    def _write_all(self, view: memoryview) -> None:
        while len(view):
            view = view[self._file.write(view) :]

    def finish(self) -> str:
        """Flush and close; returns the SHA-256. Raises the OSError of an earlier write."""
        try:
            if self.error is not None:
                raise self.error
            self._reached("flush")
            os.fsync(self._file.fileno())
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that reading back reads the disk
        finally:
            self._file.close()
            self._hasher.shutdown()
        return self._digest.hexdigest()


class Files(TorchCheckpointEngine):
    """This rank's files of one checkpoint. Never raises OSError: `error` describes it in one line."""

    def __init__(
        self, folder: Path, *, rank: int, reached: Callable[[str], None], copied: bool, key: Key | None = None
    ) -> None:
        """copied: keep copies in host memory until `write_all`; else write at once. key: encrypts .pt files; only this
        user may then read any of the files."""
        super().__init__()
        self.name = "Mantissa"
        self.written: dict[str, Written] = {}
        """Written files by path inside the checkpoint."""
        self.layouts: dict[str, Tensors] = {}
        """The tensors of these files, by their layout."""
        self.error: str | None = None
        self.finite = True
        """Whether masters and moments are finite; if not, `error` names the first that is not."""
        self._folder, self._rank, self._reached = folder, rank, reached
        self._copied, self._key = copied, key
        self._queued: list[Callable[[], None]] = []

    def save(self, state_dict: Any, path: str | Path) -> None:
        state = host_copy(state_dict) if self._copied else state_dict
        self._queue(Path(path), lambda file: torch.save(state, file), state)

    def save_text(self, text: str, path: Path) -> None:
        self._queue(path, lambda file: file.write(text.encode()), None)

    def write_all(self) -> None:
        """Write the queued files, and free each copy when it is on disk."""
        while self._queued:
            self._queued.pop(0)()

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Called by DeepSpeed."""
        try:
            Path(path).mkdir(parents=True, exist_ok=exist_ok)
        except OSError as error:
            self._note(Path(path), error)

    def _queue(self, path: Path, write: Callable[[Any], Any], state: Any) -> None:
        self._queued.append(partial(self._write, path, write, state))
        if not self._copied:
            self.write_all()

    def _write(self, path: Path, write: Callable[[Any], Any], state: Any) -> None:
        if self.error is not None:
            return
        name = path.relative_to(self._folder).as_posix()
        if (bad := _first_bad(state)) is not None:
            self.error, self.finite = f"rank {self._rank}: {bad} of {name} is not finite", False
            return
        try:
            file = HashedFile(path, self._reached, private=self._key is not None)
            if self._key is not None and path.suffix == ".pt":
                stream = EncryptingStream(self._key, file.write)
                write(stream)
                stream.finish()
            else:
                write(file)
            digest = file.finish()
        except OSError as error:
            self._note(path, error)
            return
        tensors = tensors_of(state)
        layout = layout_of(tensors)
        self.written[name] = Written(digest, file.size, self._rank, layout)
        if tensors:
            self.layouts[layout] = tensors

    def _note(self, path: Path, error: OSError) -> None:
        inside = path.relative_to(self._folder).as_posix() if path.is_relative_to(self._folder) else str(path)
        self.error = self.error or f"rank {self._rank} cannot write {inside}: {error.strerror or error}"


def _first_bad(state: Any) -> str | None:
    """Name of the first FP32 tensor in a file of DeepSpeed's, buffers aside, that has a nan or inf."""
    buffers = {("module", name) for name in state["buffer_names"]} if "buffer_names" in (state or ()) else set()
    for name, tensor in leaves(state):
        wide = tensor.dtype == torch.float32 and tensor.numel() and tuple(name.split("/")) not in buffers
        if wide and not all(map(math.isfinite, torch.stack(tensor.detach().aminmax()).tolist())):
            return name
    return None


def host_copy(state: Any) -> Any:
    """A copy of nested dictionaries, lists and tuples, for which torch.save writes the same bytes, with its tensors in
    host memory; those inside other objects are copied on their own device."""
    storages: dict[int, torch.UntypedStorage] = {}
    memo: dict[int, Any] = {id(tensor): _on_host(tensor, storages) for _, tensor in leaves(state)}
    copied = copy.deepcopy(state, memo)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return copied


def _on_host(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    source = tensor.detach().untyped_storage()
    which = source._cdata  # identifies a storage in torch.save, also an empty one
    if which not in storages:
        # pinned, so that the copy is asynchronous; torch caches the memory for the next save
        pinned = tensor.device.type != "cpu"
        target = torch.empty(source.nbytes(), dtype=torch.uint8, pin_memory=pinned).untyped_storage()
        target.copy_(source, non_blocking=pinned)
        storages[which] = target
    view = torch.empty(0, dtype=tensor.dtype)
    view.set_(storages[which], tensor.storage_offset(), tensor.size(), tensor.stride())
    view.__dict__.update(tensor.__dict__)  # such as the ds_id that ZeRO-3 gives its flat groups
    return view.requires_grad_(tensor.requires_grad)
