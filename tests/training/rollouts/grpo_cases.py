"""Code run inside the processes of test_grpo.py, and the oracle in plain torch on recorded answers."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from config.errors import UserError
from config.resolved import Resolved
from data.corpora.rollouts import Rollouts
from modeling.objectives import policy
from tests.training.checkpoint import resume_cases
from tests.training.tasks import sft_cases
from tests.training.tasks.distill_cases import why_refused
from tests.training.tasks.sft_cases import taken, trained_plainly
from tools.parity.oracle.judge import judge
from tools.parity.steps import measure, verdict
from tools.replay.repeat import Collector
from tracking.compare.surviving import read_run_events
from tracking.record import Record
from tracking.run_dir import RunDir
from training.build import assemble
from training.corruption.self_check import SelfCheck
from training.distributed import World
from training.loop import save_now
from training.rollouts import batches
from training.rollouts.transformers_sampler import Answer
from training.session import Session, session
from training.step import train_step

GROUP, LONGEST = 2, 12
TASK = (
    *("task=grpo", "model.loss=auto", "grpo.rewards=[tests.support.rows.prompts:divided]"),
    *(f"grpo.group_size={GROUP}", f"grpo.max_new_tokens={LONGEST}", "grpo.reward_seconds=60", "optimizer.eps=1e-6"),
)
CORRECTED = "grpo={correction: mask, beta: 0.2, temperature: 0.8, updates: 2}"


def resolve(folder: Path, *, overrides: tuple[str, ...] = (), **options: Any) -> Resolved:
    """A run of the base in `folder` on its prompts."""
    return sft_cases.resolve(folder, overrides=(*TASK, f"data.path={folder}/prompts.jsonl", *overrides), **options)


def steps(world: World, *, folder: Path, answers: list[Rollouts] | None = None, **options: Any) -> dict[str, Any]:
    """Losses, norms and metrics of some steps with their answers, and the masters before and after.

    answers: to be learned from, in place of those that are sampled.
    """
    given = list(answers or ())

    def step(opened: Session) -> dict[str, Any]:
        batches: Any = opened.batches
        if given:
            position = batches.position // batches._section.updates
            if batches._held is None or batches._held[0] != position:
                batches._held = position, given.pop(0)
        found = sft_cases.step(opened)
        return found | {"answers": batches._held[1], "position": batches._held[0]}

    return taken(resolve(folder, **options), world, step)


def oracle(folder: Path, recorded: list[dict[str, Any]], config: Any) -> dict[str, Any]:
    """The same steps in plain torch: one answer at a time, unpadded, from the recorded answers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    section = config.grpo
    held: dict[str, Any] = {"position": None}

    def log_probs(of: Any, tokens: np.ndarray, count: int) -> torch.Tensor:
        logits = of(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0].double()
        logits = logits[-count - 1 : -1] / section.temperature
        picked: torch.Tensor = logits.log_softmax(-1).gather(1, torch.from_numpy(tokens[-count:])[:, None])[:, 0]
        return picked

    def backward(step: dict[str, Any]) -> dict[str, Any]:
        found: Rollouts = step["answers"]
        rows = [
            (found.prompts[n, : found.prompt_lengths[n]], found.answers[n, k, :length], found.sampler[n, k, :length])
            for (n, k), length in np.ndenumerate(found.lengths)
        ]
        tokens = [np.concatenate([prompt, answer]) for prompt, answer, _ in rows]
        if held["position"] != step["position"]:
            with torch.no_grad():
                held["old"] = [
                    log_probs(model, own, len(answer)) for own, (_, answer, _) in zip(tokens, rows, strict=True)
                ]
            held["position"] = step["position"]
        reward = [sum(answer.tolist()) % 7 for _, answer, _ in rows]
        lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        scales = [json.loads(lines[sample])["scale"] for sample in found.samples for _ in range(GROUP)]
        reward = [value / scale for value, scale in zip(reward, scales, strict=True)]
        total = 0.0
        counts = {"sequence": len(rows), "token": sum(len(answer) for _, answer, _ in rows)}
        count = counts.get(str(section.loss), len(rows) * section.max_new_tokens)
        for number, ((_, answer, sampler), own) in enumerate(zip(rows, tokens, strict=True)):
            group = reward[number // GROUP * GROUP :][:GROUP]
            mean = sum(group) / GROUP
            std = (sum((value - mean) ** 2 for value in group) / (GROUP - 1)) ** 0.5
            advantage = reward[number] - mean
            advantage *= {"group_std": 1 / (std + 1e-4), "rloo": GROUP / (GROUP - 1)}.get(str(section.advantage), 1.0)
            now, old = log_probs(model, own, len(answer)), held["old"][number]
            rho = (now - old).exp()
            ratio = (now - old).mean().exp().expand_as(rho) if section.ratio == "sequence" else rho
            if section.surrogate == "cispo":
                loss = -ratio.detach().clamp(max=section.clip_high) * advantage * now
            else:
                bounded = ratio.clamp(1 - section.clip_low, 1 + section.clip_high)
                loss = -torch.minimum(ratio * advantage, bounded * advantage)
            weight = (old - torch.from_numpy(sampler).double()).exp()
            if section.correction == "mask":
                weight = weight * ((weight >= 1 / section.correction_high) & (weight <= section.correction_high))
            loss = loss * (weight.clamp(max=section.correction_high) if section.correction != "none" else 1.0)
            if section.beta:
                with torch.no_grad():
                    reference = log_probs(start, own, len(answer))
                loss = loss + section.beta * rho * ((reference - now).exp() - 1 - (reference - now))
            share = (loss.mean() if section.loss == "sequence" else loss.sum()) / count
            share.backward()
            total += float(share.detach())
        return {"loss": total, "tokens": sum(len(own) - 1 for own in tokens), "reward": sum(reward) / len(rows)}

    return trained_plainly(model, recorded, backward, eps=config.optimizer.eps)


def taught_oracle(folder: Path, recorded: list[dict[str, Any]], config: Any) -> dict[str, Any]:
    """Steps of task opd in plain torch: a teacher's distribution on one recorded answer at a time, in FP64."""
    model, teacher = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32) for name in ("base", "teacher")
    )
    section = config.distill

    def backward(step: dict[str, Any]) -> dict[str, Any]:
        found: Rollouts = step["answers"]
        total, kl, count = 0.0, 0.0, int(found.lengths.sum())
        for (n, k), length in np.ndenumerate(found.lengths):
            own = (found.prompts[n, : found.prompt_lengths[n]], found.answers[n, k, :length])
            tokens = torch.from_numpy(np.concatenate(own))[None]
            q, p = (
                (of(input_ids=tokens, use_cache=False).logits[0, -length - 1 : -1].double() / section.temperature)
                for of in (model, teacher)
            )
            q, p = q.softmax(-1), p.softmax(-1).detach()
            m = section.beta * p + (1 - section.beta) * q
            of_p, of_q = ((x * (x / m).log()).sum() for x in (p, q))
            apart = {
                "forward_kl": (p * (p / q).log()).sum(),
                "reverse_kl": (q * (q / p).log()).sum(),
                "jsd": section.beta * of_p + (1 - section.beta) * of_q,
            }[section.loss]
            share = section.temperature**2 * apart / count
            share.backward()
            total += float(share.detach())
            kl += float((p * (p / q).log()).sum().detach()) / count
        tokens_of_all = int((found.prompt_lengths[:, None] + found.lengths - 1).sum())
        return {"loss": total, "tokens": tokens_of_all, "kl": kl}

    return trained_plainly(model, recorded, backward, eps=config.optimizer.eps)


