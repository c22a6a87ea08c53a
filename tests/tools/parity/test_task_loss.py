"""The loss of each task against its definition: sound ones pass, a constant that is wrong by 1e-3 is named."""

from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.schema import OptimizerSection, ParitySection
from tests.support.jobs.process_group import ProcessGroup
from tests.support.jobs.task_jobs import overrides_of, write_all
from tools.parity.constants import of_update
from tools.parity.judge_steps import Walk, judge_steps
from tools.parity.steps import Recomputed
from training.distributed import World
from training.engine.optimizer import IMPLEMENTATIONS
from training.engine.optimizers.adamw import after
from training.engine.optimizers.rule import UpdateInputs
from training.session import run_dir_of, session
from training.tasks.task import prepare

DEMO = str(REPOSITORY / "config/recipes/demo.yaml")
FURTHER = 1.001
_FP32 = "precision.compute=fp32"
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    # the job and what it has beyond, and what is planted: an attribute of the objective, its field, and what is said
    "sigmoid": ("dpo, LoRA", ("preference.label_smoothing=0.1",), {"_section.beta": "preference.beta 0.1001"}),
    "ipo": ("dpo", ("preference.loss=ipo", "precision.compute=bf16"), {"_section.beta": "preference.beta 0.1001"}),
    "smoothed": (
        "dpo, LoRA",
        ("preference.label_smoothing=0.1", "preference.sft_weight=0.5"),
        {"_section.label_smoothing": "preference.label_smoothing 0.10", "_section.sft_weight": "sft_weight 0.5005"},
    ),
    "distilled": (
        "distill",
        ("distill={loss: jsd, beta: 0.3, temperature: 0.1, ce_weight: 0.3}",),
        {
            "_temperature": "distill.temperature 0.1001",
            "_beta": "distill.beta 0.3003",
            "_ce_weight": "distill.ce_weight 0.3003",
        },
    ),
    "cached": ("distill", ("distill={top_k: 4, temperature: 2.0}",), {"_temperature": "distill.temperature 2.00"}),
    "noise": ("sft", ("sft.neftune_alpha=5",), {"_noise._alpha": "sft.neftune_alpha 5.00"}),
    "rows": ("sft", ("sft.loss=row", "data.packing=best_fit", _FP32), {}),
    "numbers": ("classify, regression", (), {}),
    "classes": ("classify", (), {}),
    "masked": ("mlm", (), {}),
    "seq2seq": ("seq2seq", (), {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and data of each kind."""
    return write_all(tmp_path_factory.mktemp("losses"))


@contextmanager
def wrong(objective: Any, place: str) -> Any:
    """Inside, a constant of an objective is 1e-3 larger; of several names the last one is an attribute or a field."""
    *outer, name = place.split(".")
    owner = objective
    for each in outer[:-1]:
        owner = getattr(owner, each)
    held = getattr(owner, outer[-1]) if outer else objective
    if is_dataclass(held):
        changed: Any = replace(held, **{name: getattr(held, name) * FURTHER})  # type: ignore[type-var]
        setattr(owner, outer[-1], changed)
    else:
        setattr(held, name, getattr(held, name) * FURTHER)
    try:
        yield
    finally:
        if is_dataclass(held):
            setattr(owner, outer[-1], held)
        else:
            setattr(held, name, getattr(held, name) / FURTHER)


def losses(world: World, *, arguments: list[str], planted: list[str]) -> list[dict[str, Any]]:
    """Measurements of the first step's loss: as it is, then with each planted constant."""
    resolved = read_command_line(["--config", DEMO, *arguments])
    with session(resolved, world=world) as opened:
        steps, batch = Recomputed(opened, run_dir_of(resolved)).parity, opened.batches.next_step()
        found = [steps.task_loss(batch)]
        for place in planted:
            with wrong(opened.engine.objective, place):
                found.append(steps.task_loss(batch))
        if getattr(opened.engine.objective, "_adapter_off", None):
            opened.engine.objective._adapter_off = nullcontext  # type: ignore[attr-defined]
            found.append(steps.task_loss(batch))
        return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_a_constant_that_is_wrong_by_a_thousandth_is_named(pair: ProcessGroup, folder: Path, name: str) -> None:
    job, more, planted = CASES[name]
    arguments = [*overrides_of(folder, job), *more, f"run.dir={folder}/runs", "model.loss=full", "data.workers=1"]
    prepare(read_command_line(["--config", DEMO, *arguments]).config, progress=False)  # daemons may not start workers
    sound, *others = pair.run(losses, arguments=arguments, planted=[*planted])[0]
    assert sound["task_loss"] and max(sound["task_loss"].values()) < 1, sound
    assert not sound["other_constants"]
    for found in others[len(planted) :]:
        assert found["other_constants"][0] == "the reference is not the model without its adapter"
    for found, said in zip(others, planted.values(), strict=False):
        assert max(found["task_loss"].values()) > 1
        assert all(said in note for note in found["other_constants"]) and found["other_constants"], found


def failed_with_noise(world: World, *, arguments: list[str]) -> list[str]:
    """The checks that the first step fails."""
    resolved = read_command_line(["--config", DEMO, *arguments])
    with session(resolved, world=world) as opened:
        steps = Recomputed(opened, run_dir_of(resolved)).parity
        row = {"step": 1, **steps.step(opened.batches.next_step(), applied=0)}
    return [check.name for check in judge_steps([Walk(0, True, [row])], ParitySection()) if not check.passed]


def test_noise_on_embeddings_is_no_error_of_the_module(pair: ProcessGroup, folder: Path) -> None:
    job, more, _ = CASES["noise"]
    arguments = [*overrides_of(folder, job), *more, f"run.dir={folder}/runs", "data.workers=1"]
    prepare(read_command_line(["--config", DEMO, *arguments]).config, progress=False)
    assert pair.run(failed_with_noise, arguments=arguments) == [[], []]


@pytest.mark.parametrize(
    ("name", "key", "planted", "said"),
    [
        ("adamw", "lr", 1.001e-3, "learning rate 0.001001 where 0.001 is asked"),
        ("adamw", "weight_decay", 0.0, "weight_decay"),
        ("adamw", "betas", (0.9009, 0.95), "betas[0] 0.9009 where 0.9 is asked"),
        ("adamw", "betas", (0.9, 0.949), "betas[1] 0.949 where 0.95 is asked"),
        ("adamw", "eps", 1e-6, "eps 1e-06 where 1e-08 is asked"),
        ("lion", "weight_decay", 0.2, "weight_decay 0.2 where 0.1 is asked"),
        ("lamb", "betas", (0.9, 0.949), "betas[1] 0.949 where 0.95 is asked"),
        ("stable_adamw", "lr", 1.05e-3, "learning rate 0.00105 where 0.001 is asked"),
        ("sgd", "momentum", 0.91, "momentum 0.91"),
        ("muon", "momentum", 0.96, "momentum 0.96"),
        ("muon", "weight_decay", 0.11, "weight_decay 0.11 where 0.1 is asked"),
    ],
)
def test_a_constant_of_the_optimizer_is_read_back_from_what_an_update_did(name, key, planted, said) -> None:
    """The third update of a small matrix in FP32; nothing is said of one by the config, nor of one by no constant."""
    dice = torch.Generator().manual_seed(0)
    section = OptimizerSection(name=name, momentum={"sgd": 0.9, "muon": 0.95}.get(name))
    master, gradient, first = (torch.randn(32, 24, generator=dice) * size for size in (0.05, 1e-3, 1e-3))
    states = {"adamw": 2, "lamb": 2, "stable_adamw": 2}.get(name, 1) * [first]
    states[1:] = [gradient.square() * 0.7 + first.square()] if len(states) > 1 else []
    asked: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "step": 3, "matrix": name == "muon", "section": section}
    given = UpdateInputs(master, gradient, states, **asked)
    wrong = {**asked, key: planted} if key in asked else {**asked, "section": replace(section, **{key: planted})}
    for other, expected in ((wrong, said), (asked, "")):
        taken = UpdateInputs(master, gradient, states, **other)
        reached = (taken.master + IMPLEMENTATIONS[name].update(taken)).float()
        moments = after(taken)[0][1:] if name == "adamw" else []
        found = of_update(given, reached, [moment.float() for moment in moments])
        assert expected in found if expected else not found
    noise = torch.randn(32, 24, generator=dice) * 1e-4
    assert not of_update(given, (given.master + IMPLEMENTATIONS[name].update(given) + noise).float())
