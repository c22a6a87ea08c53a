"""The Engine: Mantissa's interface to DeepSpeed's engine, with workarounds for gaps upstream.

The loss is the mean over all label tokens (or pairs, or whatever the task counts) of the global batch. Each micro-batch
contributes the sum over its own labels, divided by the label count of all ranks and micro-batches of the step, times
the number of ranks, over which DeepSpeed averages gradients. Ranks that share matrices compute the same micro-batches:
they count as one rank.
"""

import copyreg
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.zero.config import ZeroStageEnum
from transformers import PreTrainedModel

from config.cli import REPOSITORY
from config.deepspeed.combinations import Combination, refuse_combination
from config.deepspeed.document import initializable
from config.errors import UserError
from config.optimizers import OPTIMIZERS
from config.resolved import Resolved
from data.batches.loader import Batch
from modeling.objectives.objective import Forward, Scored
from modeling.parameter_groups import group_of_each
from modeling.router_balance import METRICS, router_balance, untrained_balance
from modeling.sequence_parallel import SequenceAttention
from precision.manifest import load_manifest
from precision.regions import Regions
from precision.step_health import Health
from training.distributed import World, allow_fp16_on_cpu
from training.engine.expert_slices import forget_groups, shared_experts
from training.engine.gradients import ReducedGradients
from training.engine.health import NORM_ROUNDING, Columns, Evaluation, Outcome, RanksDisagree, Update, difference
from training.engine.kernels import choose_softmax
from training.engine.loss import LossPath, label_tokens_of_all
from training.engine.masters import Start, local_masters, update_ratio
from training.engine.optimizer import build_optimizer, import_muon_uncompiled
from training.engine.rng import generators, restore_generators
from training.engine.split_masters import SplitMasters
from training.engine.teacher import Teacher
from training.engine.tensor_slices import Replicas, attach_slices
from training.engine.work_time import WorkTime, by_rank, peak_memory_bytes
from training.engine.zero3_trace import renew_stale_traces
from training.loss_scaler import LossScaler
from training.progress import START, Progress
from training.tasks.task import objective_of

# Checkpoints name the ZeRO stage. Python 3.11.0 to 3.11.3 pickle an enum as a call of getattr, which a reader that
# runs no code refuses.
copyreg.pickle(ZeroStageEnum, lambda stage: (ZeroStageEnum, (stage.value,)))


