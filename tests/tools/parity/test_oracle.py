"""The oracle computes what runs record, by rules of its own, and names what a run does otherwise."""

import copy
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import starmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PretrainedConfig

from config.cli import REPOSITORY
from config.errors import UserError
from config.optimizers import OPTIMIZERS, settings_of
from config.schema import (
    AdapterSection,
    BatchSection,
    Config,
    LossScaleSection,
    ModelSection,
    OptimizerSection,
    RunSection,
    ScheduleSection,
    SourceSection,
)
from data.corpora.mixture import Mixture
from data.corpora.row_shards import RowShards
from data.corpora.sampler import STRETCH, grouped, permute, sample_ids
from modeling.build import build_model, model_config
from modeling.parameter_groups import group_of_each
from precision.loss_scale import make_policy
from tests.support.jobs.launches import command, events, finish
from tests.support.marks import slow, some_slow
from tests.support.models.mixtures import mixture, with_experts
from tests.support.models.small_models import small_model
from tests.support.rows import labelled, seq2seq
from tests.support.rows.chats import LENGTH, write_base, write_chats, write_pairs, write_teacher
from tests.support.rows.jsonl import change_jsonl, write_jsonl
from tests.training.tasks.mlm_cases import write_text
from tools.parity.gate import main, outside, recomputed
from tools.parity.jobs import Run, plan
from tools.parity.oracle.comparison import Comparison
from tools.parity.oracle.judge import ALONE, FIRST_NORM, Judged, _model, judge
from tools.parity.oracle.low_rank import add_low_rank
from tools.parity.oracle.movement import DIRECTION, DISTANCE, Movement
from tools.parity.oracle.optimizers import optimizer_of
from tools.parity.oracle.rules import Mixed, Order, loss_scale, permuted
from tools.parity.oracle.start import unlike_transformers
from tracking.run_dir import RunDir
from training.corruption.rates import schedule
from training.engine.optimizer import IMPLEMENTATIONS
from training.engine.optimizers.rule import UpdateInputs
from training.schedule import learning_rate

