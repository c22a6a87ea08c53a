"""Independent implementations of each task's objective: sample by sample, unpadded, in FP64.

A task gives the *parts* of a global batch: each with its count, and its loss summed over what counts. The loss of the
step is the sum of losses over the sum of counts. Inputs, labels and losses are derived from prepared rows and windows
by the definitions in docs/finetuning.md and the papers named there; nothing is taken from data/batches,
modeling/objectives or training/tasks except for opening prepared data and weights.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from config.errors import UserError
from config.schema import Config, DistillSection, GrpoSection, PreferenceSection
from data.corpora.corpus import Corpus
from data.corpora.labelled_shards import LabelledShards
from data.corpora.rollouts import Rollouts, path_of, read
from data.text.tokenizer import load_tokenizer
from modeling.objectives.policy import OLD, REFERENCE, SAMPLER
from precision.dtypes import DTYPES
from tools.parity.oracle.rules import IGNORED, Order, unit_interval
from tools.parity.plain import sigmoid_preference


class Part(NamedTuple):
    """A piece of a global batch that is computed separately."""

    sample: int
    counts: int
    """Number of labels, of rows with `sft.loss: row`, of texts, or of pairs."""
    loss: Callable[[], torch.Tensor]
    """() FP64: summed over what counts."""


class Task:
    """Next-token prediction on documents or rows, and the base of the other tasks."""

    def __init__(self, config: Config, corpus: Corpus, shape: PretrainedConfig, model: Any) -> None:
        self.config, self.corpus, self._shape, self.model = config, corpus, shape, model
        self._shards: Any = corpus.train
        self._seen: list[tuple[Any, ...]] = []
        """The inputs of `metrics`, one row for each part computed without gradients."""
        self.frozen: tuple[Any, str | None] | None = None
        """A second, frozen model, and the name of its dtype; None: the run's."""
        self.order = self._order(by_source=corpus.mixture.samples if corpus.mixture is not None else ())

    def held_out(self, shards: Any) -> Task:
        """This task on a validation set, whose batches `Order.evaluated` yields."""
        found = copy.copy(self)
        found._shards, found._seen = shards, []
        found.order = found._order()
        return found

    def metrics(self) -> dict[str, float]:
        """Metrics that an evaluation may report besides its loss, over all parts computed without gradients."""
        right, losses, labels = (sum(column) for column in zip(*self._seen, strict=True))
        return {"token_accuracy": right / labels, "token_loss": losses / labels}

    def _order(self, by_source: Sequence[int] = ()) -> Order:
        end = self.corpus.end_of_document
        return Order(self.config, self._shards, end_of_document=end, by_source=by_source, places=self._places())

    def parts(self, ids: Sequence[int], position: int) -> Iterator[Part]:
        """Parts of a global batch whose count is not zero. position: global batches before it."""
        for sample, inputs, labels in self.order.sequences(ids):
            count = int((labels != IGNORED).sum())
            if count:
                yield self._of_labels(sample, count, inputs, labels)

    def tokens(self, ids: Sequence[int]) -> int:
        """Tokens that the run counts for these samples."""
        return self.order.places(ids)

    def _places(self) -> Callable[[int], int] | None:
        """The number of inputs of a sample, by which samples are grouped; None: those of next-token sequences."""
        return None

    def _of_labels(self, sample: int, count: int, inputs: torch.Tensor, labels: torch.Tensor) -> Part:
        if self.config.task == "sft" and self.config.sft.loss == "row":
            return Part(sample, 1, lambda: self._summed(labels, input_ids=inputs) / count)
        return Part(sample, count, lambda: self._summed(labels, input_ids=inputs))

    def _summed(self, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of one sequence. inputs: (n,) each."""
        logits, counts = self._logits(**inputs), labels != IGNORED
        loss = functional.cross_entropy(logits[counts], labels[counts], reduction="sum")
        if not torch.is_grad_enabled():
            self._seen.append((_likeliest(logits[counts], labels[counts]), float(loss), int(counts.sum())))
        return loss

    def _logits(self, **inputs: torch.Tensor) -> torch.Tensor:
        """(outputs, ...) of one sequence."""
        return _logits(self.model, **inputs)


class DroppedOut(Task):
    """Next-token prediction with dropout, which drops the same values as the run.

    Dropout depends on the tensor's shape and on the rank's generator, so each rank's micro-batches are computed whole,
    with a generator seeded as its own was. On a CPU torch draws the same values for any dtype.
    """

    def __init__(self, *given: Any, ranks: int) -> None:
        super().__init__(*given)
        self._states, self._ranks = list[torch.Tensor](), ranks

    def parts(self, ids: Sequence[int], position: int) -> Iterator[Part]:
        """One part per micro-batch, named by its first sample. They must be computed in this order."""
        micro, seed = self.config.batch.micro_size, self.config.run.seed
        if not position:  # also where the steps are computed again
            self._states = [torch.Generator().manual_seed(seed + rank).get_state() for rank in range(self._ranks)]
        for number in range(len(ids) // micro):
            own = [self.order.window(sample) for sample in ids[number * micro : (number + 1) * micro]]
            windows = torch.from_numpy(np.stack(own).astype(np.int64))
            loss = partial(self._of_micro_batch, windows, number % len(self._states))
            yield Part(ids[number * micro], windows[:, 1:].numel(), loss)

    def _of_micro_batch(self, windows: torch.Tensor, rank: int) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._states[rank])
            logits = self.model(input_ids=windows[:, :-1]).logits.double()
            self._states[rank] = torch.get_rng_state()
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="sum")


class Masked(Task):
    """Devlin et al. 2019, section 3.1: of the chosen tokens 80% are hidden, 10% replaced and 10% unchanged."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        tokenizer = load_tokenizer(self.corpus.tokenizer_folder)
        pieces = {number: piece for piece, number in tokenizer.get_vocab().items()}
        marked = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = marked | set(tokenizer.all_special_ids)
        self._others = sorted(pieces.keys() - self._special)
        self._mask, self._pieces = tokenizer.mask_token_id, pieces
        first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
        self._edges = None if first is None or last is None else (first, last)
        document = json.loads(tokenizer.backend_tokenizer.to_str())
        known = document["model"]
        self._prefix = known.get("continuing_subword_prefix") if known["type"] == "WordPiece" else None
        by_bytes = "ByteLevel" in json.dumps([document["pre_tokenizer"], document["decoder"]])
        self._byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()} if by_bytes else {}

    def parts(self, ids: Sequence[int], position: int) -> Iterator[Part]:
        """One part per window, with the tokens hidden at this position; always the same ones for a validation set."""
        when = position if self._shards is self.corpus.train else "fixed"
        for sample in ids:
            tokens = [int(token) for token in self.order.window(sample)[:-1]]
            if self._edges is not None:
                tokens = [self._edges[0], *tokens[:-2], self._edges[1]]
            seen, labels = self._hidden(tokens, f"{self.config.run.seed}/{sample}/{when}")
            count = sum(label != IGNORED for label in labels)
            if count:
                inputs = {"input_ids": torch.tensor(seen), "attention_mask": torch.ones(len(seen), dtype=torch.int64)}
                yield Part(sample, count, partial(self._summed, torch.tensor(labels), **inputs))

    def _hidden(self, tokens: list[int], key: str) -> tuple[list[int], list[int]]:
        chosen, fate, other = (_drawn(f"{key}/{what}", len(tokens)) for what in ("chosen", "fate", "other"))
        seen, labels, word = [], [], -1
        for place, token in enumerate(tokens):
            word += not (place and self.config.mlm.whole_word and self._joined(tokens[place - 1], token))
            if token in self._special or chosen[word] >= self.config.mlm.probability:
                seen.append(token)
                labels.append(IGNORED)
                continue
            labels.append(token)
            if fate[place] < 0.8:
                seen.append(self._mask)
            else:
                seen.append(self._others[int(other[place] * len(self._others))] if fate[place] < 0.9 else token)
        return seen, labels

    def _joined(self, before: int, token: int) -> bool:
        """Whether a token continues the word of the token before it."""
        if before in self._special or token in self._special:
            return False
        if self._prefix:
            return self._pieces[token].startswith(self._prefix)
        return self._of_word(self._pieces[before][-1:]) and self._of_word(self._pieces[token][:1])

    def _of_word(self, letter: str) -> bool:
        if letter in self._byte_of:
            byte = self._byte_of[letter]
            return byte > 127 or chr(byte).isalnum() or byte == ord("_")
        return bool(letter) and (letter.isalnum() or letter == "_")


