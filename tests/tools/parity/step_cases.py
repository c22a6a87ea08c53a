"""Functions that run inside the processes of test_steps.py. Every function is called on every rank."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional

from config.resolved import Resolved
from config.schema import Fp8Section
from lab.detection.plants.permanent import reweight
from modeling import parameter_groups
from modeling.build import model_config
from modeling.router_balance import RouterBalance
from precision import fp8
from precision.inner_dtypes import promises
from precision.observe import Observation
from tests.support.models import small_run
from tests.support.models.flex_on_cpu import flex_on_cpu
from tests.support.models.small_run import SEQUENCE, VOCABULARY, RandomBatches, batch_of, engine_of, resolve
from tests.training.engine.tensor_cases import MODEL, of_kind
from tools.parity.reference import Reference
from tools.parity.steps import StepParity, walk
from training.distributed import World
from training.engine import Engine, optimizer
from training.engine.rng import generators, restore_generators
from training.progress import Progress

Plant = Callable[[Engine, World], object]
"""Changes a rank's engine before its steps."""


def step_parity(engine: Engine, resolved: Resolved, world: World) -> StepParity:
    """The comparison of an engine's steps with FP32."""
    shape = model_config(resolved.config.model, vocab_size=small_run.VOCABULARY, sequence_length=SEQUENCE)
    return StepParity(engine, Reference(resolved, shape, world), resolved)


@contextmanager
def compared(world: World, *, micro: int = 2, defect: str = "", **how: Any) -> Iterator[tuple[Engine, StepParity]]:
    """An engine on the config that `resolve` makes of `how`, and what compares its steps with FP32."""
    resolved = resolve(world, micro=micro, **how)
    with engine_of(world, resolved, defect=defect) as engine:
        yield engine, step_parity(engine, resolved, world)


def measured_steps(
    world: World, *, steps: int, micro: int = 2, plant: Plant | None = None, **how: Any
) -> list[dict[str, Any]]:
    """Some real steps on random batches, each compared with FP32. Ranks that share matrices have the same sequences, of
    which the errors of known sums are measured, too."""
    rows, applied, shared = list[dict[str, Any]](), 0, world.tensor is not None
    owner = World(0, 1, 0, world.device) if shared else world
    with compared(world, micro=micro, **how) as (engine, parity):
        if plant is not None:
            plant(engine, world)
        for step in range(1, steps + 1):
            batch = replace(batch_of(owner, micro, seed=step), position=step - 1)  # defects begin at a step
            summed = {"accumulation_error": parity.accumulation_errors(batch)} if shared and not rows else {}
            rows.append({**summed, **parity.step(batch, applied=applied)})
            applied += rows[-1]["applied"]
    return rows


def walked(world: World, *, length: int = 1, **how: Any) -> list[dict[str, Any]]:
    """The steps from the start until `length` of them are applied, as the gate measures them."""
    with compared(world, **how) as (_, parity):
        return walk(parity, RandomBatches(world, micro=2), Progress(), length=length)  # type: ignore[arg-type]


def inner_dtypes(
    world: World, *, stage: int, compute: str, overrides: Sequence[str] = (), planted: str | None = None
) -> dict[str, Any]:
    """The report on one step of the engine. planted: a norm whose statistics are BF16, on the last rank."""
    resolved = resolve(world, stage=stage, compute=compute, micro=2, overrides=overrides)
    with engine_of(world, resolved) as engine:
        if planted is not None and world.rank == world.world_size - 1:
            norm: Any = engine.model.get_submodule(planted)
            norm.forward = lambda states: norm.weight * states * states.bfloat16().pow(2).mean(-1, keepdim=True).rsqrt()
        with Observation(engine.model) as seen:
            engine.forward_backward(batch_of(world, 2, seed=1), step=1)
        return seen.inner.report(**promises(resolved.config, engine.compute, engine.regions))