MANIFEST = ("precision.path=manifest", "precision.manifest=config/manifests/bf16.json")
EXPERTS = (
    "model={architecture: mixtral, config: {hidden_size: 32, intermediate_size: 24, num_hidden_layers: 2,"
    " num_attention_heads: 2, num_key_value_heads: 2, num_local_experts: 4, num_experts_per_tok: 2}}"
)
APART = ("data.document_masking=true", "batch.micro_size=1", "run.steps=4", "data.source=jsonl")
"""Micro-batches with different numbers of labels: of short documents that are kept apart."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, draw = tmp_path_factory.mktemp("oracle"), random.Random(5)
    texts = ["".join(draw.choices("abcd ", k=draw.randint(1, 40))) for _ in range(600)]
    write_base(made / "base")
    write_chats(made / "rows.jsonl", 80)
    write_jsonl(made / "short.jsonl", [{"text": text} for text in texts])
    return made


@pytest.fixture(scope="module")
def task_files(folder: Path) -> Path:
    """Rows of every task, and models to start from."""
    write_pairs(folder / "pairs.jsonl", 40)
    labelled.write_encoder(folder / "bert")
    for kind in ("sequence", "regression", "token"):
        labelled.write_rows(folder / f"{kind}.jsonl", kind, 60, pair=kind != "token")
    write_text(folder / "text", 20)
    write_teacher(folder / "teacher")
    seq2seq.write_model(folder / "t5")
    seq2seq.write_rows(folder / "seq2seq.jsonl", 60)
    return folder


def judged(folder: Path, name: str, *overrides: str, mistake: str = "") -> Judged:
    """A small job of two ranks and what the oracle says of it."""
    if "data.source=jsonl" in overrides:
        overrides = (*overrides, f"data.path={folder}/short.jsonl")
    overrides = tuple(override.replace("FOLDER", str(folder)) for override in overrides)
    line = command("python", folder, name, "evaluate.every_steps=0", "generate.tokens=0", *overrides)
    if mistake:
        line[1:2] = [str(REPOSITORY / "tests/support/jobs/wrong_train.py"), mistake]
    finish(line, ranks=2)
    return judge(folder / "runs" / name)


def failed(found: Judged) -> set[str]:
    return {each.what for each in found.comparisons if not each.holds}


def test_a_run_in_fp32_is_what_it_computes(finished: Path) -> None:
    found = judge(finished / "runs/it")
    assert found.holds and found.steps == 6
    same_start, *others = found.notes
    assert same_start.startswith("masters at the start: checksum")
    assert others == ["masters compared: step 4", "masters compared: step 6", "evaluation compared: step 6"]
    largest = {each.what: each.largest for each in found.comparisons}
    assert largest["validation loss"] < 1e-6
    assert largest["samples"] == largest["tokens"] == largest["masters at the start"] == 0
    # the text is Mantissa's own source, which every commit changes: 1e-6 to 7e-5 were seen
    assert largest["masters"] < 3e-4 and largest["loss"] < 1e-6


MORE = ("run.steps=4", "checkpoint.every_steps=4", "evaluate.batches=1", "deepspeed.config=null")
CHATS = (
    *("model.architecture=null", "model.config={}", "model.name_or_path=FOLDER/base", "task=sft", "data.source=auto"),
    *("data.path=FOLDER/rows.jsonl", "data.tokenizer=model", f"data.sequence_length={LENGTH}"),
)
LORA = (*CHATS, "deepspeed.stage=3", "adapter={kind: lora, r: 4, alpha: 8}")
MIXED = (
    f"data={{path: null, sequence_length: 32, tokenizer: bytes, validation_fraction: 0.2, sources: "
    f"[{{path: {REPOSITORY}/data, source: text, weight: 2, name: code}}, "
    "{path: FOLDER/short.jsonl, source: jsonl, weight: 1, name: short}]}",
    "deepspeed.stage=1",
)
OTHERS: dict[str, tuple[str, ...]] = {
    "muon": ("optimizer.name=muon", "deepspeed.stage=1", "optimizer.weight_decay=0.3"),
    "lamb": ("optimizer.name=lamb", "deepspeed.stage=2", "optimizer.eps=1e-4"),
    "lion": ("optimizer.name=lion", "deepspeed.stage=3"),
    "stable_adamw": ("optimizer.name=stable_adamw", "deepspeed.stage=3", "optimizer.eps=1e-4"),
    "lora": (*LORA, "optimizer.learning_rate=1e-2", "optimizer.eps=1e-5"),
    "mixture": MIXED,
}
RUNS = OTHERS | {
    "apart": (*APART, "deepspeed.stage=3", "optimizer.gradient_clipping=0.05"),
    "bf16": ("precision.compute=bf16", "deepspeed.stage=2"),
    "manifest": ("precision.compute=fp32", *MANIFEST, "deepspeed.stage=2"),
    "fp16": ("precision.compute=fp16", "deepspeed.stage=1"),
    "sgd": ("optimizer.name=sgd", "optimizer.groups=[{match: '*mlp*', learning_rate: 0.1, weight_decay: 0.3}]"),
    "experts": (EXPERTS, "precision.compute=fp32", "deepspeed.stage=2", "optimizer.eps=1e-4"),
    "chats": (*CHATS, "data.packing=best_fit", "sft.loss=row"),
    "chats alone": (*CHATS, "data.packing=none", "sft.loss=token"),
}


def test_a_start_that_is_not_that_of_transformers_alone_is_named(folder: Path) -> None:
    """A tensor that is not read from the files, a lost key of their config; new weights of another spread."""
    saved = ModelSection(name_or_path=str(folder / "base"))
    new = ModelSection(architecture="llama", config={"hidden_size": 32, "num_hidden_layers": 2})
    for section in (saved, new):
        config = Config(model=section)
        shape = model_config(section, vocab_size=300, sequence_length=16)
        model: Any = build_model(section, shape, seed=1)
        assert not [*unlike_transformers(model, config)]
        weight = model.get_submodule("model.layers.1.mlp.up_proj").weight
        weight.data = torch.randn_like(weight) * (0.02 if section is saved else 0.2)
        model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 1.0}
        expected = ["model.layers.1.mlp.up_proj.weight"]
        found = [*unlike_transformers(model, config)]
        assert [name for name in found if name in expected] == expected
        assert (len(found) == 2 and found[0].startswith("config.rope_")) == (section is saved)


@pytest.mark.parametrize("what", some_slow(RUNS, "lora", "mixture", "manifest"))
def test_so_are_runs_of_other_configs(folder: Path, what: str) -> None:
    found = judged(folder, f"other-{what.replace(' ', '-')}", *MORE, *RUNS[what])
    assert found.holds and found.steps == 4, found.lines()


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("what", OTHERS)
def test_so_are_they_in_16_bits(folder: Path, what: str, compute: str) -> None:
    found = judged(folder, f"{compute}-{what}", *MORE, *OTHERS[what], f"precision.compute={compute}")
    assert found.holds and found.steps == 4, found.lines()


@pytest.mark.parametrize(
    ("error", "rate", "wrong"),
    [(0.02, 1.0, set()), (0.02, 1.01, {DISTANCE}), (0.0, 1.01, {DISTANCE}), (0.2, 1.0, {DIRECTION})],
)
def test_signs_of_gradients_near_zero_are_rounding_and_no_rate_is(error: float, rate: float, wrong: set[str]) -> None:
    """Two updates by Adam on gradients that are off by a share of their size: 0.6% of them have the other sign at 2%.

    Along the expected movement the run's is 1.2% too short then, more than a rate that is 1% too large.
    """
    torch.manual_seed(0)
    model, section = torch.nn.Linear(256, 256, bias=False), OptimizerSection(weight_decay=0.0)
    model.config = PretrainedConfig()  # by which the text of a model is told from its images
    run = copy.deepcopy(model).double()
    movement, optimizer = Movement(model, section), optimizer_of(run, section)
    model.double()
    optimizer.param_groups[0]["lr"] = 1e-3 * rate
    for _ in range(2):
        model.weight.grad = torch.randn_like(model.weight)
        run.weight.grad = model.weight.grad + error * torch.randn_like(model.weight)
        optimizer.step()
        movement.update(1e-3, shares={"weight": 1.0}, factor=1.0)
    u = 2.0**-8
    compared = {DISTANCE: Comparison(DISTANCE, u), DIRECTION: Comparison(DIRECTION, 16 * u / math.pi)}
    movement.compare({"weight": SimpleNamespace(read=lambda: run.weight.detach())}, compared, "step 2")
    assert {name for name, each in compared.items() if not each.holds} == wrong, compared


@pytest.mark.parametrize(("rate", "sound"), [(5e-7, True), (5.3e-7, False)])
def test_rounding_of_masters_is_no_difference_at_a_small_rate(rate: float, sound: bool) -> None:
    """A norm's ones move by eight spacings of FP32, and all are rounded alike, by 4.6% of it where 1e-5 is allowed."""
    model, section = torch.nn.LayerNorm(64, bias=False).double(), OptimizerSection(weight_decay=0.0)
    model.config = PretrainedConfig()
    run = copy.deepcopy(model).float()
    movement, optimizer = Movement(model, section), optimizer_of(run, section)
    optimizer.param_groups[0]["lr"] = rate
    model.weight.grad, run.weight.grad = torch.ones(64).double(), torch.ones(64)
    optimizer.step()
    movement.update(5e-7, shares={"weight": 1.0}, factor=1.0)
    compared = {DISTANCE: Comparison(DISTANCE, 1e-5), DIRECTION: Comparison(DIRECTION, 1e-5)}
    movement.compare({"weight": SimpleNamespace(read=lambda: run.weight.detach())}, compared, "step 1")
    assert compared[DISTANCE].holds == sound and compared[DIRECTION].holds, compared


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("what", "mistake", "named"),
    [
        ("muon", "head_as_matrix", {"distance moved"}),
        ("lamb", "ratio_of_pieces", {"distance moved"}),
        ("stable_adamw", "late_rate", {"learning rate", "distance moved"}),
        ("lion", "late_rate", {"learning rate", "distance moved"}),
        ("lora", "wrong_factor", {"norm"}),
        ("mixture", "shares_swapped", {"samples", "labels by source"}),
    ],
)
def test_a_mistake_in_them_is_named(folder: Path, what: str, mistake: str, named: set[str], stage: int) -> None:
    overrides = [override for override in OTHERS[what] if not override.startswith("deepspeed.stage")]
    found = judged(folder, f"{mistake}-{what}-{stage}", *MORE, *overrides, f"deepspeed.stage={stage}", mistake=mistake)
    assert failed(found) >= named, found.lines()


