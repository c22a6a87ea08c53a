"""Authenticated encryption of checkpoint files: AES-256-GCM in chunks, in the STREAM construction (Hoang, Reyhanitabar,
Rogaway and Vizar, CRYPTO 2015). docs/object-stores.md has the format, for other tools that read it.
"""

import io
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from config.errors import UserError
from training.checkpoint.key import Key
from training.checkpoint.manifest import Damaged

MAGIC = b"MNTSENC\x01"
CHUNK = 1 << 20
"""[bytes] Plain text per chunk."""
TAG = 16
HEADER = 52
_CACHED = 4  # chunks


class EncryptingStream(io.RawIOBase):
    """Encrypts what is written to it and passes it to `write`, a chunk at a time. Call `finish` at the end."""

    def __init__(self, key: Key, write: Callable[[memoryview], Any], *, chunk: int = CHUNK) -> None:
        """write: its buffer is reused after it returns. chunk: plain bytes in a chunk."""
        self._header = MAGIC + bytes.fromhex(key.id) + chunk.to_bytes(4, "big") + os.urandom(32)
        self._cipher, self._prefix = key.cipher(self._header)
        self._write, self._number = write, 0
        self._plain, self._filled = memoryview(bytearray(chunk)), 0
        self._sealed = memoryview(bytearray(chunk + TAG))
        write(memoryview(self._header))

    def write(self, data: Any) -> int:
        """Encrypt `data`; returns its size in bytes."""
        view = memoryview(data).cast("B")
        while len(view):
            if self._filled == len(self._plain):
                self._put(last=False)
            taken = min(len(view), len(self._plain) - self._filled)
            self._plain[self._filled : self._filled + taken] = view[:taken]
            self._filled += taken
            view = view[taken:]
        return memoryview(data).nbytes

    def finish(self) -> None:
        """Write the last chunk; without it the file cannot be read."""
        self._put(last=True)

    def _put(self, *, last: bool) -> None:
        nonce = _nonce(self._prefix, self._number, last)
        sealed = self._sealed[: self._filled + TAG]
        self._cipher.encrypt_into(nonce, self._plain[: self._filled], self._header, sealed)
        self._write(sealed)
        self._number, self._filled = self._number + 1, 0


class DecryptedFile(io.RawIOBase):
    """The plain bytes of an encrypted file, seekable; every chunk is authenticated before any of it is returned."""

    def __init__(self, path: Path, key: Key) -> None:
        """Raises UserError for another key, Damaged when the file was changed or truncated, OSError."""
        self.damage: Damaged | None = None
        """The error that a read raised; C readers may replace it with their own."""
        self._path, self._file = path, path.open("rb", buffering=0)
        try:
            header = self._file.read(HEADER)
            _require_key(path, header, key)
            self._chunk = int.from_bytes(header[16:20], "big")
            stored = os.fstat(self._file.fileno()).st_size - HEADER
            self._chunks = max(1, -(-stored // (self._chunk + TAG)))
            self._size = stored - self._chunks * TAG
            if self._chunk == 0 or self._size < (self._chunks - 1) * self._chunk:
                raise Damaged(f"{path.name}: is cut off, or its header was changed")
            self._header = header
            self._cipher, self._prefix = key.cipher(header)
            self._decrypted = lru_cache(_CACHED)(self._decrypt)
            self._at = 0
            self._decrypted(self._chunks - 1)  # its nonce says that it is the last one, so the file is not truncated
        except BaseException:
            self._file.close()
            raise

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self._size - self._at))
        done = 0
        while done < wanted:
            number, offset = divmod(self._at, self._chunk)
            plain = memoryview(self._decrypted(number))[offset : offset + wanted - done]
            view[done : done + len(plain)] = plain
            done += len(plain)
            self._at += len(plain)
        return done

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise ValueError(f"cannot seek to {start + offset}")
        self._at = start + offset
        return self._at

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def _decrypt(self, number: int) -> bytearray:
        from cryptography.exceptions import InvalidTag

        last = number == self._chunks - 1
        size = self._size - number * self._chunk if last else self._chunk
        self._file.seek(HEADER + number * (self._chunk + TAG))
        sealed, plain = bytearray(size + TAG), bytearray(size)
        filled = 0
        while filled < len(sealed) and (read := self._file.readinto(memoryview(sealed)[filled:])):
            filled += read
        try:
            self._cipher.decrypt_into(_nonce(self._prefix, number, last), sealed, self._header, plain)
        except InvalidTag:
            self.damage = Damaged(f"{self._path.name}: chunk {number} was changed, or the file is cut off")
            raise self.damage from None
        return plain


def open_file(path: Path, key: Key | None, *, plain: bool = False) -> BinaryIO:
    """Open a file of a checkpoint for reading, decrypted if it is encrypted. plain: with a key, accept a plain file,
    too, into which anyone with write access could have put anything. Raises UserError, and the errors of
    DecryptedFile."""
    needed = key_id_of(path)
    if needed is not None:
        if key is None:
            raise UserError(f"{path}: is encrypted with the key {needed}; give checkpoint.encryption_key")
        return cast(BinaryIO, DecryptedFile(path, key))
    if key is not None and not plain:
        raise UserError(
            f"{path}: is not encrypted while checkpoint.encryption_key is set, so anyone may have written it"
        )
    return path.open("rb")


def load(path: Path, key: Key | None, *, plain: bool = False, **options: Any) -> Any:
    """torch.load, with `options`, through `open_file`. May also raise Damaged."""
    with open_file(path, key, plain=plain) as file:
        try:
            return torch.load(file, **options)
        except Exception:
            damage = getattr(file, "damage", None)
            if damage is not None:
                raise damage from None
            raise


def key_id_of(path: Path) -> str | None:
    """The id of the key that a file needs if it starts like an encrypted one, of any version; else None. Raises
    OSError."""
    with path.open("rb") as file:
        header = file.read(HEADER)
    return header[8:16].hex() if header.startswith(MAGIC[:-1]) else None


def owner_only(path: str, flags: int) -> int:
    """An `opener` for `open`: only this user may read the file, even if it existed before."""
    handle = os.open(path, flags, 0o600)
    os.fchmod(handle, 0o600)
    return handle


def _nonce(prefix: bytes, number: int, last: bool) -> bytes:
    return prefix + number.to_bytes(4, "big") + (b"\x01" if last else b"\x00")


def _require_key(path: Path, header: bytes, key: Key) -> None:
    if len(header) < HEADER or not header.startswith(MAGIC[:-1]):
        raise Damaged(f"{path.name}: is not an encrypted file")
    if header[7] != MAGIC[7]:
        raise UserError(f"{path}: is encrypted in format {header[7]}; this version reads format {MAGIC[7]}")
    needed = header[8:16].hex()
    if needed != key.id:
        raise UserError(f"{path}: is encrypted with the key {needed}; checkpoint.encryption_key gives {key.id}")
