"""The tokenizer of a corpus: raw bytes, a byte-level BPE trained on the corpus, or a Hugging Face fast tokenizer.

It is always saved with the corpus as a Hugging Face tokenizer folder, so that a corpus and a checkpoint stay readable
when its origin has changed or is unreachable. `bytes` and `bpe` decode to exactly the text that was
encoded. A document ends with the tokenizer's end-of-document (eos) token.
"""

from __future__ import annotations

import hashlib
import heapq
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import cached_file

from config.errors import UserError
from data.sources.sources import Source
from data.text.encode import END_OF_DOCUMENT, is_validation, train_bpe
from data.text.workers import Workers

SAMPLE_BYTES = 32 << 20
"""[bytes] A BPE is trained on at most this much text (except for a single longer document)."""
SCANNED_BYTES = 1 << 30
"""[bytes] The sample is drawn from this much text at the start of the source, so that drawing ends on any stream."""
SMALLEST_BPE = 257
"""[tokens] 256 bytes and the end of a document."""
_UNIGRAM = re.compile(rb'"type":\s*"Unigram"')
_PROBE = "It's 12345 words, they'LL say:\n\n\tdef f(x):  return x + 1\r\n naïve — 你好 😀 998"
"""Text that splitting rules treat differently, but not by a space at the start, as Llama 2's old class does."""


def tokenizer_identity(spec: str) -> str:
    """The tokenizer's part of a corpus's fingerprint: its name, or the contents of a local folder's files."""
    folder = Path(spec).expanduser()
    if is_made(spec) or not folder.is_dir():
        return spec
    digest, unigram = hashlib.sha256(), False
    slow = () if (folder / "tokenizer.json").is_file() else (".model", "vocab.txt")  # only then are they read
    for path in sorted(folder.iterdir()):
        named = "token" in path.name or path.name in {"vocab.json", "merges.txt"} or path.name.endswith(slow)
        if path.is_file() and named:
            content = path.read_bytes()
            digest.update(path.name.encode() + b"\0" + hashlib.sha256(content).digest())
            unigram |= path.suffix == ".model" if slow else _UNIGRAM.search(content) is not None
    # with these, text that spelt a control token became it in what was prepared before
    return f"folder:{digest.hexdigest()}{':text' * unigram}"


def make_tokenizer(spec: str, source: Source, validation_fraction: float) -> PreTrainedTokenizerFast:
    """The tokenizer that data.tokenizer names; a BPE is trained on training documents only. Raises UserError."""
    if spec == "bytes":
        return _wrap(_bytes_tokenizer())
    vocabulary = _bpe_vocabulary(spec)
    if vocabulary is None:
        return _load_pretrained(spec)
    sample = draw_sample(source, validation_fraction)
    # In a separate process: the trainer's threads would make every later fork of this process print a warning.
    with Workers(1, partial, train_bpe, vocabulary) as workers:
        return _wrap(Tokenizer.from_str(workers.submit(sample).result()))


ENCODER_TOKENS = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
"""Special tokens of an encoder's tokenizer that is made here."""


def make_encoder_tokenizer(spec: str, source: Source, validation_fraction: float) -> PreTrainedTokenizerFast:
    """`make_tokenizer` for an encoder: bytes and bpe get ENCODER_TOKENS and wrap texts in them as BERT does."""
    tokenizer = make_tokenizer(spec, source, validation_fraction)
    if is_made(spec):
        tokenizer.add_special_tokens(dict(ENCODER_TOKENS))
        first, last = ((name, tokenizer.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]"))
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[first, last]
        )
    if tokenizer.pad_token_id is None:
        raise UserError(f"data.tokenizer={spec}: has no padding token. Use the tokenizer of an encoder.")
    return tokenizer


def make_masking_tokenizer(spec: str, source: Source, validation_fraction: float) -> PreTrainedTokenizerFast:
    """`make_encoder_tokenizer` for task mlm. Also raises UserError if it has no mask token."""
    tokenizer = make_encoder_tokenizer(spec, source, validation_fraction)
    mask_token(tokenizer)
    return tokenizer


