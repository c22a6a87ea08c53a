"""Build a run around a session: checkpoints, guard, record and observers; restored if the run resumes."""

import secrets
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from config.errors import one_line
from config.json_text import json_sha256
from config.load import to_dict
from config.optimizers import AVERAGES
from config.printable import printable
from config.redact import redact
from config.resolved import Resolved
from config.schema import GuardSection
from config.task import ENCODER_TASKS, loss_unit
from data.batches.loader import Batches
from data.corpora.corpus import Corpus
from data.sources.chat import leading_tokens
from data.text.tokenizer import load_tokenizer
from modeling.build import count_parameters, drawn_notes
from modeling.generate import sample_text
from precision.guard import Guard
from precision.promotions import Promotions
from tracking.record import Record
from training.checkpoint.checkpoints import Checkpoints
from training.checkpoint.reader import Opener
from training.checkpoint.retention import Retention
from training.checkpoint.store.remote import Remote
from training.corruption.checks import Checks
from training.corruption.self_check import SelfCheck
from training.distributed import World
from training.early_warnings import EarlyWarnings
from training.engine import Engine
from training.engine.kernels import FALLEN_BACK
from training.parts import Parts
from training.preemption import Preemption
from training.profile.profiler import open_profiling
from training.progress import START, Progress
from training.session import Session, run_dir_of, store_of
from training.sinks import open_record
from training.telemetry import Telemetry

_TRACING = "tracking.tracing.spans"  # loaded by runs that send spans


def build(opened: Session) -> tuple[Parts, Progress]:
    """Build all parts of a run, restore them from a checkpoint if `run.resume` finds one, and record `run_start`. A
    collective. Raises UserError for an unusable store or a checkpoint of another run."""
    resolved, engine, world, batches = opened.resolved, opened.engine, opened.world, opened.batches
    config, run_dir = resolved.config, run_dir_of(resolved)
    checkpoints = open_checkpoints(
        resolved, run_dir.checkpoints, world, identity=opened.identity, save_world=opened.apart
    )
    if opened.answers is not None:
        opened.answers.keep_in(run_dir.path / "rollouts")
    found = checkpoints.find(config.run.resume)
    state = checkpoints.load(found, engine) if found else None
    record = open_record(resolved, opened.corpus, engine, run_dir, world)
    of_data = list(opened.corpus.notes)
    if opened.corpus.tail_tokens:
        tail = f"the last {opened.corpus.tail_tokens:,} tokens of the longest one are held out"
        of_data.append(f"data: no document was drawn for validation: {tail}")
    if world.is_main:
        said = [f"DeepSpeed JSON: {config.deepspeed.config}; attention: {config.model.attention}", *of_data]
        said += [f"WARNING, slower than it could be: {line}" for line in engine.notes if FALLEN_BACK in line]
        print(printable("\n".join([*said, *drawn_notes(engine.model)])), flush=True)
    self_check = tracing = None
    if (config.guard.self_check_every or config.guard.gradient_checks) and world.tensor is None:
        self_check = SelfCheck(engine, resolved, opened.model_config, opened.corpus)
    telemetry = Telemetry(engine, probe=config.telemetry.probe) if config.telemetry.every_steps else None
    watched: dict[str, Any] = {"engine": engine, "batches": batches, "note": record.note}
    if config.tracking.otlp_endpoint:  # last of what may refuse the run, since its exporter runs from here on
        session = world.from_main(secrets.token_hex(16))
        tracing = import_module(_TRACING).open_tracing(resolved, session, checkpoints=checkpoints, **watched)
    parts, progress = assemble(
        resolved,
        engine,
        batches,
        record=record,
        checkpoints=checkpoints,
        state=state,
        validation=opened.validation,
        validation_by_source=opened.validation_by_source,
        sample=partial(sampled, resolved, engine, opened.corpus, record),
        examples=lambda: opened.answers.examples if opened.answers is not None else "",
        preemption=Preemption(config.run.max_minutes),
        checks=Checks(engine, resolved) if checks_wanted(config.guard) else None,
        self_check=self_check,
        telemetry=telemetry,
        tracing=tracing,
        profiling=open_profiling(resolved, run_dir.path, **watched),
    )
    _record_start(parts, progress, found)
    if config.run.epochs is not None:
        size = resolved.batch.global_size // config.group_size
        record.note(f"run.epochs = {config.run.epochs:g}: {config.run.steps:,} steps of {size} samples")
    for line in filter(None, [*of_data, opened.left_out, *engine.notes, *checkpoints.take_notes()]):
        record.note(line)
    return parts, progress


