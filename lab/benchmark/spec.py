"""The work of every contestant of `lab.benchmark`, and a contestant's result, as JSON files.

The work follows from Mantissa's own config: a folder with the initial weights in FP32, an array with the token windows
of every step in Mantissa's order, the learning rate of every step, and the resolved DeepSpeed JSON. For fine-tuning,
rows or pairs of every step replace the windows (`rows`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from config.resolved import Resolved
    from data.corpora.corpus import Corpus


@dataclass(frozen=True)
class _File:
    """A dataclass of plain values, stored as JSON."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """The inverse of `write`."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Spec(_File):
    """The work of a contestant."""

    model: str
    """[path or hub id] Hugging Face model: config and initial weights."""
    attention: str
    activation_checkpointing: str
    """The run config's value; reentrant selects torch's reentrant implementation."""
    reentrant: bool
    tokens: str
    """[path] .npy, (steps, global size, sequence length + 1), in sample order; labels are the tokens shifted by one.
    For rows and pairs, the folder of `rows.write_rows`."""
    steps: int
    warm_up: int
    """[steps] Untimed steps."""
    deepspeed: dict[str, Any]
    """The resolved DeepSpeed JSON."""
    optimizer: dict[str, Any]
    """The run config's `optimizer` section."""
    offload: str
    learning_rates: list[float]
    """Learning rate of each step."""
    seed: int
    task: str = "pretrain"
    """pretrain, sft or dpo."""
    adapter: dict[str, Any] | None = None
    """The run config's `adapter` section; None: all weights are trained."""
    preference: dict[str, Any] = field(default_factory=dict)
    """The run config's `preference` section."""
    tokenizer: str = ""
    """[path] Tokenizer folder of the prepared data."""
    parameters: int = 0
    tokens_per_step: float = 0.0
    """[tokens] Size of a timed step over all ranks without padding; with rows, the mean over the timed steps."""
    flops_per_token: float | None = None
    """[FLOP] See the function `flops_per_token`; None for fine-tuning, whose steps differ."""

    @property
    def tensor(self) -> int:
        """Number of consecutive ranks that share each matrix and the sequences; 1: not shared."""
        return int(self.deepspeed.get("tensor_parallel", {}).get("autotp_size", 1))

    @property
    def micro_size(self) -> int:
        """[sequences] Size of one forward pass on one rank."""
        return self.deepspeed["train_micro_batch_size_per_gpu"]

    @property
    def accumulation(self) -> int:
        """[micro-batches] Number per rank in one step."""
        return self.deepspeed["gradient_accumulation_steps"]

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return self.deepspeed["zero_optimization"]["stage"]

    @property
    def compute(self) -> str:
        """fp32, bf16 or fp16."""
        return next((name for name in ("bf16", "fp16") if self.deepspeed.get(name, {}).get("enabled")), "fp32")


@dataclass(frozen=True)
class Result(_File):
    """A contestant's result."""

    losses: list[float]
    """[nats] Loss of every step: mean over the label tokens of the global batch."""
    stamps: list[float]
    """[seconds since the epoch] End of each step; on a GPU exact for the first, the last and the last untimed step,
    which wait for the device."""
    memory_bytes: int
    """Largest peak of any rank: device memory, or resident memory on a CPU."""
    engine: str
    """Classes and device used, as found in the process."""


