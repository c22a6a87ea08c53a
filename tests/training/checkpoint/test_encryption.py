"""Encrypted files: what goes in comes out, every kind of tampering is found, and the key is never shown."""

import base64
import copy
import hashlib
import io
import os
import pickle
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, settings
from hypothesis import strategies as st

from config.errors import UserError
from config.files import file_sha256
from config.schema import CheckpointSection
from training.checkpoint.encryption import (
    HEADER,
    TAG,
    DecryptedFile,
    EncryptingStream,
    key_id_of,
    load,
    open_file,
)
from training.checkpoint.key import Key
from training.checkpoint.manifest import Damaged
from training.checkpoint.tool import tensors_in
from training.checkpoint.writer import HashedFile
from training.session import Session

KEY = Key(bytes(range(32)))
SMALL = 64


def encrypted(plain: bytes, *, key: Key = KEY, chunk: int = SMALL, pieces: int = 1) -> bytes:
    """The file that comes of `plain` when it is written in so many pieces."""
    out = bytearray()
    stream = EncryptingStream(key, out.extend, chunk=chunk)
    cuts = sorted(random.Random(len(plain)).randrange(len(plain) + 1) for _ in range(pieces - 1))
    for start, end in zip([0, *cuts], [*cuts, len(plain)], strict=True):
        assert stream.write(memoryview(plain)[start:end]) == end - start
    stream.finish()
    return bytes(out)


def read_all(path: Path, content: bytes, key: Key = KEY) -> bytes:
    path.write_bytes(content)
    with DecryptedFile(path, key) as file:
        return file.read()


