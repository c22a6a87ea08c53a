"""Code run inside the processes of test_distill.py, and the oracle in plain torch."""

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from config.errors import UserError
from config.resolved import Resolved
from tests.training.tasks.sft_cases import labelled, resolve, trained_plainly
from training.distributed import World
from training.engine.teacher import Teacher
from training.session import session
from training.tasks.task import prepare


def oracle(
    folder: Path,
    found: dict[str, Any],
    *,
    kind: str,
    temperature: float,
    ce_weight: float,
    top_k: int,
    eps: float = 1e-8,
) -> dict[str, Any]:
    """The steps of `found` in plain torch: one row at a time, unpadded, divergences from probabilities in FP64.

    eps: of AdamW.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    model, teacher = (AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32) for name in NAMES)
    model.train()
    teacher.eval()
    chats = [json.loads(line)["messages"] for line in (folder / "chats.jsonl").read_text().splitlines()]

    def backward(numbers: list[int]) -> dict[str, Any]:
        rows = [labelled(tokenizer, chats[number]) for number in numbers]
        count = sum(int((labels[1:] != -100).sum()) for _, labels in rows)
        sums = torch.zeros(4, dtype=torch.float64)
        for ids, labels in rows:
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].double()
            with torch.no_grad():
                theirs = teacher(input_ids=ids[None], use_cache=False).logits[0, :-1].double()
            counts = labels[1:] != -100
            logits, theirs, wanted = logits[counts], theirs[counts], labels[1:][counts]
            p, q = (theirs / temperature).softmax(-1), (logits / temperature).softmax(-1)
            if top_k:
                known = p.topk(top_k, dim=-1).indices
                p, q = (torch.cat([x.gather(1, known), 1 - x.gather(1, known).sum(1, True)], 1) for x in (p, q))
            m = (p + q) / 2
            kl, reverse = (p * (p / q).log()).sum(), (q * (q / p).log()).sum()
            jsd = ((p * (p / m).log()).sum() + (q * (q / m).log()).sum()) / 2
            apart = {"forward_kl": kl, "reverse_kl": reverse, "jsd": jsd}[kind]
            entropy = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
            loss = (1 - ce_weight) * temperature**2 * apart + ce_weight * entropy
            (loss / count).backward()
            same = (logits.argmax(-1) == theirs.argmax(-1)).double().sum()
            sums += torch.stack([loss, kl, entropy, same]).detach()
        values = dict(zip(("loss", "kl", "label_cross_entropy", "teacher_agreement"), sums.tolist(), strict=True))
        tokens = sum(len(ids) - 1 for ids, _ in rows)
        return {"tokens": tokens} | {name: value / count for name, value in values.items()}

    return trained_plainly(model, [step["rows"] for step in found["steps"]], backward, eps=eps)


NAMES = ("base", "teacher")


def gathering_streams(world: World, *, folder: Path, **options: Any) -> list[bool]:
    """Whether student and teacher gather on a stream of their own."""
    with session(resolve(folder, **options), world=world) as opened:
        engine = opened.engine
        return [each.zero_overlap_comm() for each in (engine.deepspeed, engine.teacher._engine)]


def refused(world: World, *, folder: Path, **options: Any) -> str:
    """Why the session does not open."""
    return why_refused(resolve(folder, **options), world)


def attention_of_teacher(world: World, *, folder: Path, **options: Any) -> str:
    """The attention of the teacher alone."""
    teacher = Teacher(resolve(folder, **options), world)
    return str(teacher._forward.config._attn_implementation)


def refused_of_full_disk(world: World, *, folder: Path, at_start: bool, **options: Any) -> str:
    """Why the session does not open on a disk that is full at the start, or gets full while the teacher answers."""
    resolved, full = resolve(folder, **options), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    prepare(resolved.config, progress=False)
    by_size = patch.object(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with by_size if at_start else patch.object(os, "fsync", side_effect=full):
        return why_refused(resolved, world)


def why_refused(resolved: Resolved, world: World) -> str:
    """The error of a session that does not open; empty where it does."""
    try:
        with session(resolved, world=world):
            return ""
    except UserError as error:
        return str(error)
