"""THE seam to DeepSpeed: everything Mantissa asks of it is asked here, and upstream's gaps are closed here.

Loss. The loss is the mean over all label tokens of the global batch. Each micro-batch contributes the sum over its own
labels, divided by the label count of all ranks and micro-batches of the step. DeepSpeed averages gradients over ranks,
so the sum is multiplied by the number of ranks first. Neither accumulation, nor the number of ranks, nor how unevenly
labels are masked changes the gradient.

Gradient norm. `Health.grad_norm` is the global norm of the unscaled gradient before clipping, at every ZeRO stage. It is
known before the optimizer step, so that a step can still be discarded (`training.gradients`).
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import PreTrainedModel

from config.command_line import Resolved
from config.schema import OptimizerSection
from data.loader import Batch
from modeling.loss import label_loss_sum
from modeling.parameter_groups import parameter_groups
from training.distributed import Place, allow_slow_fp16
from training.faults import Faults
from training.gradients import ReducedGradients
from training.loss_scaler import LossScaler, ScaleChange
from training.memory import peak_memory_bytes


@dataclass(frozen=True)
class Outcome:
    """What forward and backward of one step left behind on this rank."""

    loss_sum: torch.Tensor
    """() float64: summed loss of this rank's labels, in nats."""
    label_tokens: torch.Tensor
    """() float64: labels that count, over all ranks."""


@dataclass(frozen=True)
class Health:
    """The same on every rank."""

    loss: float
    """Raw mean loss over the global batch, in nats per label token; inf or nan if it is."""
    memory_bytes: int
    """Peak memory of the rank that needs most: device memory, or resident memory on a CPU."""
    grad_norm: float
    """Global norm of the unscaled gradient before clipping; inf when any value is not finite."""
    preempted: bool
    """Some rank was asked to stop."""

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class Update:
    """What an optimizer step did."""

    applied: bool
    """Whether the weights changed."""
    clip_coefficient: float
    """Factor that clipping applied to the gradient, 1 where it did not clip, 0 on a skipped step."""
    lr: float
    """Learning rate of this step."""
    loss_scale: float
    """Loss scale this step ran at; 1 where nothing is scaled."""
    scale_change: ScaleChange | None
    """How the scale changed afterwards."""
    scale_at_minimum: bool
    """The step overflowed and the scale could not get smaller."""


