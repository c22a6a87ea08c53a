"""Turn a checkpoint into a Hugging Face model folder: safetensors, config, tokenizer, model card, hashes."""

import copy
import json
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import GENERATION_CONFIG_NAME, IMAGE_PROCESSOR_NAME, PROCESSOR_NAME
from transformers.utils.hub import cached_files

from config.errors import UserError, one_line
from config.files import file_sha256, flush
from config.load import load_config
from config.redact import redact
from config.schema import Config
from config.task import ENCODER_TASKS, model_class_of
from data.corpora.corpus import TOKENIZER
from data.sources.chat import Chat
from data.text.tokenizer import is_made, load_tokenizer, origin_of, vocabulary_size
from modeling.build import count_parameters, empty_model, is_dropout, model_config
from precision.dtypes import DTYPES
from tools.export_hf import facts as export_facts
from tools.export_hf.adapter import merge, trained, whole_modules, words_of, write_adapter
from tools.export_hf.card import model_card
from tools.export_hf.gap import Comparison, measure, of_masters, require_within
from tools.export_hf.gap import words_of as gap_words
from tools.export_hf.rows import Row, rows_of_data, rows_of_run
from tools.export_hf.tensors import Tensors, TensorsDiffer, compare_with_second_copy, untie, write_shards
from tracking.jsonl import encode
from tracking.run_dir import RunDir
from tracking.summary import read_inputs
from training.checkpoint.manifest import check_hashes, find_problem, read_state
from training.checkpoint.partitions import SavedModel, open_saved_model
from training.checkpoint.reader import Opener
from training.tasks.shape import given_by_task

DEEPSPEED = "deepspeed"
"""Folder of a checkpoint that holds DeepSpeed's files."""
FACTS, SUMS, CARD = "mantissa.json", "SHA256SUMS", "README.md"
_VOCABULARIES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""Names of SentencePiece's files on the hub."""

Log = Callable[[str], Any]


@dataclass(frozen=True)
class Source:
    """A checkpoint, its run and its tokenizer."""

    checkpoint: Path
    run: RunDir
    config: Config
    environment: dict[str, Any]
    tokenizer: Path
    parity: Path | None
    opener: Opener