@settings(max_examples=60, deadline=None)
@given(
    chunk=st.integers(1, 100),
    multiple=st.integers(0, 5),
    beside=st.sampled_from([-1, 0, 1]),
    pieces=st.integers(1, 6),
    seed=st.integers(0, 9),
)
def test_what_goes_in_comes_out(tmp_path_factory, chunk, multiple, beside, pieces, seed) -> None:
    """Sizes at and beside the chunks' bounds, 0 and 1 among them."""
    plain = random.Random(seed).randbytes(max(0, chunk * multiple + beside))
    content = encrypted(plain, chunk=chunk, pieces=pieces)
    chunks = max(1, -(-len(plain) // chunk))
    assert len(content) == HEADER + len(plain) + chunks * TAG
    path = tmp_path_factory.getbasetemp() / "hypothesis.pt"
    assert read_all(path, content) == plain
    with DecryptedFile(path, KEY) as file:  # anywhere, in any order, like a file
        reference, chance = io.BytesIO(plain), random.Random(seed)
        for _ in range(20):
            where, how = chance.randrange(len(plain) + 2), chance.randrange(2 * chunk + 1)
            assert file.seek(where) == reference.seek(where) == file.tell()
            assert file.read(how) == reference.read(how)
        assert file.seek(-min(1, len(plain)), os.SEEK_END) == max(0, len(plain) - 1)


def test_the_format_is_the_one_described(tmp_path: Path) -> None:
    """Read with nothing of training.checkpoint.encryption, from what docs/object-stores.md says."""
    plain = random.Random(1).randbytes(150)
    content, secret = encrypted(plain), bytes(range(32))
    header = content[:52]
    assert header[:8] == b"MNTSENC\x01"
    assert header[8:16] == hashlib.sha256(secret).digest()[:8]
    chunk = int.from_bytes(header[16:20], "big")
    derived = HKDF(algorithm=hashes.SHA256(), length=39, salt=header[20:52], info=header[:20]).derive(secret)
    found, sealed = b"", [content[start : start + chunk + 16] for start in range(52, len(content), chunk + 16)]
    for number, part in enumerate(sealed):
        nonce = derived[32:] + number.to_bytes(4, "big") + bytes([number == len(sealed) - 1])
        found += AESGCM(derived[:32]).decrypt(nonce, part, header)
    assert (found, chunk, len(sealed)) == (plain, SMALL, 3)


def test_two_files_of_the_same_content_share_nothing() -> None:
    one, two = encrypted(bytes(3 * SMALL)), encrypted(bytes(3 * SMALL))
    assert one[:20] == two[:20]
    assert all(one[at : at + 16] != two[at : at + 16] for at in range(20, len(one) - 16, 16))
    step = SMALL + TAG
    assert one[HEADER : HEADER + step] != one[HEADER + step : HEADER + 2 * step]


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    """One byte in each place is flipped: magic, version, key id, chunk size, salt, text and tags."""
    content = encrypted(random.Random(2).randbytes(2 * SMALL + 5))
    for place in range(len(content)):
        corrupted = bytearray(content)
        corrupted[place] ^= 1 << random.Random(place).randrange(8)
        with pytest.raises((Damaged, UserError)) as error:
            read_all(tmp_path / "a.pt", bytes(corrupted))
        if place >= 16:
            assert error.type is Damaged, place


def test_a_file_cut_anywhere_is_found_when_it_is_opened(tmp_path: Path) -> None:
    path, content = tmp_path / "a.pt", encrypted(random.Random(3).randbytes(3 * SMALL))
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(Damaged):
            DecryptedFile(path, KEY)


def chunks_of(content: bytes) -> list[bytes]:
    step = SMALL + TAG
    return [content[start : start + step] for start in range(HEADER, len(content), step)]


def test_chunks_moved_dropped_repeated_appended_or_taken_from_another_file_are_found(tmp_path: Path) -> None:
    chance = random.Random(4)
    ours, theirs = encrypted(chance.randbytes(4 * SMALL)), encrypted(chance.randbytes(4 * SMALL))
    (a, b, c, d), header = chunks_of(ours), ours[:HEADER]
    other = chunks_of(theirs)
    tampered = {
        "moved": [b, a, c, d],
        "dropped at the front": [b, c, d],
        "dropped inside": [a, b, d],
        "dropped at the end": [a, b, c],
        "repeated": [a, a, c, d],
        "appended": [a, b, c, d, d],
        "from another file": [a, other[1], c, d],
        "the end of another file": [a, b, c, other[3]],
        "all from another file": other,
    }
    for kind, parts in tampered.items():
        with pytest.raises(Damaged):
            read_all(tmp_path / "a.pt", header + b"".join(parts))
            pytest.fail(kind)


def test_another_key_is_named_by_its_id(tmp_path: Path) -> None:
    path, other = tmp_path / "a.pt", Key(os.urandom(32))
    path.write_bytes(encrypted(b"weights"))
    assert key_id_of(path) == KEY.id != other.id
    with pytest.raises(UserError, match=rf"a\.pt: is encrypted with the key {KEY.id}.*gives {other.id}"):
        DecryptedFile(path, other)
    with pytest.raises(UserError, match=rf"is encrypted with the key {KEY.id}; give checkpoint.encryption_key"):
        open_file(path, None)
    with open_file(path, KEY) as file:
        assert file.read() == b"weights"


def test_a_plain_file_is_not_taken_for_an_encrypted_one_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"anything")
    assert key_id_of(path) is None
    with pytest.raises(UserError, match="is not encrypted while checkpoint.encryption_key is set"):
        open_file(path, KEY)
    for opened in (open_file(path, KEY, plain=True), open_file(path, None)):
        with opened:
            assert opened.read() == b"anything"
    with pytest.raises(Damaged, match="is not an encrypted file"):
        DecryptedFile(path, KEY)


def save_encrypted(state: Any, path: Path) -> str:
    """Write a file as a checkpoint's are: torch's archive, encrypted, hashed on its way to the disk."""
    file = HashedFile(path, lambda phase: None)
    stream = EncryptingStream(KEY, file.write)
    torch.save(state, stream)
    stream.finish()
    return file.finish()


def test_torch_saves_and_loads_through_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {
        "masters": [torch.randn(700, 1000), torch.randn(3)],
        "weight": torch.randn(1000, 900, dtype=torch.bfloat16),
        "step": 7,
        "empty": torch.empty(0),
    }
    path = tmp_path / "a.pt"
    assert save_encrypted(state, path) == file_sha256(path)  # the hash is of what is on disk
    assert b"masters" not in path.read_bytes()
    loaded = load(path, KEY, map_location="cpu", weights_only=True)
    assert loaded["step"] == 7
    assert torch.equal(loaded["weight"], state["weight"])
    assert torch.equal(loaded["empty"], state["empty"])
    assert all(torch.equal(one, two) for one, two in zip(loaded["masters"], state["masters"], strict=True))
    found = tensors_in(path, KEY)
    assert found["masters/0"] == ("float32", [700, 1000])


def test_a_tool_opens_the_checkpoints_of_a_run_with_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_KEY", bytes(range(32)).hex())
    config = SimpleNamespace(checkpoint=CheckpointSection(encryption_key="env:RUN_KEY"))
    of: Any = SimpleNamespace(resolved=SimpleNamespace(config=config), identity={}, world=None)
    save_encrypted({"step": 7}, tmp_path / "a.pt")
    opener = Session.saved_checkpoints(of, tmp_path)._opener
    assert opener is not None and opener.read(tmp_path / "a.pt") == {"step": 7}


@pytest.mark.parametrize("form", ["hex", "HEX", "base64", "urlsafe"])
@pytest.mark.parametrize("kind", ["env", "file"])
def test_a_key_is_read_from_the_environment_or_a_file(tmp_path, monkeypatch, kind, form) -> None:
    secret = bytes([251, 255, *range(30)])
    text = {
        "hex": secret.hex(),
        "HEX": secret.hex().upper(),
        "base64": base64.b64encode(secret).decode(),
        "urlsafe": base64.urlsafe_b64encode(secret).decode(),
    }[form]
    path = tmp_path / "key"
    path.write_text(text + "\n")
    path.chmod(0o600)
    monkeypatch.setenv("RUN_KEY", text)
    assert Key.from_setting("env:RUN_KEY" if kind == "env" else f"file:{path}").id == Key(secret).id


def test_a_key_is_shown_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = os.urandom(32)
    key, short = Key(secret), secret.hex()[:40]
    for shown in (repr(key), str(key), key.id, f"{[key]}"):
        assert secret.hex() not in shown
        assert repr(secret) not in shown
    for copying in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="a key is not pickled"):
            copying(key)
    monkeypatch.setenv("RUN_KEY", short)
    path = tmp_path / "key"
    path.write_text(short)
    path.chmod(0o600)
    given = [secret.hex(), f"env:{secret.hex()}", f"key:{secret.hex()}", "env:", "env:RUN_KEY", f"file:{path}"]
    for setting in [*given, "env:NOT_THERE", f"file:{tmp_path}/none", f"env:{base64.b64encode(secret).decode()}"]:
        with pytest.raises(UserError, match="checkpoint.encryption_key") as error:
            Key.from_setting(setting)
        assert secret.hex()[:20] not in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("mode", "refused"), [(0o600, False), (0o400, False), (0o440, False), (0o644, True), (0o620, True)]
)
def test_a_key_that_others_may_read_or_change_is_refused(tmp_path: Path, mode: int, refused: bool) -> None:
    path = tmp_path / "key"
    path.write_text("ab" * 32)
    path.chmod(mode)
    if not refused:
        assert Key.from_setting(f"file:{path}").id == Key(b"\xab" * 32).id
        return
    with pytest.raises(UserError, match=rf"others may read or change it; run `chmod 600 {path}`"):
        Key.from_setting(f"file:{path}")
