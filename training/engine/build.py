"""Build the Engine: the model with its kernels and activation checkpointing, on DeepSpeed, with its weights."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from deepspeed.runtime.zero import partition_parameters
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig

from config.errors import UserError
from config.resolved import Resolved
from config.task import model_class_of
from modeling.activation_checkpointing import apply_activation_checkpointing
from modeling.activation_checkpointing_budget import recompute_within_budget
from modeling.adapter import add_adapter
from modeling.build import Gather, build_model, drawn_notes, no_gather
from modeling.compiling import compile_blocks
from modeling.document_masking import require_documents_apart
from modeling.expert_parallel import require_shareable_experts, share_experts
from modeling.kernels import require_liger
from modeling.parameter_groups import unreached_notes
from modeling.same_calls import call_every_expert, refuse_layerdrop
from modeling.sequence_parallel import LARGEST_IN_16_BITS, LARGEST_IN_FP32, SequenceAttention, require_equal_logits
from modeling.tensor_parallel import require_shareable
from precision.routers import compute_routers_in_fp32
from training.distributed import World
from training.engine.engine import Engine
from training.engine.expert_slices import experts_name
from training.engine.kernels import choose_fp8_kernel, choose_kernels
from training.engine.sharded_pieces import attach_pieces
from training.engine.teacher import Teacher
from training.engine.weights import hold_fp32, start_masters

_FAULTS = "training.engine.faults"  # loaded by runs that have some


def build_engine(resolved: Resolved, model_config: PretrainedConfig, world: World, drawn: bool = True) -> Engine:
    """This rank's engine for the resolved config. drawn: False leaves a new model's weights at 0 and the engine without
    a start, until a checkpoint is loaded."""
    config = resolved.config
    refuse_layerdrop(model_config, stage=resolved.zero_stage, ranks=world.world_size)
    if config.adapter.base != "compute":
        _require_quantisable(resolved)
    if config.model.kernels == "liger":
        require_liger(model_config.model_type, world.device)
    if world.tensor is not None:
        require_shareable(model_config, world.tensor.size)
    if world.experts is not None:
        require_shareable_experts(model_config, world.experts.size)
    teacher = None
    if config.distill.teacher is not None and not config.distill.top_k:
        teacher = Teacher(resolved, world)
    # transformers builds and loads the model partitioned while this object exists and is set to ZeRO-3.
    # If ranks have slices, each builds the whole model, and DeepSpeed partitions the slice that is cut from it.
    # A quantised base is partitioned once it is complete, since zero.Init handles floats only.
    slices = world.tensor is not None or world.experts is not None
    partitioned = resolved.zero_stage == 3 and not slices and config.adapter.base == "compute"
    zero3 = fp32_partitions(resolved) if partitioned else None
    gather: Gather = partial(_gather_partitioned, world) if zero3 else no_gather
    model_class, seed = model_class_of(config), config.run.seed
    options: dict[str, Any] = {"model_class": model_class, "adapter": config.adapter, "drawn": drawn}
    with _keeping_dtypes():
        model = build_model(config.model, model_config, seed=seed, gather=gather, **options)
    call_every_expert(model)
    if world.experts is not None:
        share_experts(model, world.experts, experts_name(world.experts))
    model = add_adapter(model, config.adapter, seed=seed, model_class=model_class)
    notes = drawn_notes(model) + unreached_notes(model) + choose_kernels(model, resolved, world)
    if resolved.compute != "fp32" and config.precision.routers == "fp32":  # a manifest's run has parameters in FP32
        routers = set(compute_routers_in_fp32(model).values())
        notes += [f"{len(routers)} routers compute in FP32 (precision.routers)"] if routers else []
    attention = None
    if world.sequence is not None:
        attention = SequenceAttention(model, world.sequence, apart=config.keeps_documents_apart)
    recomputation, every = config.model.activation_checkpointing, config.model.checkpointing_every
    apply_activation_checkpointing(model, recomputation, reentrant=config.model.checkpointing_reentrant, every=every)
    engine = engine_on(model, resolved, world, teacher=teacher, attention=attention)
    engine.start = engine.start if drawn else None
    if config.faults:
        import_module(_FAULTS).attach_faults(engine, config.faults)
    engine.notes += notes + choose_fp8_kernel(engine.regions, world)
    engine.model.eval()
    if config.keeps_documents_apart:
        require_documents_apart(engine.logits, engine.model.config, world.device)
    if world.sequence is not None:
        largest = LARGEST_IN_FP32 if engine.compute == "fp32" and engine.regions is None else LARGEST_IN_16_BITS
        shape, apart = engine.model.config, config.keeps_documents_apart
        problem = require_equal_logits(engine.logits, shape, world.sequence, world.device, apart=apart, largest=largest)
        world.raise_first(problem, UserError)
    engine.model.train()
    gib, forward = config.model.activation_memory_gib, partial(_forward_one_micro_batch, engine, resolved)
    if gib is not None:
        found = recompute_within_budget(engine.model, gib, forward=forward, largest=partial(_largest, world))
        engine.notes.append(found.text)
    if config.model.compile:
        engine.notes.append(compile_blocks(engine.model, forward))
    return engine


def fp32_partitions(resolved: Resolved) -> HfDeepSpeedConfig:
    """While this object exists, transformers builds and loads models in FP32, each rank its partitions only."""
    return HfDeepSpeedConfig({key: value for key, value in resolved.deepspeed.items() if key not in ("bf16", "fp16")})


def engine_on(model: PreTrainedModel, resolved: Resolved, world: World, **closed_with_it: Any) -> Engine:
    """The engine of an FP32 model; the masters get its values unrounded. A collective."""
    held = hold_fp32(model, resolved.compute, world)
    engine = Engine(model, resolved, world, **closed_with_it)
    attach_pieces(engine)
    start_masters(engine, held, resolved.config.model.name_or_path)
    return engine


def _require_quantisable(resolved: Resolved) -> None:
    """Raises UserError for settings of a DeepSpeed config that were not verified with a quantised base."""
    base, zero = resolved.config.adapter.base, resolved.deepspeed.get("zero_optimization", {})
    secondary = zero.get("zero_hpz_partition_size", 1)
    name = "zero_optimization.zero_hpz_partition_size"
    for key, value, verified in (("deepspeed.offload", resolved.offload, "none"), (name, secondary, 1)):
        if value != verified:
            raise UserError(f"adapter.base = {base} is not verified with {key} = {value}; set one to its default")


def _largest(world: World, values: Sequence[int]) -> list[int]:
    return [int(value) for value in world.maximum(world.numbers(values)).tolist()]


def _forward_one_micro_batch(engine: Engine, resolved: Resolved) -> None:
    """A forward pass in training, on a micro-batch of the run's shape."""
    vocabulary = engine.model.config.get_text_config().vocab_size
    shape = (resolved.batch.micro_size, resolved.config.data.sequence_length)
    inputs: dict[str, Any] = {"input_ids": torch.arange(math.prod(shape)).remainder_(vocabulary).view(shape)}
    if resolved.config.keeps_documents_apart:  # the mask needs memory as well
        inputs["position_ids"] = torch.arange(shape[1]).remainder_(max(shape[1] // 2, 1)).expand(shape)
    inputs = {name: ids.to(engine.world.device) for name, ids in inputs.items()}
    engine.deepspeed.train()
    engine.loss_path.score(inputs, inputs["input_ids"], 1.0)


@contextmanager
def _keeping_dtypes() -> Iterator[None]:
    """Context manager: tensors whose code asks for a dtype have it at ZeRO-3 as at the other stages, such as Recurrent
    Gemma's scale of embeddings, which is BF16. `zero.Init` would cast all that are made while it builds a model."""
    original = partition_parameters.zero_wrapper_for_fp_tensor_constructor

    def wrapped(make: Callable[..., torch.Tensor], *given: Any, **named: Any) -> Callable[..., torch.Tensor]:
        cast = original(make, *given, **named)

        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = cast(*args, **kwargs)
            tensor.data = tensor.data.to(kwargs.get("dtype") or tensor.dtype)
            return tensor

        return made

    with patch.object(partition_parameters, "zero_wrapper_for_fp_tensor_constructor", wrapped):
        yield


@contextmanager
def _gather_partitioned(world: World, parameters: Sequence[torch.nn.Parameter]) -> Iterator[bool]:
    with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0):
        yield world.is_main
