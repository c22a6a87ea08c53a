"""Data, process group, model, engine and batches of a config, built the same way for `train.py` and all tools."""

import json
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from socket import gethostname
from typing import Any

import deepspeed
import transformers
from transformers import PretrainedConfig

from config.batch import refuse_sharing
from config.errors import UserError
from config.resolved import Resolved
from config.schema import SAMPLING_TASKS
from config.task import ENCODER_TASKS
from data.batches.loader import Batch, Batches, next_tokens, validation_batches
from data.batches.sequence_slices import sliced
from data.corpora.corpus import Corpus
from data.corpora.row_shards import RowShards
from data.corpora.shards import TokenShards
from modeling.build import attention_of, config_identity, count_parameters, weights_identity, without_dropout
from tracking.crash import Crash
from tracking.run_dir import RunDir
from tracking.run_lock import created_and_locked
from training import distributed
from training.checkpoint.checkpoints import Checkpoints
from training.checkpoint.choice import by_step
from training.checkpoint.contents import CONFIGS, REFERENCE
from training.checkpoint.reader import Opener
from training.checkpoint.retention import Retention
from training.checkpoint.store.store import Store
from training.distributed import World
from training.engine import Engine, build_engine
from training.engine.rng import seed_everything
from training.engine.work_time import forget_peak_memory
from training.tasks.shape import (
    documents_of,
    require_model,
    settle_labels,
    settle_orthogonalization,
    settle_steps,
    shape_of_model,
)
from training.tasks.task import answers, prepare, task_of
from training.watchdog import watch


@dataclass(frozen=True)
class Session:
    """Everything on this rank that a run, or a tool that builds one, works with."""

    resolved: Resolved
    corpus: Corpus
    model_config: PretrainedConfig
    world: World
    engine: Engine
    batches: Batches
    base: str | None = None
    """Identity of an adapter's base model, or of the reference model: sha256 of its files. None if a run only starts
    from that model."""
    teacher: str | None = None
    configs: str | None = None
    """Identities of the config.json of both; None without either."""
    answers: Any = None
    """`batches`, if they sample answers to prompts (training/rollouts/batches.py); else None."""
    apart: World | None = None
    """`world` on a group of its own, for saves; None unless the session trains."""

    def validation(self) -> Iterable[Batch]:
        """Batches of the validation set: `evaluate.batches` of them, or all."""
        return self._validation(self.corpus.validation)

    def validation_by_source(self) -> dict[str, Iterable[Batch]]:
        """Validation batches of each source of a mixture and each set of data.validation; empty without either."""
        return {name: self._validation(split) for name, split in self.corpus.validation_by_source.items()}

    @property
    def left_out(self) -> str | None:
        """The rows that `evaluate.batches` leaves out, human-readable; None if there are none, and for documents."""
        config = self.resolved.config
        size = self.resolved.batch.global_size // config.group_size
        most, held_out = config.evaluate.most_batches, self.corpus.validation.sequences(config.data.sequence_length)
        of_rows = isinstance(self.corpus.validation, RowShards)
        if not of_rows or not config.evaluate.every_steps or most is None or held_out <= most * size:
            return None
        return (
            f"evaluate.batches = {most}: an evaluation uses {most * size:,} of the {held_out:,} held-out sequences, "
            "evenly spaced; null uses all"
        )

    def _validation(self, split: TokenShards | RowShards) -> Iterable[Batch]:
        most = self.resolved.config.evaluate.most_batches
        found = validation_batches(split, batches=most, **batch_shape(self.resolved, self.corpus))
        return found if self.answers is None else self.answers.evaluated(found, split)

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that two runs must share for one to resume from the other's checkpoint."""
        config = self.resolved.config
        padded = isinstance(self.corpus.train, RowShards) and not config.keeps_documents_apart
        adapter, labels = asdict(config.adapter), config.classify if config.task == "classify" else config.mlm
        if config.adapter.base == "compute":  # as in checkpoints from before other bases existed
            del adapter["base"], adapter["double_quant"]
        return {
            **({"grouping of rows by length": "within an epoch"} if padded else {}),
            "model": self.model_config.model_type,
            "model.attention": config.model.attention,
            "parameters": count_parameters(self.engine.model),
            "data fingerprint": self.corpus.fingerprint,
            "data.sequence_length": config.data.sequence_length,
            "data.document_masking": config.keeps_documents_apart,
            "batch.global_size": self.resolved.batch.global_size,
            "task": config.task,
            "what is predicted": json.dumps(asdict(labels)) if config.task in ENCODER_TASKS else None,
            "run.seed": config.run.seed,
            **({"answers": self.answers.identity} if self.answers is not None else {}),
            "adapter": json.dumps(adapter) if config.adapter.kind != "none" else None,
            "the base model" if config.task != "grpo" or config.adapter.kind != "none" else REFERENCE: self.base,
            "the teacher": self.teacher,
            CONFIGS: self.configs,
            "world size": self.resolved.world_size,
            "parallel.sequence": self.resolved.batch.sequence,
            "parallel.tensor": self.resolved.batch.tensor,
            "parallel.expert": self.resolved.batch.expert,
            "ZeRO stage": self.resolved.zero_stage,
            "precision.compute": self.resolved.compute,
            "offload": self.resolved.offload,
            "deepspeed": deepspeed.__version__,
        }

    def saved_checkpoints(self, folder: Path) -> Checkpoints:
        """The checkpoints of a run folder, to load from. Raises UserError for a missing key."""
        opener = Opener.of(self.resolved.config.checkpoint)
        return Checkpoints(folder, keep=Retention(1), identity=self.identity, world=self.world, opener=opener)


