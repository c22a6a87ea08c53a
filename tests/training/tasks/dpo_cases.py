"""Code run inside the processes of test_dpo.py, and the oracle in plain torch."""

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
from data.corpora.row_shards import RowShards
from tests.training.tasks import sft_cases
from tests.training.tasks.sft_cases import labelled, model_of, taken, trained_plainly
from training.distributed import World
from training.session import Session, session
from training.tasks.task import prepare

PAIRS = ("task=dpo", "model.loss=auto")
KINDS: dict[str, tuple[str, ...]] = {
    "precomputed": (),
    "lora and a whole module": ("adapter={kind: lora, r: 4, alpha: 8, modules_to_save: [lm_head]}",),
    "precomputed with an adapter": (sft_cases.LORA, "preference.reference=precomputed"),
}
"""Overrides for each source of the reference."""


def resolve(folder: Path, *, overrides: tuple[str, ...] = (), **options: Any) -> Resolved:
    """A preference optimisation of the base in `folder` on its pairs."""
    return sft_cases.resolve(folder, overrides=(*PAIRS, f"data.path={folder}/pairs.jsonl", *overrides), **options)


def steps(world: World, *, folder: Path, **options: Any) -> dict[str, Any]:
    """Losses, norms, metrics and pairs of some steps, and the masters before and after."""
    return taken(resolve(folder, **options), world, _step)


def _step(opened: Session) -> dict[str, Any]:
    batch, train = opened.batches.next_step(), opened.corpus.train
    assert isinstance(train, RowShards)
    return sft_cases.step(opened, batch) | {
        "pairs": [train.rows_of(int(sample))[0] // 2 for sample in batch.sample_ids]
    }


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
    found: dict[str, Any],
    *,
    adapter: dict[str, Any] | None = None,
    preference: dict[str, Any] | None = None,
    eps: float = 1e-8,
) -> dict[str, Any]:
    """The steps of `found` in plain torch: one answer at a time, unpadded, the loss written out in FP64.

    adapter: arguments of a `LoraConfig`, for plain `peft`. eps: of AdamW.
    """
    given = {"loss": "sigmoid", "beta": 0.1, "label_smoothing": 0.0, "sft_weight": 0.0} | (preference or {})
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    model = model_of(folder, found, adapter)
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]

    def backward(numbers: list[int]) -> dict[str, Any]:
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
        means = {name: sum(values) / len(values) for name, values in estimates.items()}
        return {"loss": total / len(numbers), "tokens": tokens, "accuracy": preferred / len(numbers)} | means

    return trained_plainly(model, [step["pairs"] for step in found["steps"]], backward, eps=eps)


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