def examples(world: World, *, folder: Path) -> list[str]:
    """The answers that two evaluations show, and before them nothing."""
    with session(resolve(folder, overrides=("data.validation_fraction=0.2",)), world=world) as opened:
        found = [opened.answers.examples]
        for _ in range(2):
            opened.engine.evaluate(opened.validation())
            found.append(opened.answers.examples)
        return found


def evaluated(world: World, *, folder: Path, reward: str) -> tuple[float, str | None]:
    """The mean reward of an evaluation by a function in tests/support/rows/prompts.py; which prompts it left out."""
    given = ("data.validation_fraction=0.2", "evaluate={every_steps: 1, batches: 1}")
    given = (*given, f"grpo.rewards=[tests.support.rows.prompts:{reward}]")
    with session(resolve(folder, overrides=given), world=world) as opened:
        return opened.engine.evaluate(opened.validation()).metrics["reward/mean"], opened.left_out


def first_metrics(world: World, *, folder: Path, fault: str = "", **options: Any) -> dict[str, Any]:
    """Metrics of the first two steps, the verdict of the guard on each, or what the run ended with. fault: planted."""
    from precision.guard import Guard

    with session(resolve(folder, **options), world=world) as opened:
        FAULTS.get(fault, lambda opened: None)(opened)
        guard, found = Guard(opened.resolved.config.guard), []
        for _ in range(2):
            try:
                batch = opened.batches.next_step()
            except UserError as problem:  # one line, exit code 2
                return {"stopped": str(problem), "steps": found}
            health = opened.engine.health(opened.engine.forward_backward(batch, step=batch.position + 1))
            judgement = guard.judge(health)
            opened.engine.step(health, 0.05)
            found.append({"metrics": health.metrics, "verdict": judgement.verdict.name, "reason": judgement.reason})
        return {"steps": found}