class Classified(Task):
    """Predicts a label or a number for a text, or labels for its words."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        names = self.config.classify.labels
        self._numbers = [names.index(name) for name in self.corpus.labels] if names else []

    def _places(self) -> Callable[[int], int]:
        return lambda sample: len(self._row(sample).tokens)

    def parts(self, ids: Sequence[int], position: int) -> Iterator[Part]:
        """One part per text."""
        kind = self.config.classify.kind
        for sample in ids:
            row = self._row(sample)
            inputs = {"input_ids": _int64(row.tokens), "attention_mask": torch.ones(len(row.tokens), dtype=torch.int64)}
            if getattr(self._shape, "type_vocab_size", 0) > 1:
                inputs["token_type_ids"] = _int64(row.types)
            if kind == "regression":
                yield Part(sample, 1, partial(self._squared, float(np.float32(row.target)), **inputs))
                continue
            given = row.target if kind == "token" else row.target[None]
            labels = torch.tensor([IGNORED if one == IGNORED else self._numbers[int(one)] for one in given])
            count = int((labels != IGNORED).sum())
            if count:
                yield Part(sample, count, partial(self._labelled, labels, **inputs))

    def _row(self, sample: int) -> Any:
        assert isinstance(self._shards, LabelledShards)
        [number] = self._shards.rows_of(sample)
        return self._shards.labelled(number)

    def metrics(self) -> dict[str, float]:
        """Pearson's correlation and root mean square error for numbers; accuracy, F1 and Matthews' for labels."""
        if self.config.classify.kind == "regression":
            predicted, there = (np.array(column) for column in zip(*self._seen, strict=True))
            return {"pearson": _correlation(predicted, there), "rmse": float(((predicted - there) ** 2).mean() ** 0.5)}
        predicted, there = (np.concatenate(column) for column in zip(*self._seen, strict=True))
        labels = range(len(self._numbers))
        scores = [_f1(predicted == label, there == label) for label in labels]
        found = {"accuracy": float((predicted == there).mean()), "macro_f1": float(np.nanmean(scores))}
        chosen, real = (np.eye(len(labels))[values] for values in (predicted, there))
        found["matthews"] = _correlation(chosen, real)
        return found | ({"f1": float(np.nan_to_num(scores[1]))} if len(labels) == 2 else {})

    def _squared(self, target: float, **inputs: torch.Tensor) -> torch.Tensor:
        predicted = self._logits(**inputs).sum()
        if not torch.is_grad_enabled():
            self._seen.append((float(predicted), target))
        return (predicted - target).square()

    def _labelled(self, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        logits, counts = self._logits(**inputs), labels != IGNORED
        logits = logits if logits.dim() == 2 else logits[None]
        if not torch.is_grad_enabled():
            self._seen.append((logits[counts].argmax(-1).numpy(), labels[counts].numpy()))
        return functional.cross_entropy(logits[counts], labels[counts], reduction="sum")


class Translated(Task):
    """Predicts a target token by token with a decoder, from a source that an encoder reads."""

    def parts(self, ids: Sequence[int], position: int) -> Iterator[Part]:
        """One part per row."""
        first, pad = int(self._shape.decoder_start_token_id), self._shape.pad_token_id
        for sample in ids:
            [(tokens, trained)] = self._shards.sequence(sample)
            start = next(place for place, label in enumerate(trained) if label)
            source, target = _int64(tokens[:start]), _int64(tokens[start:])
            source = source if len(source) else torch.tensor([self.corpus.end_of_document if pad is None else pad])
            inputs = {
                "input_ids": source,
                "attention_mask": torch.ones_like(source),
                "decoder_input_ids": torch.cat([torch.tensor([first]), target[:-1]]),
            }
            yield Part(sample, len(target), partial(self._summed, target, **inputs))

    def tokens(self, ids: Sequence[int]) -> int:
        """Tokens of source and target together."""
        return sum(len(tokens) for sample in ids for tokens, _ in self._shards.sequence(sample))


class Preferred(Task):
    """Preference for the chosen one of two answers, by its margin [nats] over the initial weights' preference.

    Rafailov et al. 2023, equation 7; with label smoothing Mitchell 2023, equation 3; Zhao et al. 2023 (hinge); Azar et
    al. 2023, equation 17 (ipo). An adapter's product is zero at first, so the initial weights are the base under it.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._before = _as_it_is(self.model)
        self.frozen = self._before, None

    def parts(self, ids: Sequence[int], position: int) -> Iterator[Part]:
        """One part per pair."""
        for sample in ids:
            yield Part(sample, 1, partial(self._of_pair, [own for _, *own in self.order.sequences([sample])]))

    def _of_pair(self, pair: list[list[torch.Tensor]]) -> torch.Tensor:
        section = self.config.preference
        mine = [_log_probs(self.model, *answer) for answer in pair]
        with torch.no_grad():
            reference = [_log_probs(self._before, *answer) for answer in pair]
        (chosen, rejected), length = (answer.sum() for answer in mine), len(mine[0])
        before = [answer.sum() for answer in reference]
        margin = (chosen - before[0]) - (rejected - before[1])
        if not torch.is_grad_enabled():
            behind = [theirs - own for own, theirs in zip(mine, reference, strict=True)]
            k3 = [(apart.exp() - 1 - apart).sum() for apart in behind]
            lengths = [len(answer) for answer in mine]
            values: list[Any] = [chosen, rejected, *before, *k3, *lengths, chosen / length]
            self._seen.append(tuple(map(float, values)))
        return margin_loss(section, margin, chosen / length)

    def metrics(self) -> dict[str, float]:
        """Means over pairs; over tokens for the two estimators of a KL divergence (Schulman 2020)."""
        seen = np.array(self._seen)
        own, before, k3, lengths = (seen[:, start : start + 2] for start in (0, 2, 4, 6))
        ratios = own - before
        rewards = self.config.preference.beta * ratios
        found = {
            "rewards/margin": float((rewards[:, 0] - rewards[:, 1]).mean()),
            "rewards/accuracy": float(((np.sign(ratios[:, 0] - ratios[:, 1]) + 1) / 2).mean()),
            "log_ratio/chosen": float(ratios[:, 0].mean()),
            "nll/chosen": -float(seen[:, 8].mean()),
        }
        for side, name in enumerate(("chosen", "rejected")):
            found[f"rewards/{name}"] = float(rewards[:, side].mean())
            found[f"log_probs/{name}"] = float(own[:, side].mean())
            found[f"kl_k1/{name}"] = float(ratios[:, side].sum() / lengths[:, side].sum())
            found[f"kl_k3/{name}"] = float(k3[:, side].sum() / lengths[:, side].sum())
        return found