def export(
    source: Source,
    out: Path,
    *,
    dtype: str,
    shard_size: str,
    force: bool,
    merged: bool = False,
    merge_from: str = "compute",
    comparison: Comparison | None = None,
    log: Log = print,
) -> dict[str, Any]:
    """Write the folder `out`; returns the content of its mantissa.json.

    A run's adapter is written in peft's format, or merged into its base: its files' values (merge_from `fp32`), or
    these rounded to the run's compute dtype (`compute`). comparison: how to compare log-probabilities with the
    masters'. Raises UserError, TensorsDiffer if a tensor is not as expected, and GapTooLarge; `out` is then unchanged.
    """
    adapted, remote_code = source.config.adapter.kind != "none", source.config.model.trust_remote_code
    if merged and not adapted:
        raise UserError(f"--merge-adapters: {source.run.config} has adapter.kind = none; leave it out")
    if merge_from == "fp32" and source.config.adapter.base != "compute":
        raise UserError(
            f"--merge-from fp32: the adapter was trained on codes (adapter.base = {source.config.adapter.base}), and "
            "is merged into the weights that these stand for; leave it out"
        )
    if comparison is not None and adapted and not merged:
        raise UserError("--compare-logits: an adapter by itself has no log-probabilities; add --merge-adapters")
    _require_free(source.checkpoint, out, force=force)
    _require_whole(source.checkpoint)
    saved = open_saved_model(source.checkpoint / DEEPSPEED, source.opener)
    try:
        tokenizer = load_tokenizer(source.tokenizer)
    except Exception as error:  # the Rust tokenizers raise plain Exception for a file that they cannot parse
        reason = f"cannot be loaded ({one_line(error)})"
        raise UserError(f"{source.tokenizer}: {reason}; give another tokenizer's folder with --tokenizer") from error
    skeleton, shape = build_skeleton(source.config, tokenizer, dtype=DTYPES[dtype])
    untie(skeleton, saved)
    parity = export_facts.parity_facts(source.parity, source.config, source.environment) if source.parity else None
    rows = _rows(source, comparison) if comparison is not None else []
    started = time.perf_counter()
    compared = compare_with_second_copy(saved)
    found = None
    if merged:
        base_dtype, corpus = torch.float32 if merge_from == "fp32" else None, source.tokenizer.parent
        found = merge(saved, source.config, shape, dtype=DTYPES[dtype], corpus=corpus, base_dtype=base_dtype)
        if not found.tied:
            skeleton, shape = build_skeleton(source.config, tokenizer, dtype=DTYPES[dtype], untied=True)
    masters = found.saved if found else saved
    tensors = Tensors(masters, skeleton, DTYPES[dtype]) if merged or not adapted else None
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        try:
            aside.mkdir(parents=True)
            if tensors is None:
                write_adapter(saved, source.config, skeleton, aside, DTYPES[dtype])
                _save_tokenizer(aside, source.config, tokenizer)
            else:
                write_shards(tensors, aside, shard_size)
                _write_settings(aside, source.config, shape, tokenizer, skeleton)
        except OSError as error:
            raise UserError(f"{out}: cannot be written ({error.strerror or error}); choose another OUT") from error
        if tensors is not None:
            _require_loadable(aside, skeleton, source.config)
        facts = _facts(source, saved, skeleton, dtype=dtype, compared=compared, parity=parity)
        settings = {key: value for key, value in source.config.model.config.items() if not is_dropout(key)}
        if adapted:
            facts["adapter"] = {
                **asdict(source.config.adapter),
                "modules_to_save": whole_modules(trained(saved)),
                "labels": _labels(source.config, shape),
                "model.config": settings,
                "merged": {"from": merge_from, **found.facts} if found else None,
            }
        if comparison is not None:
            kind: Any = {"model_class": model_class_of(source.config), "trust_remote_code": remote_code}
            facts["train-inference gap"] = gap = measure(of_masters(masters, shape, **kind), aside, rows, **kind)
            gap |= {"data": Path(comparison.data).name or "of the run", "bounds": asdict(comparison.bounds)}
            for line in gap_words(gap, dtype):
                log(line)
            require_within(gap, comparison.bounds)
        _seal(aside, facts)
        _publish(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    log(facts["export"]["compared"])
    for line in words_of(found.facts, dtype) if found else ():
        log(line)
    if adapted and not merged and settings:
        log(f"its base needs the run's model.config, which no file of peft holds: load it as {out / CARD} does")
    log(f"exported {source.checkpoint} to {out} as {dtype} in {time.perf_counter() - started:.1f} s")
    command = ["python", "-m", "tracking.wandb.sync", str(source.run.path), "--export", str(out), "--online"]
    log(f"record it in wandb: {shlex.join(command)}")
    return facts


def _rows(source: Source, comparison: Comparison) -> list[Row]:
    if source.config.classify.kind == "regression" and comparison.bounds.kl is not None:
        raise UserError("--largest-kl: the model predicts a number, which has no KL; bound it by --largest-difference")
    if comparison.data:
        return rows_of_data(comparison.data, source.config, source.tokenizer, comparison.rows)
    rows = rows_of_run(source.tokenizer.parent, source.config, comparison.rows)
    if not rows:
        raise UserError(f"--compare-logits: the run's data are not in {source.tokenizer.parent}; name a file of data")
    return rows


def find_source(checkpoint: Path, *, run: Path | None, tokenizer: Path | None, parity: Path | None) -> Source:
    """The source of an export. run: its run folder, if the checkpoint is not in RUN/checkpoints.

    Raises UserError if the run's config or the tokenizer is missing.
    """
    try:
        run_dir = RunDir(run or checkpoint.resolve().parent.parent)
    except (OSError, RuntimeError) as error:  # pathlib raises RuntimeError for symlink loops
        raise UserError(f"{checkpoint}: cannot be read ({error}); give a checkpoints/step-N folder") from error
    if not run_dir.config.is_file():
        raise UserError(f"{checkpoint}: {run_dir.config} is not there; give the run folder with --run")
    config = load_config(run_dir.config, [], None, started=True)
    environment = read_inputs(run_dir)["environment"]
    if tokenizer is None:
        folder = environment.get("data", {}).get("folder")
        if folder is None:
            raise UserError(f"{run_dir.environment}: has no data.folder; give the tokenizer's folder with --tokenizer")
        tokenizer = Path(folder) / TOKENIZER
    if not (tokenizer / "tokenizer.json").is_file():
        raise UserError(f"{tokenizer}: holds no tokenizer.json; give the tokenizer's folder with --tokenizer")
    return Source(checkpoint, run_dir, config, environment, tokenizer, parity, Opener.of(config.checkpoint))


def build_skeleton(
    config: Config, tokenizer: Any, *, dtype: torch.dtype, untied: bool = False
) -> tuple[PreTrainedModel, PretrainedConfig]:
    """The run's model on the meta device, and the config to write for it.

    untied: its output head has its own weight, even if the base's is tied.
    """
    section, model_class = config.model, model_class_of(config)
    shape = model_config(
        section,
        vocab_size=vocabulary_size(tokenizer),
        sequence_length=config.data.longest,
        model_class=model_class,
        given=given_by_task(config, tokenizer),
    )
    if untied:
        shape.get_text_config().tie_word_embeddings = shape.tie_word_embeddings = False
    skeleton = empty_model(replace(section, attention="auto"), shape, model_class=model_class)
    shape = copy.deepcopy(shape)
    shape.use_cache = config.task not in ENCODER_TASKS  # for other tasks it is off only in training
    shape.architectures = [type(skeleton).__name__]
    shape.dtype = dtype
    return skeleton, shape


def _write_settings(
    folder: Path, config: Config, shape: PretrainedConfig, tokenizer: Any, skeleton: PreTrainedModel | None = None
) -> None:
    """config.json, the code of a model that brings its own, the tokenizer and, for models that generate, the base's
    generation settings or new ones, with every token that ends a text of the base or of the run."""
    section, ends = config.model, [tokenizer.eos_token_id]
    if config.learns_rows and config.task != "seq2seq":
        ends += [Chat(tokenizer, template=None, train_on="assistant").end_of_turn()]
    if section.name_or_path is None:
        shape.eos_token_id = tokenizer.eos_token_id
        if config.task != "seq2seq":  # its sources were padded with the existing pad token
            shape.pad_token_id = tokenizer.pad_token_id
    elif config.task not in ENCODER_TASKS and (own := getattr(shape, "eos_token_id", None)) is not None:
        shape.eos_token_id = _joined(own, ends)
    if skeleton is not None and skeleton._auto_class is not None:
        custom_object_save(skeleton, folder, config=cast(Any, shape))
    shape.save_pretrained(folder)
    _save_tokenizer(folder, config, tokenizer)
    if config.task in ENCODER_TASKS:
        return
    generation = None
    if section.name_or_path is not None:
        with suppress(OSError):
            generation = GenerationConfig.from_pretrained(section.name_or_path)
    if generation is None and config.task == "seq2seq":
        generation = GenerationConfig.from_model_config(shape)
    if generation is None:
        generation = GenerationConfig(
            bos_token_id=getattr(shape, "bos_token_id", None), pad_token_id=tokenizer.eos_token_id
        )
    generation.eos_token_id = _joined(generation.eos_token_id, ends)
    # `save_pretrained` refuses what published bases have, such as a temperature without do_sample
    (folder / GENERATION_CONFIG_NAME).write_text(generation.to_json_string(), encoding="utf-8")


def _save_tokenizer(folder: Path, config: Config, tokenizer: Any) -> None:
    """The tokenizer, and of its origin and the base, where they can be found, the files that transformers does not
    write and others need: llama.cpp's converter the vocabulary of SentencePiece, vLLM a processor's settings."""
    tokenizer.save_pretrained(folder)
    spec, base = config.data.tokenizer, config.model.name_or_path
    found: list[str] = []
    with suppress(OSError):
        if not is_made(spec):
            found += _present(*origin_of(spec), _VOCABULARIES)
        if base is not None:
            found += _present(base, "main", (IMAGE_PROCESSOR_NAME, PROCESSOR_NAME))
    for path in found:
        shutil.copyfile(path, folder / Path(path).name)


def _present(origin: str, revision: str, names: tuple[str, ...]) -> list[str]:
    """Paths of those of the files that a folder or hub repository has. Raises OSError."""
    return cached_files(origin, [*names], revision=revision, _raise_exceptions_for_missing_entries=False) or []


def _joined(given: int | list[int] | None, further: list[int | None]) -> Any:
    """The ids of both without repeats, the given ones first; an id by itself if there is only one."""
    found = dict.fromkeys([*(given if isinstance(given, list) else [given]), *further])
    ids = [number for number in found if number is not None]
    return ids if len(ids) > 1 else ids[0]


def _require_loadable(folder: Path, skeleton: PreTrainedModel, config: Config) -> None:
    """`from_pretrained` must find every parameter in the files, and nothing else. Loads no values."""
    loaded: Any = getattr(transformers, model_class_of(config)).from_pretrained(
        folder, device_map="meta", output_loading_info=True, trust_remote_code=config.model.trust_remote_code
    )
    found = loaded[1]
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if found.get(kind):
            names = ", ".join(sorted(map(str, found[kind]))[:3])
            raise TensorsDiffer(f"from_pretrained would not load {type(skeleton).__name__} whole: {kind}: {names}")


def _facts(
    source: Source,
    saved: SavedModel,
    skeleton: PreTrainedModel,
    *,
    dtype: str,
    compared: int,
    parity: dict[str, Any] | None,
) -> dict[str, Any]:
    config = source.config
    comparison = f"{compared} of {len(saved.tensors)} tensors were compared with a second copy ({saved.second_source})"
    base = config.model.name_or_path
    return {
        "run": config.run.name,
        "model": {
            "class": type(skeleton).__name__,
            "auto_class": model_class_of(config),
            "type": skeleton.config.model_type,
            "parameters": count_parameters(skeleton),
            "base": export_facts.without_path(base) if base else None,
            "frozen": sorted(saved.frozen),
        },
        "parity": parity,
        **export_facts.run_facts(source.run, source.checkpoint, config, source.environment),
        "export": {"dtype": dtype, "compared": f"{comparison}; every file was read back and compared."},
    }


def _labels(config: Config, shape: PretrainedConfig) -> Mapping[Any, str] | None:
    """Names of a classifier's labels by number, which the config of an adapter's base does not have.

    Empty for regression, None for a language model.
    """
    if config.task != "classify":
        return None
    return {} if config.classify.kind == "regression" else shape.id2label or {}


def _seal(folder: Path, facts: dict[str, Any]) -> None:
    """Hash the files, write facts and card, hash these too, and flush all to disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    facts["export"]["files"] = {path.relative_to(folder).as_posix(): file_sha256(path) for path in files}
    plain = redact(json.loads(encode(facts)))
    (folder / FACTS).write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    (folder / CARD).write_text(model_card(plain), encoding="utf-8")
    sums = facts["export"]["files"] | {name: file_sha256(folder / name) for name in (FACTS, CARD)}
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    (folder / SUMS).write_text(lines, encoding="utf-8")
    mode = (folder / CARD).stat().st_mode
    for path in (*files, folder / FACTS, folder / CARD, folder / SUMS):
        path.chmod(mode)  # safetensors makes its files readable by their owner only
        flush(path)
    for path in {folder, *(path.parent for path in files)}:
        flush(path)


def _publish(aside: Path, out: Path) -> None:
    replaced = out.with_name(f".{out.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if out.exists():
        out.rename(replaced)
    aside.rename(out)
    flush(out.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _require_free(checkpoint: Path, out: Path, *, force: bool) -> None:
    if out.resolve().is_relative_to(checkpoint.resolve()) or checkpoint.resolve().is_relative_to(out.resolve()):
        raise UserError(f"{out}: OUT and the checkpoint must not contain each other; choose another OUT")
    if not out.exists():
        return
    if not force:
        raise UserError(f"{out}: exists already; choose another OUT, or replace it with --force")
    if not out.is_dir() or not ((out / SUMS).is_file() or not any(out.iterdir())):
        raise UserError(f"{out}: is not an exported model (it has no {SUMS}); --force replaces only such a folder")


def _require_whole(checkpoint: Path) -> None:
    def check(manifest: dict[str, Any]) -> None:
        check_hashes(checkpoint, manifest, manifest["files"])
        read_state(checkpoint)

    wrong = find_problem(checkpoint, check)
    if wrong:
        raise UserError(f"{checkpoint}: {wrong}; give a complete checkpoints/step-N folder")
