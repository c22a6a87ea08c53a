"""Writes Megatron-LM's indexed datasets, from the format's description alone and a value at a time."""

import struct
from collections.abc import Sequence
from pathlib import Path

FORMATS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
"""Code of a dtype, and its letter in `struct`."""


def write(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], code: int = 8, *, version: int = 1) -> None:
    """PREFIX.bin and PREFIX.idx of documents, each a list of sequences of token ids."""
    content, lengths, pointers, borders = b"", [], [], [0]
    for document in documents:
        for sequence in document:
            lengths.append(len(sequence))
            pointers.append(len(content))
            for token in sequence:
                content += struct.pack(f"<{FORMATS[code]}", token)
        borders.append(len(lengths))
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, code, len(lengths), len(borders))
    index += b"".join(struct.pack("<i", length) for length in lengths)
    index += b"".join(struct.pack("<q", number) for number in (*pointers, *borders))
    Path(f"{prefix}.bin").write_bytes(content)
    Path(f"{prefix}.idx").write_bytes(index)