def prepare_work(resolved: Resolved, folder: Path, *, warm_up: int) -> Spec:
    """Write weights and tokens into `folder`. Holds the model once in FP32 in this process's memory.

    Raises UserError if the data or the model cannot be loaded, or ranks cannot share the model's matrices.
    """
    from contextlib import nullcontext

    from lab.benchmark.rows import write_rows
    from modeling.adapter import add_adapter
    from modeling.build import attention_of, build_model, count_parameters
    from modeling.tensor_parallel import require_shareable
    from training.schedule import scheduled_rate
    from training.tasks.shape import shape_of_model
    from training.tasks.task import prepare

    config = resolved.config
    corpus = prepare(config, progress=True)
    length, steps = config.data.sequence_length, config.run.steps
    pretrains = config.task == "pretrain"
    shape = shape_of_model(config, corpus)
    if resolved.batch.tensor > 1:
        require_shareable(shape, resolved.batch.tensor)
    model = build_model(config.model, shape, seed=config.run.seed, gather=lambda _: nullcontext(True))
    if config.model.name_or_path is None:
        model.save_pretrained(folder / "weights")
    tokens = folder / ("tokens.npy" if pretrains else "rows")
    if pretrains:
        per_step = _write_windows(resolved, corpus, tokens)
    else:
        per_step = write_rows(resolved, corpus, tokens, warm_up=warm_up)
    parameters = count_parameters(model)
    model = add_adapter(model, config.adapter, seed=config.run.seed)
    return Spec(
        model=config.model.name_or_path or str(folder / "weights"),
        attention=attention_of(model),
        activation_checkpointing=config.model.activation_checkpointing,
        reentrant=config.model.checkpointing_reentrant,
        tokens=str(tokens),
        steps=steps,
        warm_up=warm_up,
        deepspeed=resolved.deepspeed,
        optimizer=asdict(config.optimizer),
        offload=resolved.offload,
        learning_rates=[scheduled_rate(config, n) for n in range(steps)],
        seed=config.run.seed,
        task=config.task,
        adapter=None if config.adapter.kind == "none" else asdict(config.adapter),
        preference=asdict(config.preference) | {"precomputed": config.precomputes_reference},
        tokenizer=str(corpus.tokenizer_folder),
        parameters=parameters,
        tokens_per_step=per_step,
        flops_per_token=flops_per_token(model, length) if pretrains else None,
    )


def _write_windows(resolved: Resolved, corpus: Corpus, path: Path) -> float:
    """Write the windows of every step as an array, in Mantissa's order; returns the tokens per step."""
    import numpy as np

    from data.corpora.sampler import sample_ids
    from data.corpora.shards import TokenShards

    length, steps, seed = resolved.config.data.sequence_length, resolved.config.run.steps, resolved.config.run.seed
    assert isinstance(corpus.train, TokenShards), "documents are windows"
    samples, size = corpus.train.sequences(length), resolved.batch.global_size
    order = [sample_ids(step, samples=samples, seed=seed, global_size=size) for step in range(steps)]
    windows = corpus.train.read(np.concatenate(order), length)
    np.save(path, windows.reshape(steps, size, length + 1).astype(np.int32))
    return float(resolved.tokens_per_step)


def flops_per_token(model: PreTrainedModel, sequence: int) -> float:
    """[FLOP] Forward and backward of one token, without recomputation.

    6 for each weight of a linear layer, a router or an expert that the router chooses, the output head included, and
    12 x layers x heads x head size x sequence for attention over the whole square (Chowdhery et al. 2022, "PaLM",
    appendix B). A frozen weight counts 4, since no matmul computes its gradient; that layers below the first trained
    one need no backward pass is not subtracted.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    from modeling.build import attention_sizes
    from modeling.expert_parallel import expert_count, used_by_token
    from precision.manifest import is_router

    config, linear = model.config.get_text_config(), 0.0
    for name, module in model.named_modules():
        if ".original_module" in name:  # of one fully trained
            continue
        multiplies = isinstance(module, torch.nn.Linear | Conv1D) or is_router(module)
        for weight in module.parameters(recurse=False):
            fused = weight.dim() == 3 and weight.shape[0] == expert_count(config)
            if fused or (multiplies and weight.dim() == 2):
                linear += (6.0 if weight.requires_grad else 4.0) * used_by_token(weight.shape, config)
    widths = [heads * size for heads, _, size in attention_sizes(config)]
    return linear + 12.0 * config.num_hidden_layers * sum(widths) / len(widths) * sequence
