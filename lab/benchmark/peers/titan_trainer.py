"""torchtitan's own Trainer on a benchmark's work: its configuration, data loader, learning rates and measurements.

Imports torchtitan, which looks for its device on import; see `titan_loop`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.configs import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3 import Llama3Model, Llama3StateDictAdapter, Llama3TransformerBlock, parallelize_llama
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer
from transformers import AutoConfig, PretrainedConfig
from transformers.utils import cached_file

from lab.benchmark.peers.common import Job
from lab.benchmark.peers.titan_terms import PARAMETERS, RESHARD, UNDECAYED, require_llama
from lab.benchmark.spec import Spec

# A weight that is never loaded makes the first loss nan.
_UNLOADED = {"weight": partial(torch.nn.init.constant_, val=math.nan)}


class Windows(BaseDataLoader):
    """The job's token windows in the form of torchtitan's own data loaders: tokens with positions, and labels."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        batches: Callable[[], Any]

    def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **_: Any) -> None:
        self._batches = config.batches
        # one document per window: attention and rotary embeddings start at its first token
        self._positions = torch.arange(seq_len).repeat(local_batch_size, 1)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for batch in self._batches():
            yield {"input": batch["input_ids"], "positions": self._positions}, batch["labels"]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing: the loader is never saved."""


class NoTokenizer(BaseTokenizer):
    """Stands in for a tokenizer: the work is already token ids."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    decode = get_vocab_size = encode


class GivenRates(LRSchedulersContainer):
    """torchtitan's container of schedulers, with the job's learning rates instead of a formula."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        of_peak: Callable[[int], float]

        def build(self, *, optimizers: OptimizersContainer, training_steps: int) -> LRSchedulersContainer:
            """torchtitan's scheduler with a given function instead of a calculated one."""
            return LRSchedulersContainer(optimizers, self.of_peak)


class Measured(Trainer):
    """torchtitan's Trainer, which reports steps to the job and keeps each micro-batch's loss without a device sync."""

    job: Job
    computed_in: set[torch.dtype]

    def forward_backward_step(self, **work: Any) -> torch.Tensor:
        """torchtitan's loss of one micro-batch: the sum over this rank's tokens over the tokens of the whole step."""
        loss = super().forward_backward_step(**work)
        # a new tensor: with CUDA graphs the next replay would overwrite the loss
        self.job.loss(loss.detach() * self.job.world_size)
        # torchtitan resets the device's peak whenever it logs, and a graph's memory shows only during capture
        self.job.note_memory()
        return loss

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        self.job.step_done()


def trainer_of(job: Job, folder: Path) -> Measured:
    """torchtitan's Trainer on the job's work. folder: for its output files."""
    trainer = Measured(trainer_config(job, folder))
    trainer.job, trainer.computed_in = job, set()
    block = next(iter(trainer.model_parts[0].layers.values()))
    linear = next(module for module in block.modules() if isinstance(module, Linear))
    linear.register_forward_pre_hook(lambda module, _: trainer.computed_in.add(module.weight.dtype))
    if not job.on_cuda:
        for unit in trainer.model_parts[0].modules():
            if isinstance(unit, FSDPModule):
                unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum, and the factor here is 1
    return trainer


def trainer_config(job: Job, folder: Path) -> Trainer.Config:
    """The work as torchtitan's configuration; everything else is its default."""
    spec, world = job.spec, job.world_size
    shape = AutoConfig.from_pretrained(spec.model)
    weights = cached_file(spec.model, "config.json")
    assert weights is not None
    # its default, spmd_types, needs a later torch: FSDP2 of 2.13 rejects parameters with such annotations
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor", fsdp_reshard_after_forward=RESHARD[spec.stage])
    if spec.stage == 0:
        parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree = world, 1
    length = job.sequence_length
    return Trainer.Config(
        model_spec=ModelSpec(
            name="llama3",
            flavor=spec.model,
            model=model_of(shape, length=length, on_cuda=job.on_cuda),
            parallelize_fn=parallelize_llama,
            pipelining_fn=None,
            post_optimizer_build_fn=None,
            state_dict_adapter=Llama3StateDictAdapter,
        ),
        dump_folder=str(folder),
        hf_assets_path=str(Path(weights).parent),
        tokenizer=NoTokenizer.Config(),
        dataloader=Windows.Config(batches=job.loader),
        # in the chunks of its own recipes, if they divide the sequence
        loss=ChunkedLossWrapper.Config(
            num_chunks=math.gcd(ChunkedLossWrapper.Config().num_chunks, length),
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=shape.vocab_size),
        ),
        optimizer=optimizer_of(spec),
        lr_scheduler=GivenRates.Config(of_peak=job.rate_of_peak),
        training=TrainingConfig(
            local_batch_size=spec.micro_size,
            global_batch_size=spec.micro_size * spec.accumulation * world,
            seq_len=length,
            max_norm=spec.deepspeed.get("gradient_clipping") or math.inf,
            steps=spec.steps,
            mixed_precision_param=PARAMETERS[spec.compute],
            disable_cuda_graphs=not job.on_cuda,
        ),
        parallelism=parallelism,
        compile=CompileConfig(enable=job.compiled),
        checkpoint=CheckpointManager.Config(enable=True, load_only=True, initial_load_in_hf=True),
        activation_checkpoint=FullAC.Config() if spec.activation_checkpointing == "full" else None,
        debug=DebugConfig(seed=spec.seed),
    )


