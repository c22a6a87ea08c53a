"""Bytes that a rank really allocates and sends, to compare the planner's formulas with."""

import gc
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig

from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.launcher import as_launched
from config.resolved import Resolved
from config.task import ENCODER_TASKS, model_class_of
from data.batches.loader import Batch
from data.batches.sequence_slices import slice_of
from launch.plan.layout import Layout, layout_of
from launch.plan.model import Shape, read_shape
from modeling.build import model_config
from training.distributed import ExpertGroup, World
from training.engine import build_engine

DEMO = ["--config", str(REPOSITORY / "config/recipes/demo.yaml")]
COLLECTIVES = {
    "all_reduce": (0, "tensor", 2),
    "broadcast": (0, "tensor", 1),
    "reduce": (0, "tensor", 1),
    "all_gather": (0, "tensor_list", 1),
    "all_gather_into_tensor": (0, "output_tensor", 1),
    "reduce_scatter": (1, "input_list", 1),
    "reduce_scatter_tensor": (1, "input", 1),
    "all_to_all_single": (1, "input", 1),
}
"""Collective to position and keyword of the tensor (or list) whose bytes count, and the share of them that a rank sends
in a ring of n ranks, as a factor on (n - 1) / n."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PLAIN = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "hidden_size": 64, "vocab_size": 100}
GATED = {**PLAIN, "intermediate_size": 160, "num_attention_heads": 4}
NO_DROPOUT = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
FAMILIES = {
    "llama": GATED | {"num_key_value_heads": 4},
    "grouped": GATED | {"num_key_value_heads": 2},
    "qwen3": GATED | {"num_key_value_heads": 2},
    "gpt2": PLAIN | NO_DROPOUT | {"num_attention_heads": 4},
}
MODEL = (
    "model.config={hidden_size: 256, intermediate_size: 704, num_hidden_layers: 4, num_attention_heads: 4, "
    "num_key_value_heads: 2, tie_word_embeddings: false}"
)
LINEAR = torch._C._nn.linear
"""The function behind `torch.nn.functional.linear`."""


def hugging_face(family: str, layers: int) -> Any:
    """The config of a tiny model without a cache."""
    config = AutoConfig.for_model("llama" if family == "grouped" else family, **FAMILIES[family])
    config.num_hidden_layers, config.use_cache = layers, False
    return config


def kept_by(model: torch.nn.Module, dtype: torch.dtype, **inputs: torch.Tensor) -> int:
    """Bytes of the distinct storages, parameters aside, that are kept for the backward pass once forward is done."""
    model = model.to(dtype).train()
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    alive: WeakSet[Any] = WeakSet()

    class Held:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor
            alive.add(self)

    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
        output = model(**inputs)
    storages = {held.tensor.untyped_storage().data_ptr(): held.tensor.untyped_storage() for held in alive}
    del output
    return sum(storage.nbytes() for address, storage in storages.items() if address not in known)


def peak_of(world: World, *, overrides: Sequence[str], vocabulary: int, steps: int = 2) -> dict[str, Any]:
    """Bytes that tensors take at most in `steps` steps, from before the model was built, and that the last one sends,
    as `counted` has them."""
    resolved, world = resolve(overrides, world)
    gc.collect()  # what an earlier engine left must not be freed while this one is measured
    # ZeRO-3 leaves a linear layer of its own behind in the process, which keeps other tensors under autocast
    with (
        patch.object(functional, "linear", LINEAR),
        patient_waits(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record,
    ):
        engine = engine_of(resolved, vocabulary, world)
        for step in range(steps):
            with counted() as sent:
                one_step(engine, batch_of(world, resolved, vocabulary), step)
    parameters = sum(parameter.numel() for parameter in engine.model.parameters())
    engine.close()
    return {"peak": max_allocated(record), "parameters": parameters, "sent": dict(sent)}


def traffic_of(
    world: World, *, overrides: Sequence[str], vocabulary: int, routed: str = "", before: bool = False
) -> dict[str, float]:
    """Bytes that leave this rank in one step that is not the first, by collective and ranks of its group.

    routed: as `route`. before: a forward pass alone comes before the first step, as an evaluation.
    """
    resolved, world = resolve(overrides, world)
    engine = engine_of(resolved, vocabulary, world)
    if routed:
        route(engine, world, routed)
    first = batch_of(world, resolved, vocabulary)
    if before:
        engine.evaluate([first])
    one_step(engine, first, 0)
    with counted() as bytes_of:
        one_step(engine, batch_of(world, resolved, vocabulary), 1)
    engine.close()
    return dict(bytes_of)


def states_of(world: World, *, overrides: Sequence[str], vocabulary: int) -> dict[str, Any]:
    """Bytes of FP32 gradients that parameters hold after a step's first backward pass, and on the host of a rank's part
    of gradients and of the weights that an offloaded update gives back."""
    resolved, world = resolve(overrides, world)
    engine = engine_of(resolved, vocabulary, world)
    held, zero, backward = [], engine.deepspeed.optimizer, engine.deepspeed.backward

    def watched(*given: Any, **options: Any) -> Any:
        result = backward(*given, **options)
        held.append(sum(size_of(getattr(parameter, "grad_accum", None)) for parameter in engine.model.parameters()))
        return result

    with patch.object(engine.deepspeed, "backward", watched):
        one_step(engine, batch_of(world, resolved, vocabulary), 0)
    gradients = [part.grad for part in zero.single_partition_of_fp32_groups]
    parts = (gradients, zero.param_buffer_of_bit16_for_cpu_offload_groups)
    engine.close()
    return {"device": held[0], "host": [sum(map(size_of, tensors)) for tensors in parts]}


def size_of(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def route(engine: Any, world: World, routed: str) -> None:
    """Choose a mixture's experts in the routers' place.

    alike: all experts in turn. rank 0: those of rank 0 for all tokens but its own, whose experts are on other ranks.
    """
    shared = world.experts
    assert shared is not None
    for module in engine.model.modules():
        if type(module).__name__.endswith("Experts"):
            module.forward = partial(_chosen, module.forward, int(module.num_experts), shared, routed)


def _chosen(
    forward: Any, own: int, shared: ExpertGroup, routed: str, hidden: torch.Tensor, index: torch.Tensor, weights: Any
) -> Any:
    turn = torch.arange(index.numel(), device=index.device).view_as(index)
    if routed == "alike":
        return forward(hidden, turn.remainder(own * shared.size), weights)
    assert routed == "rank 0"
    return forward(hidden, turn.remainder(index.shape[1]) + (own if shared.rank == 0 else 0), weights)


def resolve(overrides: Sequence[str], world: World) -> tuple[Resolved, World]:
    resolved = read_command_line([*DEMO, *overrides])
    sizes = {"sequence": resolved.batch.sequence, "tensor": resolved.batch.tensor, "expert": resolved.batch.expert}
    return resolved, world.sharing(**sizes, timeout_minutes=2)


def planned(overrides: Sequence[str], *, world: int = 2, on_cpu: bool = True) -> tuple[Shape, Layout]:
    """The planner's reading of the demo with these overrides."""
    resolved = read_command_line([*DEMO, *overrides], as_launched(world))
    layout = layout_of(resolved, world=world, on_cpu=on_cpu)
    return read_shape(resolved.config, layout), layout


