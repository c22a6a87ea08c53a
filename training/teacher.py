"""The teacher of a distillation before the student is built: identified, and its answers computed if cached."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from transformers import AutoConfig, AutoTokenizer

from config.errors import UserError, one_line
from config.files import flush
from config.json_text import json_sha256
from config.resolved import Resolved
from config.schema import Config
from data.batches.loader import NO_SAMPLE, next_tokens
from data.corpora.corpus import Corpus
from data.corpora.row_shards import RowShards
from data.corpora.shards import TokenShards
from data.text.tokenizer import load_tokenizer
from modeling.build import config_identity, weights_identity
from modeling.objectives.divergence import likeliest
from training.distributed import World
from training.engine.teacher import Teacher
from training.tasks.cached_teacher import files_of, require_intact, splits_of, write_index
from training.tasks.shape import documents_of

_VERSION = 1


def prepare_teacher(resolved: Resolved, corpus: Corpus, world: World, *, vocabulary: int) -> tuple[Corpus, str]:
    """The corpus, with the teacher's answers if they are cached, and the teacher's identity. vocabulary: rows of the
    student's embedding. A collective. Raises UserError if the teacher has other tokens, or cannot be loaded."""
    section = resolved.config.distill
    identity = world.on_main(lambda: _identified(resolved.config, corpus, vocabulary))
    if section.top_k:
        if section.top_k >= vocabulary:
            raise UserError(f"distill.top_k = {section.top_k}: the vocabulary has {vocabulary} tokens; set it to 0")
        corpus = replace(corpus, targets=_cached(resolved, corpus, world, identity))
    return corpus, identity


def _identified(config: Config, corpus: Corpus, vocabulary: int) -> str:
    """The teacher's identity. vocabulary: rows of the student's embedding. Raises UserError if the teacher has other
    tokens, as it may also where its answers are cached, or cannot be loaded."""
    name = str(config.distill.teacher)
    ours = theirs = load_tokenizer(corpus.tokenizer_folder).get_vocab()
    with suppress(Exception):  # the teacher's folder has no tokenizer: only its number of tokens is compared
        theirs = AutoTokenizer.from_pretrained(name).get_vocab()
    if theirs != ours:
        token, _ = min(dict.items(ours) ^ dict.items(theirs))
        raise UserError(
            f"distill.teacher = {name}: its tokenizer is not that of the data: {token!r} is {theirs.get(token)} there "
            f"and {ours.get(token)} here; set data.tokenizer={name}"
        )
    try:
        shape = AutoConfig.from_pretrained(name, trust_remote_code=config.model.trust_remote_code)
        identity = weights_identity(name)
    except (ImportError, OSError, ValueError) as error:  # the hub lacks it or does not answer, say
        raise UserError(f"distill.teacher = {name}: cannot be loaded ({one_line(error)})") from error
    if (own := shape.get_text_config().vocab_size) != vocabulary:
        raise UserError(
            f"distill.teacher = {name}: has a vocabulary of {own} tokens, the student one of {vocabulary}; "
            "choose a teacher with as many, since models of one tokenizer may pad it differently"
        )
    return identity


def _cached(resolved: Resolved, corpus: Corpus, world: World, identity: str) -> Path:
    """The folder of the teacher's answers, computed first if need be, on a file system that all ranks share."""
    config = resolved.config
    kind = [config.distill.top_k, config.distill.temperature, config.distill.dtype, config.keeps_documents_apart]
    shape = world.on_main(lambda: config_identity(str(config.distill.teacher)))
    content = [_VERSION, corpus.fingerprint, config.data.sequence_length, identity, shape, *kind]
    key = json_sha256(content)[:16]
    folder = corpus.folder.with_name(f"{corpus.folder.name}-teacher-{key}")
    lock = FileLock(f"{folder}.lock")

    def acquire() -> None:
        try:
            lock.acquire(timeout=60 * config.data.wait_minutes)
        except (Timeout, OSError) as error:
            problem = f"is locked ({error}); end the process that has it, or wait for it"
            raise UserError(f"{folder}.lock: {problem}") from error

    world.on_main(acquire)
    try:
        if not world.from_main(folder.is_dir()):
            _fill(resolved, corpus, world, folder)
    finally:
        lock.release()
    world.on_main(lambda: require_intact(folder, verify=config.data.verify))
    return folder