@pytest.mark.parametrize(
    ("name", "family"), [*((name, "llama") for name in OPTIMIZERS), ("muon", "mixtral"), ("muon", "gpt_oss")]
)
def test_both_rules_of_an_optimizer_are_one(name: Any, family: str) -> None:
    """Random gradients of a matrix, of fused experts and their biases, of the head, an embedding and a norm."""
    torch.manual_seed(0)
    model: Any = small_model(family, "eager" if family == "gpt_oss" else "sdpa").double()
    settings = {"betas": (0.8, 0.9)} if "betas" in OPTIMIZERS[name].settings else {}
    section = OptimizerSection(name=name, weight_decay=0.3, **settings)
    optimizer, rule = optimizer_of(model, section), IMPLEMENTATIONS[name].update
    groups = group_of_each(model, section)
    states = {
        name: [torch.zeros_like(p) for _ in OPTIMIZERS[section.name].states_of(matrix=groups[id(p)]["matrix"])]
        for name, p in model.named_parameters()
    }
    for step in range(1, 4):
        expected = {}
        for key, parameter in model.named_parameters():
            parameter.grad, group = torch.randn_like(parameter) * 3.0 ** (step % 2), groups[id(parameter)]
            decay, matrix = group["weight_decay"], group["matrix"]
            given = UpdateInputs(
                parameter.detach().clone(),
                parameter.grad,
                states[key],
                section=section,
                weight_decay=decay,
                lr=0.1 * step,
                step=step,
                matrix=matrix,
            )
            expected[key] = given.master + rule(given)
            states[key] = advanced(section, given)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * step * group["factor"]
        optimizer.step()
        for key, parameter in model.named_parameters():
            assert torch.allclose(parameter, expected[key], rtol=1e-9, atol=1e-12), (key, step)


