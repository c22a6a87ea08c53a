"""The key of encrypted checkpoints: read from the environment or a file, and kept out of logs and pickles."""

import hashlib
import os
import stat
from pathlib import Path
from typing import Any, Self

from config.errors import UserError
from config.extras import require
from config.secrets import decode_key, parse_key_setting


class Key:
    """A 256-bit key. Nothing that this class prints contains it."""

    def __init__(self, secret: bytes) -> None:
        """Raises ValueError unless `secret` has 32 bytes."""
        if len(secret) != 32:
            raise ValueError(f"a key has 32 bytes, not {len(secret)}")
        self._secret = secret

    @classmethod
    def from_setting(cls, setting: str, name: str = "checkpoint.encryption_key") -> Self:
        """The key that env:NAME or file:PATH holds, in hexadecimal or base64. Raises UserError, without the key."""
        require("cryptography", name)
        kind, source = parse_key_setting(setting, name)
        text = os.environ.get(source, "") if kind == "env" else _from_file(Path(source).expanduser(), name)
        if kind == "env" and not text:
            raise UserError(f"{name} = {setting}: there is no such variable in the environment of this process")
        secret = decode_key(text.strip())
        if secret is None:
            raise UserError(f"{name} = {setting}: holds no 256-bit key; make one with `openssl rand -hex 32`")
        return cls(secret)

    @property
    def id(self) -> str:
        """Identifies the key without revealing it: the first 8 bytes of its SHA-256, in hexadecimal."""
        return hashlib.sha256(self._secret).hexdigest()[:16]

    def cipher(self, header: bytes) -> tuple[Any, bytes]:
        """The cipher of the file with this header, and the first 7 bytes of its nonces."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        derived = HKDF(algorithm=hashes.SHA256(), length=39, salt=header[20:], info=header[:20]).derive(self._secret)
        return AESGCM(derived[:32]), derived[32:]

    def __repr__(self) -> str:
        return f"Key({self.id})"

    def __reduce__(self) -> Any:
        raise TypeError("a key is not pickled; give its setting to the other process")


def _from_file(path: Path, setting: str) -> str:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(1024)
    except OSError as error:
        raise UserError(f"{setting} = file:{path}: cannot be read: {error.strerror or error}") from error
    if stat.S_IMODE(mode) & 0o027:
        raise UserError(f"{setting} = file:{path}: others may read or change it; run `chmod 600 {path}`")
    return text.decode(errors="replace")