def _fill(resolved: Resolved, corpus: Corpus, world: World, folder: Path) -> None:
    """Each rank asks for its share of the sequences; rank 0 publishes with one rename when all have written."""
    partial = Path(world.from_main(str(folder.with_name(f"{folder.name}.partial-{os.getpid()}"))))
    splits = splits_of(resolved.config, corpus)

    def begin() -> None:
        with _writing(partial):
            for leftover in folder.parent.glob(f"{folder.name}.partial-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            partial.mkdir()
            _allocate(resolved, splits, partial)

    world.on_main(begin)
    teacher = Teacher(resolved, world)
    with _writing(partial):
        for split, shards in splits.items():
            _ask(resolved, corpus, world, teacher, shards, files_of(partial, split))
    teacher.close()
    world.wait_for_all()
    if world.is_main:
        write_index(partial)
        partial.rename(folder)
        flush(folder.parent)
    world.wait_for_all()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Context manager that turns an OSError into a UserError."""
    try:
        yield
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error}); free space, or move it"
        raise UserError(f"data.cache_dir: {folder} {problem}") from error


def _allocate(resolved: Resolved, splits: dict[str, TokenShards | RowShards], partial: Path) -> None:
    """Create the files without their content. Raises OSError if they would not fit."""
    length, k = resolved.config.data.sequence_length, resolved.config.distill.top_k
    total = 0
    for split, shards in splits.items():
        for path, dtype, width in zip(files_of(partial, split), (np.int32, np.float32), (k, k + 1), strict=True):
            shape = shards.sequences(length), length, width
            total += np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape).nbytes
    size = f"{total / 2**30:.2f} GiB"
    if shutil.disk_usage(partial).free < total:
        raise OSError(errno.ENOSPC, f"{size} do not fit")
    print(f"teacher: writing its {k} likeliest tokens at every position, {size}, to {partial.parent}")


def _ask(
    resolved: Resolved,
    corpus: Corpus,
    world: World,
    teacher: Teacher,
    shards: TokenShards | RowShards,
    files: tuple[Path, Path],
) -> None:
    """Ask the teacher. Every rank asks equally often, since a sharded teacher answers all at once.

    Answers are written at their places, by descriptors that cannot read: an NFS client sends whole pages of files that
    it has mapped or read, and so what it takes for the neighbours' bytes; a full disk kills who writes to a map.
    """
    config, micro = resolved.config, resolved.batch.micro_size
    length, count = config.data.sequence_length, shards.sequences(config.data.sequence_length)
    make = next_tokens(length, documents_of(config, corpus))
    taken = micro * world.world_size
    with ExitStack() as ends:
        opened = [ends.enter_context(os.fdopen(os.open(path, os.O_WRONLY), "wb")) for path in files]
        for begin in range(0, count, taken):
            samples = begin + np.arange(taken)
            samples = np.where(samples < count, samples, NO_SAMPLE)
            mine = samples.reshape(world.world_size, micro)[world.rank][None]
            batch = make(shards, 0, samples, mine)
            [(inputs, _)] = batch.micro_batches(world.device)
            logits = teacher(**inputs).logits.flatten(0, 1)
            found = likeliest(logits, k=config.distill.top_k, temperature=config.distill.temperature)
            for file, values in zip(opened, found, strict=True):
                rows = values.cpu().numpy().reshape(micro, batch.input_ids.shape[-1], -1)
                each = length * rows[0, 0].nbytes
                first = os.fstat(file.fileno()).st_size - count * each  # after the header
                for row, sample in zip(rows, mine[0], strict=True):
                    if sample != NO_SAMPLE:
                        file.seek(first + int(sample) * each)
                        file.write(row.tobytes())
        for file in opened:
            file.flush()
            os.fsync(file.fileno())
