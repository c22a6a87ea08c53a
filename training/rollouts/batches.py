"""Batches of answers to the prompts of `Batches`, made in the training thread: to the loop they are like any others.

sync and proof -> sampling -> rewards -> the trainer's log-probabilities -> gap -> publication -> batch

Each rank samples for its own prompts, so no group is split over ranks. What depends on the whole batch (counts,
advantages, metrics) every rank computes from the answers of all.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from config.errors import UserError
from config.json_text import json_sha256
from config.printable import tell
from config.resolved import Resolved
from data.batches.loader import IGNORED_LABEL, NO_SAMPLE, Batch, Batches, batch_of, padded_length
from data.corpora import rollouts as files
from data.corpora.corpus import Corpus
from data.corpora.rollouts import Rollouts, padded
from data.corpora.row_shards import RowShards
from data.rows.prepare_prompts import read_prompt, row_of
from data.rows.prepare_rows import template_of
from data.rows.rewards import Reward, Rewards
from data.sources.chat import Chat
from data.text.tokenizer import load_tokenizer
from modeling.adapter import adapter_off
from modeling.log_probs import answer_log_probs
from modeling.objectives.objective import Forward
from modeling.objectives.policy import ADVANTAGE, ENDED, OLD, REFERENCE, REWARD, SAMPLER, advantages, counts_of
from precision.sampler_gap import measure
from tracking.run_dir import RunDir
from training.checkpoint.choice import by_step, step_of
from training.engine import Engine
from training.engine.flips import bit_sums
from training.engine.ledger import PrecisionError
from training.rollouts.continuous_sampler import ContinuousSampler
from training.rollouts.remedies import Remedies
from training.rollouts.sync import require_start, synchronise
from training.rollouts.transformers_sampler import Answer, Request, TransformersSampler, copy_of_model
from training.rollouts.vllm_sampler import VllmSampler

_SAMPLERS = {"transformers": TransformersSampler, "continuous": ContinuousSampler, "vllm": VllmSampler}
EXAMPLES, EXAMPLE_CHARACTERS = 4, 400


class RolloutBatches(Batches):
    """The endless stream of batches of answers of one rank."""

    def __init__(
        self, corpus: Corpus, resolved: Resolved, engine: Engine, shape: PretrainedConfig, *, trains: bool, **order: Any
    ) -> None:
        """trains: False for tools, which ask no server. order: arguments of `Batches`. Raises UserError."""
        config, ranks = resolved.config, resolved.batch.data_ranks
        size, group = config.batch.global_size, config.group_size
        if size % (group * ranks):
            text = f"batch.global_size = {size}: a group of grpo.group_size = {group} answers stays on one rank"
            raise UserError(f"{text}; make it a multiple of {group} x {ranks} processes")
        self._section, self._data, self._plan, self._seed = config.grpo, config.data, resolved.batch, config.run.seed
        self._checkpoints = config.checkpoint.keep
        decisive = ("group_size", "max_new_tokens", "temperature", "updates")  # for what a step learns from
        self.identity = json.dumps([getattr(config.grpo, key) for key in decisive])
        self._engine, self._by_rewards = engine, config.task == "grpo"
        self._objective: Any = engine.objective
        self._folder: Path | None = None
        self._publishes = False
        self._tokenizer = load_tokenizer(corpus.tokenizer_folder)
        self._rewards = Rewards(self._section)
        self._sources = self._rewards.sources | {"prompts": json_sha256([corpus.fingerprint, self.identity])}
        own = getattr(getattr(engine.model, "generation_config", None), "eos_token_id", None)
        turn = Chat(self._tokenizer, template=template_of(config.data), train_on="assistant").end_of_turn()
        ends = {corpus.end_of_document, turn, *(own if isinstance(own, list) else [own])} - {None}
        kind = _SAMPLERS[self._section.engine if trains or self._section.engine != "vllm" else "transformers"]
        self._reference, copy = None, copy_of_model(resolved, shape, engine)
        self.sampler: TransformersSampler = kind(copy, self._section, engine.world, ends=sorted(ends))
        if self._section.beta and config.adapter.kind == "none":
            self._reference = copy_of_model(resolved, shape, engine)
            require_start(engine, self._reference)
            self._start = bit_sums(dict(self._reference.named_parameters()))
        engine.adjustable = self._remedies = Remedies(engine, copy, self._reference)
        self._held: tuple[int, Rollouts] | None = None
        self._said, self.examples = set[tuple[str, ...]](), ""  # examples: `_in_words` of the latest evaluation
        super().__init__(corpus.train, **order)

    def keep_in(self, folder: Path, *, publishes: bool = True) -> None:
        """Keep each step's answers in `folder`. publishes: False for tools, which take whatever is there."""
        self._folder, self._publishes = folder, publishes
        self.sampler.folder = folder

    def next_step(self) -> Batch:
        """The batch at `position`, with new answers unless those of the step before are its own, too (grpo.updates)."""
        prompts = super().next_step()
        if self._held is None or self._held[0] != prompts.position or self._outdated(self._held[1]):
            self._held = prompts.position, self._answered(prompts)
        found = self._held[1]
        if found.samples.tolist() != prompts.sample_ids.tolist():
            raise PrecisionError("the answers are to other prompts than this step's; nothing was learned")
        self._objective.facts = self._remedies.note(found.facts)
        return self._batch(prompts, found, position=self.position - 1)

    def evaluated(self, prompts: Iterable[Batch], shards: RowShards) -> Iterator[Batch]:
        """Batches of answers to held-out prompts by the current weights, with the same random numbers each time."""
        version = synchronise(self._engine, self.sampler)
        self._objective.facts, self.examples = {}, ""
        for batch in prompts:
            own = self._sampled(batch, shards, version, f"validation {batch.position}")
            found = files.interleaved(self._engine.world.gather_objects(own))
            self.examples = self.examples or self._in_words(found)
            yield self._batch(batch, found, position=batch.position, evaluates=True)

    def restore(self, position: int) -> None:
        """Go to any position, and discard the answers held."""
        self._held = None
        super().restore(position)

    def close(self) -> None:
        """End the background thread and the reward processes."""
        super().close()
        self._rewards.close()
        self.sampler.close()

    def _read(self, position: int) -> Batch:
        """The prompts of a step."""
        return super()._read(position // self._section.updates)

    def _outdated(self, found: Rollouts) -> bool:
        """Whether their gap is beyond its bound, but from a head that the guard has promoted since: it would abort."""
        return found.facts["gap/of_bound"] > 1 and not found.version.endswith(self._remedies.head)

    def _answered(self, prompts: Batch) -> Rollouts:
        """The answers of all ranks: those in the step's file if they fit, else sampled now."""
        step, world, started = prompts.position * self._section.updates + 1, self._engine.world, time.perf_counter()
        version = synchronise(self._engine, self.sampler) + self._remedies.head
        seconds = time.perf_counter() - started
        now = {"sampler": self.sampler.identity, "sources": self._sources, "version": version}
        for what in [key for key in ("sampler", "sources") if self.record.get(key, now[key]) != now[key]]:
            self._say(f"the {what} of answers changed since the last checkpoint")
        self.record = now
        kept = self._kept(step)
        any_weights = self.position - 1 >= step or not self._publishes  # from the second update on, and for tools
        if kept is not None and kept.samples.tolist() == prompts.sample_ids.tolist() and not self._outdated(kept):
            same = (kept.version, kept.sources) == (version, self._sources)
            if (same or any_weights) and kept.rewards.shape[-1] == len(self._rewards.names):
                return kept
        if kept is None and self._folder is not None and not self._publishes and world.is_main:
            self._say(f"the answers are sampled anew, since there is no {files.path_of(self._folder, step)}")
        before = self._kept(step - self._section.updates) if self._held is None else self._held[1]
        assert isinstance(self._shards, RowShards)
        own = self._sampled(prompts, self._shards, version, str(step), resamples=self._section.resamples)
        parts, self_gaps = zip(*world.gather_objects(self._with_log_probs(own)), strict=True)
        found = files.interleaved(parts)
        facts = self._facts(found) | {"sync/seconds": seconds}
        apart, usual = found.old - found.sampler, before.facts if before is not None else {}
        facts |= measure(apart, found.mask, self_gaps, self._section.max_gap, usual)
        found = replace(found, facts=facts, sources=self._sources)
        if self._publishes and self._folder is not None and world.is_main:
            path = files.path_of(self._folder, step)
            with suppress(OSError):  # a disk that refuses this refuses the write, which says so
                self._prune(self._folder, step)
            try:
                files.write(path, found, sampler=self.sampler.identity)
            except OSError as error:
                self._say(f"not kept, so a resumed run samples anew: {path} ({error.strerror})")
        return found

    def _prune(self, folder: Path, step: int) -> None:
        """Delete answers that neither `grpo.keep_rollouts` keeps nor a resume from a kept checkpoint needs."""
        if not self._section.keep_rollouts:
            return
        steps = [at for path in by_step(RunDir(folder.parent).checkpoints) if (at := step_of(path)) < step]
        oldest = steps[: self._checkpoints][-1] if steps else 0
        repeated = oldest + 2 - 2 * self._section.updates  # the answers of its next step, and those before
        files.prune(folder, before=min(repeated, step + 1 - self._section.keep_rollouts))

    def _kept(self, step: int) -> Rollouts | None:
        """The answers in a step's file, on every rank. A collective."""
        folder = self._folder
        return self._engine.world.on_main(lambda: None if folder is None else files.read(files.path_of(folder, step)))

    def _sampled(self, prompts: Batch, shards: RowShards, version: str, of: str, *, resamples: int = 0) -> Rollouts:
        """Answers of this rank with their rewards. of: the step in their seeds. resamples: of silent groups."""
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
        """A group of answers to each row. rows: place in the global batch, and number in `shards`."""
        group, longest = self._section.group_size, self._section.max_new_tokens
        read = [row_of(shards, number) for _, number in rows]
        prompts, columns = [ids for ids, _ in read], [self._columns(row) for _, row in read]
        keys = [f"{self._seed}/{of}/{place}" for place, _ in rows]
        requests = [Request(ids, f"{key}/{k}") for ids, key in zip(prompts, keys, strict=True) for k in range(group)]
        answers = self.sampler.sample(requests, version=version)
        self.sampler.require_whole(answers)
        groups = [answers[first : first + group] for first in range(0, len(answers), group)]
        rewards = self._rewards.of([self._arguments(*pair) for pair in zip(columns, groups, strict=True)])
        for problem in self._rewards.problems:
            self._say(f"rewards: no reward by {problem}; later ones are counted (reward/none)")
        scores = padded([answer.log_probs for answer in answers], longest, np.float32).reshape(-1, group, longest)
        by_function = np.array([[value for value, _ in by_answer] for by_answer in rewards])
        found = Rollouts(
            samples=np.array([number for _, number in rows], dtype=np.int64),
            prompts=padded(prompts, self._sequence_length),
            prompt_lengths=np.array([len(ids) for ids in prompts], dtype=np.int64),
            answers=padded([answer.ids for answer in answers], longest).reshape(-1, group, longest),
            lengths=np.array([len(answer.ids) for answer in answers], dtype=np.int64).reshape(-1, group),
            ended=np.array([answer.ended for answer in answers], dtype=bool).reshape(-1, group),
            sampler=scores,
            old=np.zeros_like(scores),
            rewards=by_function.T.reshape(len(rows), group, len(rewards)),
            version=version,
        )
        self._check_rewards(found, rewards, columns)
        return found

    def _columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """The arguments of reward functions that depend on the row alone: its columns, and the prompt by TRL's name."""
        example, named = read_prompt(row, self._data), ("prompt", "completion", "completions", "completion_ids")
        columns = {**self._section.reward_options, **row, "prompts": example.messages or example.prompt}
        return {key: value for key, value in columns.items() if key not in named}

    def _completion(self, columns: dict[str, Any], ids: list[int]) -> Any:
        """An answer as reward functions get it: a text, or messages if the prompt is messages."""
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text if isinstance(columns["prompts"], str) else [{"role": "assistant", "content": text}]

    def _arguments(self, columns: dict[str, Any], answers: Sequence[Answer]) -> dict[str, Any]:
        """The arguments of reward functions for the answers to one prompt."""
        ids = [answer.ids.tolist() for answer in answers]
        repeated = {key: [value] * len(ids) for key, value in columns.items()}
        return {**repeated, "completions": [self._completion(columns, own) for own in ids], "completion_ids": ids}

    def _check_rewards(self, found: Rollouts, rewards: Sequence[Sequence[Reward]], columns: Sequence[Any]) -> None:
        """Raises PrecisionError if a function got another row than the prompt's, or another answer than is learned."""
        rows = [json_sha256(own) for own in columns]
        for place, (n, k) in enumerate(np.ndindex(found.lengths.shape)):
            ids = found.answers[n, k, : found.lengths[n, k]].tolist()
            right = rows[n], json_sha256([ids, self._completion(columns[n], ids)])
            for name, (_, saw) in zip(self._rewards.names, (answers[place] for answers in rewards), strict=True):
                if saw is not None and saw != (name, *right):
                    what = f"row {found.samples[rows.index(saw[1])]}" if saw[1] in rows else "an unknown row"
                    what += " with another answer, or as another function" if saw[1] == right[0] else ""
                    text = f"rewards saw {what} for the prompt of row {found.samples[n]}; nothing was learned"
                    raise PrecisionError(text)

    def _in_words(self, found: Rollouts) -> str:
        """The first EXAMPLES prompts with their first answer and its reward, texts cut to EXAMPLE_CHARACTERS."""
        parts = []
        for n, group in enumerate(self._rewards.total(found.rewards)[:EXAMPLES]):
            tokens = found.prompts[n, : found.prompt_lengths[n]], found.answers[n, 0, : found.lengths[n, 0]]
            asked, said = (self._tokenizer.decode(ids.tolist()) for ids in tokens)  # as sampler and trainer have them
            about = f"reward {group[0]:.4g} (mean of {len(group)}: {_mean(group, np.nan):.4g})"
            parts.append(f"{about}: {asked[-EXAMPLE_CHARACTERS:]} -> {said[:EXAMPLE_CHARACTERS]}")
        return "\n".join(parts)

    def _advantages(self, found: Rollouts) -> np.ndarray:
        """The advantage of each answer: (prompts, group) float64."""
        totals = torch.from_numpy(self._rewards.total(found.rewards))
        return advantages(totals, str(self._section.advantage)).numpy()

    def _with_log_probs(self, own: Rollouts) -> tuple[Rollouts, list[np.ndarray]]:
        """This rank's answers with the trainer's log-probabilities; and the differences from them of two recomputations
        of the first micro-batch, and of the second from the sampler's. A collective."""
        micro, (inputs, labels) = self._plan.micro_size, self._inputs(own, own.places.size)
        where, ends = labels != IGNORED_LABEL, own.places.ravel()
        old, first = self._scored(inputs, labels, micro), where[:micro]
        own.old[own.mask] = old[where]
        again = np.zeros_like(old[:micro])
        for rows in np.array_split(np.arange(micro), min(micro, 2)):  # in halves, each padded to its own longest answer
            length = padded_length(ends[rows], self._sequence_length)
            again[rows, :length] = self._scored(inputs[rows, :length], labels[rows, :length], len(rows))
        wide = self._scored(inputs[:micro], labels[:micro], micro, by=self.sampler.in_fp32())[first]
        drawn, scored = own.sampler[own.mask][: len(wide)], old[:micro][first]
        return own, [again[first] - scored, wide - scored, wide - drawn]

    def _inputs(self, own: Rollouts, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows, length) int64: prompts with their answers, then rows of padding; and as labels the answers' tokens."""
        inputs = np.zeros((rows, padded_length(own.places, self._sequence_length)), dtype=np.int64)
        labels = np.full_like(inputs, IGNORED_LABEL)
        for row, ((n, k), end) in enumerate(np.ndenumerate(own.places)):
            start, answer = own.prompt_lengths[n], own.answers[n, k, : own.lengths[n, k]]
            inputs[row, :start], inputs[row, start:end] = own.prompts[n, :start], answer[:-1]
            labels[row, start - 1 : end] = answer
        return inputs, labels

    def _scored(self, inputs: np.ndarray, labels: np.ndarray, micro: int, by: Forward | None = None) -> np.ndarray:
        """(rows, length) FP32: log-probabilities of the labels without dropout, by the trainer or another model."""
        mine = np.zeros((len(inputs) // micro, micro), dtype=np.int64)
        batch = batch_of(0, mine.reshape(-1), mine, inputs, inputs, {"targets": labels})
        compute = partial(answer_log_probs, temperature=self._section.temperature)
        found = self._engine.infer(lambda trainer, given: compute(by or trainer, given), [batch])
        return np.asarray(torch.cat(list(found)).cpu())

    def _scored_by_reference(self, inputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """(rows, length) FP32: those by the start weights, from the base where an adapter is trained."""
        if self._reference is None:
            with adapter_off(self._engine.model):
                return self._scored(inputs, labels, self._plan.micro_size)
        if bit_sums(dict(self._reference.eval().named_parameters())) != self._start:
            raise PrecisionError("the reference of grpo.beta has other weights than at the start; nothing was learned")
        return self._scored(inputs, labels, self._plan.micro_size, by=self._reference)

    def _facts(self, found: Rollouts) -> dict[str, float]:
        """Metrics of the step's answers and rewards."""
        facts = {"length": float(found.lengths.mean()), "truncated": 1 - float(found.ended.mean())}
        if self._rewards.names:
            totals = self._rewards.total(found.rewards)
            facts |= {"reward/mean": _mean(totals), "reward/spread": _mean((totals - _mean(totals)) ** 2) ** 0.5}
            facts["reward/none"] = float(np.isnan(totals).mean())
            facts["reward/no_signal"] = float((self._advantages(found) == 0).all(1).mean())
        for number, name in enumerate(self._rewards.labels if len(self._rewards.names) > 1 else ()):
            facts[f"reward/{name}"] = _mean(found.rewards[..., number])
        return facts

    def _batch(self, prompts: Batch, found: Rollouts, *, position: int, evaluates: bool = False) -> Batch:
        """This rank's micro-batches of the answers of all ranks."""
        section, micro = self._section, self._plan.micro_size
        mine = np.arange(self._rank, len(found.samples), self._world_size)
        own, rows = found.of(mine), prompts.input_ids.numel() * section.group_size  # with padding in an evaluation
        inputs, labels = self._inputs(own, rows)
        counts = found.lengths
        further: dict[str, np.ndarray] = {}

        def by_row(values: np.ndarray) -> np.ndarray:
            return np.pad(values.ravel(), (0, rows - values.size))

        if self._by_rewards:
            total = self._rewards.total(found.rewards)
            further = {REWARD: by_row(np.nan_to_num(total, nan=_mean(total))[mine]), ENDED: by_row(own.ended)}
            counts = np.ones_like(counts) if evaluates else counts_of(torch.from_numpy(counts), section).numpy()
        if self._by_rewards and not evaluates:
            further[ADVANTAGE] = by_row(self._advantages(own))
            for name, values in ((OLD, own.old), (SAMPLER, own.sampler)):
                further[name] = np.zeros(labels.shape)
                further[name][labels != IGNORED_LABEL] = values[own.mask]
            if section.beta:
                further[REFERENCE] = self._scored_by_reference(inputs, labels)
        facts: dict[str, Any] = {"label_tokens": int(counts[mine].sum()), "label_tokens_of_all": int(counts.sum())}
        facts |= {"counts": by_row(counts[mine]).reshape(-1, micro), "places_of_all": int(found.places.sum())}
        ids, ours = np.repeat(prompts.sample_ids, section.group_size), np.zeros((rows // micro, micro), dtype=np.int64)
        further = {name: values.astype(np.float32) for name, values in further.items()}
        return batch_of(position, ids, ours, inputs, labels, further, **facts)

    def _say(self, text: str) -> None:
        """Write a line to stderr, once for its first words: a function's errors may quote each answer."""
        if (words := tuple(text.split(": ")[:3])) not in self._said:
            self._said.add(words)
            tell(text, f"rank {self._engine.world.rank}")


def _mean(values: np.ndarray, of_none: float = 0.0) -> float:
    """Mean of the values that are not NaN."""
    return of_none if np.isnan(values).all() else float(np.nanmean(values))