def held_twice(world: World, *, folder: Path, **options: Any) -> list[str]:
    """Names of the weights of which trainer and sampler each hold a copy."""
    with session(resolve(folder, **options), world=world) as opened:
        own = dict(opened.answers.sampler.model.named_parameters())
        pairs = ((name, own[name], trained) for name, trained in opened.engine.model.named_parameters())
        return [name for name, copy, trained in pairs if copy.data_ptr() != trained.data_ptr()]


def samplings(world: World, *, folder: Path, to: Path, given: list[str]) -> list[int]:
    """How often each session of the same weights asks its sampler for the first step; all keep its answers in `to`.

    given: an override for each.
    """
    found, record = [], dict[str, Any]()
    for override in given:
        with session(resolve(folder, overrides=(override,)), world=world) as opened:
            answers: Any = opened.answers
            answers.keep_in(to)
            answers.record = record
            with patch.object(answers.sampler, "sample", side_effect=answers.sampler.sample) as sample:
                opened.batches.next_step()
            found.append(sample.call_count)
            changed = record.get("sources", answers.record["sources"]) != answers.record["sources"]
            assert (("the sources of answers changed since the last checkpoint",) in answers._said) == changed
            record = answers.record
    return found


def reactions(world: World, *, folder: Path, fault: str, steps: int = 4, **options: Any) -> list[dict[str, Any]]:
    """The `step`, `incident` and `self_check` events of some steps of the loop's own, and of one after a resume."""
    resolved, collector = resolve(folder, **options), Collector()
    found: list[dict[str, Any]] = []
    with session(resolved, world=world) as opened:
        FAULTS[fault](opened)
        parts: dict[str, Any] = {
            "record": Record([collector]),
            "self_check": SelfCheck(opened.engine, resolved, opened.model_config, opened.corpus),
        }
        parts["checkpoints"] = opened.saved_checkpoints(folder / "none")
        run, progress = assemble(resolved, opened.engine, opened.batches, **parts)
        for _ in range(steps):
            progress, _, health = train_step(run, progress)
            found.append(health.metrics)
        state = run.state_dict(progress)
        assert state["batches"].keys() == {"sampler", "sources", "version"}
        changed = opened.engine.adjustable.state_dict()
        run.load_state_dict(state)
        assert opened.engine.adjustable.state_dict() == changed
        run.promotions.load_state_dict({"by_step": [], "regions": {}}, opened.engine.adjustable)
        assert opened.engine.adjustable.state_dict() == {}
        assert all("forward" not in vars(model.lm_head) for model in (opened.engine.model, opened.answers._reference))
    kinds = ("step", "incident", "warning", "self_check")
    return [{"metrics": found, "events": [e for e in collector.events if e["event"] in kinds], "changed": changed}]


def identity(world: World, **options: Any) -> dict[str, Any]:
    """The facts that another run must share to resume from this one."""
    with session(resolve(**options), world=world) as opened:
        return opened.identity


def rolled_back(world: World, *, folder: Path, saved: Path) -> list[tuple[str, int, list[str]]]:
    """Verdict, position afterwards and steps sampled for of some attempts; the third samples by another policy."""
    given = ("guard.reactions=[rollback, abort]", "guard.self_check_every=0", "grpo.updates=2")
    resolved, found, sampled = resolve(folder, overrides=given), list[tuple[str, int, list[str]]](), list[str]()
    with session(resolved, world=world) as opened:
        opened.answers.keep_in(saved / "rollouts")
        parts: dict[str, Any] = {"record": Record([]), "checkpoints": opened.saved_checkpoints(saved)}
        run, progress = assemble(resolved, opened.engine, opened.batches, **parts)
        right, sample = opened.answers.sampler._section, opened.answers._sampled
        opened.answers._sampled = lambda *a, **k: sampled.append(a[3]) or sample(*a, **k)
        for attempt in range(5):
            opened.answers.sampler._section = right
            if attempt == 2:
                save_now(run, progress, "now")
                _other_temperature(opened)
            progress, judgement, _ = train_step(run, progress)
            found.append((judgement.verdict.name, progress.position, sampled[:]))
            sampled.clear()
    return found


