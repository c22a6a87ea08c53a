"""Batches of answers: the order of prompts is `Batches`', what becomes of them is made here, in the training thread.

sync, prove -> sample -> reward -> the trainer's own log-probabilities -> the gap -> publish -> a batch as any other

So step, guard, attribution, telemetry and loss scaler see a fixed batch. A rank samples for prompts of its own, so that
a group is never on two. Everything that depends on the whole batch (counts, advantages, metrics) is made by each rank
from the answers of all.
"""

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from config.errors import UserError
from config.printable import printable
from config.resolved import Resolved
from data.batches.loader import IGNORED_LABEL, NO_SAMPLE, Batch, Batches, batch_of, padded_length
from data.corpora.corpus import Corpus
from data.corpora.row_shards import RowShards
from data.rows.prepare_prompts import row_of
from data.text.tokenizer import load_tokenizer
from modeling.adapter import adapter_off
from modeling.log_probs import answer_log_probs
from modeling.objectives.policy import ADVANTAGE, ENDED, OLD, REFERENCE, REWARD, SAMPLER, advantages
from modeling.objectives.policy import counted as counted_by_answer
from training.engine import Engine
from training.engine.ledger import PrecisionError
from training.rollouts import rollouts as files
from training.rollouts.gap import Gap
from training.rollouts.remedies import Remedies
from training.rollouts.rewards import Reward, Rewards, digest
from training.rollouts.rollouts import Rollouts, padded
from training.rollouts.sync import bit_sums, require_start, synchronise
from training.rollouts.transformers_sampler import Answer, Request, TransformersSampler, copy_of_model
from training.rollouts.vllm_sampler import VllmSampler

EXAMPLES, EXAMPLE_CHARACTERS = 4, 400
_TARGETS = "targets"