def advanced(section: OptimizerSection, given: UpdateInputs) -> list[torch.Tensor]:
    """The states after an update, as config/optimizers.py lists them."""
    gradient, settings = given.gradient, settings_of(section)
    if section.name == "sgd":
        return [settings["momentum"] * given.states[0] + gradient + given.weight_decay * given.master]
    if section.name == "lion":
        keeps: tuple[float, ...] = (section.betas[1],)
    else:
        keeps = (settings["momentum"],) if given.matrix else section.betas
    powers = (gradient, gradient.square())
    return [keep * state + (1 - keep) * power for keep, state, power in zip(keeps, given.states, powers, strict=False)]


DROPS = (
    *("model.architecture=gpt2", "model.config={n_embd: 32, n_layer: 2, n_head: 2, resid_pdrop: 0.1, attn_pdrop: 0.1}"),
    *("model.activation_checkpointing=full", "evaluate.every_steps=2", "evaluate.batches=1"),
)
FP32_ATTENTION = ("precision.compute=fp32", f"precision.manifest={REPOSITORY}/lab/detection/fp32_attention.json")


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("stage", "path"), [(2, "fp32"), (0, "fp32"), (1, "bf16"), (3, "fp32"), (3, "fp16"), (3, "manifest")]
)
def test_so_are_runs_with_dropout(folder: Path, stage: int, path: str) -> None:
    """The same values are dropped, by each rank's own generator."""
    compute = FP32_ATTENTION if path == "manifest" else (f"precision.compute={path}",)
    found = judged(folder, f"drops-{stage}-{path}", *MORE, *DROPS, f"deepspeed.stage={stage}", *compute)
    assert found.holds and found.steps == 4, found.lines()


TRAINED = ("model.architecture=null", "model.config={}", "model.activation_checkpointing=none", "data.source=auto")
BERT, SHORT = "model.name_or_path=FOLDER/bert", f"data.sequence_length={labelled.LENGTH}"
WORDS = ("task=mlm", BERT, "data.source=text", "data.path=FOLDER/text", SHORT, "data.validation_fraction=0.2")
PAIRS = ("task=dpo", "model.name_or_path=FOLDER/base", "data.path=FOLDER/pairs.jsonl")
TAUGHT = ("task=distill", "data.format=messages", "model.name_or_path=FOLDER/base", "data.path=FOLDER/rows.jsonl")
TASKS: dict[str, tuple[str, ...]] = {
    "dpo": PAIRS,
    "dpo, ipo": (*PAIRS, "preference={loss: ipo, sft_weight: 0.3}", "adapter={kind: lora, r: 4, alpha: 8}"),
    "dpo, smoothed": (*PAIRS, "preference={label_smoothing: 0.2, beta: 0.5}"),
    "classify": (
        *("task=classify", BERT, "data.path=FOLDER/sequence.jsonl", SHORT),
        *("data.validation_fraction=0.5", "evaluate={every_steps: 4, batches: null}"),
    ),
    "words": ("task=classify", "classify.kind=token", BERT, "data.path=FOLDER/token.jsonl", SHORT),
    "regression": ("task=classify", "classify.kind=regression", BERT, "data.path=FOLDER/regression.jsonl", SHORT),
    "mlm": WORDS,
    "mlm, by token": (*WORDS, "mlm.whole_word=false"),
    "seq2seq": (
        *("task=seq2seq", "model.name_or_path=FOLDER/t5", "data.path=FOLDER/seq2seq.jsonl"),
        *(f"data.sequence_length={seq2seq.SOURCE}", f"data.target_length={seq2seq.TARGET}"),
    ),
    "distill": (*TAUGHT, "distill={teacher: FOLDER/teacher, temperature: 2.0, ce_weight: 0.25}"),
    "distill, likeliest": (
        *TAUGHT,
        "distill={teacher: FOLDER/teacher, loss: jsd, beta: 0.3, temperature: 1.5, ce_weight: 0.5, top_k: 5}",
    ),
    "distill, documents": (
        *("task=distill", "model.name_or_path=FOLDER/base", "data.source=jsonl", "data.document_masking=true"),
        "distill={teacher: FOLDER/teacher, loss: reverse_kl}",
    ),
}


