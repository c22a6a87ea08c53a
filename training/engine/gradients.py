"""The reduced gradients between backward and step: measured once, then applied or discarded.

DeepSpeed measures the gradient norm inside its optimizer step, too late to discard the step. Here its own measurement
is made before the step, which is given the result as a number on the host, so that DeepSpeed's checks of it do not wait
for the device. FP16's search for inf and nan is left out: a sum of squares finds them too. To discard a step, it is
given an infinite norm: DeepSpeed's overflow path clears every accumulator and leaves masters, state and counters
unchanged.
"""

import math
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer, utils
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import combine_grad_norm_groups, get_global_norm_of_tensors
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.utils import groups, safe_get_full_grad

from training.distributed import TensorGroup
from training.engine.tensor_slices import counts_here


def _mask_not_finite(values: torch.Tensor, device: Any = None, val: float = -1.0) -> None:
    """Replaces DeepSpeed's function, which copies `val` to the device first, and so waits for it."""
    values.masked_fill_(~values.isfinite(), val)


class _Given(list[Any]):
    """A norm passed in place of the tensors that it belongs to."""


def _norm_of(input_tensors: list[Any], **options: Any) -> Any:
    """Replaces DeepSpeed's function in BF16_Optimizer, which may be given the norm itself."""
    given = isinstance(input_tensors, _Given)
    return input_tensors[0] if given else get_global_norm_of_tensors(input_tensors, **options)


for _module in (utils, stage3, stage_1_and_2):
    _module.mask_nan_or_inf_with_val_inplace = _mask_not_finite
bf16_optimizer.get_global_norm_of_tensors = _norm_of


def reduced_gradient(parameter: torch.nn.Parameter, stage: int) -> torch.Tensor | None:
    """The whole gradient, still scaled; None for a parameter without one. A collective from ZeRO-1 on."""
    return parameter.grad if stage == 0 else safe_get_full_grad(parameter)