class Distilled(Task):
    """The student's distribution q learns a teacher's p at every label, both at a temperature.

    Hinton et al. 2015 (forward KL, times the square of the temperature); Gu et al. 2024 (reverse KL); Agarwal et al.
    2024, section 2 (jsd). If only a teacher's k likeliest tokens are known, all others count as one more outcome.
    """

    def __init__(self, config: Config, corpus: Corpus, shape: PretrainedConfig, model: Any) -> None:
        super().__init__(config, corpus, shape, model)
        section, trusted = config.distill, config.model.trust_remote_code
        options: Any = {"dtype": DTYPES.get(section.dtype, "auto"), "trust_remote_code": trusted}
        teacher: Any = AutoModelForCausalLM.from_pretrained(str(section.teacher), **options)
        computes = next(name for name, known in DTYPES.items() if known == teacher.dtype)
        self._teacher = teacher.double().eval().requires_grad_(False)
        self.frozen = self._teacher, computes

    def _of_labels(self, sample: int, count: int, inputs: torch.Tensor, labels: torch.Tensor) -> Part:
        return Part(sample, count, partial(self._apart, inputs, labels))

    def _apart(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        section, counts = self.config.distill, labels != IGNORED
        logits = self._logits(input_ids=inputs)[counts]
        with torch.no_grad():
            of_teacher = _logits(self._teacher, input_ids=inputs)[counts]
        p, q = (torch.softmax(each / section.temperature, -1) for each in (of_teacher, logits))
        if section.top_k:
            known = p.topk(section.top_k, -1).indices
            p, q = (on_known(one, known) for one in (p, q))
        of_labels = functional.cross_entropy(logits, labels[counts], reduction="sum")
        if not torch.is_grad_enabled():
            agreed = int((logits.argmax(-1) == of_teacher.argmax(-1)).sum())
            self._seen.append((float(_kl(p, q)), float(of_labels), agreed, len(logits)))
        return divergence_loss(section, p, q, of_labels)

    def metrics(self) -> dict[str, float]:
        """Means over labels."""
        apart, entropy, agreed, labels = (sum(column) for column in zip(*self._seen, strict=True))
        return {"kl": apart / labels, "label_cross_entropy": entropy / labels, "teacher_agreement": agreed / labels}


class _RecordedOrder(Order):
    """The answers that the run recorded for the prompts of each position, each as one sequence."""

    def __init__(self, config: Config, *given: Any, **options: Any) -> None:
        """config: with the run's folder in run.dir and run.name."""
        self._folder, self._section = Path(config.run.dir) / config.run.name / "rollouts", config.grpo
        prompts = replace(config.batch, global_size=config.batch.global_size // config.grpo.group_size)
        super().__init__(replace(config, batch=prompts), *given, **options)

    def batch(self, position: int) -> list[int]:
        """The prompt of each answer. Raises UserError if the step's file is missing or has other prompts."""
        number = position // self._section.updates
        path = path_of(self._folder, number * self._section.updates + 1)
        found, ids = read(path), super().batch(number)
        if found is None or found.samples.tolist() != ids:
            raise UserError(
                f"{path}: has no answers to the prompts of step {position + 1}; the run has to keep rollouts/"
            )
        self.answers: Rollouts = found
        return [sample for sample in ids for _ in range(self._section.group_size)]

    def places(self, ids: Sequence[int]) -> int:
        """[tokens] Inputs of the answers of the newest batch with their prompts."""
        return int((self.answers.prompt_lengths[:, None] + self.answers.lengths - 1).sum())

    def sequences(self, ids: Sequence[int]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """The answers of the newest batch in its order."""
        found = self.answers
        for (n, k), length in np.ndenumerate(found.lengths):
            whole = _int64(np.concatenate([found.prompts[n, : found.prompt_lengths[n]], found.answers[n, k, :length]]))
            labels = torch.full_like(whole[1:], IGNORED)
            labels[-length:] = whole[-length:]
            yield int(found.samples[n]), whole[:-1], labels


class OnAnswers(Task):
    """A task whose samples are answers of the model."""

    def _order(self, by_source: Sequence[int] = ()) -> Order:
        return _RecordedOrder(self.config, self._shards, end_of_document=self.corpus.end_of_document)

    @torch.no_grad()
    def misdrawn(self, position: int) -> float:
        """How far the random numbers of the newest batch's answers are from where the distribution function has their
        tokens, a mean over answers; 0 in a later step on the same answers. position: of the batch."""
        section, off = self.config.grpo, []
        if position % section.updates:
            return 0.0
        step = str(position + 1)
        of = [step, *(f"{step}/{attempt}" for attempt in range(1, section.resamples + 1))]
        for row, (_, inputs, labels) in enumerate(self.order.sequences(())):
            n, k = divmod(row, section.group_size)
            there = labels != IGNORED
            shares = torch.softmax(self._logits(input_ids=inputs)[there] / section.temperature, -1)
            own, reached = (values.gather(-1, labels[there][:, None])[:, 0] for values in (shares, shares.cumsum(-1)))
            keys = (f"{self.config.run.seed}/{part}/{n}/{k}" for part in of)
            drawn = torch.tensor([_drawn(key, len(own), b"mantissa-answer") for key in keys], dtype=torch.float64)
            apart = (reached - own - drawn).clamp(min=0) + (drawn - reached).clamp(min=0)
            off.append(float(apart.mean(1).min()))  # of the attempt that was kept
        return sum(off) / len(off)


class Rewarded(OnAnswers):
    """Answers weighted by their advantages, which are recomputed from the recorded rewards."""

    def __init__(self, config: Config, corpus: Corpus, shape: PretrainedConfig, model: Any) -> None:
        super().__init__(config, corpus, shape, model)
        self._start = _as_it_is(model).eval() if config.grpo.beta else None
        self._old: dict[int, list[torch.Tensor]] = {}

    def parts(self, ids: Sequence[int], position: int) -> Iterator[Part]:
        """One part per answer."""
        order: Any = self.order
        found, section = order.answers, self.config.grpo
        weights = np.array(section.reward_weights or [1.0] * len(section.rewards))
        sequences = list(self.order.sequences(ids))
        first = position // section.updates  # not the weights' version, which a skipped step does not change
        if first not in self._old:
            with torch.no_grad():
                self._old = {first: [self._scored(self.model, *own) for _, *own in sequences]}
        for row, (sample, inputs, labels) in enumerate(sequences):
            n, k = divmod(row, section.group_size)
            group = [np.nansum(one * weights) for one in found.rewards[n] if not np.isnan(one).all()]
            advantage = 0.0
            if len(group) > 1 and not np.isnan(found.rewards[n, k]).all():
                advantage = float(np.nansum(found.rewards[n, k] * weights) - np.mean(group))
                advantage *= {
                    "group_std": 1 / (np.std(group, ddof=1) + 1e-4),
                    "rloo": len(group) / (len(group) - 1),
                }.get(str(section.advantage), 1.0)
            length = int(found.lengths[n, k])
            old = self._old[first][row]
            apart = torch.from_numpy(found.old[n, k, :length].astype(np.float64) - found.sampler[n, k, :length])
            known = {OLD: old, SAMPLER: old - apart}
            if self._start is not None:
                with torch.no_grad():
                    known[REFERENCE] = self._scored(self._start, inputs, labels)
            counts = {"sequence": 1, "token": length}.get(str(section.loss), section.max_new_tokens)
            yield Part(sample, counts, partial(self._weighted, inputs, labels, known, torch.tensor(advantage)))

    def _weighted(
        self, inputs: torch.Tensor, labels: torch.Tensor, known: Any, advantage: torch.Tensor
    ) -> torch.Tensor:
        return policy_loss(self.config.grpo, self._scored(self.model, inputs, labels), known, advantage)

    def _scored(self, model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return _log_probs(model, inputs, labels, temperature=self.config.grpo.temperature)


class Taught(OnAnswers, Distilled):
    """Learns a teacher's distribution on the model's own answers."""


TASKS: dict[str, type[Task]] = {
    "pretrain": Task,
    "sft": Task,
    "mlm": Masked,
    "classify": Classified,
    "seq2seq": Translated,
    "dpo": Preferred,
    "distill": Distilled,
    "grpo": Rewarded,
    "opd": Taught,
}
"""The config's task to the oracle's implementation of it."""


def margin_loss(section: PreferenceSection, margin: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Losses of pairs from their margins and the mean log-probabilities of the chosen answers' tokens, in nats."""
    if section.loss == "hinge":
        loss = torch.clamp(1 - section.beta * margin, min=0)
    elif section.loss == "ipo":
        loss = (margin - 0.5 / section.beta) ** 2
    else:
        loss = sigmoid_preference(margin, beta=section.beta, label_smoothing=section.label_smoothing)
    return loss - section.sft_weight * chosen


def divergence_loss(section: DistillSection, p: torch.Tensor, q: torch.Tensor, of_labels: torch.Tensor) -> torch.Tensor:
    """The summed loss from a teacher's and a student's distributions at the temperature and the cross-entropy."""
    if section.loss == "forward_kl":
        apart = _kl(p, q)
    elif section.loss == "reverse_kl":
        apart = _kl(q, p)
    else:
        middle = section.beta * p + (1 - section.beta) * q
        apart = section.beta * _kl(p, middle) + (1 - section.beta) * _kl(q, middle)
    return (1 - section.ce_weight) * section.temperature**2 * apart + section.ce_weight * of_labels


def policy_loss(
    section: GrpoSection, now: torch.Tensor, known: Mapping[str, torch.Tensor], advantage: torch.Tensor
) -> torch.Tensor:
    """The loss of one answer, summed over what counts in it: Shao et al. 2024, equation 3; Yu et al. 2025, equation 8;
    Liu et al. 2025; Zheng et al. 2025, equation 5; MiniMax 2025, equation 4. now, known: (tokens,) log-probabilities of
    the current model, and by name of that before the first update on these answers, the sampler and the reference."""
    old = known[OLD]
    rho, weight, most = (now - old).exp(), (old - known[SAMPLER]).exp(), section.correction_high
    ratio = (now - old).mean().exp() if section.ratio == "sequence" else rho
    if section.surrogate == "cispo":
        gain = ratio.detach().clamp(max=section.clip_high) * advantage * now
    else:
        assert section.clip_low is not None and section.clip_high is not None
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - section.clip_low, 1 + section.clip_high) * advantage)
    within = (weight <= most) & (weight >= 1 / most)
    weights = {"none": weight**0, "truncate": weight.clamp(max=most), "mask": weight * within}
    losses = -gain * weights[section.correction]
    if REFERENCE in known:
        losses = losses + section.beta * rho * ((known[REFERENCE] - now).exp() - 1 - (known[REFERENCE] - now))
    return losses.mean() if section.loss == "sequence" else losses.sum()


def on_known(p: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Probabilities of these outcomes, and the total of all others as one more."""
    return torch.cat([p.gather(-1, known), p.scatter(-1, known, 0.0).sum(-1, keepdim=True)], -1)


def undropped(config: Config, device: str) -> str | None:
    """Why the run's dropout cannot be repeated here; None if it can. device: the one that the run used."""
    if device != "cpu":
        return f"the oracle drops on the CPU, and the run drew on {device}"
    if config.task != "pretrain" or config.keeps_documents_apart:
        return "the oracle drops values of documents end to end only, where no batch is padded"
    if config.data.sources:
        return "the oracle drops values of a single source only"
    if config.parallel.sequence > 1 or config.parallel.tensor > 1:
        return "the oracle drops values only where each rank has whole sequences and matrices"
    return None


def _as_it_is(model: Any) -> Any:
    """A copy of a model as it is now, without gradients; untrained weights are shared."""
    frozen = {id(item): item for item in model.parameters() if not item.requires_grad}
    return copy.deepcopy(model, frozen).requires_grad_(False)


def _logits(model: Any, **inputs: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(**{name: value[None] for name, value in inputs.items()}).logits[0]
    return found.double()


def _log_probs(model: Any, inputs: torch.Tensor, labels: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    """The log-probability [nats] of each label, given all tokens before it."""
    there = labels != IGNORED
    of_all = torch.log_softmax(_logits(model, input_ids=inputs)[there] / temperature, -1)
    return of_all.gather(-1, labels[there][:, None])[:, 0]


def _likeliest(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Number of labels that are the likeliest token; in a tie of n, each counts 1 / n. logits: (n, tokens)."""
    best = logits == logits.amax(-1, keepdim=True)
    return float((best.gather(-1, labels[:, None])[:, 0] / best.sum(-1)).sum())


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Pearson's, for matrices over all columns together (Gorodkin 2004, equation 8); 0 if either is constant."""
    a, b = first - first.mean(0), second - second.mean(0)
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float((a * b).sum()) / size if size else 0.0


def _f1(predicted: np.ndarray, there: np.ndarray) -> float:
    """2 correct / (predicted + actual); nan if there are neither."""
    total = int(predicted.sum() + there.sum())
    return 2 * int((predicted & there).sum()) / total if total else math.nan


def _int64(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values).astype(np.int64))


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL divergence summed over all rows, in nats."""
    return (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum()


def _drawn(key: str, count: int, person: bytes = b"mantissa-mask") -> list[float]:
    """The first `count` numbers in [0, 1) of the stream that belongs to a key, in one use of it."""
    digest = hashlib.blake2b(key.encode(), digest_size=8, person=person).digest()
    return [unit_interval(int.from_bytes(digest, "little"), place) for place in range(count)]