def of_task(folder: Path, name: str, what: str, *more: str, mistake: str = "") -> Judged:
    given = (*MORE, *TRAINED, "data.tokenizer=model", f"data.sequence_length={LENGTH}", "data.validation_fraction=0")
    overrides = [override for override in TASKS[what] if not override.startswith("model.name_or_path")]
    start = [override for override in TASKS[what] if override.startswith("model.name_or_path")]
    return judged(folder, name, *given, *start, *overrides, *more, mistake=mistake)


@pytest.mark.parametrize("what", some_slow(TASKS, "dpo"))
def test_so_are_runs_of_other_tasks(task_files: Path, what: str) -> None:
    found = of_task(task_files, f"task-{what.replace(', ', '-')}", what, "deepspeed.stage=3")
    assert found.holds and found.steps == 4, found.lines()


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("what", TASKS)
def test_so_are_other_tasks_in_16_bits(task_files: Path, what: str, compute: str) -> None:
    more = ("deepspeed.stage=2", f"precision.compute={compute}", "precision.loss_scale.initial=256")
    found = of_task(task_files, f"{compute}-{what.replace(', ', '-')}", what, *more)
    assert found.holds and found.steps == 4, found.lines()


@pytest.mark.parametrize(
    ("what", "mistake", "named"),
    [
        ("dpo", "answers_swapped", {"loss", "norm"}),
        *starmap(
            slow,
            (
                ("dpo, smoothed", "wrong_beta", {"norm"}),
                ("classify", "labels_of_neighbours", {"loss", "norm"}),
                ("regression", "labels_of_neighbours", {"masters", "distance moved"}),
                ("words", "mean_of_means", {"norm", "masters"}),
                ("words", "shifted_labels", {"loss", "norm"}),
                ("mlm", "mean_of_means", {"norm", "masters"}),
                ("mlm", "always_masked", {"loss", "norm"}),
                ("seq2seq", "mean_of_means", {"norm", "masters"}),
                ("seq2seq", "shifted_labels", {"loss", "norm"}),
                ("distill", "mean_of_means", {"norm", "masters"}),
                ("distill, likeliest", "wrong_temperature", {"loss"}),
            ),
        ),
    ],
)
def test_a_mistake_in_other_tasks_is_named(task_files: Path, what: str, mistake: str, named: set[str]) -> None:
    found = of_task(task_files, f"{mistake}-{what.replace(', ', '-')}", what, mistake=mistake)
    assert failed(found) >= named, found.lines()


@pytest.mark.slow
def test_ranks_that_drop_the_same_values_are_named(folder: Path) -> None:
    found = judged(folder, "same-draws", *MORE, *DROPS, mistake="same_draws")
    assert failed(found) >= {"loss", "norm"}, found.lines()


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        ("late_rate", {"learning rate", "masters", "distance moved"}),
        ("mean_of_means", {"norm", "masters"}),
        slow("swapped_batches", {"samples"}),
    ],
)
def test_a_mistake_that_both_twins_of_a_gate_would_share_is_named(folder: Path, mistake: str, named: set[str]) -> None:
    found = judged(folder, mistake, *APART, mistake=mistake)
    assert failed(found) >= named, found.lines()


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5), st.integers(1, 3))
def test_both_loss_scales_are_one(overflows: list[bool], window: int, hysteresis: int) -> None:
    section = LossScaleSection(initial=256.0, window=window, hysteresis=hysteresis, minimum=16.0, maximum=1024.0)
    scale, policy = loss_scale(section), make_policy(section)
    assert scale is not None
    for overflow in overflows:
        assert scale(overflow) == policy.scale
        policy.update(overflow)


