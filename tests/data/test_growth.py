"""The cost of a corpus does not grow with its size: counted in bytes of memory and in mappings, not timed."""

import gc
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import data.corpora.shards
import data.text.prepare
from config.schema import DataSection
from data.batches.loader import Batches
from data.corpora.sampler import sample_ids
from data.corpora.shards import TokenShards, open_shard, write_shard
from data.text.prepare import prepare

LENGTH = 256


def peak_of(act: Callable[[], Any]) -> int:
    """[bytes] That Python and numpy held at most while `act` ran, beyond what they held before."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        act()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def draw(samples: int) -> Callable[[], np.ndarray]:
    # Half an epoch in, and some position at most, whatever the size.
    return lambda: sample_ids(samples // 2048, samples=samples, seed=5, global_size=1024)


def test_drawing_a_step_takes_the_same_memory_at_every_size_of_corpus() -> None:
    # Powers of four fill their network, so that no value has to be drawn again and the comparison is exact.
    draw(4**10)()
    small, large = peak_of(draw(4**10)), peak_of(draw(4**20))
    assert abs(large - small) < 1024
    # Where most values leave the range and are drawn again: bounded by the batch all the same.
    assert max(peak_of(draw(samples)) for samples in (4**9 + 1, 10**6, 10**12, 4**19 + 1)) < 2 * small


def sparse(path: Path, tokens: int) -> dict[str, Any]:
    """A shard of so many zeros that takes no room on the disk; its entry for the index, the checksum made up."""
    metadata = {"format_version": "1", "dtype": "uint16", "sha256": "0" * 64}
    tensor = {"dtype": "U16", "shape": [tokens], "data_offsets": [0, 2 * tokens]}
    header = json.dumps({"__metadata__": metadata, "tokens": tensor}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + 2 * tokens)
    return {"file": path.name, "bytes": path.stat().st_size, "tokens": tokens, "header": metadata}


def test_opening_and_reading_takes_the_same_memory_at_every_size_of_corpus(tmp_path: Path) -> None:
    sizes = {windows: windows * LENGTH + 1 for windows in (4**6, 4**16)}
    assert max(sizes.values()) > 10**12
    entries = {windows: sparse(tmp_path / f"{windows}.safetensors", tokens) for windows, tokens in sizes.items()}

    def read(windows: int) -> Callable[[], None]:
        def act() -> None:
            shards = TokenShards([open_shard(tmp_path / f"{windows}.safetensors", entries[windows], verify=False)])
            options: dict[str, int] = {"sequence_length": LENGTH, "micro_size": 4, "rank": 0, "world_size": 2}
            batches = Batches(shards, seed=1, global_size=16, **options)
            for _ in range(6):
                assert not batches.next_step().input_ids.any()
            batches.close()

        return act

    read(4**6)()
    small, large = (peak_of(read(windows)) for windows in sizes)
    # Whether one batch or two are alive at the peak is for the reading thread; each is 32 KiB.
    assert abs(large - small) < 100_000, f"{small} and {large} bytes"


def mapped() -> int:
    """[bytes] Of files that count as this process's memory."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) * 1024


def test_verifying_a_shard_does_not_leave_it_in_the_process(tmp_path: Path) -> None:
    tokens = np.zeros(1 << 25, dtype=np.uint16)
    entry = write_shard(tmp_path / "train-00000.safetensors", tokens, {"split": "train"})
    del tokens
    before = mapped()
    shard = open_shard(tmp_path / "train-00000.safetensors", entry, verify=True)
    assert mapped() - before < 8 << 20
    array = shard.array
    assert not array.any()
    assert mapped() - before > 48 << 20, "what is read of a mapping counts, so this would have been seen"


def test_only_so_many_shards_are_mapped_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is given 65,530 mappings; a corpus may have more shards."""
    monkeypatch.setattr(data.corpora.shards, "SHARDS_MAPPED", 4)
    opened = []
    for number in range(12):
        path = tmp_path / f"train-{number:05d}.safetensors"
        entry = write_shard(path, np.full(LENGTH + 1, number, dtype=np.uint16), {"split": "train"})
        opened.append(open_shard(path, entry, verify=True))
    shards = TokenShards(opened)
    order = np.tile(np.arange(12), 3)
    windows = shards.read(order, LENGTH)
    assert (windows == order[:, None]).all()
    assert Path("/proc/self/maps").read_text().count(str(tmp_path)) == 4


def test_preparing_takes_the_same_memory_at_every_size_of_source(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(data.text.prepare, "SHARD_TOKENS", 100_000)
    monkeypatch.setattr(data.text.prepare, "BATCH_CHARACTERS", 50_000)
    generator = random.Random(0)

    def preparing(name: str, documents: int) -> Callable[[], Any]:
        folder = tmp_path / name
        folder.mkdir()
        for number in range(documents):
            (folder / f"{number:04d}.txt").write_bytes(generator.randbytes(5_000).hex().encode())
        folders = {"path": str(folder), "cache_dir": f"{folder}.cache"}
        section = DataSection(source="text", **folders, tokenizer="bytes", workers=1)
        return lambda: prepare(section, progress=False)

    preparing("warm", 1)()
    small, large = peak_of(preparing("small", 60)), peak_of(preparing("large", 480))
    assert abs(large - small) < 400_000, f"{small} and {large} bytes for 0.6 and 4.8 MB of text"