@contextmanager
def session(
    resolved: Resolved,
    *,
    corpus: Corpus | None = None,
    world: World | None = None,
    trains: bool = False,
    shares: Collection[str] = ("sequence",),
) -> Iterator[Session]:
    """Join the process group, prepare the data, build model, engine and batches; close them afterwards. A collective.

    corpus, world: existing ones to use; the process group then stays open. trains: the caller is `train.py`: lost ranks
    are watched for, and the run folder is opened first. shares: those of `parallel.sequence`, `tensor` and `expert`
    that the caller is verified with; `train.py` is with all. Raises UserError.
    """
    config = resolved.config
    refuse_sharing(resolved.batch, but=("sequence", "tensor", "expert") if trains else shares)
    with ExitStack() as ends:
        joined, apart = world is None, None
        transformers.utils.logging.set_verbosity_error()  # warnings that matter are our own errors or notes
        if resolved.rank or not sys.stderr.isatty():  # it prints one bar per rank, and a line per update in a log
            transformers.utils.logging.disable_progress_bar()
        if world is None:
            world = distributed.join(resolved)
            ends.callback(distributed.stop)
        world = world.sharing(**asdict(config.parallel), timeout_minutes=config.run.timeout_minutes)
        if trains:
            crash, owned = Crash(run_dir_of(resolved).events, world.rank), list[bool]()

            def write_end(cause: str, exit_code: int) -> bool:
                """A job that was refused the run folder must not record an end for the job that owns it."""
                return bool(owned) and crash.write(cause, exit_code)

            ends.enter_context(watch.watched(world, write_end))
            # now: training may use another network, and would end without a checkpoint at its first save; and a machine
            # may prepare its data longer than a collective of training waits
            apart = world.on_own_group(timeout_minutes=config.run.timeout_minutes)
        ends.push(refuse_unordered)
        if corpus is None:
            require_model(config)
            corpus = _agreed(prepare(config, progress=resolved.rank == 0), apart or world)
        config = settle_steps(settle_labels(config, corpus), corpus)
        config = settle_orthogonalization(config, on_gpu=world.device.type == "cuda" and resolved.compute != "fp32")
        resolved = replace(resolved, config=config)
        shape = shape_of_model(config, corpus)
        quiet = without_dropout(shape, kept=config.model.config) if config.task in ("dpo", *SAMPLING_TASKS) else []
        if trains:
            check_validation(resolved, corpus)  # before the slow part
            ends.enter_context(locked_run_dir(resolved, world))
            owned.append(True)
        vocabulary = shape.get_text_config().vocab_size
        teacher = None
        if config.distill.teacher is not None:
            corpus, teacher = answers("teacher").prepare_teacher(resolved, corpus, world, vocabulary=vocabulary)
        with suppress(OSError):  # the peak then counts from the process's start
            forget_peak_memory(world.device)
        drawn = not trains or world.on_main(lambda: start_counts(resolved))
        engine = build_engine(resolved, shape, world, drawn)
        if quiet:
            engine.notes.append(f"dropout of the model is off, as the reference has none: {', '.join(quiet)}")
        # the value that `auto` resolved to, for the record and for restarts
        model = replace(config.model, attention=attention_of(engine.model))
        resolved = replace(resolved, config=replace(config, model=model))
        if not joined:
            ends.callback(engine.close)
        # ranks that share matrices need equal dropout masks, or their replicated parameters would diverge
        seed_everything(config.run.seed + world.zero_rank)
        base, name = None, config.model.name_or_path
        of_reference = config.task == "dpo" or config.task == "grpo" and config.grpo.beta
        if name is not None and (config.adapter.kind != "none" or of_reference):
            base = world.from_main(weights_identity(name) if world.is_main else None)
        read = [str(each) for each in (name if base else None, config.distill.teacher) if each is not None]
        configs = world.on_main(lambda: " ".join(map(config_identity, read)) or None)
        cut = batch_shape(resolved, corpus) | {"seed": config.run.seed, "mixture": corpus.mixture}
        if config.precomputes_reference:
            engine.notes += answers("references").add_references(corpus, engine, resolved, base=base)
        sampled = None
        if config.task in SAMPLING_TASKS:
            sampled = answers("rollouts.batches").RolloutBatches(corpus, resolved, engine, shape, trains=trains, **cut)
        batches: Batches = sampled or Batches(corpus.train, **cut)
        ends.callback(batches.close)
        yield Session(resolved, corpus, shape, world, engine, batches, base, teacher, configs, sampled, apart)