def tampered(finished: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Judged:
    run = shutil.copytree(finished / "runs/it", folder / "it")
    change_jsonl(run / "events.jsonl", change)
    return judge(run, steps=2)


def other_evaluation(event: dict[str, Any]) -> None:
    event["loss"] *= 1 + 1e-5
    event["perplexity"] *= math.exp(event["loss"] * (1 - 1 / (1 + 1e-5)))


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("step", lambda event: event.update(loss=event["loss"] * (1 + 1e-5)), "loss"),
        ("step", lambda event: event.update(grad_norm=event["grad_norm"] * 1.0001), "norm"),
        ("step", lambda event: event.update(tokens=event["tokens"] - 1), "tokens"),
        ("step", lambda event: event.update(loss=float("nan")), "loss"),
        ("eval", other_evaluation, "validation loss"),
    ],
)
def test_a_wrong_record_is_named(finished, tmp_path, kind, change, named) -> None:
    def at_step_2(event: dict[str, Any]) -> None:
        if event["event"] == kind and (kind == "eval" or event["step"] == 2):
            change(event)

    found = tampered(finished, tmp_path, at_step_2)
    assert failed(found) == {named}
    assert found.lines()[-1] == f"2 steps differs from the oracle in: {named}"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda event, before: event.update(sample_ids_sha256="0" * 64), "samples"),
        (
            lambda event, before: event.update({key: before[key] for key in ("position", "sample_ids_sha256")}),
            "samples",
        ),
        (lambda event, before: event.update(tokens=event["tokens"] - 1), "tokens"),
    ],
)
def test_the_order_of_steps_that_are_not_recomputed_is_compared(finished, tmp_path, change, named) -> None:
    before: dict[str, Any] = {}

    def at_step_5(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            if event["step"] == 5:
                change(event, before)
            before.update(event)

    assert failed(tampered(finished, tmp_path, at_step_5)) == {named}
    run = Run(RunDir(tmp_path / "it"), True, "", None)
    order, _ = outside(run, lambda line: None, "evaluation")
    assert not order.passed and named in order.where


def test_the_gate_recomputes_steps_of_a_run_that_has_no_twin(finished, tmp_path) -> None:
    """Tasks that sample have none; with one its steps are recomputed, and the run's order and evaluations alone."""
    run = Run(RunDir(finished / "runs/it"), True, "", None)
    chosen = plan(str(run.folder.config), ["parity.points=1"], folder=tmp_path, processes=2)
    for twin, names in ((None, ["oracle", "evaluation"]), (run, ["oracle", "fp32_evaluation", "order", "evaluation"])):
        checks = recomputed(chosen, run, twin, lambda line: None)
        assert [check.name for check in checks] == names and all(check.passed for check in checks)


def test_a_rate_that_magnifies_rounding_widens_bounds(folder: Path) -> None:
    """At this rate FP32's rounding of the initial weights changes later norms fourfold, the run's are up to 92% off.
    At 0.3 one rounding of the weights may change them less than the order of sums does."""
    high = ("optimizer.learning_rate=0.5", "schedule.warmup_steps=0", "optimizer.gradient_clipping=null")
    found = judged(folder, "high", *MORE, *high, "model.config.num_hidden_layers=4")
    norms = next(each for each in found.comparisons if each.what == "norm")
    assert norms.holds
    assert norms.largest < 1e-4 or any(note.startswith("bound of norm: 4 times the ") for note in found.notes)


@pytest.mark.parametrize(("step", "factor", "named"), [(1, 1.02, {FIRST_NORM}), (2, 1.02, set()), (2, 1.04, {"norm"})])
def test_in_16_bits_later_norms_have_twice_the_bound_of_the_first(finished, tmp_path, step, factor, named) -> None:
    def change(event: dict[str, Any]) -> None:
        if event["event"] == "run_start":
            event["compute"] = "bf16"
        elif event["event"] == "step" and event["step"] == step:
            event["grad_norm"] *= factor

    # the run's evaluations are FP32's, and wrong for BF16
    assert failed(tampered(finished, tmp_path, change)) - {"validation loss"} == named


EVALUATED = (*APART, "data.validation_fraction=0.3", "checkpoint.every_steps=2", "evaluate.every_steps=2")


@pytest.mark.parametrize(
    ("mistake", "compute"),
    [
        *((mistake, "fp32") for mistake in ("evaluated_stale", "rows_of_one_rank", "")),
        *(slow(mistake, "fp32") for mistake in ("evaluated_by_means", "evaluated_without_the_last")),
        *(slow("evaluated_in_training", compute) for compute in ("fp32", "bf16")),
        *(slow(mistake, "bf16") for mistake in ("evaluated_stale", "")),
    ],
)
def test_a_mistake_in_evaluations_alone_is_named(folder: Path, mistake: str, compute: str) -> None:
    """Nothing else of the run is wrong; without a mistake nothing is named.

    In BF16 a mean over few rows that is off by 3e-5 is within rounding, and only the FP32 run's shows it.
    """
    overrides = (*DROPS[:3], "checkpoint.every_steps=2") if mistake == "evaluated_in_training" else EVALUATED
    given = (*MORE, "run.steps=2", *overrides, "evaluate.every_steps=2", "deepspeed.stage=2")
    more = ("run.steps=2", "evaluate.batches=null", f"precision.compute={compute}", "optimizer.learning_rate=0.02")
    found = judged(folder, f"{mistake}-{compute}", *given, *more, mistake=mistake)
    assert failed(found) == ({"validation loss"} if mistake else set()), found.lines()


@pytest.mark.parametrize("compute", ["fp32", slow("bf16")])
@pytest.mark.parametrize("what", some_slow(TASKS, "words"))
def test_the_evaluation_of_each_task_is_what_it_computes_with_all_metrics(task_files, what, compute) -> None:
    more = ("data.validation_fraction=0.3", "run.steps=2", "checkpoint.every_steps=2", f"precision.compute={compute}")
    given = (*more, "evaluate={every_steps: 2, batches: 2}", "deepspeed.stage=2")
    name = f"evaluated-{compute}-{what.replace(', ', '-')}"
    found = of_task(task_files, name, what, *given)
    [event] = events(task_files, name, "eval")
    assert found.holds and {"validation loss", "validation metrics"} <= {each.what for each in found.comparisons}
    assert event.get("metrics") or what == "distill, documents"


@pytest.mark.slow
def test_an_evaluation_of_other_pairs_is_named(task_files: Path) -> None:
    more = ("evaluate.every_steps=4", "data.validation_fraction=0.3")
    found = of_task(task_files, "pairs-of-one-rank", "dpo", *more, mistake="rows_of_one_rank")
    assert failed(found) - {"validation metrics"} == {"validation loss"}, found.lines()


@example("linear", 1, 0.0, 1.0, 2)
@given(
    st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    st.integers(0, 12),
    st.floats(0.0, 1.0),
    st.floats(0.01, 1.0),
    st.integers(1, 60),
)
def test_both_schedules_are_one(name: Any, warmup: int, ratio: float, decay: float, total: int) -> None:
    section = ScheduleSection(name=name, warmup_steps=warmup, final_ratio=ratio, decay_fraction=decay)
    rate = schedule(section, peak=0.3, total=total)
    for applied in range(total):
        expected = learning_rate(section, peak=0.3, applied=applied, total=total)
        assert rate(applied) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@given(st.integers(1, 5000), st.integers(0, 2**31), st.integers(0, 9), st.data())
def test_both_orders_are_one(samples: int, seed: int, epoch: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, samples - 1))
    expected = permute(np.array([index]), samples=samples, seed=seed, epoch=np.array([epoch]))
    assert permuted(index, samples=samples, seed=seed, epoch=epoch) == expected[0]


