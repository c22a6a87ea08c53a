"""What runs inside the processes of test_dpo.py, and the oracle in plain torch."""

from __future__ import annotations

import io
import json
import os
import signal
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from config.resolved import Resolved
from config.schema import OptimizerSection
from data.row_shards import RowShards
from modeling.parameter_groups import parameter_groups
from tests.training.tasks import sft_cases
from tests.training.tasks.sft_cases import CLIPPING, RATE, labelled, taken
from training.distributed import World
from training.session import Session, session
from training.tasks.task import prepare

PAIRS = ("task=dpo", "model.loss=auto")
LORA = "adapter={kind: lora, r: 4, alpha: 8}"
KINDS: dict[str, tuple[str, ...]] = {
    "precomputed": (),
    "lora and a whole module": ("adapter={kind: lora, r: 4, alpha: 8, modules_to_save: [lm_head]}",),
    "precomputed with an adapter": (LORA, "preference.reference=precomputed"),
}
"""Where the reference is from."""


def resolve(folder: Path, *, overrides: tuple[str, ...] = (), **options: Any) -> Resolved:
    """A preference optimisation of the base in `folder` on its pairs."""
    return sft_cases.resolve(folder, overrides=(*PAIRS, f"data.path={folder}/pairs.jsonl", *overrides), **options)


def steps(world: World, *, folder: Path, **options: Any) -> dict[str, Any]:
    """Losses, norms, metrics and pairs of some steps, and the masters before and after."""
    return taken(resolve(folder, **options), world, _step)


