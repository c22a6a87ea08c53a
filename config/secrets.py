"""Refuses credentials and keys in the config, which run folders and trackers record."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from typing import Any

from config.errors import UserError

ADVICE = (
    "keep credentials in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, "
    "AZURE_STORAGE_CONNECTION_STRING), in a profile, or give the machine a role"
)
WITH_PASSWORD = re.compile(r"://[^/@\s]*@")
_SECRET_NAMES = re.compile(
    r"secret|token|passw|pwd|credential|connectionstring|privatekey|accesskey|accountkey|apikey|customerkey|^key$|^sas"
)
_NO_SECRETS = {"ssekmskeyid", "bucketkeyenabled", "ssecustomerkeymd5"}
# Values of gcsfs's `token` that are not credentials: the name of a method or of a file.
_NO_TOKENS = re.compile(r"google_default|cache|anon|browser|cloud|.*\.json")


def refuse_secrets(url: str, options: Mapping[str, Any]) -> None:
    """Raises UserError naming the key, never the value, if the URL or an option looks like a credential."""
    if WITH_PASSWORD.search(url):
        raise UserError(f"checkpoint.dir: holds a user or password before the @; take it out and {ADVICE}")
    for path, value in _leaves(options, "checkpoint.storage_options"):
        name = re.sub(r"[^a-z0-9]", "", path.rpartition(".")[2].lower())
        looks_secret = _SECRET_NAMES.search(name) and name not in _NO_SECRETS and not _NO_TOKENS.fullmatch(str(value))
        if (looks_secret and value not in (None, "", False)) or WITH_PASSWORD.search(str(value)):
            raise UserError(f"{path}: looks like a credential and would be recorded; take it out and {ADVICE}")


def parse_key_setting(setting: str, name: str = "checkpoint.encryption_key") -> tuple[str, str]:
    """("env", NAME) or ("file", PATH). Raises UserError with a message that never shows what may be the key itself."""
    kind, _, source = setting.partition(":")
    if kind not in ("env", "file") or not source or decode_key(source) is not None:
        raise UserError(f"{name}: give env:NAME or file:PATH, never the key itself")
    return kind, source


def decode_key(text: str) -> bytes | None:
    """The 32 bytes encoded by 64 hexadecimal digits or either base64 alphabet; None for anything else."""
    try:
        if len(text) == 64:
            return bytes.fromhex(text)
        secret = base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)
    except (ValueError, binascii.Error):
        return None
    return secret if len(secret) == 32 else None


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item, path)
    else:
        yield path, value
