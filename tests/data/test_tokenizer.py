"""Tokenizers: exact round trips, document ends that text cannot forge, determinism, and refusals."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import data.text.encode
import data.text.tokenizer
from config.errors import UserError
from config.schema import DataSection
from data.sources.sources import Source, open_source
from data.text.encode import END_OF_DOCUMENT, DocumentEncoder, byte_ids, is_validation, pieces, train_bpe
from data.text.tokenizer import draw_sample, load_tokenizer, make_tokenizer, tokenizer_identity, vocabulary_size

EXAMPLES = ["", " ", "def f(x):\n    return x\r\n", "ünï\x00cödé 🙂 \u2028 e\u0301"]
EXAMPLES += [f"a{END_OF_DOCUMENT}b {END_OF_DOCUMENT}"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("text")
    for path in sorted(Path(data.text.encode.__file__).parent.glob("*.py")):
        (folder / path.name).write_bytes(path.read_bytes())
    return open_source(DataSection(source="text", path=str(folder)))


@pytest.fixture(scope="module", params=["bytes", "bpe:500"])
def tokenizer(request: pytest.FixtureRequest, source: Source, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(request.param, source, 0.0).save_pretrained(folder)
    return load_tokenizer(folder)


@settings(deadline=None)
@given(text=st.text() | st.sampled_from(EXAMPLES))
def test_any_text_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < vocabulary_size(tokenizer) and tokenizer.eos_token_id not in ids


def test_the_vocabulary_is_what_was_asked(source: Source) -> None:
    assert vocabulary_size(make_tokenizer("bytes", source, 0.0)) == 257
    assert vocabulary_size(make_tokenizer("bpe:400", source, 0.0)) == 400


def test_training_a_bpe_twice_gives_the_same(source: Source) -> None:
    sample = draw_sample(source, 0.0)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        first, second = (pool.submit(train_bpe, 600, sample).result() for _ in range(2))
    assert first == second
    assert len(json.loads(first)["model"]["vocab"]) == 600


def test_the_sample_is_bounded_deterministic_and_without_validation_documents(source, monkeypatch):
    whole = draw_sample(source, 0.0)
    sizes = [len(text.encode()) for text in whole]
    limit = sum(sizes) // 2
    monkeypatch.setattr(data.text.tokenizer, "SAMPLE_BYTES", limit)
    part = draw_sample(source, 0.0)
    assert part == whole[: len(part)] == draw_sample(source, 0.0)
    assert 0 < sum(sizes[: len(part)]) <= limit
    monkeypatch.undo()
    kept = draw_sample(source, 0.5)
    assert kept == [text for text in whole if not is_validation(text, 0.5)]
    assert 0 < len(kept) < len(whole)
    monkeypatch.setattr(data.text.tokenizer, "SCANNED_BYTES", 1)
    assert len(draw_sample(source, 0.0)) == 1


def test_the_sample_is_the_documents_of_the_smallest_hashes_in_any_order_of_arrival(tmp_path, monkeypatch):
    """A large document that is evicted must not make room for a later one with a larger hash."""
    generator = random.Random(3)
    for case in range(30):
        folder = tmp_path / str(case)
        folder.mkdir()
        for index in range(12):
            (folder / f"{index:02d}.txt").write_text(f"{index}-{case} " + "x" * generator.choice([3, 30, 300]))
        texts = open_source(DataSection(source="text", path=str(folder)))
        whole = draw_sample(texts, 0.0)
        monkeypatch.setattr(data.text.tokenizer, "SAMPLE_BYTES", sum(len(text) for text in whole) // 2)
        part = draw_sample(texts, 0.0)
        assert part == whole[: len(part)]
        monkeypatch.undo()


def word_level(folder: Path, **special: str) -> Path:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<end>": 1, "hello": 2, "world": 70000}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def test_a_local_folder_and_a_vocabulary_with_gaps(tmp_path: Path, source: Source) -> None:
    folder = word_level(tmp_path, eos_token="<end>")
    tokenizer = make_tokenizer(str(folder), source, 0.0)
    assert tokenizer.eos_token_id == 1
    assert vocabulary_size(tokenizer) == 70001


def test_a_tokenizer_without_an_end_of_document_is_refused(tmp_path: Path, source: Source) -> None:
    with pytest.raises(UserError, match=r"data.tokenizer=.*has no end-of-document token"):
        make_tokenizer(str(word_level(tmp_path)), source, 0.0)


def test_what_is_no_tokenizer_is_told_in_one_line(tmp_path: Path, source: Source) -> None:
    (tmp_path / "empty").mkdir()
    broken = word_level(tmp_path / "broken", eos_token="<end>")
    (broken / "tokenizer.json").write_text('{"model": 5}')
    for folder in (tmp_path / "empty", broken):
        with pytest.raises(UserError, match=r"data.tokenizer=.*cannot be loaded") as caught:
            make_tokenizer(str(folder), source, 0.0)
        assert "\n" not in str(caught.value)


def test_identity_follows_a_folders_contents(tmp_path: Path) -> None:
    folder = word_level(tmp_path / "a", eos_token="<end>")
    identity = tokenizer_identity(str(folder))
    assert identity == tokenizer_identity(str(word_level(tmp_path / "b", eos_token="<end>")))
    (folder / "tokenizer_config.json").write_text("{}")
    assert identity != tokenizer_identity(str(folder))


@given(text=st.text(alphabet=st.sampled_from("ab\n"), max_size=60), limit=st.integers(1, 12))
def test_pieces_join_to_the_text_and_are_bounded(text: str, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.text.encode, "PIECE_CHARACTERS", limit)
        cut = list(pieces(text))
    assert "".join(cut) == text
    assert all(len(piece) <= limit for piece in cut)
    assert all(piece.endswith("\n") for piece in cut[:-1] if "\n" in piece)


def test_the_table_of_bytes_gives_what_its_tokenizer_gives(source: Source) -> None:
    tokenizer = make_tokenizer("bytes", source, 0.0).backend_tokenizer
    tokenizer.encode_special_tokens = True
    everything = "".join(map(chr, [*range(0x800), 0x20AC, 0xFFFF, 0x1F642, 0x10FFFF])) + END_OF_DOCUMENT
    # Valid UTF-8 has every byte but 0xC0, 0xC1 and 0xF5 to 0xFF; the table is whole all the same.
    wanted = tokenizer.encode(everything, add_special_tokens=False).ids
    assert byte_ids()[list(everything.encode())].tolist() == wanted
    assert sorted(byte_ids().tolist()) == list(range(256))
    assert [tokenizer.decode([token]) for token in byte_ids()[:0x80].tolist()] == [chr(code) for code in range(0x80)]


@pytest.mark.parametrize("bytewise", [True, False])
def test_documents_end_with_the_end_of_document_and_nothing_else_does(source, bytewise, monkeypatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # as the encoder sets it
    tokenizer = make_tokenizer("bytes", source, 0.0)
    texts = [text for text in EXAMPLES if text]
    found = DocumentEncoder(tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id, "uint16", 0.5, bytewise)(
        texts
    )
    for split, tokens in enumerate((found["train"], found["validation"])):
        wanted = [text for text in texts if is_validation(text, 0.5) is bool(split)]
        assert found["counts"][split].tolist() == [len(wanted), sum(len(text.encode()) for text in wanted)]
        ends = [i for i, token in enumerate(tokens) if token == tokenizer.eos_token_id]
        starts = [0, *[end + 1 for end in ends]]
        assert [tokenizer.decode(tokens[a:b]) for a, b in zip(starts, ends, strict=False)] == wanted
        assert starts[-1] == len(tokens)


def test_the_validation_share_is_near_the_fraction() -> None:
    held_out = sum(is_validation(f"document {i}", 0.1) for i in range(10_000))
    # Binomial: mean 1000, standard deviation 30. A hash, so always the same number.
    assert abs(held_out - 1000) < 120
    assert not any(is_validation(f"document {i}", 0.0) for i in range(1000))


def test_workers_start_light() -> None:
    program = (
        "import data.text.encode, sys; print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
