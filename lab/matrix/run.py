"""Measure one cell of the precision matrix: Mantissa's engine, bare DeepSpeed and plain torch on the same batches.

The reference is one process of plain torch in FP32 with torch's own AdamW and clipping; for FP8 cells it multiplies FP8
operands too, and other optimizers step in FP64 by `tools.parity.oracle.optimizers`. It starts from the same weights;
for bare DeepSpeed on the cast path they are rounded to the cell's dtype, as its masters are.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import deepspeed
import numpy as np
import torch
from deepspeed.utils import safe_get_full_fp32_param
from transformers import PreTrainedModel

from config.deepspeed.document import initializable
from config.errors import UserError
from config.load import load_config
from config.resolved import Resolved
from config.schema import Config, ModelSection
from data.batches.loader import Batch
from data.batches.sequence_slices import slice_of
from lab.matrix.cells import CLIPPING, DTYPES, SEQUENCE, VOCABULARY, Cell, global_size
from modeling.activation_checkpointing import apply_activation_checkpointing
from modeling.build import build_model, model_config
from modeling.linear_cross_entropy import IGNORED, label_loss_sum
from tools.parity.fp8_linear import in_fp8
from tools.parity.oracle.optimizers import optimizer_of
from training.distributed import World, allow_fp16_on_cpu
from training.engine import Engine, build_engine
from training.engine.expert_slices import forget_groups
from training.engine.tensor_slices import attach_slices, joined
from training.engine.tensors import whole_master


@dataclass(frozen=True)
class Trajectory:
    """Losses, norms and scales of a few steps, and the masters before and after."""

    start: dict[str, torch.Tensor]
    losses: list[float] = field(default_factory=list)
    """[nats] Mean over the label tokens of the global batch, by step."""
    norms: list[float] = field(default_factory=list)
    """[norm] Global norm of the unscaled gradient before clipping, by step."""
    scales: list[float] = field(default_factory=list)
    """[factor] Loss scale, by step."""
    end: dict[str, torch.Tensor] = field(default_factory=dict)


class Errors(NamedTuple):
    """Errors of a run against the reference."""

    start: float
    """Largest absolute difference of the masters before the first step."""
    loss: float
    """Largest relative error of a step's loss."""
    norm: float
    """Largest relative error of a step's gradient norm."""
    masters: float
    """||masters - reference|| / ||reference - start|| after the last step."""


