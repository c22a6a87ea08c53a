"""Text from a trained model: `python -m tools.generate MODEL --prompt TEXT`, `--chat`, or `--rows FILE`.

MODEL is an exported folder, an adapter's folder, or a checkpoints/step-N folder, which is exported to a temporary
folder first (FP32, an adapter merged). --prompt continues TEXT, or answers it if MODEL has an encoder. With --chat TEXT
is a user's turn, rendered by the tokenizer's chat template; without TEXT the turns of one conversation are read from
the terminal, one per line. --rows answers the last turn of each chat in a JSONL file and counts exact matches, for an
adapter's folder also those of its base alone; --note writes the count on the run's page. Greedy unless --temperature is
given; one process, on a GPU if there is one.
"""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from config import json_text
from config.cli import Arguments, entry_point
from config.errors import UserError, one_line
from config.options import positive_int, positive_number
from config.printable import printable
from config.schema import AdapterSection
from data.sources.file_rows import json_rows
from data.sources.row_formats import BadRow, Example, read_example
from tracking.serve.notes import Notes, read_notes, write_notes

if TYPE_CHECKING:
    from data.sources.chat import Chat


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    options = read_options(arguments)
    import transformers

    # peft uses its name from older versions of transformers
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with model_folder(options.model) as folder:
        model, tokenizer = load(folder, dtype=options.dtype, trusted=options.trust_remote_code)
        if options.chat and tokenizer.chat_template is None:
            given = "--rows" if options.rows else "--chat"
            raise UserError(f"{given}: the tokenizer in {options.model} has no chat template; leave it out")
        for answer in scores(model, tokenizer, options) if options.rows else answers(model, tokenizer, options):
            print(printable(answer), flush=True)
    return 0


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises UserError."""
    parser = Arguments("python -m tools.generate", __doc__)
    parser.add_argument("model", type=Path, help="exported folder, adapter's folder or checkpoints/step-N folder")
    parser.add_argument("--prompt", help="text to continue, or with --chat the user's turn")
    parser.add_argument("--chat", action="store_true", help="render turns with the chat template")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="chats (messages) as JSONL: count exact matches")
    parser.add_argument("--note", type=Path, metavar="RUN", help="with --rows: run folder whose page gets the count")
    parser.add_argument("--tokens", type=positive_int, default=128, help="most new tokens (default 128)")
    parser.add_argument("--temperature", type=positive_number, help="sample at this temperature (default: greedy)")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling (default 0)")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="compute dtype")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model's own code, as in training")
    options = parser.parse_args(arguments)
    if options.prompt is None and not options.chat and options.rows is None:
        raise UserError("--prompt: is missing; give what to continue, --chat or --rows")
    if options.note is not None and (options.rows is None or not options.note.is_dir()):
        raise UserError(f"--note {options.note}: needs --rows and the folder of a run; correct it")
    options.chat = options.chat or options.rows is not None
    return options


@contextmanager
def model_folder(given: Path) -> Iterator[Path]:
    """`given`, or a temporary export of it if it is a checkpoint. Raises UserError."""
    if (given / "config.json").is_file() or (given / "adapter_config.json").is_file():
        yield given
        return
    if not (given / "deepspeed").is_dir():
        raise UserError(f"{given}: is neither an exported folder nor a checkpoint; give one of them")
    from tools.export_hf.export import export, find_source
    from training.checkpoint.retention import read_lock

    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "model"
        source = find_source(given, run=None, tokenizer=None, parity=None)
        with read_lock(given):
            adapted = source.config.adapter.kind != "none"
            export(source, out, dtype="fp32", shard_size="5GB", force=False, merged=adapted, log=lambda text: None)
        yield out


def load(folder: Path, *, dtype: str, trusted: bool = False) -> tuple[Any, Any]:
    """The model in evaluation mode, on the device, and its tokenizer. trusted: run its own code. Raises UserError."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    from modeling import quantised_base
    from precision.dtypes import DTYPES

    _require_generative(folder)
    settings = json_text.object_in(folder / "config.json")
    options: dict[str, Any] = {"dtype": DTYPES[dtype], "trust_remote_code": trusted}
    try:
        if (folder / "adapter_config.json").is_file():
            from peft import AutoPeftModelForCausalLM, AutoPeftModelForSeq2SeqLM, PeftModel

            adapter = json_text.object_in(folder / "adapter_config.json")
            auto: Any = AutoModelForCausalLM
            adapted: Any = AutoPeftModelForCausalLM
            if adapter.get("task_type") == "SEQ_2_SEQ_LM":
                auto, adapted = AutoModelForSeq2SeqLM, AutoPeftModelForSeq2SeqLM
            section, changed = _base_of(folder)
            quantised = section.base != "compute"
            options |= {"quantization_config": quantised_base.settings(section)} if quantised else {}
            if changed:
                name = adapter["base_model_name_or_path"]
                config = AutoConfig.from_pretrained(name, trust_remote_code=trusted)
                config.update(changed)
                base = auto.from_pretrained(name, config=config, **options)
                model: Any = PeftModel.from_pretrained(base, str(folder))
            else:
                model = adapted.from_pretrained(str(folder), **options)
            if quantised:
                quantised_base.compute_as_inputs(model)
        else:
            has_encoder = settings.get("is_encoder_decoder") and "ForCausalLM" not in str(settings.get("architectures"))
            auto = AutoModelForSeq2SeqLM if has_encoder else AutoModelForCausalLM
            model = auto.from_pretrained(str(folder), **options)
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trusted)
    except UserError:
        raise
    except Exception as error:  # the Rust tokenizers raise plain Exception for a file that they cannot parse
        own_code = "trust_remote_code" in str(error)
        fix = "give --trust-remote-code if you trust its code" if own_code else "export the checkpoint again"
        raise UserError(f"{folder}: cannot be loaded ({one_line(error)}); {fix}") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval(), tokenizer