class Engine:
    """One model, its masters and its optimizer on DeepSpeed. Every method is a collective."""

    def __init__(self, model: PreTrainedModel, resolved: Resolved, place: Place) -> None:
        optimizer_section = resolved.config.optimizer
        self.place = place
        self.stage = resolved.zero_stage
        self.compute = resolved.compute
        self.clipping = optimizer_section.gradient_clipping
        self.slow_fp16 = self.compute == "fp16" and allow_slow_fp16()
        self.faults = Faults(resolved.config.faults, rank=place.rank, model=model)
        self.deepspeed, *_ = deepspeed.initialize(
            model=model,
            optimizer=_optimizer(model, optimizer_section, offload=resolved.offload != "none", device=place.device),
            config=resolved.deepspeed,
        )
        self.gradients = ReducedGradients(self.deepspeed, stage=self.stage)
        self._norm = torch.zeros((), device=place.device)
        self._scale_section = resolved.config.precision.loss_scale
        self._scaler: LossScaler | None = None
        self._install_scaler(None)

    @property
    def model(self) -> PreTrainedModel:
        """The module DeepSpeed trains."""
        return self.deepspeed.module

    @property
    def loss_scale(self) -> float:
        """Factor on the loss in the backward pass."""
        if self.compute != "fp16":
            return 1.0
        return float(self._scaler.cur_scale if self._scaler else self.deepspeed.optimizer.loss_scaler.cur_scale)

    def forward_backward(self, batch: Batch, *, step: int) -> Outcome:
        """Gradients of the mean loss over the global batch. `step` is the attempted step, from 1, for injected faults.

        batch.input_ids and batch.labels: (accumulation, micro-batch, sequence) int64.
        """
        device = self.place.device
        label_tokens = torch.tensor(float(batch.label_tokens), dtype=torch.float64, device=device)
        label_tokens = self.place.sum(label_tokens).clamp_(min=1.0)
        weight = self.place.world_size / label_tokens
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        micro_batches = len(batch.input_ids)
        for index in range(micro_batches):
            last = index == micro_batches - 1
            self.deepspeed.set_gradient_accumulation_boundary(last)
            micro_loss = self._loss_sum(batch.input_ids[index], batch.labels[index])
            with self.faults.armed(step) if last else nullcontext():
                self.deepspeed.backward(micro_loss * weight.to(micro_loss.dtype), scale_wrt_gas=False)
            loss_sum += micro_loss.detach().double()
        return Outcome(loss_sum, label_tokens)

    def health(self, outcome: Outcome, *, preempted_here: bool = False) -> Health:
        """One small gather, so that every rank sees and decides the same. The only device sync of its own in a step."""
        self._norm = self.gradients.norm()
        here = [float(peak_memory_bytes(self.place.device)), float(preempted_here), self.loss_scale]
        mine = torch.stack([outcome.loss_sum, outcome.label_tokens, self._norm.double()])
        rows = self.place.gather(torch.cat([mine, mine.new_tensor(here)])).tolist()
        _require_equal("the gradient norm", [row[2] for row in rows])
        _require_equal("the loss scale", [row[5] for row in rows])
        return Health(
            loss=sum(row[0] for row in rows) / rows[0][1],
            grad_norm=rows[0][2] / self.loss_scale,
            memory_bytes=int(max(row[3] for row in rows)),
            preempted=any(row[4] for row in rows),
        )

    def step(self, health: Health, lr: float) -> Update:
        """Clip the gradients that `health` measured and apply them at learning rate `lr`; finite ones only."""
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = lr
        scale = self.loss_scale
        applied = math.isfinite(health.grad_norm)
        if applied:
            self.gradients.apply(self._norm)
            if self.stage > 0 and not self.deepspeed.was_step_applied():
                raise RuntimeError("DeepSpeed refused a step whose gradient norm is finite")
        else:
            self.gradients.discard()
        change = self._scaler.settle() if self._scaler else None
        clipped = applied and 0 < self.clipping < health.grad_norm
        return Update(
            applied=applied,
            clip_coefficient=(self.clipping / (health.grad_norm + 1e-6) if clipped else 1.0) if applied else 0.0,
            lr=lr,
            loss_scale=scale,
            scale_change=change,
            scale_at_minimum=bool(self._scaler and self._scaler.at_minimum),
        )

    @torch.no_grad()
    def evaluate(self, batches: Any) -> float:
        """Mean loss in nats over every label token of `batches` on all ranks."""
        self.deepspeed.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self.place.device)
        for batch in batches:
            for input_ids, labels in zip(batch.input_ids, batch.labels, strict=True):
                totals[0] += self._loss_sum(input_ids, labels).double()
            totals[1] += batch.label_tokens
        self.deepspeed.train()
        loss, tokens = self.place.sum(totals).tolist()
        return loss / max(tokens, 1.0)

    def save(self, folder: Path, tag: str) -> None:
        """DeepSpeed's sharded checkpoint into folder/tag, without its `latest` file."""
        self.deepspeed.save_checkpoint(str(folder), tag=tag, save_latest=False)

    def load(self, folder: Path, tag: str, scaler_state: dict[str, Any] | None) -> None:
        """Restore weights, masters and moments.

        DeepSpeed also brings back the optimizer's settings and a pickled loss scaler; the config's settings and our
        own scaler, in the state that Mantissa saved, take their places again.
        """
        groups = self.deepspeed.optimizer.param_groups
        settings = [{key: group[key] for key in ("betas", "eps", "weight_decay")} for group in groups]
        path, _ = self.deepspeed.load_checkpoint(str(folder), tag=tag, load_lr_scheduler_states=False)
        if path is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint in {folder / tag}")
        for group, setting in zip(self.deepspeed.optimizer.param_groups, settings, strict=True):
            group.update(setting)
        self._install_scaler(scaler_state)

    def momentum_norm(self) -> float:
        """Global norm of the first moments, in gradient units."""
        squares = torch.zeros((), dtype=torch.float64, device=self.place.device)
        for state in self.deepspeed.basic_optimizer.state.values():
            if "exp_avg" in state:
                squares += state["exp_avg"].double().square().sum().to(squares.device)
        return float(squares if self.stage == 0 else self.place.sum(squares)) ** 0.5

    def scaler_state(self) -> dict[str, Any] | None:
        """State of the dynamic loss scaler as plain types; None where there is none."""
        return self._scaler.state_dict() if self._scaler else None

    def close(self) -> None:
        """Release what DeepSpeed holds, so that another engine can be built in this process."""
        self.deepspeed.destroy()

    def _loss_sum(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        device = self.place.device
        logits = self.deepspeed(input_ids=input_ids.to(device, non_blocking=True), use_cache=False).logits
        return label_loss_sum(logits, labels.to(device, non_blocking=True))

    def _install_scaler(self, state: dict[str, Any] | None) -> None:
        if self.compute != "fp16" or self._scale_section.policy == "static":
            return
        self._scaler = LossScaler(self._scale_section)
        if state is not None:
            self._scaler.load_state_dict(state)
        self.deepspeed.optimizer.loss_scaler = self._scaler


class RanksDisagree(RuntimeError):
    """Ranks hold different values of what must be one; training on would let their weights part without a word."""


def _require_equal(what: str, values: list[float]) -> None:
    """values: by rank. NaN never appears among them."""
    odd = [f"rank {rank} has {value!r}" for rank, value in enumerate(values) if value != values[0]]
    if odd:
        raise RanksDisagree(f"{what} differs between ranks: rank 0 has {values[0]!r}, {', '.join(odd)}")


def _optimizer(
    model: PreTrainedModel, section: OptimizerSection, *, offload: bool, device: torch.device
) -> torch.optim.Optimizer:
    """AdamW on the masters: DeepSpeed's CPU kernel when a GPU run offloads its state, else torch's fused one.

    On a CPU torch's fused AdamW is as fast as DeepSpeed's and needs no build.
    """
    groups = parameter_groups(model, weight_decay=section.weight_decay)
    options: dict[str, Any] = {"lr": section.learning_rate, "betas": section.betas, "eps": section.eps}
    if offload and device.type == "cuda":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
    return torch.optim.AdamW(groups, fused=True, **options)