WRONG: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "std over the wrong group": (
        *(batches, "advantages"),
        lambda right: lambda totals, kind: right(totals.flatten()[None], kind),
    ),
    "group split over ranks": (batches, "advantages", lambda right: lambda totals, kind: right(totals[:, :1], kind)),
    "advantages with the wrong sign": (batches, "advantages", lambda right: lambda *given: -right(*given)),
    "tokens counted on this rank": (batches, "counts_of", lambda right: lambda *given: right(*given) // 2),
    "seeds repeat in every step": (
        *(batches, "Request"),
        lambda right: lambda ids, key: right(ids, key.partition("/")[0] + "/".join(key.split("/")[2:])),
    ),
    "temperature in the loss alone": (
        *(policy, "token_log_probs"),
        lambda right: (
            lambda logits, labels, *, temperature: right(
                logits, labels, temperature=temperature * (0.9 if logits.requires_grad else 1)
            )
        ),
    ),
}
"""Wrong uses of the answers of a step: name to module, function, and what becomes of it."""


def recomputed(world: World, *, folder: Path, wrong: str | None) -> tuple[list[str], list[str], list[str]]:
    """Findings of the oracle and of the gate's single steps in a short run, and the constants that the latter name."""
    name = "sound" if wrong is None else wrong.replace(" ", "-")
    given = (*TASK[1:], "grpo={updates: 2, beta: 0.1, algorithm: dapo}", "model.config={}", "run.steps=4")
    overrides = resume_cases.task_job(folder, *given, "guard.spike_sigmas=0", task="grpo", rows="prompts")
    module, target, make = WRONG[wrong] if wrong else (batches, "advantages", lambda right: right)
    with patch.object(module, target, make(getattr(module, target))):
        resume_cases.job(world, folder=str(folder), name=name, overrides=overrides, passes=None)
        resolved, run = resume_cases.resolve(str(folder), name, overrides), RunDir(folder / "runs" / name)
        walked = measure(run, resolved, [0, 2], length=1, world=world) if wrong in (None, *LOSSES) else []
    found = judge(run.path, steps=4, log=str).comparisons if world.is_main else []
    judged = verdict(walked, resolved.config.parity) if walked else {"failed": [], "checks": []}
    notes = [check["note"] for check in judged["checks"] if check["name"] == "task_loss"]
    return [each.what for each in found if not each.holds], judged["failed"], notes


def recomputed_later(world: World, *, folder: Path) -> tuple[list[bool], list[str], list[str]]:
    """Which steps a run in FP16 applied, which comparisons the oracle has failed, and what it notes: of its first four
    steps, of the second on the same answers after checkpoint 5, and of the first on new ones after checkpoint 6."""
    scale = ("precision.compute=fp16", "deepspeed.stage=2", f"precision.loss_scale.initial={2**21}")
    given = (
        *TASK[1:],
        "grpo={updates: 2, beta: 0.1, algorithm: dapo}",
        "model.config={}",
        "guard.spike_sigmas=0",
        *scale,
    )
    given = (*given, "run.steps=8", "checkpoint.also_after=[5, 6]", "checkpoint.keep=9")
    overrides = resume_cases.task_job(folder, *given, task="grpo", rows="prompts")
    resume_cases.job(world, folder=str(folder), name="later", overrides=overrides, passes=None)
    run = RunDir(folder / "runs/later")
    found = judge(run.path, steps=4, points=[5, 6], log=str)
    applied = [event["applied"] for event in read_run_events(run.events) if event["event"] == "step"]
    return applied, [each.what for each in found.comparisons if not each.holds], found.notes


LOSSES = ("temperature in the loss alone",)
"""The wrong uses that the comparison of single steps sees too."""


def refused(world: World, *, folder: Path, **options: Any) -> str:
    """Why the session does not open."""
    return why_refused(resolve(folder, **options), world)


