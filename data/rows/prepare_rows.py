"""Prepare rows for fine-tuning once: read, tokenize, cut or drop what is too long, pack, publish as `prepare` does.

The fingerprint covers everything that determines the tokens, including `data.sequence_length` and the chat template.
Rows do not depend on the number of workers. A few thousand rows are prepared in this process, since starting another
one takes longer.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import transformers

from config.errors import UserError
from config.schema import DataSection
from data.corpora.corpus import TOKENIZER, Corpus, fingerprint_of_parts, lost
from data.rows.packing import best_fit, by_number
from data.rows.row_preparation import (
    FIX,
    BatchEncoder,
    EncodedRows,
    Preparation,
    Row,
    batches_of,
    empty,
    source_of_texts,
)
from data.sources.chat import Chat, Tokens
from data.sources.row_formats import BadRow, Example, Found, read_examples, recognise
from data.sources.row_sources import located_rows
from data.sources.seq2seq_rows import SourceAndTarget, for_encoder_decoder
from data.sources.sources import Source
from data.text.batch_results import Work, kept_folder, results
from data.text.preparation_progress import ProgressFile
from data.text.prepare import prepared
from data.text.tokenizer import is_made, load_tokenizer, make_tokenizer, tokenizer_identity

_VERSION = "rows-2"
_BATCHES_HERE = 16
"""With at most this many batches, rows are prepared in this process: a worker takes seconds to import transformers."""


def prepare_rows(data: DataSection, *, progress: bool) -> Corpus:
    """Open the rows that a config names, preparing them first if need be. Raises UserError."""
    return prepared(data, rows_fingerprint, _fill, progress=progress)


def rows_fingerprint(data: DataSection, source: Source) -> str:
    """Name of the prepared rows: 20 hex digits of a hash over everything that determines them."""
    own = Path(data.tokenizer).expanduser() / "chat_template.jinja"
    parts = [
        _VERSION,
        data.source,
        source.identity,
        tokenizer_identity(data.tokenizer),
        own.read_text(encoding="utf-8") if own.is_file() else "",
        template_of(data),
        *(getattr(data, key) for key in _DECIDING),
        *([] if data.target_length is None else [data.target_length]),
    ]
    return fingerprint_of_parts(parts)


_DECIDING = (
    *("text_field", "format", "on_bad_row", "train_on", "packing", "too_long", "sequence_length"),
    "validation_fraction",
)


def template_of(data: DataSection) -> str | None:
    """The content of data.chat_template. Raises UserError."""
    if data.chat_template is None:
        return None
    try:
        return Path(data.chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.chat_template={data.chat_template}: cannot be read ({error}); name another file"
        ) from error


_RENDERED = "rendered"
"""Key in the counts of a batch: the rows that went through the chat template."""


@dataclass
class RowEncoder(BatchEncoder):
    """Turns located rows into tokens according to a chat template and a config."""

    chat: Chat

    def encode(self, row: dict[str, Any], found: EncodedRows) -> list[Row]:
        """One sequence, or the two of a pair."""
        sides = self._sides(row, found.counts)
        found.longest |= Counter(row=max(len(side.ids) for side in sides))
        if isinstance(self.chat, SourceAndTarget):
            target = int(sides[0].trained.sum())
            found.longest |= Counter(source=len(sides[0].ids) - target, target=target)
        fitted = self._fitted(sides, found.counts)
        return [{"tokens": side.ids, "trained": side.trained.astype(np.uint8)} for side in fitted]

    def advice(self, row: dict[str, Any] | BadRow) -> str:
        """Advice to correct data.format, if the row has the fields of another format."""
        with suppress(BadRow):
            found = recognise(row, self.data.text_field) if isinstance(row, dict) else self.data.format
            if found != self.data.format:
                return (
                    f"the row is of format {found}, not {self.data.format}: correct data.format, or name files of "
                    "several formats in data.sources"
                )
        return FIX

    def _sides(self, row: dict[str, Any], counts: Counter[str]) -> list[Tokens]:
        """The row as one sequence, or as the two of a pair. Raises BadRow."""
        examples = read_examples(row, self.data.format, self.data.text_field, self.data.source)
        sides = [self.chat.tokens(example) for example in examples]
        counts[_RENDERED] += self.chat.renders(examples[0])
        if len(sides) > 1 and np.array_equal(sides[0].ids, sides[1].ids):
            raise BadRow("rejected", "has the same tokens as chosen, so there is nothing to prefer")
        return sides

    def _fitted(self, sides: list[Tokens], counts: Counter[str]) -> list[Tokens]:
        """A row's sequences cut to the maximum length, or none. Cut on the left, a pair keeps one prompt."""
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
            counts["dropped, because cutting left no label"] += 1
            return []
        if len(cut) > 1 and np.array_equal(cut[0].ids, cut[1].ids):
            counts["dropped, because cutting left no difference"] += 1
            return []
        counts["truncated"] += 1
        return cut


def make_encoder(data: DataSection, tokenizer: str) -> RowEncoder:
    """An encoder with the tokenizer in a folder. data: with its format resolved. Raises UserError."""
    loaded, template = load_tokenizer(tokenizer), template_of(data)
    if data.target_length is not None:
        return RowEncoder(data, SourceAndTarget(loaded, template=template))
    return RowEncoder(data, Chat(loaded, template=template, train_on=data.train_on))


def make_packing_encoder(data: DataSection, tokenizer: str) -> Callable[[list[Found]], dict[str, np.ndarray]]:
    """`make_encoder` for a worker process, whose results are arrays."""
    encode = make_encoder(data, tokenizer)
    return lambda batch: encode(batch).packed()


