"""Prepare a corpus once: read the source, tokenize in several processes, publish shards atomically.

Every rank of a run calls `prepare`; it needs no process group. Whichever takes the file lock first prepares, the others
wait and find the corpus finished. Everything is written into `<fingerprint>.partial-<pid>` and renamed at the end;
leftovers of a killed preparation are removed by the next one that holds the lock, except the batches in
`<fingerprint>.pieces` (`batch_results`). The tokens do not depend on the number of workers.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerFast

from config.errors import Unreadable, UserError
from config.json_text import json_sha256
from config.schema import DataSection
from data.corpora.corpus import (
    SPLITS,
    TOKENIZER,
    Corpus,
    fingerprint_of_parts,
    is_prepared,
    open_corpus,
    tokenizer_sha256,
    write_index,
)
from data.corpora.shards import FORMAT_VERSION, token_dtype, write_shard
from data.sources.chat import leading_tokens
from data.sources.sources import Source, open_source
from data.text.batch_results import Work, kept_folder, results
from data.text.cache_folder import cache_folder
from data.text.encode import DocumentEncoder
from data.text.holdout import hold_out_tail
from data.text.preparation_progress import Display, ProgressFile, read_progress
from data.text.token_ids import copied
from data.text.tokenizer import (
    make_masking_tokenizer,
    make_tokenizer,
    tokenizer_identity,
    vocabulary_size,
)
from data.text.workers import WorkerDied

SHARD_TOKENS = 1 << 26
"""[tokens] Size of a full shard: 128 MiB of uint16."""
BATCH_CHARACTERS = 1 << 20
"""[characters] Text handed to a worker at a time; a longer document is a batch of its own."""
_LONGEST_POLL_SECONDS = 5.0
_RESULTS_VERSION = 3
"""Version of the format of kept results; those of other versions are not found."""
MakeTokenizer = Callable[[str, Source, float], PreTrainedTokenizerFast]
"""Makes data.tokenizer's tokenizer from the source and data.validation_fraction."""


def prepare(data: DataSection, *, progress: bool, for_encoder: bool = False) -> Corpus:
    """Open the corpus that a config names, preparing it first if need be. It does not depend on the run's seed.

    progress: print progress, also while another process prepares.
    for_encoder: with the tokenizer of `make_masking_tokenizer`. Raises UserError.
    """
    fill = partial(_fill, make=make_masking_tokenizer if for_encoder else make_tokenizer)
    corpus = prepared(data, partial(corpus_fingerprint, for_encoder=for_encoder), fill, progress=progress)
    if data.hold_out == "auto" and data.validation_fraction and not corpus.validation_documents:
        return hold_out_tail(corpus, fraction=data.validation_fraction, sequence_length=data.sequence_length)
    return corpus


Fill = Callable[[DataSection, Source, str, Path, "ProgressFile"], None]
"""Writes a whole corpus from: data, source, its fingerprint, the folder to fill, and where to report progress."""


def prepared(
    data: DataSection, fingerprint_of: Callable[[DataSection, Source], str], fill: Fill, *, progress: bool
) -> Corpus:
    """The finished corpus of one source, written by `fill` if it does not exist. Raises UserError."""
    try:
        source = open_source(data)
        fingerprint = fingerprint_of(data, source)
    except OSError as error:
        key = "data.path" if data.path else "data.source"
        reason = f"{error.filename or 'its files'} cannot be read ({error.strerror or error})"
        raise UserError(f"{key}={data.path or data.source}: {reason}. Change the permissions, or {key}.") from error

    folder = cache_folder(data, fingerprint, say=progress)
    if not is_prepared(folder):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            display = Display(source.label, active=progress)
            with _lock(folder, data.wait_minutes, display):
                if not is_prepared(folder):
                    _prepare_locked(data, source, folder, display, fill)
                display.finish()
        except WorkerDied as error:
            raise UserError(
                f"data.workers={data.workers}: {error} while tokenizing, most often for lack of memory. "
                "Use fewer workers or a machine with more memory."
            ) from error
        except OSError as error:
            raise UserError(
                f"data.cache_dir={data.cache_dir}: cannot be written ({error}). Free space there or set another folder."
            ) from error
    return open_corpus(folder, verify=data.verify)