def engine_of(resolved: Resolved, vocabulary: int, world: World) -> Any:
    config = resolved.config
    names = {"id2label": dict(enumerate(config.classify.labels))} if config.task == "classify" else {}
    tokens = {"pad_token_id": 0} if config.task in (*ENCODER_TASKS, "seq2seq") else {}
    tokens |= {"decoder_start_token_id": 0} if config.task == "seq2seq" else {}
    shape = model_config(
        config.model,
        vocab_size=vocabulary,
        sequence_length=config.data.longest,
        model_class=model_class_of(config),
        given=names | tokens,
    )
    return build_engine(resolved, shape, world)


def batch_of(world: World, resolved: Resolved, vocabulary: int) -> Batch:
    """Random tokens in the shape that the config gives a rank, none of them padding."""
    generator = torch.Generator().manual_seed(world.zero_rank)
    plan, sequence, task = resolved.batch, resolved.config.data.sequence_length, resolved.config.task
    samples = (plan.accumulation, plan.micro_size)
    rows = (*samples, 2) if task == "dpo" else samples
    ids = torch.randint(vocabulary, (*rows, sequence + 1), generator=generator)
    inputs, labels = ids[..., :-1].contiguous(), ids[..., 1:].contiguous()
    count, further, positions = labels.numel(), {}, None
    if task == "dpo":
        further, labels, count = {"targets": labels}, torch.zeros(samples, dtype=torch.int64), math.prod(samples)
    if task in ENCODER_TASKS:
        further = {"attention_mask": torch.ones_like(inputs)}
    if task == "classify":
        further["attention_mask"][..., -1] = 0
        labels = torch.zeros(*samples, 1, dtype=torch.int64)
    if task == "seq2seq":
        labels = torch.randint(vocabulary, (*samples, resolved.config.data.label_length), generator=generator)
        further = {"attention_mask": torch.ones_like(inputs), "decoder_input_ids": labels.clone()}
        further["attention_mask"][..., -1], count = 0, labels.numel()
    if resolved.config.keeps_documents_apart:
        positions = torch.arange(sequence).remainder(sequence // 2).expand(inputs.shape)
    batch = Batch(0, inputs, labels, np.arange(plan.global_size), count, position_ids=positions, further=further)
    share = world.sequence
    return slice_of(batch, rank=share.rank, ranks=share.size) if share else batch


def one_step(engine: Any, batch: Batch, step: int) -> None:
    outcome = engine.forward_backward(batch, step=step + 1)
    engine.step(engine.health(outcome), 1e-4)


@contextmanager
def patient_waits() -> Iterator[None]:
    """Inside, whoever waited for a collective is the last that holds its buffers, and gives them back.

    Otherwise it is, now and then, the thread of gloo that ran the collective: the profiler does not see what is freed
    there, and counts a buffer of millions of bytes on.
    """
    original = dist.Work.wait

    def wait(work: dist.Work, *arguments: Any, **options: Any) -> Any:
        result = original(work, *arguments, **options)
        time.sleep(0.002)
        return result

    with patch.object(dist.Work, "wait", wait):
        yield


def max_allocated(record: profile) -> float:
    """The most that was allocated at a time; what was there before the recording is left out, also when it is freed.

    Memory that is allocated again was freed, wherever that was.
    """
    pending, found = list(record.profiler.kineto_results.experimental_event_tree()), []
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    alive: dict[int, int] = {}
    running = most = 0
    for _, address, size in sorted(found, key=lambda item: item[0]):
        if size > 0:
            reused = [start for start, length in alive.items() if start < address + size and address < start + length]
            running -= sum(alive.pop(start) for start in reused)
            alive[address] = size
            running += size
            most = max(most, running)
        else:
            running -= alive.pop(address, 0)
    return float(most)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the bytes that leave this rank on the way to torch.distributed, which does its work.

    By collective and ranks of its group, as "all_reduce of 2"; of a ring as the benchmark counts them. Also the bytes
    that were given to exchanges of rows, "rows", with those that stay on their rank.
    """
    found: Counter[str] = Counter()

    def counting(name: str, original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            ranks = dist.get_world_size(options.get("group"))
            at, key, factor = COLLECTIVES[name]
            payload = arguments[at] if len(arguments) > at else options[key]
            tensors = payload if isinstance(payload, list | tuple) else [payload]
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            share = factor * (ranks - 1) / ranks
            splits = arguments[3] if len(arguments) > 3 else None
            if name == "all_to_all_single" and splits:
                share = 1 - splits[dist.get_rank(options.get("group"))] / max(sum(splits), 1)
                found["rows"] += size
            found[f"{name} of {ranks}"] += size * share
            return original(*arguments, **options)

        return call

    # DeepSpeed took two of them when it started
    patched = {name: counting(name, getattr(dist, name)) for name in COLLECTIVES}
    taken = {"all_gather_function": "all_gather_into_tensor", "reduce_scatter_function": "reduce_scatter_tensor"}
    with (
        patch.multiple(dist, **patched),
        patch.multiple(deepspeed.comm.comm.cdb, **{name: patched[of] for name, of in taken.items()}),
    ):
        yield found