def _agreed(corpus: Corpus, world: World) -> Corpus:
    """The corpus under rank 0's fingerprint: copies of large files have other times, hence another name, on machines
    that prepare them for themselves. A collective. Raises UserError if a rank has other tokens than rank 0."""
    (first, content, fingerprint), *others = world.gather_objects((gethostname(), corpus.content, corpus.fingerprint))
    for rank, (host, found, _) in enumerate(others, 1):
        if found != content:
            raise UserError(
                f"{corpus.source}: rank {rank} on {host} has other tokens than rank 0 on {first}; give all machines "
                "the same files, owner/name@revision of the hub, or one data.cache_dir that all of them see"
            )
    return replace(corpus, fingerprint=fingerprint)


def start_counts(resolved: Resolved) -> bool:
    """Whether the weights that the model starts with are used: not if a checkpoint will replace all of them, unless
    references are computed with them, or passes at the start compare logits or count activations."""
    config = resolved.config
    passes = config.keeps_documents_apart or config.parallel.sequence > 1 or config.model.activation_memory_gib
    if passes or config.adapter.kind != "none" or config.task in ("dpo", *SAMPLING_TASKS):
        return True
    saved = by_step(run_dir_of(resolved).checkpoints)
    return config.run.resume == "never" or (config.run.resume == "auto" and not saved)


def refuse_unordered(kind: Any, problem: BaseException | None, traceback: Any) -> None:
    """Raise a UserError instead of torch's error about an operator without a deterministic form."""
    operator, found, _ = str(problem).partition(" does not have a deterministic implementation")
    if isinstance(problem, RuntimeError) and found:
        raise UserError(f"run.deterministic = true: {operator} has no deterministic form; set it to false") from problem


def check_validation(resolved: Resolved, corpus: Corpus) -> None:
    """Raises UserError if evaluations are configured and the validation set is empty."""
    config = resolved.config
    if config.evaluate.every_steps and not corpus.validation.sequences(config.data.sequence_length):
        rows = config.learns_rows or config.task == "classify"
        missing = "row; give more rows" if rows else f"sequence of {config.data.sequence_length} tokens; give more text"
        raise UserError(
            f"evaluate.every_steps = {config.evaluate.every_steps}: the validation set holds no {missing}, raise "
            f"data.validation_fraction = {config.data.validation_fraction}, name files in data.validation, or set "
            "evaluate.every_steps=0"
        )


def batch_shape(resolved: Resolved, corpus: Corpus) -> dict[str, Any]:
    """This rank's batch shape, as arguments of the data loader."""
    config, plan = resolved.config, resolved.batch
    make, documents = task_of(config).make_batch(config, corpus), documents_of(config, corpus)
    if plan.sequence > 1:
        make = make or next_tokens(config.data.sequence_length, documents)
        make = sliced(make, rank=resolved.rank % plan.sequence, ranks=plan.sequence)
    return {
        "make_batch": make,
        "documents": documents,
        "sequence_length": config.data.sequence_length,
        "global_size": plan.global_size // config.group_size,
        "micro_size": plan.micro_size if config.group_size == 1 else 1,
        "rank": resolved.rank // plan.sharing,
        "world_size": plan.data_ranks,
    }


def store_of(resolved: Resolved) -> Store | None:
    """The run's folder in `checkpoint.dir`, if configured. Raises UserError when no file system is installed for it, or
    a secret is in its settings."""
    section = resolved.config.checkpoint
    if section.dir is None:
        return None
    return Store(f"{section.dir.rstrip('/')}/{resolved.config.run.name}", section.storage_options)


def run_dir_of(resolved: Resolved) -> RunDir:
    run = resolved.config.run
    return RunDir(Path(run.dir).expanduser() / run.name)


@contextmanager
def locked_run_dir(resolved: Resolved, world: World) -> Iterator[RunDir]:
    """The run folder, created and locked by rank 0. A collective. Raises UserError on every rank, also for a store that
    cannot be used."""
    run = resolved.config.run
    root, error = Path(run.dir).expanduser(), None
    with ExitStack() as ends:
        if world.is_main:
            try:
                if (store := store_of(resolved)) is not None:  # before an earlier run's folder is moved away
                    store.require_usable(empty=run.resume == "never")
                ends.enter_context(created_and_locked(root, run.name, fresh=run.resume == "never"))
            except Exception as problem:  # raised on every rank, so that none waits for rank 0
                error = problem
        error = world.from_main(error)
        if error is not None:
            raise error
        yield run_dir_of(resolved)