def spoiled(engine: Engine, world: World, *, module: str, rank: int | None = None, forward: bool = True) -> None:
    """The output of one module is 1% too large, or only the gradients that it makes are. rank: there alone."""

    def spoil(_: Any, args: Any, output: Any) -> Any:
        first, *rest = output if isinstance(output, tuple) else (output,)
        wrong = first * 1.01 if forward else 1.01 * first - 0.01 * first.detach()
        return (wrong, *rest) if isinstance(output, tuple) else wrong

    if rank in (None, world.rank):
        engine.model.get_submodule(module).register_forward_hook(spoil)


def rounded_moment(engine: Engine, world: World, *, key: str) -> None:
    """Keeps one of Adam's moments in BF16 from each step to the next."""
    optimizer: Any = engine.deepspeed.basic_optimizer
    right = optimizer.step

    def step(*args: Any, **options: Any) -> None:
        right(*args, **options)
        for state in optimizer.state.values():
            state[key].copy_(state[key].bfloat16())

    optimizer.step = step


def damped_gradients(engine: Engine, world: World) -> None:
    """The embedding's gradients are so small that FP32 holds their squares in a few bits."""
    engine.model.get_input_embeddings().weight.register_hook(lambda gradient: gradient * 1e-17)


def decaying_norms(world: World, **how: Any) -> list[dict[str, Any]]:
    """`measured_steps` of an engine whose groups all have the matrices' weight decay."""
    right = parameter_groups.parameter_groups

    def wrong(model: Any, section: Any) -> Any:
        return [{**group, "weight_decay": section.weight_decay} for group in right(model, section)]

    with patch.object(parameter_groups, "parameter_groups", wrong), patch.object(optimizer, "parameter_groups", wrong):
        return measured_steps(world, **how)