def measure(world: World, cell: Cell, *, steps: int, upstream: bool = True) -> dict[str, Any]:
    """Measure a cell with Mantissa and with bare DeepSpeed; plain numbers and strings. A collective.

    verdict: verified, wrong, refused (by the config or the engine) or raised. If `Cell.bare`, bare DeepSpeed runs too,
    even if Mantissa refuses, and its result is under "upstream", unless `upstream` is false.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        overrides, path = cell.prepare(folder)
        config = load_config(path, overrides, None)
        options: dict[str, Any] = {"clipping": cell.clipping, "steps": steps, "world": world, "fp8": cell.fp8}
        expected = reference(config, "fp32", **options)
        found = _judge(world, cell, expected, lambda: mantissa(world, cell.resolve(folder), steps=steps))
        if upstream and cell.bare:
            document = cell.resolve_document(folder)
            expected = reference(config, cell.dtype, **options) if cell.dtype != "fp32" else expected
            found["upstream"] = _judge(world, cell, expected, lambda: bare(world, config, document, steps=steps))
    return found


def _judge(world: World, cell: Cell, expected: Trajectory, run: Callable[[], Trajectory]) -> dict[str, Any]:
    verdict, reason, numbers = "verified", "", {}
    try:
        trajectory = run()
        wrong = problems(cell, trajectory, expected)
        verdict, reason = ("wrong", "; ".join(wrong)) if wrong else ("verified", "")
        numbers = {name: value for name, value in errors(trajectory, expected)._asdict().items() if value == value}
    except UserError as error:
        verdict, reason = "refused", str(error).partition(": ")[2]
    except Exception as error:
        verdict, reason = "raised", f"{type(error).__name__}: {error}"
    # One rank may have raised where another did not.
    verdicts = world.gather_objects((verdict, reason))
    verdict, reason = next((item for item in verdicts if item[0] == "raised"), (verdict, reason))
    return {"verdict": verdict, "reason": reason, "errors": numbers}


def problems(cell: Cell, run: Trajectory, expected: Trajectory) -> list[str]:
    """Why the run is not verified; empty if it is. A dynamic FP16 loss scale must have grown twice."""
    found = errors(run, expected)
    sizes = {"loss": found.loss, "norm": found.norm, "masters": found.masters}
    wrong = [f"{name} {value:.1e}" for name, value in sizes.items() if not value <= cell.bound]
    if found.start != 0:
        wrong.append(f"masters differ by {found.start:.1e} before the first step")
    static = cell.setting is not None and cell.setting.other == "static"
    if cell.combination.compute in ("fp16", "mixed") and not static and len(set(run.scales)) < 3:
        wrong.append(f"the loss scale did not grow twice: {run.scales}")
    return wrong


def learning_rate(base: float, step: int) -> float:
    """A rate that falls slightly at every step, so that an engine that ignores it shows an error."""
    return base * (1 - 0.05 * step)


def rows(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of a step's global batch, (size, SEQUENCE) int64; each row is masked differently."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (size, SEQUENCE + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(size):
        labels[row, : row * SEQUENCE // size] = IGNORED
    return tokens[:, :-1], labels


def batch_of(world: World, step: int, *, accumulation: int) -> Batch:
    """This rank's share of a step's global batch."""
    size, share = global_size(world.world_size), world.sequence
    both = share or world.tensor
    ranks = both.size if both else 1
    inputs, labels = (whole.chunk(world.world_size // ranks)[world.rank // ranks] for whole in rows(step, size))
    shape = (accumulation, -1, SEQUENCE)
    counted = int((labels != IGNORED).sum())
    batch = Batch(0, inputs.reshape(shape), labels.reshape(shape), np.arange(size), counted)
    return slice_of(batch, rank=share.rank, ranks=ranks) if share else batch


def fp32_model(section: ModelSection, *, seed: int) -> PreTrainedModel:
    """The FP32 model with the weights that every run starts from."""
    shape = model_config(section, vocab_size=VOCABULARY, sequence_length=SEQUENCE)
    return build_model(section, shape, seed=seed)


def reference(config: Config, dtype: str, *, clipping: bool, steps: int, world: World, fp8: bool = False) -> Trajectory:
    """Plain torch in FP32, or in FP64 for an optimizer other than AdamW, from weights rounded to `dtype`.

    fp8: linear layers of the blocks multiply operands rounded by FP8's definition; nothing else is rounded. The
    reported loss excludes the balance loss.
    """
    device, size = world.device, global_size(world.world_size)
    built = fp32_model(config.model, seed=config.run.seed)
    balance, taken = config.model.balance_loss, getattr(built.config, "num_experts_per_tok", 0)
    model: torch.nn.Module = built
    model = model.to(DTYPES[dtype]).float().to(device).train()
    section = config.optimizer
    model = model if section.name == "adamw" else model.double()
    optimizer = optimizer_of(model, section)
    found = Trajectory(_weights(model))
    linear = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    eight_bit = [name for name in linear if fp8 and ".layers." in name]
    for step in range(1, steps + 1):
        inputs, labels = (tensor.to(device) for tensor in rows(step, size))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(section.learning_rate, step)
        optimizer.zero_grad()
        with in_fp8(model, eight_bit, config.precision.fp8):
            output = model(input_ids=inputs, **({"output_router_logits": True} if balance else {}))
            loss = label_loss_sum(output.logits, labels) / (labels != IGNORED).sum()
            extra = balance * balancing_loss(output.router_logits, taken) if balance else 0.0
            (loss + extra).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING if clipping else math.inf)
        optimizer.step()
        found.losses.append(float(loss.detach()))
        found.norms.append(float(norm))
    found.end.update(_weights(model))
    return found


def balancing_loss(router_logits: Sequence[torch.Tensor], taken: int) -> torch.Tensor:
    """Fedus et al. 2021, equations 4 to 6, the mean over layers; () FP32.

    router_logits: (tokens, experts) of each layer, for the whole batch. taken: experts per token.
    """
    by_layer = []
    for logits in router_logits:
        probabilities = logits.softmax(-1)
        used = torch.zeros_like(probabilities).scatter(1, probabilities.topk(taken, -1).indices, 1.0)
        by_layer.append(logits.shape[1] * (used.mean(0) * probabilities.mean(0)).sum())
    return torch.stack(by_layer).mean()


def mantissa(world: World, resolved: Resolved, *, steps: int) -> Trajectory:
    """Mantissa's engine, driven as in a run. A collective."""
    config = resolved.config
    sizes = {"sequence": resolved.batch.sequence, "tensor": resolved.batch.tensor, "expert": resolved.batch.expert}
    world = world.sharing(**sizes, timeout_minutes=config.run.timeout_minutes)
    shape = model_config(config.model, vocab_size=VOCABULARY, sequence_length=SEQUENCE)
    engine = build_engine(resolved, shape, world)
    try:
        found = Trajectory(_mantissa_masters(engine))
        for step in range(1, steps + 1):
            batch = batch_of(world, step, accumulation=resolved.batch.accumulation)
            health = engine.health(engine.forward_backward(batch, step=step))
            update = engine.step(health, learning_rate(config.optimizer.learning_rate, step))
            found.losses.append(health.loss)
            found.norms.append(health.grad_norm)
            found.scales.append(update.loss_scale)
        found.end.update(_mantissa_masters(engine))
        return found
    finally:
        engine.close()


