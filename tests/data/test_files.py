"""Files split into documents, whatever the blocks that they are read in."""

import io
import random
import tracemalloc

import pytest

import data.sources.files
from data.sources.files import pieces


@pytest.mark.parametrize("separator", [b"\n", b"\n\n", b"aba", b"aaab", "ß".encode(), b"abaabaaba"])
def test_pieces_are_those_of_split(separator: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    alphabet = sorted({separator[i : i + 1] for i in range(len(separator))} | {b"c", separator})
    for size in (1, 2, 3, 5, 64):
        monkeypatch.setattr(data.files, "BLOCK_BYTES", size)
        for length in (0, 1, *range(30, 300, 10)):
            content = b"".join(draw.choices(alphabet, k=length))
            assert list(pieces(io.BytesIO(content), separator)) == content.split(separator)


def test_a_file_is_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(io.RawIOBase):
        """64 MiB that are made while they are read, a line end in every 4 MiB."""

        left = 64

        def read(self, size: int = -1) -> bytes:
            if not self.left:
                return b""
            self.left -= 1
            return b"x" * (size - 1) + (b"\n" if self.left % 4 == 0 else b"x")

    tracemalloc.start()
    count = sum(1 for piece in pieces(Endless(), b"\n"))  # type: ignore[arg-type]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 17
    assert most < 20 << 20