def summed(world: World, *, rounded: bool = False, **how: Any) -> dict[str, float]:
    """The errors of known sums of gradients. rounded: the engine adds up in BF16."""
    with compared(world, **how) as (engine, parity):
        totals: dict[int, torch.Tensor] = {}

        def adding(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
            def add(gradient: torch.Tensor) -> torch.Tensor:
                before = totals.pop(number, None)
                if before is None:
                    totals[number] = gradient.bfloat16()
                    return gradient.bfloat16().to(gradient.dtype)
                return ((before + gradient.bfloat16()).float() - before.float()).to(gradient.dtype)

            return add

        for number, parameter in enumerate(engine.model.parameters() if rounded else ()):
            parameter.register_hook(adding(number))
        return parity.accumulation_errors(batch_of(world, 2, seed=1))


def weighted(world: World, *, planted: str = "", **how: Any) -> dict[str, Any]:
    """The errors of how micro-batches of different numbers of labels are weighted.

    planted: by the means of the micro-batches or of the ranks; the sum of losses is reported in FP16; or the z-loss of
    routers counts twice.
    """
    batch = batch_of(world, 2, seed=1)
    counts = torch.from_numpy(batch.counted.sum(1)).double()
    with compared(world, **how) as (engine, parity):
        if planted == "micro-batches":
            wrong = counts.mean() / counts
            reweight(engine, lambda index: wrong[index])
        if planted == "ranks":
            every = float(world.sum(counts.sum()[None])[0])
            factor = every / (float(counts.sum()) * world.world_size)
            reweight(engine, lambda index: factor)
        if planted == "reported":
            right = engine.forward_backward

            def forward_backward(*args: Any, **options: Any) -> Any:
                outcome = right(*args, **options)
                return replace(outcome, loss_sum=outcome.loss_sum.half().double())

            engine.forward_backward = forward_backward  # type: ignore[method-assign]
        if planted == "z-loss":
            router: Any = engine.router
            forward_backward = engine.forward_backward

            def summed(*args: Any, **options: Any) -> Any:
                router._z *= 2
                try:
                    return forward_backward(*args, **options)
                finally:
                    router._z /= 2

            engine.forward_backward = summed  # type: ignore[method-assign]
        return parity.weighting_errors(batch)


def router_losses(world: World, *, value: float, gradient: float, **how: Any) -> float:
    """The error of the routers' terms, where both twins compute so many times their value and their gradient."""
    right = RouterBalance.loss

    def loss(self: RouterBalance, counts: torch.Tensor) -> Any:
        found, parts = right(self, counts)
        return gradient * found + (value - gradient) * found.detach(), parts

    with patch.object(RouterBalance, "loss", loss), compared(world, **how) as (_, parity):
        errors: dict[str, float] = parity.task_loss(batch_of(world, 2, seed=1))["task_loss"]
        return max(error for name, error in errors.items() if name.startswith("(balancing loss)"))


def dropped(world: World, *, planted: str = "", **how: Any) -> dict[str, str]:
    """A model's dropout where it departs from the declared one. planted: on the last rank, a rate of 0.11 for 0.1,
    attention that drops nothing, or a mask of its own."""
    rates = "resid_pdrop: 0.1, attn_pdrop: 0.1, embd_pdrop: 0.1"
    gpt2 = ["model.architecture=gpt2", f"model.config={{n_embd: 64, n_layer: 2, n_head: 4, {rates}}}"]
    with compared(world, overrides=gpt2, **how) as (engine, parity):
        block: Any = engine.model.get_submodule("transformer.h.1")
        if planted and world.rank == world.world_size - 1:
            if planted == "rate":
                block.mlp.dropout.p = 0.11
            elif planted == "attention":
                block.attn.attn_dropout.p = 0.0
            else:
                block.mlp.dropout.forward = lambda states: states * (torch.rand(states.shape) > 0.1) / 0.9
        found: dict[str, str] = parity.dropout_errors(batch_of(world, 2, seed=1))["dropped_otherwise"]
        return found


def evaluated(world: World, *, planted: str = "", **how: Any) -> dict[str, Any]:
    """Measurements of an evaluation. planted: the head is in training mode, or in FP32, while it is evaluated, or its
    output is scaled in evaluation mode; also where the reference's own is."""
    with compared(world, **how) as (engine, parity):
        head: Any = engine.model.lm_head
        right, forward = engine.evaluate, head.forward
        others: list[Any] = [parity._reference.model.lm_head] if planted == "both" else []
        for each in [head, *others] if planted in ("scale", "both") else ():
            each.register_forward_hook(lambda module, args, output: output if module.training else output * 1.01)

        def evaluate(batches: Any) -> Any:
            if planted == "mode":
                head.eval = head.train
                head.train = lambda mode=True: torch.nn.Module.train(head, True)
            if planted == "dtype":
                head.forward = lambda states: forward(states).float()
            try:
                return right(batches)
            finally:
                head.__dict__.pop("eval", None), head.__dict__.pop("train", None)
                head.forward = forward

        engine.evaluate = evaluate  # type: ignore[method-assign]
        return parity.evaluation_errors(batch_of(world, 2, seed=1))


def with_dropout(world: World, **how: Any) -> dict[str, Any]:
    """A step as a run takes it; then, from the same generators, its loss repeated and the same step measured.

    Of eight seeds it begins with the one whose dropout moves the loss furthest. What one seed does to it is chance, and
    can be less than what rounding does.
    """
    with compared(world, **how) as (engine, parity):
        batch, moved = batch_of(world, 2, seed=1), {}
        without = engine.evaluate([batch]).loss
        for seed in range(8):
            torch.manual_seed(seed)
            moved[seed] = abs(parity.loss_with_dropout(batch) - without)
        torch.manual_seed(max(moved, key=lambda seed: moved[seed]))
        drawn = generators(world.device)
        engine.model.train()
        run = engine.health(engine.forward_backward(batch, step=1)).loss
        engine.discard_gradients()
        other = parity.loss_with_dropout(batch)
        restore_generators(drawn, world.device)
        return {
            "run": run,
            "other": other,
            "repeated": parity.loss_with_dropout(batch),
            "step": parity.step(batch, applied=0),
        }


def of_shared_matrices(
    world: World, *, overrides: Sequence[str], kind: str | None = None, vocabulary: int = VOCABULARY, **how: Any
) -> list[dict[str, Any]]:
    """`measured_steps` of two ranks that share every matrix. kind: of model.

    vocabulary: an odd one gives one rank a row more of the head.
    """
    given = ["parallel.tensor=2", "telemetry.every_steps=0", of_kind(kind) if kind else MODEL % "false", *overrides]
    with patch.object(small_run, "VOCABULARY", vocabulary):
        return measured_steps(world.sharing(tensor=2, timeout_minutes=2), micro=4, overrides=given, **how)


def with_flex_attention(world: World) -> tuple[str, dict[str, Any]]:
    """A measured step of a run with FlexAttention, and the attention of its reference."""
    resolved = resolve(world, stage=2, compute="bf16", micro=2, overrides=["model.attention=flex_attention"])
    with flex_on_cpu(), engine_of(world, resolved) as engine:
        reference = Reference(resolved, engine.model.config, world)
        step = StepParity(engine, reference, resolved).step(batch_of(world, 2, seed=1), applied=0)
    return reference.model.config._attn_implementation, step


LAYER = "model.layers.0.mlp.down_proj"


def wrong_layer(engine: Engine, world: World, *, wrong: str) -> None:
    """One FP8 layer computes otherwise, as WRONG has it."""
    layer: Any = engine.model.get_submodule(LAYER)
    layer.forward = WRONG[wrong](layer)


def _forward(
    layer: Any,
    *,
    quantise: Callable[..., Any] = fp8.quantise,
    weight: Callable[[torch.Tensor], torch.Tensor] = lambda own: own,
    **section: Any,
) -> Callable[..., Any]:
    given: Any = {"ambient": torch.bfloat16, "section": Fp8Section(**section)}

    def forward(input: torch.Tensor) -> torch.Tensor:
        with patch.object(fp8, "quantise", quantise), torch.autocast("cpu", enabled=False):
            return fp8.linear_fp8(input, weight(layer.weight), layer.bias, **given)

    return forward


def _with(scale_of: Callable[[torch.Tensor, torch.dtype], torch.Tensor]) -> Callable[..., Any]:
    """Rounding with another scale, and values beyond the format's largest clipped."""

    def quantise(values: torch.Tensor, dim: int | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        wide, top = values.float(), torch.finfo(dtype).max
        largest = wide.abs().amax() if dim is None else wide.abs().amax(dim, keepdim=True)
        scale = scale_of(largest, dtype)
        return (wide / scale).clamp(-top, top).to(dtype), scale

    return quantise


def _towards_zero(values: torch.Tensor, dim: int | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    wide = values.float()
    scale = fp8.scale_of(wide.abs().amax() if dim is None else wide.abs().amax(dim, keepdim=True), dtype)
    mantissa, exponent = torch.frexp(wide / scale)
    return torch.ldexp(torch.trunc(mantissa * 16) / 16, exponent).to(dtype), scale


WRONG: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "clips": partial(_forward, quantise=_with(lambda largest, dtype: fp8.scale_of(largest / 2, dtype))),
    "plain scales": partial(_forward, quantise=_with(lambda largest, dtype: largest / torch.finfo(dtype).max)),
    "weight rounded twice": partial(_forward, weight=lambda own: own + (own.bfloat16().float() - own).detach()),
    "rounds towards zero": partial(_forward, quantise=_towards_zero),
    "gradient in e5m2": partial(_forward, gradient="e5m2"),
    "weight gradient in fp8": partial(_forward, weight_gradient="fp8"),
    "5% of a gradient lost": partial(_forward, weight=lambda own: own.detach() + 0.95 * (own - own.detach())),
    "not in fp8": lambda layer: lambda input: functional.linear(input.bfloat16(), layer.weight.bfloat16()),
}
"""Wrong forward passes of a layer by name. Each is another arithmetic than the plan's, some as near to FP32."""