def other_reference(world: World, *, folder: Path) -> str:
    """Why a session does not open whose reference is wider than the trainer."""
    right, made = batches.copy_of_model, list[Any]()

    def copied(*given: Any) -> Any:
        made.append(right(*given))
        return made[-1].float() if len(made) == 2 else made[-1]

    with patch.object(batches, "copy_of_model", copied):
        return refused(world, folder=folder, compute="bf16", overrides=("grpo.beta=0.1",))


def _with(method: str, make: Callable[[Any], Any]) -> Callable[[Session], None]:
    """Puts `make(the method)` in place of a method of the session's answers, such as `sampler.sample`."""

    def plant(opened: Session) -> None:
        *path, name = method.split(".")
        owner = reduce(getattr, path, opened.answers)
        setattr(owner, name, make(getattr(owner, name)))

    return plant


def _received(kept: Callable[[str], bool]) -> Callable[[Session], None]:
    """The sampler receives only the weights whose names are kept."""
    return _with("sampler.receive", lambda right: lambda weights: right(pair for pair in weights if kept(pair[0])))


def _drawn(change: Callable[[Answer], Answer]) -> Callable[[Session], None]:
    """The sampler changes each answer that it has drawn."""
    return _with("sampler._drawn", lambda right: lambda requests: [change(answer) for answer in right(requests)])


def _next_text(columns: dict[str, Any]) -> dict[str, Any]:
    return columns | {"completions": columns["completions"][1:] + columns["completions"][:1]}


def _stale_head(opened: Session) -> None:
    model = opened.answers.sampler.model
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)
    _received(lambda name: name != "lm_head.weight")(opened)


def _other_temperature(opened: Session) -> None:
    sampler: Any = opened.answers.sampler
    sampler._section = replace(sampler._section, temperature=0.7 * sampler._section.temperature)


def _nucleus(opened: Session) -> None:
    """The sampler draws from the likeliest tokens that have 0.9 together (top-p)."""
    sampler: Any = opened.answers.sampler
    drawn = sampler._drawn

    def cut(module: Any, args: Any, output: Any) -> None:
        shares, order = output.logits.float().softmax(-1).sort(-1, descending=True)
        beyond = shares.cumsum(-1) - shares > 0.9
        output.logits.masked_fill_(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)

    def with_top_p(requests: Any) -> Any:
        handle = sampler.model.register_forward_hook(cut)
        try:
            return drawn(requests)
        finally:
            handle.remove()

    sampler._drawn = with_top_p


def _rounded_head(opened: Session) -> None:
    """The sampler's logits keep eight bits less than the trainer's."""
    head = opened.answers.sampler.model.lm_head
    head.register_forward_hook(lambda _, args, output: output if output.dtype == torch.float32 else output.bfloat16())


def _dropout_in_old(opened: Session) -> None:
    """The trainer scores its answers in training mode."""
    opened.engine.deepspeed.eval = lambda: None


def _penalised(opened: Session) -> None:
    """The sampler makes tokens less likely that the answer has already (repetition penalty)."""
    model, seen = opened.answers.sampler.model, list[torch.Tensor]()

    def penalise(module: Any, args: Any, given: Any, output: Any) -> None:
        ids, cache = given["input_ids"], output.past_key_values

        def kept(rows: torch.Tensor) -> None:
            seen[0] = seen[0][rows]
            type(cache).reorder_cache(cache, rows)

        if cache is not None:
            cache.reorder_cache = kept
        seen[:] = [ids] if ids.shape[1] > 1 or not seen else [torch.cat([*seen, ids], 1)]
        output.logits.scatter_add_(
            2, seen[0][:, None], torch.full_like(seen[0][:, None], -1, dtype=output.logits.dtype)
        )

    model.register_forward_hook(penalise, with_kwargs=True)


def _next_row(opened: Session) -> None:
    """A reward function gets the columns of the row before the prompt's."""
    answers: Any = opened.answers
    arguments, rows = answers._arguments, list[Any]()

    def shifted(row: Any, given: Any) -> Any:
        rows.append(row)
        return arguments(rows[-2] if len(rows) > 1 else row, given)

    answers._arguments = shifted