def optimizer_of(spec: Spec) -> OptimizersContainer.Config:
    """torchtitan's fused AdamW, which does not decay norms, biases and embeddings."""
    section = spec.optimizer
    options = {"lr": section["learning_rate"], "betas": tuple(section["betas"]), "eps": section["eps"]}
    decays = ((UNDECAYED, 0.0), (".*", section["weight_decay"]))  # the first matching pattern wins
    given = [(pattern, {**options, "weight_decay": decay}) for pattern, decay in decays]
    groups = [ParamGroupConfig(pattern=each, optimizer_name="AdamW", optimizer_kwargs=kwargs) for each, kwargs in given]
    return OptimizersContainer.Config(param_groups=groups)


def model_of(shape: PretrainedConfig, *, length: int, on_cuda: bool) -> Llama3Model.Config:
    """torchtitan's Llama, with queries, keys and values from one matmul as in all its sizes.

    length: [tokens] of a sequence. Attention is its default, FlexAttention, on a GPU. On a CPU, where that lacks a
    backward pass, it is SDPA without a mask, since every window is one document.
    """

    rope = require_llama(shape)

    def norm() -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=shape.hidden_size, eps=shape.rms_norm_eps, param_init=_UNLOADED)

    def block() -> Llama3TransformerBlock.Config:
        return Llama3TransformerBlock.Config(
            attention_norm=norm(),
            ffn_norm=norm(),
            attention=make_gqa_config(
                dim=shape.hidden_size,
                n_heads=shape.num_attention_heads,
                n_kv_heads=shape.num_key_value_heads,
                head_dim=shape.head_dim,
                wqkv_param_init=_UNLOADED,
                wo_param_init=_UNLOADED,
                inner_attention=get_attention_config("flex") if on_cuda else ScaledDotProductAttention.Config(),
                fuse_qkv=True,
                rope=ComplexRoPE.Config(dim=shape.head_dim, max_seq_len=length, **rope),
            ),
            feed_forward=make_ffn_config(
                dim=shape.hidden_size,
                hidden_dim=shape.intermediate_size,
                w1_param_init=_UNLOADED,
                w2w3_param_init=_UNLOADED,
            ),
        )

    return Llama3Model.Config(
        dim=shape.hidden_size,
        vocab_size=shape.vocab_size,
        enable_weight_tying=shape.tie_word_embeddings,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab_size,
            embedding_dim=shape.hidden_size,
            param_init={"weight": skip_param_init} if shape.tie_word_embeddings else _UNLOADED,
        ),
        norm=norm(),
        lm_head=Linear.Config(in_features=shape.hidden_size, out_features=shape.vocab_size, param_init=_UNLOADED),
        layers=[block() for _ in range(shape.num_hidden_layers)],
    )


def trained_with(trainer: Measured) -> str:
    """A description of the trained model. A collective. Raises RuntimeError if it is not what the work requires."""
    job, model = trainer.job, trainer.model_parts[0]
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    parameters = list(model.parameters())
    if not units or not all(isinstance(each, DTensor) and each.dtype == torch.float32 for each in parameters):
        raise RuntimeError(f"this loop should train FP32 shards with FSDP2 and has {units} FSDP units")
    here = torch.tensor(sum(each.to_local().numel() for each in parameters), device=job.device)
    torch.distributed.all_reduce(here)
    share = int(here) / sum(each.numel() for each in parameters)
    if share != (job.world_size if job.spec.stage == 0 else 1):
        raise RuntimeError(f"ZeRO-{job.spec.stage}: the ranks hold {share:g} times the parameters")
    wanted = getattr(torch, PARAMETERS[job.spec.compute])
    if trainer.computed_in != {wanted}:
        raise RuntimeError(f"{job.spec.compute}: it computed in {sorted(map(str, trainer.computed_in))}")
    optimizers = {type(optimizer).__name__ for optimizer in trainer.optimizers}
    words = [f"torchtitan's {Trainer.__name__}", f"{units} FSDPModules", *sorted(optimizers), str(wanted)]
    if job.compiled:
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        modules = sum(module._compiled_call_impl is not None for module in model.modules())
        if not graphs or not modules:
            raise RuntimeError(f"it should be compiled and has {modules} compiled modules and {graphs} graphs")
        words.append(f"{modules} compiled modules in {graphs} graphs")
    return ", ".join([*words, str(job.device)])