def _work(data: DataSection, tokenizer_folder: Path) -> Work:
    """The work of tokenizing rows. data: with its format resolved."""
    digest = hashlib.sha256(f"{_VERSION}.3 {tokenizers.__version__} {transformers.__version__} {data.format}".encode())
    for file in sorted(tokenizer_folder.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    arguments = (data, str(tokenizer_folder))
    return Work(make_packing_encoder, arguments, digest.hexdigest())


def with_format(data: DataSection, source: Source) -> DataSection:
    """`data` with its format resolved: that of the first row that has one. Raises UserError."""
    if data.format != "auto":
        return data
    problem = empty(source)
    for where, row in located_rows(data, source):
        try:
            if isinstance(row, BadRow):
                raise row
            found = recognise(row, data.text_field)
            if found == "preference":
                raise UserError(f"{where}: is a pair of answers, which only task=dpo reads; set it")
            if found == "text" and data.target_length is not None:
                raise UserError(f"{where}: is one text without the source and target of task=seq2seq; set task=sft")
            return replace(data, format=found)  # type: ignore[arg-type]  # one of its choices
        except BadRow as error:
            problem = f"{where}: {error}; {FIX}, or name its form with data.format"
            if data.on_bad_row == "error":
                break
    raise UserError(problem)


def tokenizer_of_rows(data: DataSection, source: Source) -> Any:
    """data.tokenizer's tokenizer; a BPE is trained on the text of the rows. data: with its format resolved."""

    def texts_of(row: dict[str, Any]) -> Iterator[str]:
        return map(_text_of, read_examples(row, data.format, data.text_field, data.source))

    of_rows = source_of_texts(data, source, texts_of)
    tokenizer = make_tokenizer(data.tokenizer, of_rows, 0.0)
    if data.target_length is not None and is_made(data.tokenizer):
        for_encoder_decoder(tokenizer)
    return tokenizer


def _text_of(example: Example) -> str:
    contents = [message["content"] for message in example.messages or []]
    return "\n".join(text for text in contents if isinstance(text, str)) or example.prompt + example.completion


def _fill(data: DataSection, source: Source, fingerprint: str, folder: Path, report: ProgressFile) -> None:
    report("making the tokenizer for")
    said = data.format
    data = with_format(data, source)
    tokenizer = tokenizer_of_rows(data, source)
    tokenizer.chat_template = template_of(data) or tokenizer.chat_template
    preparation = Preparation(data, source, folder, tokenizer)
    encoded = _encoded(data, source, folder / TOKENIZER, kept_folder(folder.with_name(fingerprint)))
    preparation.write(encoded, partial(_sequences, data, partial(report, "packing")), report)
    rendered = preparation.found.counts.pop(_RENDERED, 0)
    too_long = f"{data.sequence_length + 1} tokens"
    if data.target_length is not None:
        too_long = f"a source of {data.sequence_length} or a target of {data.target_length} tokens"
    preparation.require_rows(too_long)
    own = make_encoder(data, str(folder / TOKENIZER)).chat if rendered else None
    preparation.publish(fingerprint, _notes(data, preparation, own, recognised=said == "auto"))


def _sequences(
    data: DataSection, report: Callable[[int], object], lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sequences according to data.packing; a pair is a sequence of two rows. report: as for `best_fit`."""
    if data.packing != "none":
        return best_fit(lengths.astype(np.int64) - 1, data.sequence_length, report)
    return by_number(lengths, 2 if data.format == "preference" else 1)


def _encoded(data: DataSection, source: Source, tokenizer: Path, kept: Path) -> Iterator[EncodedRows]:
    """The batches of the source in order. kept: as for `results`."""
    batches = batches_of(data, source)
    first = list(islice(batches, _BATCHES_HERE + 1))
    if len(first) <= _BATCHES_HERE:
        yield from map(make_encoder(data, str(tokenizer)), first)
        return
    yield from map(EncodedRows.unpacked, results(_work(data, tokenizer), chain(first, batches), data.workers, kept))


def _notes(data: DataSection, preparation: Preparation, chat: Chat | None, *, recognised: bool) -> list[str]:
    """Human-readable lines on what was decided and counted. chat: None if no row went through a chat template."""
    counts = preparation.counts()
    how = "recognised by their fields" if recognised else "as data.format says"
    form = f"data: {counts['rows']:,} rows of format {data.format} ({how})"
    if chat is not None:
        which = "of data.chat_template" if data.chat_template else "of the tokenizer"
        form += f"; chat template {which}"
        if data.train_on != "all" and data.target_length is None:
            form += f", answers located by {'its generation markers' if chat.has_markers else 'rendering turn by turn'}"
    train, held_out = preparation.train, preparation.validation
    kept = f"data: {train.rows:,} rows in {train.sequences:,} sequences to train on, {held_out.rows:,} rows held out"
    if data.format == "preference":
        kept = f"data: {train.sequences:,} pairs to train on, {held_out.sequences:,} held out"
    kept += lost(counts)
    if data.target_length is None:
        kept += f"; the longest row has {counts['longest']:,} tokens"
    else:
        kept += f"; the longest source has {counts['longest source']:,} tokens, the longest target "
        kept += f"{counts['longest target']:,}"
    share = f"data: {counts['trained'] / max(counts['tokens'], 1):.1%} of {counts['tokens']:,} tokens are labels"
    full = (train.tokens - train.rows) / max(train.sequences * data.sequence_length, 1)
    share += f"; sequences of {data.sequence_length:,} are {full:.1%} full" if data.packing != "none" else ""
    return [form, kept, share]
