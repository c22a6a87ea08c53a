"""Prepare rows for fine-tuning once: read, turn into tokens, cut or drop what is too long, pack, publish.

It publishes as `prepare` does: one process prepares under a lock, the folder appears by one rename, later runs with the
same fingerprint open it. The fingerprint has everything that decides the tokens, `data.sequence_length` and the chat
template included. What was dropped, cut or skipped is counted in the index, and so in the record of every run on it.

Rows do not depend on the number of workers or of machines that help: their results are taken in the order of the
batches. A few thousand rows are prepared in this process, since starting another takes longer.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import transformers

from config.errors import UserError
from config.schema import DataSection
from data.chat import Chat, Tokens
from data.corpus import SPLITS, TOKENIZER, Corpus, open_corpus, tokenizer_sha256, write_index
from data.crew import Pieces, Reader
from data.json_rows import Found
from data.packing import best_fit, by_number
from data.pieces import Work
from data.preparation_progress import Progress, ProgressFile
from data.prepare import identified, published
from data.row_formats import BadRow, Example, read_examples, recognise
from data.row_shards import write_tensors
from data.row_sources import is_held_out, located_rows
from data.seq2seq_rows import SourceAndTarget, for_encoder_decoder
from data.shards import token_dtype
from data.sources import Source
from data.tokenizer import is_made, load_tokenizer, make_tokenizer, tokenizer_identity, vocabulary_size

_VERSION = "rows-2"
_BATCH_ROWS = 512
_ROWS_HERE = 8192
"""Up to so many rows are prepared in this process: a worker takes seconds to import transformers."""
_SHARD_TOKENS = 1 << 26
"""[tokens] A shard is closed when it has so many."""
_FIX = "correct the row, or set data.on_bad_row=skip"


def prepare_rows(data: DataSection, *, progress: bool) -> Corpus:
    """Open the rows that a config names, preparing them first if need be. progress: as for `prepare`.

    Raises UserError for a source or tokenizer that cannot be read, a row that does not fit (data.on_bad_row), and what
    `prepare` raises it for.
    """
    source, fingerprint = identified(data, rows_fingerprint)
    folder = published(data, source, fingerprint, _fill, progress=progress, work=_work)
    return open_corpus(folder, verify=data.verify)


def rows_fingerprint(data: DataSection, source: Source) -> str:
    """Name of the prepared rows: 20 hex digits of a hash over everything that decides them."""
    own = Path(data.tokenizer).expanduser() / "chat_template.jinja"
    parts = [
        _VERSION,
        data.source,
        source.identity,
        tokenizer_identity(data.tokenizer),
        own.read_text(encoding="utf-8") if own.is_file() else "",
        _template(data),
        *(getattr(data, key) for key in _DECIDING),
        *([] if data.target_length is None else [data.target_length]),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


_DECIDING = (
    *("text_field", "format", "on_bad_row", "train_on", "packing", "too_long", "sequence_length"),
    "validation_fraction",
)


def _template(data: DataSection) -> str | None:
    """The content of data.chat_template. Raises UserError."""
    if data.chat_template is None:
        return None
    try:
        return Path(data.chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.chat_template={data.chat_template}: cannot be read ({error}); name another file"
        ) from error


@dataclass
class EncodedRows:
    """The rows of a batch that were kept, and what became of the others. A pair is two that follow each other."""

    tokens: list[np.ndarray] = field(default_factory=list)
    trained: list[np.ndarray] = field(default_factory=list)
    held_out: list[bool] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    longest: int = 0
    """[tokens] Of a row, before it was cut."""
    longest_source: int = 0
    """[tokens] The same of the sources of task seq2seq."""
    longest_target: int = 0
    """[tokens] Of its targets."""
    first_bad: str | None = None
    """Where and why, of the first row that was skipped."""


_RENDERED = "rendered"
"""In the counts of a batch: how many of its rows went through the chat template."""
_FACTS = ("counts", "longest", "longest_source", "longest_target", "first_bad")


class RowsCodec:
    """How batches of rows and what `RowEncoder` makes of them are written (`pieces`)."""

    def pack(self, batch: list[Found]) -> bytes:
        """As JSON. Raises TypeError for what JSON does not have, such as dates of a parquet file."""
        rows = [[where, None, str(row)] if isinstance(row, BadRow) else [where, row] for where, row in batch]
        return json.dumps(rows).encode()

    def unpack(self, packed: bytes) -> list[Found]:
        """The rows."""
        return [(where, BadRow("", *problem) if problem else row) for where, row, *problem in json.loads(packed)]

    def tensors(self, result: EncodedRows) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Tokens and labels laid end to end, and what was counted."""
        tensors = {
            "tokens": np.concatenate([np.empty(0, np.int64), *result.tokens]),
            "trained": np.concatenate([np.empty(0, bool), *result.trained]),
            "lengths": np.array([len(ids) for ids in result.tokens], dtype=np.int64),
            "held_out": np.array(result.held_out, dtype=bool),
        }
        return tensors, {name: getattr(result, name) for name in _FACTS}

    def result(self, tensors: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> EncodedRows:
        """The rows that were kept."""
        starts = np.cumsum(tensors["lengths"])[:-1]
        tokens, trained = (
            np.split(tensors[name], starts) if len(tensors["lengths"]) else [] for name in ("tokens", "trained")
        )
        facts = {name: facts[name] for name in _FACTS} | {"counts": Counter(facts["counts"])}
        return EncodedRows(tokens, trained, tensors["held_out"].tolist(), **facts)


@dataclass(frozen=True)
class RowEncoder:
    """Turns located rows into tokens as a config says."""

    data: DataSection
    """Its format is known."""
    chat: Chat

    def __call__(self, batch: list[Found]) -> EncodedRows:
        """Raises UserError for the first row that does not fit, unless those are to be skipped."""
        found = EncodedRows()
        for where, row in batch:
            found.counts["rows"] += 1
            try:
                if isinstance(row, BadRow):
                    raise row
                held_out = is_held_out(row, self.data.validation_fraction)  # refuses what no tokenizer reads
                sides = self._sides(row, found.counts)
            except BadRow as error:
                if error.of_config:  # skipping such rows would leave none
                    raise UserError(f"{where}: {error}") from error
                if self.data.on_bad_row == "error":
                    raise UserError(f"{where}: {error}; {self._other_format(row) or _FIX}") from error
                found.counts["skipped"] += 1
                found.first_bad = found.first_bad or f"{where}: {error}"
                continue
            found.longest = max(found.longest, *(len(side.ids) for side in sides), 0)
            if isinstance(self.chat, SourceAndTarget):
                target = int(sides[0].trained.sum())
                found.longest_source = max(found.longest_source, len(sides[0].ids) - target)
                found.longest_target = max(found.longest_target, target)
            for side in self._fitted(sides, found.counts):
                found.tokens.append(side.ids)
                found.trained.append(side.trained)
                found.held_out.append(held_out)
        return found

    def _other_format(self, row: dict[str, Any] | BadRow) -> str | None:
        """What to do about a row that has the fields of another format than the data's; None for other rows."""
        try:
            found = recognise(row, self.data.text_field) if isinstance(row, dict) else self.data.format
        except BadRow:
            return None
        if found == self.data.format:
            return None
        return (
            f"the row is of format {found}, not {self.data.format}: correct data.format, or name files of "
            "several formats in data.sources"
        )

    def _sides(self, row: dict[str, Any], counts: Counter[str]) -> list[Tokens]:
        """The row as one sequence, or as both of a pair. Raises BadRow."""
        examples = read_examples(row, self.data.format, self.data.text_field)
        sides = [self.chat.tokens(example) for example in examples]
        counts[_RENDERED] += self.chat.renders(examples[0])
        if len(sides) > 1 and np.array_equal(sides[0].ids, sides[1].ids):
            raise BadRow("rejected", "has the same tokens as chosen, so there is nothing to prefer")
        return sides

    def _fitted(self, sides: list[Tokens], counts: Counter[str]) -> list[Tokens]:
        """The sequences of a row cut to their length, or none of them. Cut off the left, a pair keeps one prompt."""
        if isinstance(self.chat, SourceAndTarget):
            return self.chat.fitted(sides[0], self.data, counts)
        longest = self.data.sequence_length + 1
        excess = max(len(side.ids) for side in sides) - longest
        if excess <= 0:
            return sides
        if self.data.too_long == "drop":
            counts["dropped"] += 1
            return []
        part = slice(excess, None) if self.data.too_long == "truncate_left" else slice(longest)
        cut = [Tokens(side.ids[part], side.trained[part].copy()) for side in sides]
        for side in cut:
            side.trained[:1] = False
        if not all(side.trained.any() for side in cut):
            counts["dropped, because no label was left when cut"] += 1
            return []
        counts["truncated"] += 1
        return cut


_encoder: RowEncoder | None = None


def start_encoder(data: DataSection, tokenizer: str) -> None:
    """Initialise a worker process. tokenizer: its folder."""
    global _encoder
    _encoder = make_encoder(data, tokenizer)


def make_encoder(data: DataSection, tokenizer: str) -> RowEncoder:
    """An encoder with the tokenizer in a folder. data: with its format. Raises UserError."""
    loaded, template = load_tokenizer(tokenizer), _template(data)
    if data.target_length is not None:
        return RowEncoder(data, SourceAndTarget(loaded, template=template))
    return RowEncoder(data, Chat(loaded, template=template, train_on=data.train_on))


def encode_in_worker(batch: list[Found]) -> EncodedRows:
    """`RowEncoder` in a worker process."""
    assert _encoder is not None, "start_encoder was not called in this process"
    return _encoder(batch)


def _work(data: DataSection, tokenizer_folder: Path) -> Work:
    """Turning a batch of rows into tokens. data: with its format."""
    digest = hashlib.sha256(f"{_VERSION} {tokenizers.__version__} {transformers.__version__} {data.format}".encode())
    for file in sorted(tokenizer_folder.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    arguments = (data, str(tokenizer_folder))
    return Work(encode_in_worker, start_encoder, arguments, RowsCodec(), digest.hexdigest())


def with_format(data: DataSection, source: Source) -> DataSection:
    """`data` with the format of its rows: of the first that has one. Raises UserError."""
    if data.format != "auto":
        return data
    problem = f"{source.label}: holds no row: it is empty. Write rows into it, or name another file."
    for where, row in located_rows(data, source):
        try:
            if isinstance(row, BadRow):
                raise row
            found = recognise(row, data.text_field)
            if found == "preference":
                raise UserError(f"{where}: is a pair of answers, which task=sft does not read; set task=dpo")
            if found == "text" and data.target_length is not None:
                raise UserError(f"{where}: is one text, which task=seq2seq has no source and target of; set task=sft")
            return replace(data, format=found)  # type: ignore[arg-type]  # one of its choices
        except BadRow as error:
            problem = f"{where}: {error}; {_FIX}, or name its form with data.format"
            if data.on_bad_row == "error":
                break
    raise UserError(problem)


def tokenizer_of_rows(data: DataSection, source: Source) -> Any:
    """The tokenizer that data.tokenizer names; a BPE is trained on the text of the rows. data: with its format."""

    def texts() -> Iterator[dict[str, Any]]:
        for _, row in located_rows(data, source):
            if isinstance(row, BadRow):
                continue
            try:
                examples = read_examples(row, data.format, data.text_field)
            except BadRow:
                continue
            yield from ({"text": _text_of(example)} for example in examples)

    of_rows = replace(source, open=texts, text_field="text", deduplicate=False)
    tokenizer = make_tokenizer(data.tokenizer, of_rows, data.validation_fraction)
    if data.target_length is not None and is_made(data.tokenizer):
        for_encoder_decoder(tokenizer)
    return tokenizer


def _text_of(example: Example) -> str:
    contents = [message["content"] for message in example.messages or []]
    return "\n".join(text for text in contents if isinstance(text, str)) or example.prompt + example.completion


def _fill(data: DataSection, source: Source, fingerprint: str, folder: Path, report: ProgressFile) -> None:
    report(Progress("tokenizer", 0, None))
    said = data.format
    data = with_format(data, source)
    tokenizer = tokenizer_of_rows(data, source)
    tokenizer.chat_template = _template(data) or tokenizer.chat_template
    tokenizer.save_pretrained(folder / TOKENIZER)
    vocab_size = vocabulary_size(tokenizer)
    writers = {split: _SplitWriter(folder, split, token_dtype(vocab_size)) for split in SPLITS}
    counts: Counter[str] = Counter()
    longest, first_bad = [0, 0, 0], None
    for part in _encoded(data, source, folder / TOKENIZER, Pieces(folder.with_name(fingerprint))):
        counts.update(part.counts)
        lengths = (part.longest, part.longest_source, part.longest_target)
        longest, first_bad = list(map(max, longest, lengths)), first_bad or part.first_bad
        for ids, trained, held_out in zip(part.tokens, part.trained, part.held_out, strict=True):
            writers[SPLITS[int(held_out)]].add(ids, trained)
        report(Progress("tokens", sum(writer.tokens for writer in writers.values()), None))
    splits = {split: writer.finish(data) for split, writer in writers.items()}
    rendered = counts.pop(_RENDERED, 0)
    found: dict[str, Any] = {"format": data.format, "longest": longest[0], **counts}
    if data.target_length is not None:
        found |= {"longest source": longest[1], "longest target": longest[2]}
    found |= {"tokens": sum(w.tokens for w in writers.values()), "trained": sum(w.labels for w in writers.values())}
    if not writers["train"].rows:
        raise _nothing_to_train_on(data, source, found, first_bad, writers["validation"].rows)
    own = make_encoder(data, str(folder / TOKENIZER)).chat if rendered else None
    write_index(
        folder,
        {
            "fingerprint": fingerprint,
            "source": source.label,
            "revision": source.revision(),
            "vocab_size": vocab_size,
            "end_of_document": tokenizer.eos_token_id,
            "tokenizer_sha256": tokenizer_sha256(folder / TOKENIZER),
            "sequence_length": data.sequence_length,
            "skipped": {"does not fit its format": counts["skipped"]} if counts["skipped"] else {},
            "counts": found,
            "notes": _notes(data, found, writers, own, recognised=said == "auto", first_bad=first_bad),
            **splits,
        },
    )


def _encoded(data: DataSection, source: Source, tokenizer: Path, pieces: Pieces) -> Iterator[EncodedRows]:
    """The batches of the source in their order."""
    rows = located_rows(data, source)
    batches = iter(lambda: list(islice(rows, _BATCH_ROWS)), [])
    first = list(islice(batches, _ROWS_HERE // _BATCH_ROWS + 1))
    if len(first) <= _ROWS_HERE // _BATCH_ROWS:
        encode = make_encoder(data, str(tokenizer))
        yield from map(encode, first)
        return
    work = _work(data, tokenizer)
    pieces.begin(work, tokenizer, {"format": data.format})
    yield from Reader(pieces, work, data.workers).results(chain(first, batches))


def _nothing_to_train_on(
    data: DataSection, source: Source, counts: dict[str, Any], first_bad: str | None, held_out: int
) -> UserError:
    if held_out:
        return UserError(
            f"data.validation_fraction={data.validation_fraction:g}: all {held_out} rows of {source.label} were drawn "
            "for validation. Set it to 0 or give more rows."
        )
    dropped, skipped = counts.get("dropped", 0), counts.get("skipped", 0)
    most = f"{data.sequence_length + 1} tokens"
    if data.target_length is not None:
        most = f"a source of {data.sequence_length} or a target of {data.target_length} tokens"
    reason = f"{dropped} dropped as longer than {most}, {skipped} skipped"
    first = f" (first: {first_bad})" if first_bad else ""
    return UserError(
        f"{source.label}: no row of {counts.get('rows', 0)} is left to train on: {reason}{first}. "
        f"{what_to_do(dropped=bool(dropped))}"
    )


def what_to_do(*, dropped: bool) -> str:
    """About rows of which none is left. dropped: some were too long."""
    if dropped:
        return "Raise data.sequence_length, set data.too_long, or correct the rows."
    return "Correct the rows, or the keys of data that say what they are."


def _notes(
    data: DataSection,
    counts: dict[str, Any],
    writers: dict[str, _SplitWriter],
    chat: Chat | None,
    *,
    recognised: bool,
    first_bad: str | None,
) -> list[str]:
    """What was decided and counted, in words. chat: None where no row went through a chat template."""
    how = "recognised by their fields" if recognised else "as data.format says"
    form = f"data: {counts['rows']:,} rows of format {data.format} ({how})"
    if chat is not None:
        which = "of data.chat_template" if data.chat_template else "of the tokenizer"
        located = ", answers located by its generation markers"
        located = "" if data.train_on == "all" or data.target_length is not None else located
        located = located if chat.has_markers or not located else ", answers located by rendering turn by turn"
        form += f"; chat template {which}{located}"
    train, held_out = writers["train"], writers["validation"]
    kept = f"data: {train.rows:,} rows in {train.sequences:,} sequences to train on, {held_out.rows:,} rows held out"
    if data.format == "preference":
        kept = f"data: {train.sequences:,} pairs to train on, {held_out.sequences:,} held out"
    reasons = {key: counts.get(key, 0) for key in ("dropped", "truncated", "skipped")}
    kept += "".join(f", {count:,} {key}" for key, count in reasons.items() if count)
    if data.target_length is None:
        kept += f"; the longest row has {counts['longest']:,} tokens"
    else:
        kept += f"; the longest source has {counts['longest source']:,} tokens, the longest target "
        kept += f"{counts['longest target']:,}"
    share = f"data: {counts['trained'] / max(counts['tokens'], 1):.1%} of {counts['tokens']:,} tokens are labels"
    full = train.places / max(train.sequences * data.sequence_length, 1)
    share += f"; sequences of {data.sequence_length:,} are {full:.1%} full" if data.packing != "none" else ""
    return [form, kept, share, *([f"data: first row skipped: {first_bad}"] if first_bad else [])]


class _SplitWriter:
    """Collects the rows of one split and writes a shard of every _SHARD_TOKENS."""

    def __init__(self, folder: Path, split: str, dtype: str) -> None:
        self._folder, self._split, self._dtype = folder, split, dtype
        self._ids: list[np.ndarray] = []
        self._trained: list[np.ndarray] = []
        self._held = 0
        self._shards: list[dict[str, Any]] = []
        self._lengths: list[int] = []
        self._labels: list[int] = []
        self.tokens = self.labels = 0
        """Of all rows so far."""
        self.sequences = 0

    @property
    def rows(self) -> int:
        """Rows so far."""
        return len(self._lengths)

    @property
    def places(self) -> int:
        """Inputs so far."""
        return self.tokens - self.rows

    def add(self, ids: np.ndarray, trained: np.ndarray) -> None:
        """Append a row."""
        self._ids.append(ids.astype(self._dtype))
        self._trained.append(trained.astype(np.uint8))
        self._lengths.append(len(ids))
        self._labels.append(int(trained.sum()))
        self.tokens, self.labels = self.tokens + self._lengths[-1], self.labels + self._labels[-1]
        self._held += len(ids)
        if self._held >= _SHARD_TOKENS:
            self._flush()

    def finish(self, data: DataSection) -> dict[str, Any]:
        """Write what is left and the sequences; this split's part of the index."""
        if self._held:
            self._flush()
        lengths = np.array(self._lengths, dtype=np.int32)
        if data.packing != "none":
            rows, ends = best_fit(lengths.astype(np.int64) - 1, data.sequence_length)
        else:
            rows, ends = by_number(len(lengths), 2 if data.format == "preference" else 1)
        self.sequences = len(ends)
        order = {"rows": rows, "ends": ends, "lengths": lengths, "labels": np.array(self._labels, dtype=np.int32)}
        entry = write_tensors(self._folder / f"{self._split}-sequences.safetensors", order)
        return {"shards": self._shards, "sequences": entry, "documents": self.rows, "text_bytes": 0}

    def _flush(self) -> None:
        ends = np.cumsum([len(ids) for ids in self._ids], dtype=np.int64)
        tensors = {"tokens": np.concatenate(self._ids), "trained": np.concatenate(self._trained), "ends": ends}
        path = self._folder / f"{self._split}-{len(self._shards):05d}.safetensors"
        self._shards.append(write_tensors(path, tensors))
        self._ids, self._trained, self._held = [], [], 0