def corpus_fingerprint(data: DataSection, source: Source, *, for_encoder: bool = False) -> str:
    """Name of the corpus: 20 hex digits of a hash over everything that determines its tokens."""
    parts = [FORMAT_VERSION, data.source, source.identity, source.text_field, str(source.deduplicate)]
    parts += [tokenizer_identity(data.tokenizer), repr(data.validation_fraction), *["encoder"] * for_encoder]
    parts += ["begin"] * (data.begin_of_document == "auto")
    return fingerprint_of_parts(parts)


def _lock(folder: Path, wait_minutes: float, display: Display) -> AbstractContextManager[Any]:
    """Take the corpus's lock, unless the corpus is published meanwhile; until then display its holder's progress.
    UserError after `wait_minutes` without any."""
    lock = FileLock(f"{folder}.lock")
    began, seen = time.monotonic(), ""
    deadline = began + wait_minutes * 60
    while True:
        try:
            return lock.acquire(blocking=False)
        except Timeout:
            if is_prepared(folder):  # its holder may delete kept batches for an hour
                return nullcontext()
            found = read_progress(folder)
            display.show(found)
            if found not in ("", seen):
                deadline, seen = time.monotonic() + wait_minutes * 60, found
            if time.monotonic() >= deadline:
                raise UserError(
                    f"data.wait_minutes={wait_minutes:g}: another process is still preparing {folder} (it holds "
                    f"{folder}.lock) without progress. Raise data.wait_minutes, or stop it if it hangs."
                ) from None
            # a thousand ranks may ask a shared file system for hours
            time.sleep(min(_LONGEST_POLL_SECONDS, 0.05 + (time.monotonic() - began) / 20))


def _prepare_locked(data: DataSection, source: Source, folder: Path, display: Display, fill: Fill) -> None:
    for leftover in folder.parent.glob(f"{folder.name}.partial-*"):
        shutil.rmtree(leftover)
    if folder.exists():
        # A folder without an index is the remainder of an interrupted deletion.
        shutil.rmtree(folder)
    partial = folder.parent / f"{folder.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        with ProgressFile(partial, display) as report:
            fill(data, source, folder.name, partial, report)
        partial.rename(folder)
        shutil.rmtree(kept_folder(folder), ignore_errors=True)
    except (UserError, OSError) as error:
        # After other failures, such as a connection that breaks or a worker out of memory, kept results are reused.
        if not isinstance(error, Unreadable):
            shutil.rmtree(kept_folder(folder), ignore_errors=True)
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fill(
    data: DataSection, source: Source, fingerprint: str, folder: Path, report: ProgressFile, *, make: MakeTokenizer
) -> None:
    """Write a whole corpus into `folder`: tokenizer, shards, and last the index. If all documents were drawn for
    validation, none is held out, provided the end of one can be instead."""
    report("making the tokenizer for")
    tokenizer = make(data.tokenizer, source, data.validation_fraction)
    tokenizer.save_pretrained(folder / TOKENIZER)
    vocab_size = vocabulary_size(tokenizer)
    dtype = token_dtype(vocab_size)
    header = {
        "vocab_size": str(vocab_size),
        "tokenizer_sha256": tokenizer_sha256(folder / TOKENIZER),
        "source_fingerprint": hashlib.sha256(source.identity.encode()).hexdigest(),
    }
    end_of_document = tokenizer.eos_token_id
    writers = {split: _SplitWriter(folder, split, dtype, header, end_of_document) for split in SPLITS}
    skipped: Counter[str] = Counter()
    places: dict[str, str] = {}
    leading: list[int] = []
    if source.ids_field is None:
        bytewise = data.tokenizer == "bytes"
        # tokenizing bytes again is faster than reading kept results
        kept = None if bytewise else kept_folder(folder.with_name(fingerprint))
        leading = [] if make is make_masking_tokenizer else leading_tokens(tokenizer.backend_tokenizer)
        begin = leading if data.begin_of_document == "auto" else []
        tokenizer_json = (folder / TOKENIZER / "tokenizer.json").read_text(encoding="utf-8")
        work = _work(tokenizer_json, end_of_document, dtype, data.validation_fraction, bytewise, *begin)
        batches = results(work, _batches(source.documents(skipped, places)), data.workers, kept)
    else:
        batches = copied(data, source, skipped, size=vocab_size, end_of_document=end_of_document, dtype=dtype)
    with closing(batches):
        for batch in batches:
            for split, counts in zip(SPLITS, batch["counts"].tolist(), strict=True):
                writers[split].add(batch[split], *counts)
            if source.ids_field is None:
                report("tokenizing", sum(writer.text_bytes for writer in writers.values()), source.total_bytes)
            else:
                report("copying the tokens of", sum(writer.token_bytes for writer in writers.values()))
    splits = {split: writer.finish() for split, writer in writers.items()}
    read = sum(writer.documents for writer in writers.values()) + sum(skipped.values())
    if data.source == "text" and data.document_separator is not None and read == len(source.files):
        raise UserError(
            f"data.document_separator={json.dumps(data.document_separator)}: is not in {source.label}. Give the "
            "separator of its documents (YAML reads \\n as a line end in double quotes only), or null."
        )
    held_out = writers["validation"].documents
    if not writers["train"].documents and held_out and data.hold_out == "auto":
        for file in folder.glob("*.safetensors"):
            file.unlink()
        _fill(replace(data, validation_fraction=0.0), source, fingerprint, folder, report, make=make)
        return
    if not writers["train"].documents:
        raise _no_training_text(data, source, held_out, skipped)
    write_index(
        folder,
        {
            "fingerprint": fingerprint,
            "source": source.label,
            "revision": source.revision(),
            "vocab_size": vocab_size,
            "end_of_document": end_of_document,
            "tokenizer_sha256": header["tokenizer_sha256"],
            "skipped": dict(skipped),
            "skipped_places": places,
            "left_off": tokenizer.decode(leading) if data.begin_of_document == "none" else "",
            **splits,
        },
    )


