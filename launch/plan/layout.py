"""The settings of a run that determine its memory and speed: parallelism, batch, dtypes and the ZeRO section."""

import math
from dataclasses import dataclass
from typing import Any

from config.batch import slice_length
from config.deepspeed.document import offload, zero_stage
from config.resolved import Resolved
from config.schema import Config

ZERO_DEFAULTS = {
    "reduce_bucket_size": 5e8,
    "stage3_max_live_parameters": 1e9,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_param_persistence_threshold": 1e5,
    "sub_group_size": 1e9,
}
"""[elements] DeepSpeed's defaults for keys that the JSON omits."""
BUFFERED_ALLREDUCE = 500_000_000
"""[elements] Gradients that DeepSpeed flattens per all-reduce where there is no ZeRO bucket (engine.py)."""


@dataclass(frozen=True)
class Layout:
    """How a run is distributed over ranks, and its dtypes."""

    config: Config
    stage: int
    world: int
    micro: int
    """[samples] Micro-batch size."""
    accumulation: int
    sequence: int
    """[tokens] Length of a row, or of the source of an encoder-decoder."""
    targets: int
    """[tokens] Length of the target of an encoder-decoder; 0 for other models."""
    sharing: int
    """[ranks] Sequence parallelism: number of ranks that share each sequence."""
    tensor: int
    """[ranks] Tensor parallelism: number of ranks that share each matrix and process the same sequences."""
    expert: int
    """[ranks] Expert parallelism: number of ranks that share the experts of each layer; each has its own sequences."""
    rows: int
    """[sequences] Number per sample: two for a pair of answers."""
    compute: str
    """fp32, bf16 or fp16: dtype of parameters and activations on the cast path."""
    reduced: int
    """[bytes] Size of one gradient value on the network."""
    masked: bool
    """Whether rows packed into one sequence are masked from each other, so that attention gets a mask."""
    reference_pass: bool
    """Whether each micro-batch also runs through the model without its adapter."""
    offload: str
    """none, optimizer, param or optimizer+param."""
    overlap: bool
    zero: dict[str, Any]
    """The zero_optimization section."""
    on_cpu: bool
    """Whether ranks run on a CPU, where unwritten buffers take no memory and the process itself counts."""

    @property
    def tokens(self) -> int:
        """[tokens] Micro-batch of one rank: its slices of shared sequences; source and target of an encoder-decoder."""
        return self.micro * self.rows * slice_length(self.sequence + self.targets, self.sharing)

    @property
    def block_tokens(self) -> int:
        """[tokens] Largest part of `tokens` that one block processes."""
        longest = max(self.sequence, self.targets)
        return self.micro * self.rows * slice_length(longest, self.sharing)

    @property
    def label_tokens(self) -> int:
        """[tokens] Part of `tokens` that has logits."""
        return self.micro * self.rows * slice_length(self.targets or self.sequence, self.sharing)

    @property
    def global_size(self) -> int:
        return self.micro * self.accumulation * self.zero_ranks // self.sharing

    @property
    def zero_ranks(self) -> int:
        """[ranks] Number over which ZeRO partitions states and averages gradients; all hold the same matrix slices."""
        return self.world // self.tensor

    @property
    def manifest(self) -> bool:
        """Whether parameters are FP32 and matmuls run in 16 bits under autocast."""
        return self.config.precision.path == "manifest"

    @property
    def checkpointing(self) -> str:
        """Kind of activation checkpointing: none, full, selective, attention, ops or budget."""
        return self.config.model.activation_checkpointing

    @property
    def passes_before(self) -> bool:
        """Whether a forward pass without backward precedes the first step: of a reference, an evaluation, the tests of
        rows and slices, the measurement for an activation budget, or for compilation."""
        config = self.config
        return bool(
            config.precomputes_reference
            or config.evaluate.at_start
            or config.keeps_documents_apart
            or config.parallel.sequence > 1
            or config.model.activation_memory_gib is not None
            or config.model.compile
        )

    @property
    def width(self) -> int:
        """[bytes] Size of one parameter."""
        return 4 if self.compute == "fp32" else 2

    def size(self, key: str, most: float = math.inf) -> float:
        """[elements] A size in the zero_optimization section; at most `most` on a CPU: untouched memory is free."""
        given = float(self.zero.get(key, ZERO_DEFAULTS[key]))
        return min(given, most) if self.on_cpu else given

    @property
    def counting_pass(self) -> bool:
        """Whether an extra forward pass counts each expert's tokens first (docs/moe.md)."""
        model = self.config.model
        return self.accumulation > 1 and (model.balance_loss > 0 or model.router_z_loss > 0)

    @property
    def secondary(self) -> int:
        """[ranks] Number that partition hpZ's second copy of the parameters; 1 if there is none."""
        return min(int(self.zero.get("zero_hpz_partition_size", 1)), self.world) if self.stage == 3 else 1

    @property
    def bf16_optimizer(self) -> bool:
        """Whether DeepSpeed's BF16_Optimizer is used (ZeRO-1 with BF16 and no offload), which keeps unpartitioned FP32
        gradients."""
        return self.stage == 1 and self.compute == "bf16" and self.offload == "none"


def layout_of(resolved: Resolved, *, world: int, on_cpu: bool) -> Layout:
    """The layout of a resolved run on `world` ranks."""
    config = resolved.config
    zero = resolved.deepspeed.get("zero_optimization", {})
    return Layout(
        config=config,
        stage=zero_stage(resolved.deepspeed),
        world=world,
        micro=resolved.batch.micro_size,
        accumulation=resolved.batch.accumulation,
        sequence=config.data.sequence_length,
        targets=config.data.label_length if config.task == "seq2seq" else 0,
        sharing=resolved.batch.sequence,
        tensor=resolved.batch.tensor,
        expert=resolved.batch.expert,
        rows=2 if config.task == "dpo" else 1,
        compute=resolved.compute,
        reduced=4 if config.precision.reduce == "fp32" or resolved.compute == "fp32" else 2,
        masked=config.keeps_documents_apart,
        reference_pass=config.task == "dpo" and config.preference.reference == "adapter_off",
        offload=offload(resolved.deepspeed),
        overlap=bool(zero.get("overlap_comm", False)),
        zero=zero,
        on_cpu=on_cpu,
    )