def sampled(resolved: Resolved, engine: Engine, corpus: Corpus, record: Record) -> str:
    """Sample text from the model; empty if none is configured, a rank cannot read the tokenizer or the model generates
    none. A collective."""
    generate, tokenizer, problem = resolved.config.generate, None, None
    if not generate.tokens or resolved.config.task in ENCODER_TASKS:
        return ""
    try:
        tokenizer = load_tokenizer(corpus.tokenizer_folder)
    except Exception as error:  # the cache may be gone or damaged; tokenizers raise plain Exception
        problem = f"no text was sampled: {corpus.tokenizer_folder}: {one_line(error)}"
    problem = next(filter(None, engine.world.gather_objects(problem)), None)
    if problem is not None or tokenizer is None:
        record.note(str(problem))
        return ""
    has_encoder = engine.model.config.is_encoder_decoder
    begins = not has_encoder and (resolved.config.learns_rows or resolved.config.data.begin_of_document == "auto")
    apart = engine.stage < 3 and engine.world.tensor is None and engine.world.experts is None
    try:
        text = sample_text(
            engine.model,
            tokenizer,
            prompt=generate.prompt,
            tokens=generate.tokens,
            temperature=generate.temperature,
            seed=resolved.config.run.seed,
            device=engine.world.device,
            has_encoder=has_encoder,
            begin=leading_tokens(tokenizer.backend_tokenizer) if begins else (),
        )
    except Exception as error:  # a sample must not cost the run, nor each of its resumes
        if isinstance(error, RuntimeError) and not apart:
            raise  # it may be this rank's alone, such as of its memory, while others wait for it within a pass
        record.note(f"no text was sampled: {one_line(error)}")
        return ""
    return str(redact(text))


def checks_wanted(guard: GuardSection) -> bool:
    """Whether the config asks for any check for silent corruption."""
    return bool(guard.replica_checks or guard.update_checks or guard.reexecute != "never")


def assemble(
    resolved: Resolved, engine: Engine, batches: Batches, *, state: dict[str, Any] | None = None, **further: Any
) -> tuple[Parts, Progress]:
    """The parts of a run, and its progress. state: from a checkpoint that was loaded into the engine; None for a new
    run. further: other fields of Parts, `record` and `checkpoints` among them."""
    progress = Progress(**state["progress"]) if state else START
    section, regions = resolved.config.optimizer, engine.regions
    warnings = EarlyWarnings(
        resolved.config.warnings,
        beta2=section.betas[1] if set(AVERAGES) <= set(engine.optimizer_spec.states) else None,
        clipping=section.gradient_clipping,
        in_fp16=lambda name: (engine.compute if regions is None else regions.dtypes.get(name)) == "fp16",
    )
    parts = Parts(
        resolved=resolved,
        engine=engine,
        batches=batches,
        guard=Guard(resolved.config.guard),
        promotions=Promotions(),
        warnings=warnings,
        first_step=progress.step,
        **further,
    )
    if state is not None:
        parts.load_state_dict(state)
    return parts, progress


def open_checkpoints(
    resolved: Resolved, folder: Path, world: World, *, identity: dict[str, Any], save_world: World | None = None
) -> Checkpoints:
    """The run's checkpoints as configured. Raises UserError for a missing key."""
    section = resolved.config.checkpoint
    keep = Retention(section.keep, every=section.keep_every, best=section.keep_best)
    store = store_of(resolved)
    return Checkpoints(
        folder,
        keep=keep,
        identity=identity,
        world=world,
        run_name=resolved.config.run.name,
        background=section.background == "always" or (section.background == "auto" and resolved.offload == "none"),
        verify_after_save=section.verify_after_save,
        opener=Opener.of(section),
        remote=Remote(store, keep) if store is not None else None,
        save_world=save_world,
    )


def _record_start(parts: Parts, progress: Progress, found: Path | None) -> None:
    resolved, engine = parts.resolved, parts.engine
    config, regions, manifest = resolved.config, engine.regions, None
    if regions is not None:
        manifest = {"default": regions.manifest.default, "rules": [asdict(rule) for rule in regions.manifest.rules]}
    parts.record.event(
        "run_start",
        step=progress.step,
        tokens=progress.tokens,
        world_size=resolved.world_size,
        config_sha256=json_sha256(to_dict(config), sort_keys=True),
        parameters=count_parameters(engine.model),
        trained_parameters=count_parameters(engine.model, trained=True),
        active_parameters=count_parameters(engine.model, active=True),
        active_trained_parameters=count_parameters(engine.model, trained=True, active=True),
        compute=resolved.compute,
        zero_stage=resolved.zero_stage,
        resumed_from=str(found) if found else None,
        masters=str(engine.start),
        name=config.run.name,
        model=type(engine.model).__name__,
        attention=config.model.attention,
        accumulation=resolved.batch.accumulation,
        sequence_ranks=resolved.batch.sequence,
        tensor_ranks=resolved.batch.tensor,
        expert_ranks=resolved.batch.expert,
        hypothesis=config.run.hypothesis,
        loss_unit=loss_unit(config),
        regions=None if regions is None else regions.dtypes,
        manifest=manifest,
    )
