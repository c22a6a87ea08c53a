"""The settings of a run that decide its memory and speed: parallelism, batch, dtypes and the ZeRO section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from config.batch import slice_length
from config.deepspeed.document import offload, zero_stage
from config.optimizers import OPTIMIZERS, OptimizerSpec
from config.resolved import Resolved
from config.schema import DistillSection, ModelSection

ZERO_DEFAULTS = {
    "reduce_bucket_size": 5e8,
    "stage3_max_live_parameters": 1e9,
    "stage3_prefetch_bucket_size": 5e7,
    "sub_group_size": 1e9,
}
"""[elements] DeepSpeed's own defaults, for keys that its JSON leaves out."""
BUFFERED_ALLREDUCE = 500_000_000
"""[elements] DeepSpeed flattens so many gradients for one all-reduce where no ZeRO bucket does (engine.py)."""


@dataclass(frozen=True)
class Layout:
    """How a run is spread over ranks, and in which dtypes."""

    stage: int
    world: int
    micro: int
    """[samples] In one forward pass."""
    accumulation: int
    sequence: int
    """[tokens]"""
    sharing: int
    """[ranks] That share each sequence."""
    rows: int
    """[sequences] Of one sample: two of a pair of answers."""
    compute: str
    """fp32, bf16 or fp16: dtype of parameters and activations on the cast path."""
    manifest: bool
    """FP32 parameters whose matmuls run in 16 bits under autocast."""
    reduced: int
    """[bytes] Of one gradient value on the network."""
    checkpointing: str
    """none, full, selective, attention, ops or budget."""
    attention: str
    masked: bool
    """Rows that share a sequence do not see each other, so that attention gets a mask."""
    task: str
    reference_pass: bool
    """Each micro-batch also runs through the model without its adapter."""
    distill: DistillSection
    """What a student is held to."""
    model: ModelSection
    """Says whether the loss is computed in chunks."""
    optimizer: OptimizerSpec
    """Says what is kept beside the masters."""
    bf16_matrices: bool
    """Whole matrices are orthogonalized in BF16."""
    split_masters: bool
    """FP32 masters are held as 16-bit weights and remainders."""
    offload: str
    """none, optimizer, param or optimizer+param."""
    overlap: bool
    zero: dict[str, Any]
    """The zero_optimization section."""
    on_cpu: bool
    """Buffers take memory only as far as they are written, and the process itself counts."""
    background_save: bool
    """Checkpoints are written from a copy in host memory."""
    saves_between: bool
    """Checkpoints are written during training, not only at its end."""

    @property
    def tokens(self) -> int:
        """[tokens] Of one rank in one micro-batch: of its slices, where sequences are shared."""
        return self.micro * self.rows * slice_length(self.sequence, self.sharing)

    @property
    def global_size(self) -> int:
        """[samples] In one optimizer step."""
        return self.micro * self.accumulation * self.world // self.sharing

    @property
    def width(self) -> int:
        """[bytes] Of one parameter."""
        return 4 if self.compute == "fp32" else 2

    def size(self, key: str, most: float) -> float:
        """[elements] A size of the zero_optimization section; at most `most` on a CPU: untouched memory is free."""
        given = float(self.zero.get(key, ZERO_DEFAULTS[key]))
        return min(given, most) if self.on_cpu else given

    @property
    def secondary(self) -> int:
        """[ranks] That a second copy of the parameters is divided by; 1 where there is none (hpZ)."""
        return min(int(self.zero.get("zero_hpz_partition_size", 1)), self.world) if self.stage == 3 else 1

    @property
    def bf16_optimizer(self) -> bool:
        """ZeRO-1 with BF16 runs on DeepSpeed's BF16_Optimizer, which keeps whole FP32 gradients."""
        return self.stage == 1 and self.compute == "bf16"


def layout_of(resolved: Resolved, *, world: int, on_cpu: bool) -> Layout:
    """The layout of a resolved run on `world` ranks."""
    config = resolved.config
    zero = resolved.deepspeed.get("zero_optimization", {})
    kept_on_host = offload(resolved.deepspeed)
    return Layout(
        stage=zero_stage(resolved.deepspeed),
        world=world,
        micro=resolved.batch.micro_size,
        accumulation=resolved.batch.accumulation,
        sequence=config.data.sequence_length,
        sharing=resolved.batch.sequence,
        rows=2 if config.task == "dpo" else 1,
        compute=resolved.compute,
        manifest=config.precision.path == "manifest",
        reduced=4 if config.precision.reduce == "fp32" or resolved.compute == "fp32" else 2,
        checkpointing=config.model.activation_checkpointing,
        attention=config.model.attention,
        masked=config.keeps_documents_apart,
        task=config.task,
        reference_pass=config.task == "dpo" and config.preference.reference == "adapter_off",
        distill=config.distill,
        model=config.model,
        optimizer=OPTIMIZERS[config.optimizer.name],
        bf16_matrices=config.optimizer.orthogonalization == "bf16",
        split_masters=config.precision.masters == "split",
        offload=kept_on_host,
        overlap=bool(zero.get("overlap_comm", False)),
        zero=zero,
        on_cpu=on_cpu,
        background_save=config.checkpoint.background == "always"
        or (config.checkpoint.background == "auto" and kept_on_host == "none"),
        saves_between=config.checkpoint.every_steps > 0,
    )