class Engine:
    """One model, its masters and its optimizer on DeepSpeed. Every method is a collective."""

    def __init__(
        self,
        model: PreTrainedModel,
        resolved: Resolved,
        world: World,
        teacher: Teacher | None = None,
        attention: SequenceAttention | None = None,
    ) -> None:
        """teacher: runs live while the student trains. attention: the model's, if ranks share sequences. Both are
        closed with the engine."""
        optimizer_section = resolved.config.optimizer
        self.world = world
        self.stage = resolved.zero_stage
        self.compute = resolved.compute
        self.optimizer_spec = OPTIMIZERS[optimizer_section.name]
        self._group_keys = *self.optimizer_spec.settings, "weight_decay", "lr_factor", "matrix"
        self.group_of = group_of_each(model, optimizer_section)
        """Maps the id of each trainable parameter to its group's settings, in the order of the groups."""
        self.has_frozen_base = resolved.config.adapter.kind != "none"
        """Whether frozen weights belong to a base model, which checkpoints leave out."""
        self.clipping = optimizer_section.gradient_clipping
        self.buffer_dtypes = {name: buffer.dtype for name, buffer in model.named_buffers()}
        """Dtypes by buffer name, as set by the model's own code."""
        allow_fp16_on_cpu()
        import_muon_uncompiled()
        with shared_experts(model, world, stage=self.stage):
            self.deepspeed, *_ = deepspeed.initialize(
                model=model,
                optimizer=build_optimizer(
                    model,
                    optimizer_section,
                    masters=resolved.config.precision.masters,
                    offload=resolved.offload != "none",
                    device=world.device,
                ),
                config=initializable(resolved.deepspeed),
            )
        if self.stage == 3:
            renew_stale_traces(self.deepspeed.optimizer.parameter_offload.get_param_coordinator())
        attach_slices(self.model, world.tensor)
        self.split_masters: SplitMasters | None = None
        """The split masters; None if masters are FP32 tensors."""
        if resolved.config.precision.masters == "split":
            self.split_masters = SplitMasters(self.deepspeed, stage=self.stage, world=world)
        self.start: Start | None = None
        """The masters' starting values; None until they have them."""
        self.gradients = ReducedGradients(self.deepspeed, stage=self.stage, tensor=world.tensor)
        self._replicas = Replicas(self.model, world) if world.tensor is not None else None
        self._work = WorkTime(world.device)
        self.objective = objective_of(resolved.config, self.model, teacher)
        self.teacher = teacher
        self._attention = attention
        self.router = router_balance(model, resolved.config.model)
        softmax, notes = choose_softmax(resolved, world)
        self.loss_path = LossPath(self.deepspeed, self.objective, resolved, world, self.router, softmax)
        problem = self.loss_path.unchunked_reason
        self.notes = [f"the loss computes all logits at once: {problem}"] if problem is not None else []
        """Decisions made while building, for the record."""
        self.notes += notes if self.loss_path.chunked else []
        self.notes += untrained_balance(model, resolved.config.model)
        self.regions = regions_of(model, resolved)
        """Precision regions of the manifest path; None on the cast path."""
        self.adjustable: Any = self.regions  # by the guard; on the cast path, tasks that sample set their own
        guard = resolved.config.guard
        self._measures_updates = guard.min_update_ratio is not None or guard.max_update_ratio is not None
        self._scale_section = resolved.config.precision.loss_scale
        self._scaler: LossScaler | None = None
        self.install_scaler(None)
        self.deepspeed.train()  # transformers loads models in eval mode

    @property
    def model(self) -> PreTrainedModel:
        """The module DeepSpeed trains."""
        return self.deepspeed.module

    @property
    def loss_scale(self) -> float:
        """Factor on the loss in the backward pass."""
        return float(self._scaler.cur_scale) if self._scaler else 1.0

    def masters(self) -> list[torch.Tensor]:
        """This rank's partition of the masters, FP32; copies if masters are split. Not a collective."""
        flats = local_masters(self.deepspeed.optimizer)
        split = self.split_masters
        return flats if split is None else [split.of[flat].values(0, len(flat)) for flat in flats]

    def whole_masters(self) -> AbstractContextManager[None]:
        """Context in which the masters are writable FP32 tensors. A collective. Raises UserError at its end if weights
        differ from their rounded masters, which split masters cannot represent."""
        return nullcontext() if self.split_masters is None else self.split_masters.made_whole()

    def forward_backward(
        self, batch: Batch, *, step: int, on_loss: Callable[[torch.Tensor], Any] | None = None
    ) -> Outcome:
        """Compute the gradients of the mean loss over the global batch: input_ids and labels (accumulation,
        micro-batch, sequence) int64. step: attempted step, from 1, for wrappers such as faults. on_loss: called with
        each micro-batch's summed loss before its backward pass."""
        outcome = self._begin(batch)
        share = self.world.zero_ranks / outcome.label_tokens
        for index, (inputs, labels) in enumerate(batch.micro_batches(self.world.device)):
            self.add_micro_batch(index, inputs, labels, share, outcome, on_loss)
        return outcome

    def add_micro_batch(
        self,
        index: int,
        inputs: dict[str, Any],
        labels: torch.Tensor,
        share: torch.Tensor,
        sums: Outcome,
        on_loss: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        """Run one micro-batch forward and backward, and add to the step's sums. share: () float64, the factor on its
        summed loss."""
        share = share.float()
        with self._work.measured():
            scored = self.loss_path.score(inputs, labels, share * self.loss_scale)
        if on_loss is not None:
            on_loss(scored.loss)
        loss = scored.loss * share
        if self.router is not None:
            experts = self.world.sum(self.router.counts()) if sums.experts is None else sums.experts
            balance, parts = self.router.loss(experts)
            loss = loss + balance * self.world.world_size
            # every micro-batch of every rank adds the same number, that of the whole step
            equal_parts = self.world.world_size * sums.micro_batches
            sums.routed += torch.cat([parts, self.router.load(experts) / equal_parts])
        self.backward(loss, last=index == sums.micro_batches - 1)
        sums.loss_sum += scored.loss.detach().double()
        if scored.sums is not None:
            sums.metrics += scored.sums
        if sums.source_of is not None:
            assert scored.parts is not None, "a task with several sources knows its loss by sample"
            sums.by_source[0] += _by_source(scored.parts, sums.source_of[index], len(sums.sources))

    def forward_beside(self, batch: Batch) -> None:
        """Run the step's first micro-batch forward for observers, without side effects."""
        before = generators(self.world.device)
        self.loss_path.score(*next(iter(batch.micro_batches(self.world.device))), 0.0)
        restore_generators(before, self.world.device)

    def _begin(self, batch: Batch) -> Outcome:
        """The outcome of a step, its sums still zero."""
        device, counts, source_of = self.world.device, batch.counts_by_source, batch.sources
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        by_source = zeros(2, 0)
        if source_of is not None:
            source_of = source_of.to(device, non_blocking=True)
            by_source = self.world.numbers([0.0] * len(counts) + [*counts]).view(2, len(counts))
        return Outcome(
            generators=generators(device),
            label_tokens=label_tokens_of_all(batch, self.world),
            micro_batches=len(batch.input_ids),
            experts=self._tokens_by_expert(batch) if self.router is not None and len(batch.input_ids) > 1 else None,
            sources=batch.source_names,
            source_of=source_of,
            loss_sum=zeros(()),
            metrics=zeros(len(self.objective.sums)),
            routed=zeros(len(METRICS) if self.router else 0),
            by_source=by_source,
        )

    @torch.no_grad()
    def _tokens_by_expert(self, batch: Batch) -> torch.Tensor:
        """(layers, experts) counts of the whole step, which the gradients of its first micro-batch need already."""
        assert self.router is not None
        before = generators(self.world.device)
        found: Any = 0
        for inputs, labels in batch.micro_batches(self.world.device):
            self.loss_path.score(inputs, labels, 0.0)
            found = found + self.router.counts()
        restore_generators(before, self.world.device)
        return self.world.sum(found)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add a micro-batch's gradients; after the `last` one of a step, reduce them over ranks. loss: () of any dtype,
        already divided by the label tokens of the step."""
        self.deepspeed.set_gradient_accumulation_boundary(last)
        self.deepspeed.backward(loss, scale_wrt_gas=False)

    def score(self, inputs: dict[str, Any], labels: torch.Tensor) -> Scored:
        """Forward pass and summed loss of a micro-batch as the objective defines them, all logits at once."""
        return self.objective.score(self.deepspeed, inputs, labels)

    def logits(self, inputs: dict[str, torch.Tensor]) -> Any:
        """(micro-batch, sequence, vocabulary): a forward pass that materializes all logits."""
        return self.deepspeed(**inputs, use_cache=False).logits

    def health(
        self,
        outcome: Outcome,
        progress: Progress = START,
        *,
        preempted_here: bool = False,
        save_ended_here: bool = False,
        data_seconds: float = 0.0,
        checks: torch.Tensor | None = None,
        repeats: bool = False,
    ) -> Health:
        """Measure the gradient norm, and gather a few numbers so that every rank decides alike: a step's only device
        sync.

        progress: before the step. data_seconds: this rank's wait for the batch. checks: (n,) float64 of this rank,
        gathered with the rest. repeats: whether the step can be repeated. Raises RanksDisagree, naming the ranks, when
        scale or counters differ, or norms in a step that cannot be repeated.
        """
        empty = outcome.loss_sum.new_empty(0)
        scalars = {
            "memory": float(peak_memory_bytes(self.world.device)),
            "loss scale": self.loss_scale,
            "applied": float(progress.applied),
            "skipped": float(progress.skipped),
            "preempted": float(preempted_here),
            "save ended": float(save_ended_here),
            "work seconds": data_seconds + self._work.take(),
        }
        ranks = Columns(
            self.world,
            {
                "loss": outcome.loss_sum[None],
                "label tokens": outcome.label_tokens[None],
                "norm": self.gradients.norm().double()[None],
                **dict(zip(scalars, self.world.numbers([*scalars.values()]).split(1), strict=True)),
                "copies": self._replicas.sums(progress.step) if self._replicas is not None else empty,
                "uncounted": self.gradients.largest_uncounted().double()[None] if self._replicas is not None else empty,
                "metrics": outcome.metrics,
                "routed": outcome.routed,
                "loss by source": outcome.by_source[0],
                "count by source": outcome.by_source[1],
                "checks": empty if checks is None else checks,
            },
        )
        if self._replicas is not None:
            losses = ranks.numbers("loss")
            self._replicas.require_equal([(loss, *row) for loss, row in zip(losses, ranks.rows("copies"), strict=True)])
        self.gradients.give(ranks.numbers("norm")[0])
        disagreement = difference("the gradient norm", ranks.numbers("norm"), most=NORM_ROUNDING)
        if disagreement and not repeats:
            raise RanksDisagree(disagreement)
        equal = {"loss scale": "loss scale", "count of applied steps": "applied", "count of skipped steps": "skipped"}
        for what, column in equal.items():
            if text := difference(f"the {what}", ranks.numbers(column)):
                raise RanksDisagree(text)
        # ranks that share matrices have the same sums, so one of them counts
        every, label_tokens = self.world.tensor.size if self.world.tensor else 1, ranks.numbers("label tokens")[0]
        metrics = self.objective.metrics(ranks.sums("metrics", every), label_tokens)
        by_source = dict(zip(outcome.sources, map(int, ranks.sums("count by source", every)), strict=True))
        losses_by_source = dict(zip(outcome.sources, ranks.sums("loss by source", every), strict=True))
        dynamic = self._scaler is not None and self._scale_section.policy != "static"
        all_finite = all(math.isfinite(number) for row in ranks.rows("uncounted") for number in row)
        return Health(
            loss=ranks.sums("loss", every)[0] / label_tokens,
            grad_norm=ranks.numbers("norm")[0] / self.loss_scale if all_finite else math.inf,
            step=progress.step + 1,
            consecutive_skips=progress.consecutive_skips,
            scales_dynamically=dynamic,
            scale_at_minimum=dynamic and self.loss_scale <= self._scale_section.minimum,
            memory_bytes=int(max(ranks.numbers("memory"))),
            metrics=metrics | dict(zip(METRICS, ranks.sums("routed", every), strict=False)),
            counts_by_source=by_source,
            loss_by_source={name: losses_by_source[name] / count for name, count in by_source.items() if count},
            by_rank=by_rank(memory_bytes=ranks.numbers("memory"), work_seconds=ranks.numbers("work seconds")),
            preempted=any(ranks.numbers("preempted")),
            save_ended=all(ranks.numbers("save ended")),
            checks=ranks.rows("checks"),
            disagreement=disagreement,
        )

    def group_settings(self, lr: float) -> tuple[bool, list[tuple[Any, ...]]]:
        """Whether each parameter group has its part of the learning rate, and the groups' other settings."""
        groups = self.deepspeed.optimizer.param_groups
        settings = [tuple(group[key] for key in self._group_keys) for group in groups]
        return all(group["lr"] == lr * group["lr_factor"] for group in groups), settings

    def step(self, health: Health, lr: float, *, apply: bool = True) -> Update:
        """Clip the gradients that `health` measured and apply them at learning rate `lr`, or discard them.

        Non-finite gradients are never applied. The loss scaler sees their overflow, but neither a discarded finite step
        nor a non-finite forward pass. If the guard bounds the update ratio, it is measured, which copies the masters.
        """
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]  # of optimizer.groups
        scale = self.loss_scale
        finite = math.isfinite(health.grad_norm)
        applied = apply and finite
        measures = applied and self._measures_updates
        before = [master.detach().clone() for master in self.masters()] if measures else []
        if applied:
            self._apply()
        elif health.scale_overflowed:
            self.gradients.discard()
        else:
            self.discard_gradients()
        change = self._scaler.apply_change() if self._scaler else None
        clipped = applied and 0 < self.clipping < health.grad_norm
        return Update(
            applied=applied,
            clip_coefficient=(self.clipping / (health.grad_norm + 1e-6) if clipped else 1.0) if applied else 0.0,
            lr=lr,
            loss_scale=scale,
            scale_change=change,
            update_ratio=update_ratio(before, self.masters(), stage=self.stage, world=self.world) if measures else None,
        )

    def _apply(self) -> None:
        self.gradients.apply()
        if self.split_masters is not None:
            self.split_masters.hide()
        if self.stage > 0 and not self.deepspeed.was_step_applied():
            raise RuntimeError("DeepSpeed refused a step whose gradient norm is finite")

    def discard_gradients(self) -> None:
        """Discard the gradients; the loss scaler does not count it as an overflow."""
        with self._scaler.ignoring_overflow() if self._scaler else nullcontext():
            self.gradients.discard()

    @torch.no_grad()
    def evaluate(self, batches: Any) -> Evaluation:
        """Mean loss over all labels of `batches` on all ranks, and the objective's metrics."""
        self.deepspeed.eval()
        totals = torch.zeros(2 + len(self.objective.sums), dtype=torch.float64, device=self.world.device)
        for batch in batches:
            for inputs, labels in batch.micro_batches(self.world.device):
                scored = self.loss_path.score(inputs, labels, 1.0)
                totals[0] += scored.loss.double()
                if scored.sums is not None:
                    totals[2:] += scored.sums
            totals[1] += batch.label_tokens
        self.deepspeed.train()
        total, count, *sums_of_all = self.world.sum(totals).tolist()
        mean = total / max(count, 1.0)
        perplexity = (math.exp(mean) if mean < 700 else math.inf) if self.objective.has_perplexity else None
        return Evaluation(mean, perplexity, self.objective.metrics(sums_of_all, count), count)

    @torch.no_grad()
    def infer(
        self, compute: Callable[[Forward, dict[str, Any]], torch.Tensor], batches: Iterable[Batch]
    ) -> Iterator[torch.Tensor]:
        """The results of `compute` on each micro-batch's inputs, with the current weights and without dropout."""
        self.deepspeed.eval()
        try:
            for batch in batches:
                for inputs, _ in batch.micro_batches(self.world.device):
                    yield compute(self.deepspeed, inputs)
        finally:
            self.deepspeed.train()

    def save(self, folder: Path, tag: str, writer: CheckpointEngine | None = None) -> None:
        """Write DeepSpeed's sharded checkpoint to folder/tag through `writer`, without `latest` and recovery script."""
        self.deepspeed._copy_recovery_script = lambda save_path: None
        self.deepspeed.module_state_dict = self._module_state
        with self.whole_masters(), self._checkpoints_through(writer or self.deepspeed.checkpoint_engine):
            self.deepspeed.save_checkpoint(
                str(folder), tag=tag, save_latest=False, exclude_frozen_parameters=self.has_frozen_base
            )

    def _module_state(self, **options: Any) -> dict[str, Any]:
        """DeepSpeed's state dict without frozen weights, of which it would keep a tied embedding as the output head."""
        state: dict[str, Any] = type(self.deepspeed).module_state_dict(self.deepspeed, **options)
        every = self.model.named_parameters(remove_duplicate=False) if self.has_frozen_base else ()
        frozen = {name for name, parameter in every if not parameter.requires_grad}
        return {name: value for name, value in state.items() if name not in frozen}

    def load(self, folder: Path, tag: str, reader: CheckpointEngine) -> None:
        """Restore weights, masters and optimizer state through `reader`. The optimizer's settings and the loss scaler,
        which DeepSpeed restores as well, become the config's and a new one (`install_scaler`)."""
        settings = [{key: group[key] for key in self._group_keys} for group in self.deepspeed.optimizer.param_groups]
        # On each rank DeepSpeed would list the folder and look for the files of all ranks; each reads only its own.
        of, own = self.deepspeed, self.deepspeed.checkpoint_mp_rank
        of._get_all_ckpt_names = lambda path, tag: [
            of._get_ckpt_name(path, tag, mp_placeholder=f"{rank:02d}") for rank in range(of.mp_world_size)
        ]
        of._get_all_zero_checkpoint_names = lambda path, tag, bf16: of._get_mp_rank_zero_checkpoint_names(
            path, tag, own, of.loaded_checkpoint_dp_world_size, bf16
        )
        with self.whole_masters(), self._checkpoints_through(reader):
            path, _ = self.deepspeed.load_checkpoint(
                str(folder), tag=tag, load_lr_scheduler_states=False, load_module_strict=not self.has_frozen_base
            )
        if self.world.experts is not None and self.stage < 3:  # the weights file has rank 0's experts
            self.deepspeed.optimizer.update_lp_params()
        if path is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint in {folder / tag}")
        for group, setting in zip(self.deepspeed.optimizer.param_groups, settings, strict=True):
            group.update(setting)
        if hasattr(self.deepspeed.optimizer, "clip_grad"):  # ZeRO-1 and 2 loaded the saved run's
            self.deepspeed.optimizer.clip_grad = self.clipping
        self.install_scaler(None)

    def _checkpoints_through(self, files: CheckpointEngine) -> AbstractContextManager[Any]:
        # with MoE layers of its own, DeepSpeed would save each expert in a file named after the layer
        return patch.multiple(self.deepspeed, checkpoint_engine=files, has_moe_layers=False)

    def scaler_state(self) -> dict[str, Any] | None:
        """State of the loss scaler as plain types; None if there is none."""
        return self._scaler.state_dict() if self._scaler else None

    def close(self) -> None:
        """Release DeepSpeed's resources, so that another engine can be built in this process."""
        self.deepspeed.destroy()
        forget_groups()
        if self.teacher is not None:
            self.teacher.close()
        if self._attention is not None:
            self._attention.close()

    def install_scaler(self, state: dict[str, Any] | None) -> None:
        """Install a loss scaler with a checkpoint's state, or a new one; none if nothing computes in FP16."""
        needed = self.compute == "fp16" or (self.regions is not None and self.regions.uses("fp16"))
        if not needed and self._scaler is None:  # it stays when its regions are promoted
            return
        self._scaler = LossScaler(self._scale_section)
        if state is not None:
            self._scaler.load_state_dict(state)
        self.deepspeed.optimizer.loss_scaler = self._scaler