def _base_of(folder: Path) -> tuple[AdapterSection, dict[str, Any]]:
    """How an exported adapter's base was stored in training, as floats if nothing says so, and its `model.config`."""
    facts = json_text.object_in(folder / "mantissa.json").get("adapter")
    known = facts if isinstance(facts, dict) else {}
    settings = known.get("model.config")
    section = AdapterSection()
    if known.get("base") in ("nf4", "int8"):
        section = AdapterSection(base=known["base"], double_quant=known.get("double_quant") is True)
    return section, settings if isinstance(settings, dict) else {}


def _require_generative(folder: Path) -> None:
    """Raises UserError for the folder of an encoder, which `from_pretrained` would load with a random head."""
    adapter = json_text.object_in(folder / "adapter_config.json")
    base = Path(str(adapter.get("base_model_name_or_path"))) if adapter else folder
    classes = map(str, json_text.object_in(base / "config.json").get("architectures") or [])
    encoder = next((name for name in classes if name.endswith(_ENCODERS)), "")
    if encoder or adapter and adapter.get("task_type") not in (None, "CAUSAL_LM", "SEQ_2_SEQ_LM"):
        what = "an adapter of an encoder" if adapter else f"a {encoder}"
        raise UserError(f"{folder}: is {what}, which generates no text; use it in transformers")


_ENCODERS = ("ForSequenceClassification", "ForTokenClassification", "ForMaskedLM")


def answers(model: Any, tokenizer: Any, options: argparse.Namespace) -> Iterator[str]:
    """The model's continuation of the prompt, or its answer to each of the user's turns. Raises UserError."""
    from data.sources.chat import leading_tokens

    if not options.chat:
        reads = model.config.is_encoder_decoder
        own = tokenizer(options.prompt, add_special_tokens=reads).input_ids
        ids = own if reads or not tokenizer.is_fast else [*leading_tokens(tokenizer.backend_tokenizer), *own]
        answer = generate(model, tokenizer, ids or [tokenizer.eos_token_id], options)
        yield answer if reads else options.prompt + answer
        return
    chat = _chat_of(model, tokenizer)
    messages: list[dict[str, str]] = []
    for said in [options.prompt] if options.prompt is not None else _typed():
        messages.append({"role": "user", "content": said})
        try:
            ids = chat.prompt(Example(messages=messages)).tolist()
        except BadRow as problem:
            raise UserError(f"--chat: {problem}") from problem
        answer = generate(model, tokenizer, ids, options)
        messages.append({"role": "assistant", "content": answer})
        yield answer


