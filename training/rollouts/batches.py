"""Batches of answers: the order of prompts is `Batches`', what becomes of them is made here, in the training thread.

sync, prove -> sample -> reward -> the trainer's own log-probabilities -> the gap -> publish -> a batch as any other

So step, guard, attribution, telemetry and loss scaler see a fixed batch. A rank samples for prompts of its own, so that
a group is never on two. Everything that depends on the whole batch (counts, advantages, metrics) is made by each rank
from the answers of all.
"""

import json
import sys
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
from modeling.objectives.policy import ADVANTAGE, ENDED, OLD, REFERENCE, REWARD, SAMPLER, advantages, answer_log_probs
from modeling.objectives.policy import counted as counted_by_answer
from training.engine import Engine
from training.rollouts import rollouts as files
from training.rollouts.gap import Gap, by_position
from training.rollouts.rewards import Rewards
from training.rollouts.rollouts import Rollouts
from training.rollouts.sampler import Answer, Request
from training.rollouts.sync import Synced, synchronise
from training.rollouts.transformers_sampler import TransformersSampler, copy_of_model
from training.rollouts.vllm_sampler import VllmSampler

EXAMPLES, EXAMPLE_CHARACTERS = 4, 400
_TARGETS = "targets"


class RolloutBatches(Batches):
    """The endless stream of batches of answers of one rank."""

    def __init__(
        self,
        corpus: Corpus,
        resolved: Resolved,
        engine: Engine,
        shape: PretrainedConfig,
        **order: Any,
    ) -> None:
        """order: of `Batches`. Raises UserError for a reward that cannot be loaded."""
        config, ranks = resolved.config, resolved.batch.data_ranks
        if config.batch.global_size % (config.group_size * ranks):
            raise UserError(
                f"batch.global_size = {config.batch.global_size}: a group of grpo.group_size = {config.group_size} "
                f"answers stays on one rank; make it a multiple of {config.group_size} x {ranks} processes"
            )
        self._section, self._plan, self._seed = config.grpo, resolved.batch, config.run.seed
        self._engine = engine
        self._folder: Path | None = None
        self._publishes = False
        self._longest = config.data.sequence_length
        self._tokenizer = load_tokenizer(corpus.tokenizer_folder)
        self._rewards = Rewards(self._section)
        self._ends = _ends(corpus, engine)
        copy = TransformersSampler(
            copy_of_model(resolved, shape, engine),
            length=self._section.max_new_tokens,
            temperature=self._section.temperature,
            ends=self._ends,
            at_once=self._section.at_once,
        )
        self.sampler: TransformersSampler | VllmSampler = copy
        if self._section.engine == "vllm":
            self.sampler = VllmSampler(self._section, engine.world, copy, ends=self._ends)
        self._reference: Any = None
        if self._section.beta and config.adapter.kind == "none":
            self._reference = copy_of_model(resolved, shape, engine)
        self._gap = Gap(bound=self._section.max_gap, one_sided=self._section.max_one_sided)
        self._held: tuple[int, Rollouts] | None = None
        self._said: set[str] = set()
        self._examples = ""
        super().__init__(corpus.train, **order)

    def keep_in(self, folder: Path, *, publishes: bool = True) -> None:
        """Read the answers of a step from its file in `folder` where there is one, and publish those that are sampled.

        publishes: False only reads, as tools do.
        """
        self._folder, self._publishes = folder, publishes
        if isinstance(self.sampler, VllmSampler):
            self.sampler.folder = folder

    def next_step(self) -> Batch:
        """The batch at `position`, its answers sampled now, unless the steps before it have the same ones."""
        prompts = super().next_step()
        if self._held is None or self._held[0] != prompts.position:
            self._held = prompts.position, self._answered(prompts)
        found = self._held[1]
        objective: Any = self._engine.objective
        objective.facts = files.facts_of(found)
        return self._batch(prompts, found, position=self._position - 1)

    def evaluated(self, prompts: Iterable[Batch], shards: RowShards) -> Iterator[Batch]:
        """Batches of answers to held-out prompts, by the present weights and the same random numbers each time."""
        synced = synchronise(self._engine, self.sampler)
        objective: Any = self._engine.objective
        objective.facts = {}
        for batch in prompts:
            found = self._gathered(self._sampled(batch, shards, synced, f"validation {batch.position}"))
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
        step, world = prompts.position * self._section.updates + 1, self._engine.world
        synced = synchronise(self._engine, self.sampler)
        kept = self._kept(step)
        midway = self._position - 1 >= step  # of a step that is not the first on its answers
        if kept is not None and (midway or kept.version == synced.version):
            self._gap.usual = files.facts_of(kept).get("gap/self_usual")
            return kept
        if self._gap.usual is None and (before := self._kept(step - self._section.updates)) is not None:
            self._gap.usual = files.facts_of(before).get("gap/self_usual")
        assert isinstance(self._shards, RowShards)
        own = self._sampled(prompts, self._shards, synced, str(step))
        own, self_gaps = self._with_log_probs(own)
        found = self._gathered(own)
        found = replace(found, facts=json.dumps(self._facts(found, synced, world.gather_objects(self_gaps))))
        if self._publishes and self._folder is not None and world.is_main:
            self._publish(files.path_of(self._folder, step), found)
        return found

    def _kept(self, step: int) -> Rollouts | None:
        """The answers in a step's file, on every rank. A collective."""
        world = self._engine.world
        path = files.path_of(self._folder, step) if self._folder is not None and world.is_main else None
        found: Rollouts | None = world.from_main(None if path is None else files.read(path))
        return found

    def _publish(self, path: Path, found: Rollouts) -> None:
        sources = json.dumps(self._rewards.sources)
        try:
            files.write(path, found, sampler=self.sampler.identity, rewards=sources)
        except OSError as error:
            self._say(f"not kept, so a resumed run samples anew: {path} ({error.strerror})")

    def _sampled(self, prompts: Batch, shards: RowShards, synced: Synced, of: str) -> Rollouts:
        """Answers of this rank with their rewards. of: the part of their seeds that names the step."""
        numbers, group = prompts.input_ids.flatten().tolist(), self._section.group_size
        real = [(place, number) for place, number in enumerate(numbers) if number != NO_SAMPLE]
        rows = [row_of(shards, number) for _, number in real]
        places = [self._rank + place * self._world_size for place, _ in real]
        keys = [f"{self._seed}/{of}/{place}/{k}" for place in places for k in range(group)]
        asked = [ids for ids, _ in rows for _ in range(group)]
        requests = [Request(ids, key) for ids, key in zip(asked, keys, strict=True)]
        answers = self.sampler.sample(requests, version=synced.version)
        groups = [answers[first : first + group] for first in range(0, len(answers), group)]
        rewards = self._rewards.of([self._arguments(row, own) for (_, row), own in zip(rows, groups, strict=True)])
        for problem in self._rewards.problems:
            self._say(f"rewards: no reward by {problem}; later ones are counted (reward/none)")
        return Rollouts(
            samples=np.array([number for _, number in real], dtype=np.int64),
            prompts=np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in rows)]),
            prompt_lengths=np.array([len(ids) for ids, _ in rows], dtype=np.int64),
            answers=np.concatenate([np.empty(0, np.int64), *(answer.ids for answer in answers)]),
            lengths=np.array([len(answer.ids) for answer in answers], dtype=np.int64),
            ended=np.array([answer.ended for answer in answers], dtype=bool),
            sampler=np.concatenate([np.empty(0, np.float32), *(answer.log_probs for answer in answers)]),
            old=np.zeros(sum(len(answer.ids) for answer in answers), dtype=np.float32),
            rewards=rewards,
            version=synced.version,
        )

    def _arguments(self, row: dict[str, Any], answers: Sequence[Answer]) -> dict[str, Any]:
        """The arguments of a reward function for one prompt: TRL's, and every column of the row."""
        prompt: Any = row.get("prompt", row.get("messages", row.get("conversations")))
        ids = [answer.ids.tolist() for answer in answers]
        texts = [self._tokenizer.decode(own, skip_special_tokens=True) for own in ids]
        completions: list[Any] = texts
        if not isinstance(prompt, str):
            completions = [[{"role": "assistant", "content": text}] for text in texts]
        columns = {**self._section.reward_options, **row}
        columns = {key: value for key, value in columns.items() if key not in ("prompt", "completion")}
        repeated = {key: [value] * len(ids) for key, value in columns.items()}
        return {**repeated, "prompts": [prompt] * len(ids), "completions": completions, "completion_ids": ids}

    def _in_words(self, found: Rollouts) -> str:
        """EXAMPLES prompts with their first answers as text, of which no part is longer than EXAMPLE_CHARACTERS."""
        totals = self._rewards.total(found.rewards).reshape(-1, found.group)
        parts = []
        for place, prompt in enumerate(found.parts("prompts")[:EXAMPLES]):
            answer = found.parts("answers")[place * found.group]
            asked, said = (self._tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in (prompt, answer))
            known = totals[place][~np.isnan(totals[place])]
            mean = f"{known.mean():.4g}" if len(known) else "none"
            about = f"reward {totals[place, 0]:.4g} (mean of {found.group}: {mean})"
            parts.append(f"{about}: {asked[-EXAMPLE_CHARACTERS:]} -> {said[:EXAMPLE_CHARACTERS]}")
        return "\n".join(parts)

    def _gathered(self, own: Rollouts) -> Rollouts:
        """The answers of all ranks in the order of the global batch. A collective."""
        return files.interleaved(self._engine.world.gather_objects(own))

    def _with_log_probs(self, own: Rollouts) -> tuple[Rollouts, list[np.ndarray]]:
        """This rank's answers with the trainer's log-probabilities, in the shapes of the step; and how far two
        recomputations of the first micro-batch are from them, and the second from the sampler's. A collective."""
        micro, inputs = self._plan.micro_size, self._inputs(own)
        old = np.concatenate(self._scored(*(values.reshape(-1, micro, *values.shape[1:]) for values in inputs)))
        where = inputs[1] != IGNORED_LABEL
        places = where[:micro].sum(1) + (inputs[1][:micro] != IGNORED_LABEL).argmax(1)
        again: list[np.ndarray] = []
        for rows in np.array_split(np.arange(micro), 2 if micro > 1 else 1):  # halves, without the others' padding
            part = [values[None, rows, : padded_length(places[rows], self._longest)] for values in inputs]
            again.append(self._scored(*part)[0][part[1][0] != IGNORED_LABEL])
        first = old[:micro][where[:micro]]
        sampled = own.sampler[: len(first)]
        device = self._engine.world.device
        ids, targets = (torch.from_numpy(values[:micro]).to(device) for values in inputs)
        with torch.no_grad(), self.sampler.in_fp32() as model:
            given = {"input_ids": ids, _TARGETS: targets}
            wide = answer_log_probs(model, given, self._section.temperature).cpu().numpy()[where[:micro]]
        return replace(own, old=old[where]), [np.concatenate(again) - first, wide - first, wide - sampled]

    def _inputs(self, own: Rollouts) -> tuple[np.ndarray, np.ndarray]:
        """(answers, length) int64: prompts with their answers, and the answers' tokens where each is predicted."""
        prompts = [ids for ids in own.parts("prompts") for _ in range(own.group)]
        pairs = list(zip(prompts, own.parts("answers"), strict=True))
        length = padded_length([len(prompt) + len(answer) - 1 for prompt, answer in pairs], self._longest)
        inputs = np.zeros((len(pairs), length), dtype=np.int64)
        labels = np.full_like(inputs, IGNORED_LABEL)
        for row, (prompt, answer) in enumerate(pairs):
            tokens = np.concatenate([prompt, answer])
            inputs[row, : len(tokens) - 1] = tokens[:-1]
            labels[row, len(prompt) - 1 : len(tokens) - 1] = answer
        return inputs, labels

    def _scored(self, inputs: np.ndarray, labels: np.ndarray, *, reference: bool = False) -> list[np.ndarray]:
        """(micro, length) FP32 of each micro-batch: log-probabilities of the labels by the trainer, without dropout."""
        shape = inputs.shape[:2]
        flat = (values.reshape(-1, values.shape[-1]) for values in (inputs, labels))
        mine, ids = np.zeros(shape, dtype=np.int64), next(flat)
        batch = batch_of(0, mine.reshape(-1), mine, ids, ids, {_TARGETS: next(flat)})
        compute = partial(answer_log_probs, temperature=self._section.temperature)
        engine = self._engine
        if reference and self._reference is not None:
            device = engine.world.device
            with torch.no_grad():
                return [compute(self._reference, given).cpu().numpy() for given, _ in batch.micro_batches(device)]
        with adapter_off(engine.model) if reference else nullcontext():
            return [found.cpu().numpy() for found in engine.infer(compute, [batch])]

    def _facts(self, found: Rollouts, synced: Synced, self_gaps: list[list[np.ndarray]]) -> dict[str, float]:
        """Metrics of the step over all ranks."""
        totals = self._rewards.total(found.rewards).reshape(-1, found.group)
        known = totals[~np.isnan(totals)]
        learned = advantages(torch.from_numpy(totals), str(self._section.advantage))
        apart = np.split(found.old - found.sampler, np.cumsum(found.lengths.reshape(-1, found.group).sum(1))[:-1])
        facts = {
            "reward/mean": float(known.mean()) if len(known) else 0.0,
            "reward/spread": float(known.std()) if len(known) else 0.0,
            "reward/none": 1 - len(known) / totals.size,
            "reward/no_signal": float((learned == 0).all(1).double().mean()),
        }
        if len(self._rewards.names) > 1:
            for name, column in zip(self._rewards.names, found.rewards.T, strict=True):
                own = column[~np.isnan(column)]
                facts[f"reward/{name.rpartition(':')[2]}"] = float(own.mean()) if len(own) else 0.0
        facts |= self._gap.measure(apart, self_gaps)
        by_answer = np.split(found.old - found.sampler, np.cumsum(found.lengths)[:-1])
        facts |= {f"gap/k3_quarter_{number}": k3 for number, k3 in enumerate(by_position(by_answer), 1)}
        return facts | {"sync/seconds": synced.seconds, "sync/tensors": float(synced.tensors)}

    def _batch(self, prompts: Batch, found: Rollouts, *, position: int, evaluates: bool = False) -> Batch:
        """This rank's micro-batches of the answers of all ranks."""
        group, section, plan = self._section.group_size, self._section, self._plan
        numbers = prompts.input_ids.flatten().tolist()
        mine = range(self._rank, len(found.samples), self._world_size)
        own, rows = found.of(mine), len(numbers) * group
        inputs, labels = self._inputs(own) if len(mine) else (np.zeros((0, 8), np.int64),) * 2
        where = labels != IGNORED_LABEL
        totals = self._rewards.total(found.rewards).reshape(-1, group)
        learned = advantages(torch.from_numpy(totals), str(section.advantage)).numpy()
        further = {
            REWARD: np.nan_to_num(totals)[list(mine)].reshape(-1).astype(np.float32),
            ENDED: own.ended.astype(np.float32),
        }
        if evaluates:
            counts, own_count = len(found.lengths), len(own.lengths)
        else:
            of_all, of_own = (counted_by_answer(torch.from_numpy(part.lengths), section) for part in (found, own))
            counts, own_count = int(of_all.sum()), int(of_own.sum())
            further[ADVANTAGE] = learned[list(mine)].reshape(-1).astype(np.float32)
            spread = {OLD: own.old, SAMPLER: own.sampler}
            if section.beta:
                shaped = (values.reshape(-1, plan.micro_size, values.shape[-1]) for values in (inputs, labels))
                spread[REFERENCE] = np.concatenate(self._scored(*shaped, reference=True))[where]
            for name, values in spread.items():
                further[name] = np.zeros(labels.shape, dtype=np.float32)
                further[name][where] = values

        def whole(values: np.ndarray, fill: int = 0) -> np.ndarray:
            """Add rows of padding, of which a validation set's last batch has some."""
            more = np.full((rows - len(values), *values.shape[1:]), fill, dtype=values.dtype)
            return np.concatenate([values, more])

        samples = np.repeat(prompts.sample_ids, group)
        places = int((np.repeat(found.prompt_lengths, group) + found.lengths - 1).sum())
        return batch_of(
            position,
            samples,
            np.zeros((rows // plan.micro_size, plan.micro_size), dtype=np.int64),
            whole(inputs),
            whole(labels, IGNORED_LABEL),
            {name: whole(values) for name, values in further.items()},
            label_tokens=own_count,
            label_tokens_of_all=counts,
            places_of_all=places,
        )

    def _say(self, text: str) -> None:
        """A line on the standard error, once."""
        if text not in self._said:
            self._said.add(text)
            print(printable(f"rank {self._engine.world.rank}: {text}"), file=sys.stderr, flush=True)


def _ends(corpus: Corpus, engine: Engine) -> list[int]:
    """The tokens that end an answer: the tokenizer's, and those of the model's generation_config.json."""
    own = getattr(getattr(engine.model, "generation_config", None), "eos_token_id", None)
    more = own if isinstance(own, list) else [own]
    return sorted({corpus.end_of_document, *(end for end in more if end is not None)})
