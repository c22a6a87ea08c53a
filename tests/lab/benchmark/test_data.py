"""The benchmark of preparation: the text that was asked for, all rows, and mistakes in one line."""

import random
from pathlib import Path

import pytest

from config.schema import DataSection
from lab.benchmark import data as benchmark


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    generator = random.Random(0)
    for number in range(40):
        (folder / f"{number:02d}.txt").write_text("".join(generator.choices("aä🙂 \n", k=2000)))
    return folder


@pytest.mark.parametrize("megabytes", [0.00001, 0.03, 0.1])
def test_the_text_is_as_long_as_was_asked(texts: Path, tmp_path: Path, megabytes: float) -> None:
    source = DataSection(source="text", path=str(texts))
    out = tmp_path / "out"
    out.mkdir()
    benchmark.write_documents(source, megabytes, out)
    written = "".join(path.read_text() for path in sorted(out.iterdir()))
    whole = "".join(path.read_text() for path in sorted(texts.iterdir()))
    assert whole.startswith(written)
    assert megabytes * 1e6 - 3 <= len(written.encode()) <= megabytes * 1e6