class RolloutBatches(Batches):
    """The endless stream of batches of answers of one rank."""

    def __init__(
        self, corpus: Corpus, resolved: Resolved, engine: Engine, shape: PretrainedConfig, *, trains: bool, **order: Any
    ) -> None:
        """trains: False for tools, which ask no server. order: of `Batches`. Raises UserError for a reward that does
        not load."""
        config, ranks = resolved.config, resolved.batch.data_ranks
        if config.batch.global_size % (config.group_size * ranks):
            raise UserError(
                f"batch.global_size = {config.batch.global_size}: a group of grpo.group_size = {config.group_size} "
                f"answers stays on one rank; make it a multiple of {config.group_size} x {ranks} processes"
            )
        self._section, self._plan, self._seed = config.grpo, resolved.batch, config.run.seed
        decisive = ("group_size", "max_new_tokens", "temperature", "updates")
        self.identity = json.dumps([getattr(config.grpo, key) for key in decisive])
        """The settings that decide which answers are sampled, and on which steps they are learned from."""
        self._by_rewards = config.task == "grpo"
        self._engine, self._longest = engine, config.data.sequence_length
        self._folder: Path | None = None
        self._publishes = False
        self._tokenizer = load_tokenizer(corpus.tokenizer_folder)
        self._rewards = Rewards(self._section)
        ends, model = _ends(corpus, engine), copy_of_model(resolved, shape, engine)
        kind = VllmSampler if self._section.engine == "vllm" and trains else TransformersSampler
        self.sampler: TransformersSampler = kind(model, self._section, engine.world, ends=ends)
        self._reference: Any = None
        if self._section.beta and config.adapter.kind == "none":
            self._reference = copy_of_model(resolved, shape, engine)
            require_start(engine, self._reference)
            self._start = bit_sums(self._reference)
        self._remedies = Remedies(engine, [model] if self._reference is None else [model, self._reference])
        engine.adjustable = self._remedies
        self._gap = Gap(self._section.max_gap)
        self._held: tuple[int, Rollouts] | None = None
        self._said: set[str] = set()
        self._examples = ""
        super().__init__(corpus.train, **order)

    def keep_in(self, folder: Path, *, publishes: bool = True) -> None:
        """Read the answers of a step from its file in `folder` where there is one, and publish those that are sampled.

        publishes: False for tools, which take recorded answers whatever the weights are.
        """
        self._folder, self._publishes = folder, publishes
        self.sampler.folder = folder

    def next_step(self) -> Batch:
        """The batch at `position`, its answers sampled now, unless the steps before it have the same ones."""
        prompts = super().next_step()
        if self._held is None or self._held[0] != prompts.position:
            self._held = prompts.position, self._answered(prompts)
        found = self._held[1]
        if found.samples.tolist() != prompts.sample_ids.tolist():
            raise PrecisionError("the answers are to other prompts than this step's; nothing was learned")
        objective: Any = self._engine.objective
        objective.facts = self._remedies.note(found.facts)
        return self._batch(prompts, found, position=self._position - 1)

    def evaluated(self, prompts: Iterable[Batch], shards: RowShards) -> Iterator[Batch]:
        """Batches of answers to held-out prompts, by the present weights and the same random numbers each time."""
        version = synchronise(self._engine, self.sampler)
        objective: Any = self._engine.objective
        objective.facts = {}
        for batch in prompts:
            found = self._sampled(batch, shards, version, f"validation {batch.position}")
            found = files.interleaved(self._engine.world.gather_objects(found))
            self._examples = self._examples or self._in_words(found)
            yield self._batch(batch, found, position=batch.position, evaluates=True)

    def take_examples(self) -> str:
        """The first prompts of the newest evaluation, which are the same ones each time, with an answer and rewards."""
        found, self._examples = self._examples, ""
        return found

    def restore(self, position: int) -> None:
        """Go to a position, as `Batches.restore` does, and forget the answers that were held."""
        self._held = None
        super().restore(position)

    def close(self) -> None:
        """End the background thread and the processes of the rewards."""
        super().close()
        self._rewards.close()
        self.sampler.close()

    def _read(self, position: int) -> Batch:
        """The prompts of a step."""
        return super()._read(position // self._section.updates)

    def _answered(self, prompts: Batch) -> Rollouts:
        """The answers of all ranks: from the step's file where its weights are these, else sampled now."""
        step, world, started = prompts.position * self._section.updates + 1, self._engine.world, time.perf_counter()
        version = synchronise(self._engine, self.sampler)
        seconds = time.perf_counter() - started
        kept = self._kept(step)
        midway = self._position - 1 >= step or not self._publishes  # the first step on these answers was before
        if kept is not None and kept.samples.tolist() == prompts.sample_ids.tolist():
            fits = kept.rewards.shape[-1] == len(self._rewards.names)
            if fits and (midway or (kept.version, kept.sources) == (version, self._rewards.sources)):
                self._gap.usual = kept.facts.get("gap/self_usual")
                return kept
        if self._gap.usual is None and (before := self._kept(step - self._section.updates)) is not None:
            self._gap.usual = before.facts.get("gap/self_usual")
        assert isinstance(self._shards, RowShards)
        own = self._sampled(prompts, self._shards, version, str(step), resamples=self._section.resamples)
        own, self_gaps = self._with_log_probs(own)
        found = files.interleaved(world.gather_objects(own))
        facts = self._facts(found, world.gather_objects(self_gaps)) | {"sync/seconds": seconds}
        found = replace(found, facts=facts, sources=self._rewards.sources)
        if self._publishes and self._folder is not None and world.is_main:
            path = files.path_of(self._folder, step)
            try:
                files.write(path, found, sampler=self.sampler.identity)
            except OSError as error:
                self._say(f"not kept, so a resumed run samples anew: {path} ({error.strerror})")
        return found

    def _kept(self, step: int) -> Rollouts | None:
        """The answers in a step's file, on every rank. A collective."""
        world = self._engine.world
        path = files.path_of(self._folder, step) if self._folder is not None and world.is_main else None
        found: Rollouts | None = world.from_main(None if path is None else files.read(path))
        return found

    def _sampled(self, prompts: Batch, shards: RowShards, version: str, of: str, *, resamples: int = 0) -> Rollouts:
        """Answers of this rank with their rewards. of: the part of their seeds that names the step.

        resamples: most times that groups whose answers all have the same reward are sampled again.
        """
        real = [(place, int(n)) for place, n in enumerate(prompts.input_ids.flatten()) if n != NO_SAMPLE]
        rows = [(self._rank + place * self._world_size, number) for place, number in real]
        found = self._asked(shards, rows, version, of)
        for attempt in range(1, resamples + 1):
            silent = np.flatnonzero((self._advantages(found) == 0).all(1)).tolist()
            if not silent:
                break
            found.put(silent, self._asked(shards, [rows[number] for number in silent], version, f"{of}/{attempt}"))
        return found

    def _asked(self, shards: RowShards, rows: Sequence[tuple[int, int]], version: str, of: str) -> Rollouts:
        """One group of answers to each row, given as its place in the global batch and its number in `shards`."""
        group, longest = self._section.group_size, self._section.max_new_tokens
        prompts, given = zip(*(row_of(shards, number) for _, number in rows), strict=True) if rows else ((), ())
        keys = [f"{self._seed}/{of}/{place}" for place, _ in rows]
        requests = [Request(ids, f"{key}/{k}") for ids, key in zip(prompts, keys, strict=True) for k in range(group)]
        answers = self.sampler.sample(requests, version=version)
        self.sampler.require_whole(answers)
        columns = [self._columns(row) for row in given]
        groups = [answers[first : first + group] for first in range(0, len(answers), group)]
        rewards = self._rewards.of([self._arguments(*pair) for pair in zip(columns, groups, strict=True)])
        for problem in self._rewards.problems:
            self._say(f"rewards: no reward by {problem}; later ones are counted (reward/none)")
        scores = padded([answer.log_probs for answer in answers], longest, np.float32).reshape(-1, group, longest)
        found = Rollouts(
            samples=np.array([number for _, number in rows], dtype=np.int64),
            prompts=padded(prompts, self._longest),
            prompt_lengths=np.array([len(ids) for ids in prompts], dtype=np.int64),
            answers=padded([answer.ids for answer in answers], longest).reshape(-1, group, longest),
            lengths=np.array([len(answer.ids) for answer in answers], dtype=np.int64).reshape(-1, group),
            ended=np.array([answer.ended for answer in answers], dtype=bool).reshape(-1, group),
            sampler=scores,
            old=np.zeros_like(scores),
            rewards=np.full((len(rows), group, len(self._rewards.names)), np.nan),
            version=version,
        )
        self._take_rewards(found, rewards, columns)
        return found

    def _columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a reward function that a row decides: every column, and the prompt by TRL's name."""
        columns = {**self._section.reward_options, **row}
        prompt = row.get("prompt", row.get("messages", row.get("conversations")))
        return {key: columns[key] for key in columns if key not in ("prompt", "completion")} | {"prompts": prompt}

    def _completion(self, columns: dict[str, Any], ids: list[int]) -> Any:
        """An answer as reward functions get it: a text, or messages where the prompt is messages."""
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text if isinstance(columns["prompts"], str) else [{"role": "assistant", "content": text}]

    def _arguments(self, columns: dict[str, Any], answers: Sequence[Answer]) -> dict[str, Any]:
        """The arguments of a reward function for the answers to one prompt, TRL's among them."""
        ids = [answer.ids.tolist() for answer in answers]
        repeated = {key: [value] * len(ids) for key, value in columns.items()}
        return {**repeated, "completions": [self._completion(columns, own) for own in ids], "completion_ids": ids}

    def _take_rewards(self, found: Rollouts, rewards: Sequence[Sequence[Reward]], columns: Sequence[Any]) -> None:
        """Fill in the rewards. Raises PrecisionError where a function was given another row than that of the prompt, or
        another answer than the one that is learned from."""
        rows = [digest(own) for own in columns]
        for place, (n, k) in enumerate(np.ndindex(found.lengths.shape)):
            ids = found.answers[n, k, : found.lengths[n, k]].tolist()
            right = rows[n], digest([ids, self._completion(columns[n], ids)])
            for number, (value, saw) in enumerate(by_answer[place] for by_answer in rewards):
                if saw is not None and saw != (self._rewards.names[number], *right):
                    what = f"row {found.samples[rows.index(saw[1])]}" if saw[1] in rows else "an unknown row"
                    what += " with another answer, or as another function" if saw[1] == right[0] else ""
                    text = f"rewards saw {what} for the prompt of row {found.samples[n]}; nothing was learned"
                    raise PrecisionError(text)
                found.rewards[n, k, number] = math.nan if saw is None else value

    def _in_words(self, found: Rollouts) -> str:
        """EXAMPLES prompts with their first answers as text, of which no part is longer than EXAMPLE_CHARACTERS."""
        parts = []
        for n, group in enumerate(self._rewards.total(found.rewards)[:EXAMPLES]):
            tokens = found.prompts[n, : found.prompt_lengths[n]], found.answers[n, 0, : found.lengths[n, 0]]
            asked, said = (self._tokenizer.decode(ids.tolist()) for ids in tokens)  # as sampler and trainer have them
            mean = _mean(group) if not np.isnan(group).all() else math.nan
            about = f"reward {group[0]:.4g} (mean of {len(group)}: {mean:.4g})"
            parts.append(f"{about}: {asked[-EXAMPLE_CHARACTERS:]} -> {said[:EXAMPLE_CHARACTERS]}")
        return "\n".join(parts)

    def _advantages(self, found: Rollouts) -> np.ndarray:
        """The advantage of each answer: (prompts, group) float64."""
        totals = torch.from_numpy(self._rewards.total(found.rewards))
        return advantages(totals, str(self._section.advantage)).numpy()

    def _with_log_probs(self, own: Rollouts) -> tuple[Rollouts, list[np.ndarray]]:
        """This rank's answers with the trainer's log-probabilities, in the shapes of the step; and how far two
        recomputations of the first micro-batch are from them, and the second from the sampler's. A collective."""
        micro, (inputs, labels) = self._plan.micro_size, self._inputs(own)
        where = labels != IGNORED_LABEL
        old = self._scored(inputs, labels, micro)
        first, head = where[:micro], slice(0, micro)
        ends = first.shape[1] - first[:, ::-1].argmax(1)
        again = np.zeros_like(old[head])
        for rows in np.array_split(np.arange(micro), 2 if micro > 1 else 1):  # halves, without the others' padding
            length = padded_length(ends[rows], self._longest)
            again[rows, :length] = self._scored(inputs[rows, :length], labels[rows, :length], len(rows))
        ids, targets = (torch.from_numpy(values[head]).to(self._engine.world.device) for values in (inputs, labels))
        with torch.no_grad():
            given, temperature = {"input_ids": ids, _TARGETS: targets}, self._section.temperature
            wide = answer_log_probs(self.sampler.in_fp32(), given, temperature).cpu().numpy()[first]
        drawn, scored = own.sampler[own.mask][: len(wide)], old[head][first]
        own.old[own.mask] = old[where]
        return own, [again[first] - scored, wide - scored, wide - drawn]

    def _inputs(self, own: Rollouts) -> tuple[np.ndarray, np.ndarray]:
        """(answers, length) int64: prompts with their answers, and the answers' tokens where each is predicted."""
        ends = own.prompt_lengths[:, None] + own.lengths - 1
        inputs = np.zeros((ends.size, padded_length(ends, self._longest)), dtype=np.int64)
        labels = np.full_like(inputs, IGNORED_LABEL)
        for row, (prompt, k) in enumerate(np.ndindex(ends.shape)):
            start, end = int(own.prompt_lengths[prompt]), int(ends[prompt, k])
            answer = own.answers[prompt, k, : end - start + 1]
            inputs[row, :start], inputs[row, start:end] = own.prompts[prompt, :start], answer[:-1]
            labels[row, start - 1 : end] = answer
        return inputs, labels

    def _scored(self, inputs: np.ndarray, labels: np.ndarray, micro: int, *, reference: bool = False) -> np.ndarray:
        """(answers, length) FP32: log-probabilities of the labels by the trainer, some rows at a time, no dropout."""
        mine = np.zeros((len(inputs) // micro, micro), dtype=np.int64)
        batch = batch_of(0, mine.reshape(-1), mine, inputs, inputs, {_TARGETS: labels})
        compute, engine = partial(answer_log_probs, temperature=self._section.temperature), self._engine
        if reference and self._reference is not None:
            if bit_sums(self._reference.eval()) != self._start:
                raise PrecisionError(
                    "the reference of grpo.beta has other weights than at the start; nothing was learned"
                )
            with torch.no_grad():
                found = [compute(self._reference, given) for given, _ in batch.micro_batches(engine.world.device)]
        else:
            with adapter_off(engine.model) if reference else nullcontext():
                found = list(engine.infer(compute, [batch]))
        scores: np.ndarray = torch.cat(found).cpu().numpy()
        return scores

    def _facts(self, found: Rollouts, self_gaps: list[list[np.ndarray]]) -> dict[str, float]:
        """Metrics of the step over all ranks."""
        facts = {"length": float(found.lengths.mean()), "truncated": 1 - float(found.ended.mean())}
        if self._rewards.names:
            totals = self._rewards.total(found.rewards)
            facts |= {"reward/mean": _mean(totals), "reward/spread": _mean((totals - _mean(totals)) ** 2) ** 0.5}
            facts["reward/none"] = float(np.isnan(totals).mean())
            facts["reward/no_signal"] = float((self._advantages(found) == 0).all(1).mean())
        for number, name in enumerate(self._rewards.names if len(self._rewards.names) > 1 else ()):
            facts[f"reward/{name.rpartition(':')[2]}"] = _mean(found.rewards[..., number])
        return facts | self._gap.measure(found.old - found.sampler, found.mask, self_gaps)

    def _batch(self, prompts: Batch, found: Rollouts, *, position: int, evaluates: bool = False) -> Batch:
        """This rank's micro-batches of the answers of all ranks."""
        section, micro = self._section, self._plan.micro_size
        mine = np.arange(self._rank, len(found.samples), self._world_size)
        own, rows = found.of(mine), prompts.input_ids.numel() * section.group_size
        inputs, labels = self._inputs(own)
        counts = [torch.from_numpy(part.lengths) for part in (own, found)]
        further: dict[str, np.ndarray] = {}
        if self._by_rewards:
            further = {REWARD: np.nan_to_num(self._rewards.total(own.rewards)).ravel(), ENDED: own.ended.ravel()}
            counts = [torch.ones_like(count) if evaluates else counted_by_answer(count, section) for count in counts]
        if self._by_rewards and not evaluates:
            further[ADVANTAGE] = self._advantages(own).ravel()
            for name, values in ((OLD, own.old), (SAMPLER, own.sampler)):
                further[name] = np.zeros(labels.shape)
                further[name][labels != IGNORED_LABEL] = values[own.mask]
            if section.beta:
                further[REFERENCE] = self._scored(inputs, labels, micro, reference=True)

        def whole(values: np.ndarray, fill: int = 0) -> np.ndarray:
            """Add rows of padding, of which a validation set's last batch has some."""
            more = [(0, rows - len(values)), *[(0, 0)] * (values.ndim - 1)]
            return np.pad(values, more, constant_values=fill)

        return batch_of(
            position,
            np.repeat(prompts.sample_ids, section.group_size),
            np.zeros((rows // micro, micro), dtype=np.int64),
            whole(inputs),
            whole(labels, IGNORED_LABEL),
            {name: whole(values.astype(np.float32)) for name, values in further.items()},
            label_tokens=int(counts[0].sum()),
            label_tokens_of_all=int(counts[1].sum()),
            counts=whole(counts[0].numpy().reshape(-1)).reshape(-1, micro),
            places_of_all=int((found.prompt_lengths[:, None] + found.lengths - 1).sum()),
        )

    def _say(self, text: str) -> None:
        """A line on the standard error, once."""
        if text not in self._said:
            self._said.add(text)
            print(printable(f"rank {self._engine.world.rank}: {text}"), file=sys.stderr, flush=True)


def _mean(values: np.ndarray) -> float:
    """Mean of the values that are not NaN; 0 if there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else 0.0


def _ends(corpus: Corpus, engine: Engine) -> list[int]:
    """The tokens that end an answer: the tokenizer's, and those of the model's generation_config.json."""
    own = getattr(getattr(engine.model, "generation_config", None), "eos_token_id", None)
    more = own if isinstance(own, list) else [own]
    return sorted({corpus.end_of_document, *(end for end in more if end is not None)})