class ReducedGradients:
    """The gradients of one DeepSpeed engine. Every method is a collective."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, *, stage: int, tensor: TensorGroup | None = None) -> None:
        """tensor: the ranks that this one shares matrices with."""
        self._engine = engine
        self._stage = stage
        self._tensor = tensor
        self._given_norm: torch.Tensor | None = None
        """() FP32: the norm that DeepSpeed gets in the coming step, or infinity to discard the step."""
        optimizer: Any = engine.optimizer
        if engine.seq_data_parallel_group.size() == 1 and engine.communication_data_type == torch.float32:
            # DeepSpeed would copy one rank's gradients, divide them by 1 and reduce them.
            engine.allreduce_no_retain = lambda *given, **options: None
            optimizer.reduce_scatter = stage == 3  # which at ZeRO-1 and 2 leads to the next function
            optimizer.gradient_reduction_w_predivide = lambda gradients, dtype: gradients
            scatter = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
            setattr(optimizer, scatter, lambda parameters, dtype: [p.grad.reshape(-1) for p in parameters])
        if stage == 0:
            engine.clip_fp32_gradients = self._clip
            return
        optimizer.has_overflow = lambda partition_gradients=True: False  # an overflow shows in the norm
        if isinstance(optimizer, BF16_Optimizer):
            self._tensors_for_norm = optimizer.get_grads_for_norm
            optimizer.get_grads_for_norm = self._bf16_tensors
        elif stage == 3:
            self._norm_groups = optimizer._get_norm_groups
            if not (optimizer.offload_optimizer or optimizer.offload_param):
                self._norm_groups = self._norms_of_pieces
                if not engine.zero_overlap_comm():
                    # The device runs everything in the order in which it is queued, so the host need not wait for what
                    # DeepSpeed has gathered or reduced, nor for what it has queued ahead.
                    accelerator: Any = get_accelerator()
                    accelerator.resolves_data_dependency = accelerator.handles_memory_backpressure = lambda: True
            optimizer._get_norm_groups = lambda: [self._given_norm]
        else:
            self._scaled_norm = optimizer.scaled_global_norm
            optimizer.scaled_global_norm = lambda norm_type=2: self._given_norm

    def norm(self) -> torch.Tensor:
        """() FP32: global L2 norm of the still scaled gradient; inf when any value is not finite."""
        if self._stage == 0:
            parameters = [p for p in self._engine.module.parameters() if p.grad is not None]
            counted = [p.grad for p in parameters if p.grad is not None and counts_here(p, self._tensor)]
            norm = torch.nn.utils.get_total_norm(counted)
            if self._tensor is not None:
                norm = self._tensor.sum(norm.double().square()).sqrt()
        elif isinstance(self._engine.optimizer, BF16_Optimizer):
            shared = self._engine.mpu if self._tensor is not None else None
            whole, of_experts = self._tensors_for_norm()
            norm = torch.as_tensor(get_global_norm_of_tensors(input_tensors=whole, mpu=shared))
            for name, gradients in of_experts.items():  # each rank has only its own experts'
                group = groups._get_expert_parallel_group(name)
                other = get_global_norm_of_tensors(input_tensors=gradients, moe_ep_group=group)
                norm = combine_grad_norm_groups([norm, torch.as_tensor(other)])
        elif self._stage == 3:
            norm = combine_grad_norm_groups(self._norm_groups())
        else:
            norm = self._scaled_norm()
        norm = norm.float()
        if norm.device != self._engine.device:  # with offload DeepSpeed has it in host memory
            norm = norm.to(self._engine.device)
        # DeepSpeed writes -1 for a norm that is not finite.
        self._given_norm = torch.where(torch.isfinite(norm) & (norm >= 0), norm, torch.full_like(norm, math.inf))
        return self._given_norm

    def _norms_of_pieces(self) -> list[torch.Tensor]:
        """DeepSpeed's norms of ZeRO-3's groups, reduced together, and without a copy of -1.0 to the device for each."""
        optimizer: Any = self._engine.optimizer
        squares = []
        for index, parameters in enumerate(optimizer.fp16_groups):
            held = zip(optimizer.averaged_gradients[index], parameters, strict=True)
            norms = [gradient.double().norm() for gradient, p in held if counts_here(p, self._tensor)]
            zero = torch.zeros((), dtype=torch.float64, device=self._engine.device)
            squares.append(torch.stack(norms or [zero]).square().sum())
        of_all = torch.stack(squares)
        if dist.get_world_size() > 1:
            dist.all_reduce(of_all)
        return [*of_all.sqrt()]

    def give(self, norm: float) -> None:
        """Let the coming step clip by this norm, known on the host, in place of the one that `norm` measured."""
        self._given_norm = torch.tensor(norm, dtype=torch.float32)

    def _clip(self) -> None:
        """Clip at ZeRO-0, where DeepSpeed would measure the norm again."""
        assert self._given_norm is not None
        clip = (self._engine.gradient_clipping() / (self._given_norm + 1e-6)).clamp(max=1.0)
        for parameter in self._engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(clip)

    def largest_uncounted(self) -> torch.Tensor:
        """() FP32: largest magnitude in this rank's replicas of gradients that `norm` counts on another rank; nan if
        any of them has a nan. No collective and no device sync."""
        zero = torch.zeros((), device=self._engine.device)  # torch's norm of an empty list is in host memory
        uncounted = (gradient for gradient, parameter in self._local() if not counts_here(parameter, self._tensor))
        return torch.nn.utils.get_total_norm([zero, *uncounted], math.inf).float()

    def _local(self) -> Iterator[tuple[torch.Tensor, torch.nn.Parameter]]:
        """This rank's part of the reduced gradients, with the parameters; not for offloaded gradients."""
        optimizer: Any = self._engine.optimizer
        if self._stage == 0:
            yield from ((p.grad, p) for p in self._engine.module.parameters() if p.grad is not None)
        elif isinstance(optimizer, BF16_Optimizer):
            for gradients, parameters in zip(optimizer.fp32_groups_gradients, optimizer.bf16_groups, strict=True):
                yield from zip(gradients, parameters, strict=True)
        else:
            groups_of_parameters = optimizer.fp16_groups if self._stage == 3 else optimizer.params_in_partition
            for index, parameters in enumerate(groups_of_parameters):
                held = (g for g in optimizer.averaged_gradients[index] if not getattr(g, "_zero_padding", False))
                yield from zip(held, parameters, strict=True)

    def apply(self) -> None:
        """Run the optimizer step on the gradients that `norm` measured last, which must have been finite."""
        self._engine.step()

    def discard(self) -> None:
        """Clear the gradients; masters and moments stay bit for bit the same."""
        if self._stage == 0:
            self._engine.zero_grad()
            return
        self.give(math.inf)
        self._engine.step()
        if self._stage < 3 and getattr(self._engine.optimizer, "cpu_offload", False):
            # DeepSpeed 0.19.8 keeps them if masters are offloaded: the next step would add its own to them, and after
            # an overflow none would ever be finite again (docs/upstream/)
            held = self._engine.optimizer.averaged_gradients
            held.update(dict.fromkeys(held))

    def _bf16_tensors(self, for_clipping: bool = False) -> Any:
        """The tensors that BF16_Optimizer asks for: all gradients to clip, or the given norm."""
        return self._tensors_for_norm(for_clipping=True) if for_clipping else (_Given([self._given_norm]), {})