def mask_token(tokenizer: PreTrainedTokenizerFast) -> int:
    """Id of the mask token. Raises UserError if there is none."""
    if tokenizer.mask_token_id is None:
        raise UserError("data.tokenizer: has no mask token, which task = mlm needs; use that of an encoder")
    return int(tokenizer.mask_token_id)


def is_made(spec: str) -> bool:
    """Whether data.tokenizer names a tokenizer made here, so that no other has its tokens."""
    return spec == "bytes" or _bpe_vocabulary(spec) is not None


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer saved in a folder, such as `Corpus.tokenizer_folder`. Needs no network."""
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    return cast(PreTrainedTokenizerFast, tokenizer)


def vocabulary_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """Number of ids a model needs: the largest id plus one, which `len` understates for vocabularies with gaps."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)


def draw_sample(source: Source, validation_fraction: float) -> list[str]:
    """Training documents for the BPE: those with the smallest hashes among the first SCANNED_BYTES, in hash order."""
    heap: list[tuple[int, str]] = []
    held = scanned = 0
    cut = 1 << 64  # smallest hash that did not fit: documents with larger hashes stay out, even if they would fit
    for text in source.documents(Counter()):
        raw = text.encode()
        scanned += len(raw)
        order = int.from_bytes(hashlib.blake2b(raw, digest_size=8, person=b"sample").digest(), "little")
        if order < cut and not is_validation(text, validation_fraction):
            heapq.heappush(heap, (-order, text))
            held += len(raw)
        while held > SAMPLE_BYTES and len(heap) > 1:
            evicted, dropped = heapq.heappop(heap)
            held -= len(dropped.encode())
            cut = -evicted
        if scanned >= SCANNED_BYTES:
            break
    return [text for _, text in sorted(heap, reverse=True)]


def _bpe_vocabulary(spec: str) -> int | None:
    kind, _, size = spec.partition(":")
    if kind != "bpe":
        return None
    if not size.isdecimal() or int(size) < SMALLEST_BPE:
        raise UserError(f"data.tokenizer={spec}: the vocabulary size must be {SMALLEST_BPE} or more, as in bpe:4096.")
    return int(size)


def _bytes_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    return tokenizer


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_DOCUMENT,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


def origin_of(spec: str) -> tuple[str, str]:
    """The folder or hub id that data.tokenizer names, and the revision there."""
    folder = Path(spec).expanduser()
    name, _, revision = (str(folder), "", "") if folder.is_dir() else spec.partition("@")
    return name, revision or "main"


def _of_its_file(tokenizer: PreTrainedTokenizerFast, name: str, revision: str) -> PreTrainedTokenizerFast:
    """The tokenizer of tokenizer.json where the class cuts text otherwise: transformers builds GPT2Tokenizer and others
    from a BPE's vocabulary and merges, with a splitting rule of their own."""
    try:
        path = cached_file(name, "tokenizer.json", revision=revision)
    except OSError:  # it was made from other files
        return tokenizer
    filed = Tokenizer.from_file(str(path))
    found, expected = (one.encode(_PROBE, add_special_tokens=False).ids for one in (tokenizer.backend_tokenizer, filed))
    if not isinstance(filed.model, models.BPE) or found == expected:
        return tokenizer
    return cast(PreTrainedTokenizerFast, PreTrainedTokenizerFast.from_pretrained(name, revision=revision))


def _load_pretrained(spec: str) -> PreTrainedTokenizerFast:
    name, revision = origin_of(spec)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Exception as error:  # the Rust tokenizers raise plain Exception for a file they cannot parse
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        fix = "Use bytes, bpe:<vocab>, a tokenizer folder or a hub id."
        raise UserError(f"data.tokenizer={spec}: cannot be loaded ({reason}). {fix}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"data.tokenizer={spec}: has no fast form (tokenizer.json). Use a tokenizer that has one.")
    tokenizer = _of_its_file(tokenizer, name, revision)
    if tokenizer.eos_token_id is None and tokenizer.sep_token_id is not None:
        tokenizer.eos_token = tokenizer.sep_token  # BERT ends texts with it
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"data.tokenizer={spec}: has no end-of-document token. Set eos_token in its tokenizer_config.json."
        )
    return tokenizer