def _work(*arguments: Any) -> Work:
    """arguments: those of `DocumentEncoder`."""
    identity = json_sha256([_RESULTS_VERSION, FORMAT_VERSION, tokenizers.__version__, *arguments])
    return Work(DocumentEncoder, arguments, identity)


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in documents:
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _no_training_text(data: DataSection, source: Source, held_out: int, skipped: Counter[str]) -> UserError:
    if held_out:
        return UserError(
            f"data.validation_fraction={data.validation_fraction:g}: all {held_out} documents of {source.label} were "
            "drawn for validation. Set it to 0 or give more documents."
        )
    if not skipped:
        return UserError(f"{source.label}: holds no document: it is empty. Write some into it, or name another file.")
    left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
    what = "text" if source.ids_field is None else "tokens"
    return UserError(f"{source.label}: holds no document with {what} (left out: {left_out}). Point it at {what}.")


class _SplitWriter:
    """Collects the tokens of one split and writes a shard whenever SHARD_TOKENS are held."""

    def __init__(self, folder: Path, split: str, dtype: str, header: dict[str, str], end_of_document: int) -> None:
        self._folder, self._split = folder, split
        self._header, self._end_of_document = {**header, "split": split}, end_of_document
        self._buffer = np.empty(SHARD_TOKENS, dtype=dtype)
        self._held = 0
        self._shards: list[dict[str, Any]] = []
        self.documents = 0
        self.text_bytes = 0
        self.token_bytes = 0

    def add(self, tokens: np.ndarray, documents: int, text_bytes: int) -> None:
        """Append encoded documents; a document may be split between two shards."""
        self.documents += documents
        self.text_bytes += text_bytes
        self.token_bytes += tokens.nbytes
        start = 0
        while start < len(tokens):
            taken = min(len(tokens) - start, len(self._buffer) - self._held)
            self._buffer[self._held : self._held + taken] = tokens[start : start + taken]
            self._held += taken
            start += taken
            if self._held == len(self._buffer):
                self._flush()

    def finish(self) -> dict[str, Any]:
        """Write the remaining tokens and return this split's part of the index."""
        if self._held:
            self._flush()
        return {"shards": self._shards, "documents": self.documents, "text_bytes": self.text_bytes}

    def _flush(self) -> None:
        tokens = self._buffer[: self._held]
        header = {**self._header, "documents": str(int(np.count_nonzero(tokens == self._end_of_document)))}
        path = self._folder / f"{self._split}-{len(self._shards):05d}.safetensors"
        self._shards.append(write_shard(path, tokens, header))
        self._held = 0