def _next_answers(opened: Session) -> None:
    """The groups of answers come to the rewards one place too late, the rows do not."""
    answers: Any = opened.answers
    of = answers._rewards.of

    def rolled(groups: Any) -> Any:
        late = [{key: group[key] for key in ("completions", "completion_ids")} for group in groups[-1:] + groups[:-1]]
        return of([mine | others for mine, others in zip(groups, late, strict=True)])

    answers._rewards.of = rolled


def _other_scale(opened: Session) -> None:
    """The sampler adds twice what the adapter makes."""
    layers = [module for module in opened.answers.sampler.model.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        layer.scaling = {name: 2 * value for name, value in layer.scaling.items()}


def _other_rope(opened: Session) -> None:
    """The sampler has the rotary frequencies of another config."""
    for name, buffer in opened.answers.sampler.model.named_buffers():
        buffer.mul_(0.7 if name.endswith("inv_freq") else 1.0)


def _moving_reference(opened: Session) -> None:
    """The reference has the weights that the policy has now."""
    answers: Any = opened.answers
    batch = answers._batch

    def moved(*given: Any, **options: Any) -> Any:
        answers._reference.load_state_dict(opened.engine.model.state_dict())
        return batch(*given, **options)

    answers._batch = moved


def _answers_again(opened: Session) -> None:
    """A step has the answers of the one before."""
    answers: Any = opened.answers
    answered, found = answers._answered, list[Any]()

    def late(prompts: Any) -> Any:
        found.append(answered(prompts))
        return found[max(0, len(found) - 2)]

    answers._answered = late


def _scored_later(opened: Session) -> None:
    """The trainer scores answers with weights of another step than the one they were sampled with."""
    answers: Any = opened.answers
    scored, weight = answers._with_log_probs, opened.engine.model.lm_head.weight

    def later(own: Any) -> Any:
        weight.data.mul_(1.05)
        found = scored(own)
        weight.data.div_(1.05)
        return found

    answers._with_log_probs = later


FAULTS: dict[str, Callable[[Session], None]] = {
    "no sync": _with("sampler.receive", lambda right: lambda weights: [None for _ in weights]),
    "one tensor not synced": _received(lambda name: name != "model.layers.1.mlp.down_proj.weight"),
    "stale tied head": _stale_head,
    "temperature on one side": _other_temperature,
    "top-p on one side": _nucleus,
    "rounded head": _rounded_head,
    "adapter never delivered": _received(lambda name: "lora_" not in name),
    "dropout in the old log-probs": _dropout_in_old,
    # each token has the log-probability of the one before it, as where an answer is cut wrongly
    "off by one": _drawn(lambda answer: answer._replace(log_probs=np.roll(answer.log_probs, 1))),
    # no end token, as where an answer is cut by its value, or where padding has it
    "cut before the end": _drawn(
        lambda answer: (
            answer._replace(ids=answer.ids[:-1], log_probs=answer.log_probs[:-1]) if len(answer.ids) > 1 else answer
        )
    ),
    "off by one after the end": _drawn(
        lambda answer: Answer(np.append(answer.ids, 70), np.append(answer.log_probs, np.float32(-4)), answer.ended)
    ),
    # they come back in the order in which they ended, not in that of the requests
    "answers of other prompts": _with(
        "sampler.sample",
        lambda right: (
            lambda requests, version: sorted(right(requests, version=version), key=lambda answer: len(answer.ids))
        ),
    ),
    "repetition penalty on one side": _penalised,
    "padding is attended to": _with(
        "sampler.model.forward", lambda right: lambda **given: right(**{**given, "attention_mask": None})
    ),
    "scored with other weights": _scored_later,
    "rewards see the row before": _next_row,
    "rewards see other answers": _next_answers,
    "rewards of another function": _with("_rewards.of", lambda right: lambda groups: right(groups)[::-1]),
    # the text is that of the group's next answer, the tokens are right
    "rewards see other texts": _with("_arguments", lambda right: lambda row, given: _next_text(right(row, given))),
    "one seed for a group": _with(
        "sampler._drawn",
        lambda right: lambda requests: right([asked._replace(key=asked.key.rpartition("/")[0]) for asked in requests]),
    ),
    # nan, which no comparison with a bound finds too large
    "log-probabilities that are not finite": _drawn(
        lambda answer: answer._replace(log_probs=np.append(answer.log_probs[:-1], np.float32("nan")))
    ),
    "another scale of the adapter": _other_scale,
    "another rope": _other_rope,
    "a reference that follows the policy": _moving_reference,
    "answers of the step before": _answers_again,
}