def _chat_of(model: Any, tokenizer: Any) -> "Chat":
    """The maker of prompts from texts and conversations, as in training."""
    from data.sources.chat import Chat
    from data.sources.seq2seq_rows import SourceAndTarget

    if model.config.is_encoder_decoder:
        return SourceAndTarget(tokenizer, template=None)
    return Chat(tokenizer, template=None, train_on="assistant")


def scores(model: Any, tokenizer: Any, options: argparse.Namespace) -> Iterator[str]:
    """Each answer to a row of `options.rows`, and the number that match its last turn exactly. Raises UserError."""
    chats = _chats(options.rows, _chat_of(model, tokenizer))
    passes = {"exact match": nullcontext()}
    if hasattr(model, "disable_adapter"):
        passes = {"exact match before training": model.disable_adapter(), "after training": nullcontext()}
    counts = []
    for name, manner in passes.items():
        right = 0
        with manner:
            for ids, wanted in chats:
                answer = generate(model, tokenizer, ids, options).strip()
                same = answer == wanted.strip()
                right += same
                yield f"{'right' if same else 'wrong'}: {shorten(answer, 100)}"
        counts.append(f"{name} {right} of {len(chats)}")
    found = f"{', '.join(counts)} ({options.rows})"
    if options.note is not None:
        notes = read_notes(options.note)
        write_notes(options.note, Notes(notes.tags, f"{notes.note}\n{found}".strip()))
    yield found


def _chats(path: Path, chat: "Chat") -> list[tuple[list[int], str]]:
    """(prompt, answer) of each conversation of a JSONL file. Raises UserError naming the first bad line."""
    found = []
    for where, row in json_rows(str(path)):
        try:
            if isinstance(row, BadRow):
                raise row
            example = read_example(row, "messages", "text")
            *asked, wanted = example.messages or [{}]
            if not asked or wanted["role"] != "assistant":
                raise BadRow("messages", "do not end with an assistant's turn after another one; correct the row")
            content = wanted["content"]
            texts = [part.get("text") for part in content] if isinstance(content, list) else [content]
            if not all(isinstance(text, str) for text in texts):
                raise BadRow("messages", "end with a turn that has other parts than text; write it as one text")
            found.append((chat.prompt(replace(example, messages=asked)).tolist(), "".join(texts)))
        except BadRow as problem:
            raise UserError(f"{where}: {problem}") from problem
    if not found:
        raise UserError(f"--rows {path}: has no rows; give chats, one a line")
    return found


def generate(model: Any, tokenizer: Any, ids: list[int], options: argparse.Namespace) -> str:
    """The new tokens as text, up to the end of the turn or of the document. Raises UserError for too long a prompt."""
    import torch

    from modeling.generate import can_cache, tokens_within, without_settings

    torch.manual_seed(options.seed)
    given = torch.tensor([ids], device=model.device)
    ends = {tokenizer.eos_token_id}
    if options.chat and not model.config.is_encoder_decoder:
        ends.update(tokenizer.all_special_ids)  # one of them ends a turn, and none is part of one
    sampling = {} if options.temperature is None else {"temperature": options.temperature}
    try:
        tokens = tokens_within(model, options.tokens, after=len(ids))
    except ValueError as problem:
        raise UserError(f"{options.model}: {problem}; shorten it") from problem
    with torch.no_grad(), without_settings(model):
        found = model.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=tokens,
            pad_token_id=tokenizer.eos_token_id,
            use_cache=can_cache(model.config),
            eos_token_id=sorted(ends),
            do_sample=bool(sampling),
            **sampling,
        )
    new = found[0] if model.config.is_encoder_decoder else found[0, len(ids) :]
    return str(tokenizer.decode(new, skip_special_tokens=True))


def _typed() -> Iterator[str]:
    """Lines from the terminal or a pipe."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


if __name__ == "__main__":
    sys.exit(main())