def regions_of(model: PreTrainedModel, resolved: Resolved) -> Regions | None:
    """The precision regions of the manifest path. Raises UserError if their dtypes are not supported."""
    precision, parallel = resolved.config.precision, resolved.config.parallel
    if precision.path != "manifest" or precision.manifest is None:
        return None
    manifest, where = load_manifest(REPOSITORY / precision.manifest), f"precision.manifest = {precision.manifest}"
    for key, ranks in (("tensor", parallel.tensor), ("expert", parallel.expert)):
        if ranks > 1 and any(rule.compute == "fp8" for rule in manifest.rules):
            raise UserError(f"{where}: FP8 is not verified with parallel.{key} = {ranks}; remove one of them")
    regions = Regions(model, manifest, precision.fp8)
    sixteen_bit = [compute for compute in ("bf16", "fp16") if regions.uses(compute)]
    kind = "mixed" if len(sixteen_bit) == 2 else (sixteen_bit or ["fp32"])[0]
    if regions.uses("fp8"):
        if "fp16" in sixteen_bit:
            raise UserError(f"{where}: FP8 is not verified beside FP16; use bf16 instead of fp16 in it, or remove fp8")
        kind = {"fp32": "fp8", "bf16": "fp8_bf16"}[kind]
    path = "cast" if kind == "fp32" else "manifest"
    refuse_combination(where, Combination(path, kind, resolved.zero_stage, resolved.offload))
    return regions


def _by_source(parts: torch.Tensor, sources: torch.Tensor, count: int) -> torch.Tensor:
    """(count,) float64: sums of a micro-batch's loss parts by source. sources: (micro,) int64, one per sample."""
    # not index_add, whose order of summation varies on a GPU
    of_samples = parts.double().view(len(sources), -1).sum(1)
    belongs = sources[:, None] == torch.arange(count, device=sources.device)
    return torch.where(belongs, of_samples[:, None], 0.0).sum(0)