@pytest.mark.parametrize("weights", [(3.0, None, None), (None, None, None), (0.1, 0.7, 0.2), (1.0,) * 39])
def test_both_mixtures_are_one(weights: tuple[float | None, ...]) -> None:
    """Over three blocks, in which the small sources come to their next epochs."""
    sizes = (700, 90, 13, *[5] * 36)[: len(weights)]
    sources = [SourceSection(weight=weight, epochs=1.5 if weight is None else None) for weight in weights]
    shares = tuple(size * 1.5 if weight is None else weight for size, weight in zip(sizes, weights, strict=True))
    expected = Mixture(tuple(map(str, sizes)), sizes, shares).sample_ids(0, seed=7, global_size=2500).tolist()
    mixed = Mixed(sources, sizes, seed=7)
    assert [mixed.sample(index) for index in range(2500)] == expected


class Rows(RowShards):
    """Rows of which only the number is known."""

    def __init__(self, count: int) -> None:
        self.count = count

    def sequences(self, sequence_length: int) -> int:
        return self.count


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=3), st.integers(1, 70), st.integers(0, 99), st.integers(0, 60)
)
def test_both_group_rows_alike(sizes: list[int], size: int, seed: int, position: int) -> None:
    samples, weights = sum(sizes), tuple(float(number + 1) for number in range(len(sizes)))
    lengths = np.random.default_rng(seed).integers(1, 9, samples)
    config = Config(run=RunSection(seed=seed), batch=BatchSection(global_size=size), task="dpo")
    if len(sizes) > 1:
        sources = tuple(SourceSection(weight=weight) for weight in weights)
        config = replace(config, data=replace(config.data, sources=sources, packing="none"))
        mixture = Mixture(tuple("abc"[: len(sizes)]), tuple(sizes), weights)
        drawn = cache(lambda at: mixture.sample_ids(at, seed=seed, global_size=size))
        bounds = partial(mixture.bounds, seed=seed, about=STRETCH * size)
    else:
        drawn = cache(lambda at: sample_ids(at, samples=samples, seed=seed, global_size=size))
        bounds = lambda place: (place // samples * samples, (place // samples + 1) * samples)  # noqa: E731
    config = replace(config, evaluate=replace(config.evaluate, batches=None))
    order = Order(
        config, Rows(samples), end_of_document=0, by_source=sizes if len(sizes) > 1 else (), places=lengths.__getitem__
    )
    expected = grouped(position, lengths.__getitem__, drawn, bounds, seed=seed, global_size=size)
    assert order.batch(position) == expected.tolist()


def test_the_command_line(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(finished / "runs/it")
    assert main(["--oracle", run, "--steps", "2"]) == 0
    assert capsys.readouterr().out.endswith("2 steps as the oracle computed them\n")
    for arguments, problem in (
        (["--oracle", run, "run.seed=2"], "run.seed=2: the oracle takes the run's own config; leave it out"),
        (["--oracle", str(tmp_path)], "config.yaml"),
        (["--oracle", run, "--config", "x.yaml"], "not allowed with argument"),
    ):
        assert main(arguments) == 2
        assert problem in capsys.readouterr().err


def test_a_run_with_an_attention_of_gpus_alone_is_recomputed_without_it(finished: Path, tmp_path: Path) -> None:
    for kernel in ("flex_attention", "flash_attention_2"):
        run = configured(finished, tmp_path / kernel, {"attention: sdpa": f"attention: {kernel}"}, without="")
        assert judge(run, steps=1, log=lambda line: None).holds


def configured(finished: Path, folder: Path, changes: dict[str, str], without: str = "checkpoints") -> Path:
    """The finished run, as if it had another config."""
    run = shutil.copytree(finished / "runs/it", folder / "it", ignore=shutil.ignore_patterns(without))
    text = (run / "config.yaml").read_text(encoding="utf-8")
    for old, new in changes.items():
        assert f"{old}\n" in text
        text = text.replace(f"{old}\n", f"{new}\n")
    (run / "config.yaml").write_text(text, encoding="utf-8")
    return run


DORA = {
    "adapter:\n  kind: none": "adapter:\n  kind: dora",
    "architecture: llama": "architecture: null",
    "name_or_path: null": "name_or_path: base",
}


def test_what_it_does_not_compute_in_any_pass_is_one_line(finished, tmp_path, capsys) -> None:
    assert main(["--oracle", str(configured(finished, tmp_path, DORA))]) == 2
    assert "adapter.kind = dora: the oracle does not compute it" in capsys.readouterr().err


ALWAYS = {"masters at the start", ALONE, "samples", "tokens", "learning rate"}
DROPPED = {
    "document_masking: false": "document_masking: true",
    "num_hidden_layers: 2": "num_hidden_layers: 2\n    attention_dropout: 0.1",
}
MUON = {"name: adamw": "name: muon", "orthogonalization: auto": "orthogonalization: bf16"}


@pytest.mark.parametrize(
    ("changes", "key", "compared"),
    [
        ({"balance_loss: 0.0": "balance_loss: 0.1"}, "model.balance_loss = 0.1", {"loss"}),
        (MUON, "optimizer.orthogonalization = bf16", {"loss", FIRST_NORM, "norm"}),
        (DROPPED, "the model has attention_dropout = 0.1; the oracle drops values of documents end to end only", set()),
    ],
)
def test_what_it_does_not_compute_in_training_spares_the_rest(finished, tmp_path, changes, key, compared) -> None:
    run = configured(finished, tmp_path, changes)
    found = judge(run, steps=4, log=lambda line: None)
    assert found.holds and {each.what for each in found.comparisons} == ALWAYS | compared
    assert any(note.startswith(f"compared as far as it does not depend on it: {key}") for note in found.notes)

    def at_step_4(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 4:
            event |= {"sample_ids_sha256": "0" * 64, "lr": event["lr"] * 1.001, "loss": 0.0, "grad_norm": 0.0}

    change_jsonl(run / "events.jsonl", at_step_4)
    assert failed(judge(run, steps=4, log=lambda line: None)) == {"samples", "learning rate"}


def test_low_rank_factors_are_of_layers_that_are_linear() -> None:
    """`peft` leaves the routers of Phi-3.5-MoE alone, and gives Mixtral's, and its experts, factors as parameters."""
    kinds = with_experts()
    model = mixture("phimoe", kinds["phimoe"])
    add_low_rank(model, AdapterSection(kind="lora", r=2), seed=0)
    adapted = {name.partition("layers.0.")[2] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert adapted == {"", *(f"self_attn.{name}_proj" for name in "qkvo")}
    for targets, found in ((("all-linear",), "down_proj, gate.weight, gate_up_proj"), (("q_proj", "w2"), "down_proj")):
        section = AdapterSection(kind="lora", r=2, target_modules=targets)
        with pytest.raises(UserError, match=f"^adapter.target_modules = {', '.join(targets)}: {found} have factors"):
            add_low_rank(mixture("mixtral", kinds["mixtral"]), section, seed=0)


def test_a_mixture_that_is_loaded_computes_in_fp64(tmp_path: Path) -> None:
    """transformers chooses grouped matmuls, which do not take FP64, in the loaded model's own copy of the config."""
    write_base(tmp_path / "base", "mixtral")
    config = Config(model=ModelSection(name_or_path=str(tmp_path / "base")))
    shape = model_config(config.model, vocab_size=64, sequence_length=16)
    model, _, _ = _model(tmp_path, config, shape, compares=False)
    assert model.double()(torch.arange(8)[None]).logits.dtype == torch.float64