def bare(world: World, config: Config, document: dict[str, Any], *, steps: int) -> Trajectory:
    """DeepSpeed used as in its documentation: initialize, backward, step, its own loss scaler. A collective.

    Its optimizer is torch's AdamW, or another rule as in the reference, on whatever DeepSpeed passes to it.
    """
    allow_fp16_on_cpu()
    world = world.sharing(tensor=config.parallel.tensor, timeout_minutes=config.run.timeout_minutes)
    section, stage = config.optimizer, document["zero_optimization"]["stage"]
    model = fp32_model(config.model, seed=config.run.seed)
    apply_activation_checkpointing(model, config.model.activation_checkpointing, reentrant=False)
    optimizer = optimizer_of(model, section)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=initializable(document))
    attach_slices(engine.module, world.tensor)
    accumulation = document["gradient_accumulation_steps"]
    try:
        found = Trajectory(_deepspeed_masters(engine, stage, world))
        for step in range(1, steps + 1):
            for group in engine.optimizer.param_groups:
                group["lr"] = learning_rate(section.learning_rate, step)
            batch = batch_of(world, step, accumulation=accumulation)
            tokens = float((rows(step, global_size(world.world_size))[1] != IGNORED).sum())
            total = torch.zeros((), dtype=torch.float64, device=world.device)
            found.scales.append(float(getattr(engine.optimizer, "cur_scale", 1.0)))
            for inputs, labels in zip(batch.input_ids.to(world.device), batch.labels.to(world.device), strict=True):
                loss = label_loss_sum(engine(input_ids=inputs, use_cache=False).logits, labels)
                # DeepSpeed divides by the accumulation and averages over ranks with different sequences.
                engine.backward(loss * (world.zero_ranks * accumulation / tokens))
                engine.step()
                total += loss.detach().double()
            found.losses.append(float(world.sum(total)) * world.zero_ranks / world.world_size / tokens)
            norm = engine.get_global_grad_norm()
            found.norms.append(math.nan if norm is None else float(norm))
        found.end.update(_deepspeed_masters(engine, stage, world))
        return found
    finally:
        engine.destroy()
        forget_groups()


def errors(run: Trajectory, expected: Trajectory) -> Errors:
    """Errors of `run`. NaN if it reports no gradient norm."""
    moved = _distance(expected.end, expected.start)
    return Errors(
        start=max(float((run.start[name] - value).abs().max()) for name, value in expected.start.items()),
        loss=_largest(run.losses, expected.losses),
        norm=_largest(run.norms, expected.norms),
        masters=_distance(run.end, expected.end) / moved,
    )


def _largest(values: list[float], expected: list[float]) -> float:
    ratios = [abs(value - exact) / abs(exact) for value, exact in zip(values, expected, strict=True)]
    return math.nan if any(math.isnan(ratio) for ratio in ratios) else max(ratios)


def _distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((left[name] - right[name]).double().square().sum()) for name in right))


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}


def _mantissa_masters(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: whole_master(engine, parameter) for name, parameter in engine.model.named_parameters()}


def _deepspeed_masters(engine: deepspeed.DeepSpeedEngine, stage: int, world: World) -> dict[str, torch.Tensor]:
    """FP32 masters by name, gathered from partitions."""
    parameters = dict(engine.module.named_parameters())
    if stage > 0:
        whole = {name: safe_get_full_fp32_param(parameter) for name, parameter in parameters.items()}
    else:
        # FP16 without ZeRO keeps masters in groups, in the order of the 16-bit parameters.
        sixteen = getattr(engine.optimizer, "fp16_groups", [])
        masters = getattr(engine.optimizer, "fp32_groups", [])
        by_id = {id(p): m for ps, ms in zip(sixteen, masters, strict=True) for p, m in zip(ps, ms, strict=True)}
        whole = {name: by_id.get(id(parameter), parameter) for name, parameter in parameters.items()}
    shapes = {name: getattr(parameter, "ds_shape", parameter.shape) for name, parameter in parameters.items()}
    own = {name: value.detach().float().clone().reshape(shapes[name]) for name, value in whole.items()}
    return {name: joined(value, parameters[name], world) for name, value in own.items()}