def _step(opened: Session) -> dict[str, Any]:
    engine, batch, train = opened.engine, opened.batches.next_step(), opened.corpus.train
    assert isinstance(train, RowShards)
    health = engine.health(engine.forward_backward(batch, step=batch.position + 1))
    assert engine.step(health, RATE).applied
    found = {"loss": health.loss, "grad_norm": health.grad_norm, "tokens": batch.tokens, "metrics": health.metrics}
    return found | {"pairs": [train.rows_of(int(sample))[0] // 2 for sample in batch.sample_ids]}


def first_step(world: World, *, folder: Path, **options: Any) -> dict[str, Any]:
    """Loss, metrics and notes of the first step, and of the validation set before it; what was said of references."""
    printed = io.StringIO()
    with ExitStack() as ends:
        with redirect_stdout(printed):
            opened = ends.enter_context(session(resolve(folder, **options), world=world))
        engine, trains = opened.engine, opened.engine.model.training
        before = engine.evaluate(opened.validation()) if opened.resolved.config.data.validation_fraction else None
        health = engine.health(engine.forward_backward(opened.batches.next_step(), step=1))
        engine.discard_gradients()
        notes = [note for note in engine.notes if "reference" in note]
        found = {"notes": notes, "said": [line for line in printed.getvalue().splitlines() if "reference" in line]}
        return {"loss": health.loss, "metrics": health.metrics, "validation": before, "trains": trains} | found


def oracle(
    folder: Path,
    pairs_of_steps: list[list[int]],
    model: Any = None,
    *,
    preference: dict[str, Any] | None = None,
    eps: float = 1e-8,
) -> dict[str, Any]:
    """The same steps in plain torch: one answer at a time, unpadded, the loss written out in FP64. eps: of AdamW."""
    given = {"loss": "sigmoid", "beta": 0.1, "label_smoothing": 0.0, "sft_weight": 0.0} | (preference or {})
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32) if model is None else model
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    optimizer = torch.optim.AdamW(
        parameter_groups(model, OptimizerSection(weight_decay=0.1)), lr=RATE, betas=(0.9, 0.95), eps=eps
    )
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = []
    for numbers in pairs_of_steps:
        total, tokens, preferred = 0.0, 0, 0.0
        estimates: dict[str, list[float]] = {f"{k}/{s}": [] for k in ("kl_k1", "kl_k3") for s in ("chosen", "rejected")}
        for number in numbers:
            sides = [labelled(tokenizer, [*rows[number]["prompt"], *rows[number][s]]) for s in ("chosen", "rejected")]
            tokens += sum(len(ids) - 1 for ids, _ in sides)
            policies = [token_log_probs(model, *side) for side in sides]
            with torch.no_grad():
                references = [token_log_probs(base, *side) for side in sides]
            for name, p, q in zip(("chosen", "rejected"), policies, references, strict=True):
                ratio = (q - p.detach()).exp()
                estimates[f"kl_k1/{name}"] += (-ratio.log()).tolist()
                estimates[f"kl_k3/{name}"] += (ratio - 1 - ratio.log()).tolist()
            policy, reference = ([side.sum() for side in both] for both in (policies, references))
            margin = policy[0] - policy[1] - (reference[0] - reference[1])
            loss = written_out(given, margin) - given["sft_weight"] * policy[0] / int((sides[0][1] != -100).sum())
            (loss / len(numbers)).backward()
            total += float(loss.detach())
            preferred += 0.5 + 0.5 * float(margin.detach().sign())
        norm = float(torch.nn.utils.clip_grad_norm_(parameters.values(), CLIPPING))
        optimizer.step()
        optimizer.zero_grad()
        found.append(
            {"loss": total / len(numbers), "grad_norm": norm, "tokens": tokens, "accuracy": preferred / len(numbers)}
            | {name: sum(values) / len(values) for name, values in estimates.items()}
        )
    return {"steps": found, "after": {name: parameter.detach().clone() for name, parameter in parameters.items()}}


def token_log_probs(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(labels,) float64: of the labelled tokens, in nats."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)
    picked = logits.gather(1, labels[1:].clamp(min=0)[:, None])[:, 0]
    return picked[labels[1:] != -100]


def written_out(given: dict[str, Any], margin: torch.Tensor) -> torch.Tensor:
    """The loss of one pair from its margin."""
    beta, smoothing = given["beta"], given["label_smoothing"]
    if given["loss"] == "hinge":
        return torch.maximum(1 - beta * margin, torch.zeros_like(margin))
    if given["loss"] == "ipo":
        return (margin - 1 / (2 * beta)) ** 2
    right, wrong = torch.sigmoid(beta * margin).log(), torch.sigmoid(-beta * margin).log()
    return -(1 - smoothing) * right - smoothing * wrong


def parity_steps(world: World, *, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Two steps, each compared with FP32 module by module."""
    from tools.parity.reference import Reference
    from tools.parity.steps import StepParity

    resolved = resolve(folder, **options)
    with session(resolved, world=world) as opened:
        parity = StepParity(opened.engine, Reference(resolved, opened.model_config, world), resolved)
        return [parity.step(opened.batches.next_step(), applied=step) for step in range(2)]


def telemetry(world: World, *, folder: Path, probe: bool, **options: Any) -> dict[str, Any]:
    """What is measured on the first step."""
    from training.telemetry import Telemetry

    with session(resolve(folder, **options), world=world) as opened:
        meter, batch = Telemetry(opened.engine, probe=probe), opened.batches.next_step()
        with meter.watching(batch):
            outcome = opened.engine.forward_backward(batch, step=1)
        opened.engine.health(outcome)
        meter.measure()
        return meter.finish(applied=False)


def causes(world: World, *, folder: Path, **options: Any) -> list[tuple[int, Any]]:
    """Who made the first step not finite."""
    from training.attribution import attribute

    with session(resolve(folder, **options), world=world) as opened:
        batch = opened.batches.next_step()
        outcome = opened.engine.forward_backward(batch, step=1)
        assert not opened.engine.health(outcome).finite
        return attribute(opened.engine, batch, outcome, step=1)


def killed_while_writing(world: World, *, folder: Path, **options: Any) -> None:
    """The process is killed when the references are on disk, before they have their name."""
    resolved, renamed = resolve(folder, **options), Path.replace
    prepare(resolved.config, progress=False)

    def die(path: Path, target: Path) -> Path:
        if "references" in path.name:
            os.kill(os.getpid(), signal.SIGKILL)
        return renamed(path, target)

    Path.replace = die  # type: ignore[assignment,method-assign]
    with session(resolved, world=world):
        pass


def by_source(world: World, *, folder: Path, **options: Any) -> dict[str, float]:
    """The loss of the first step, whole and by source, and before it that of each source's held-out pairs."""
    with session(resolve(folder, **options), world=world) as opened:
        engine = opened.engine
        found = {name: engine.evaluate(own).loss for name, own in opened.validation_by_source().items()}
        health = engine.health(engine.forward_backward(opened.batches.next_step(), step=1))
        engine.discard_gradients()
        of_step = {f"step, {name}": loss for name, loss in health.loss_by_source.items()}
        return found | of_step | {"step": health.loss}
