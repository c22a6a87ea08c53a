"""The settings of a run that decide its memory and speed: parallelism, batch, dtypes and the ZeRO section."""

from __future__ import annotations

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
"""[elements] DeepSpeed's own defaults, for keys that its JSON leaves out."""
BUFFERED_ALLREDUCE = 500_000_000
"""[elements] Gradients that DeepSpeed flattens for one all-reduce where no ZeRO bucket does (engine.py)."""


@dataclass(frozen=True)
class Layout:
    """Distribution of a run over ranks, and its dtypes."""

    config: Config
    stage: int
    world: int
    micro: int
    """[samples] Size of one forward pass."""
    accumulation: int
    sequence: int
    """[tokens] Length of a row, or of an encoder-decoder's source."""
    targets: int
    """[tokens] Length of an encoder-decoder's target; 0 for other models."""
    sharing: int
    """[ranks] Number that share each sequence."""
    tensor: int
    """[ranks] Number that share each matrix and compute the same sequences."""
    expert: int
    """[ranks] Number that share the experts of each layer; each has its own sequences."""
    rows: int
    """[sequences] Number in one sample: two for a pair of answers."""
    compute: str
    """fp32, bf16 or fp16: dtype of parameters and activations on the cast path."""
    reduced: int
    """[bytes] Size of one gradient value on the network."""
    masked: bool
    """Rows that share a sequence do not see each other, so that attention gets a mask."""
    reference_pass: bool
    """Whether each micro-batch also runs through the model without its adapter."""
    optimizer: str
    """A name of config/optimizers.py, which says what is kept beside the masters."""
    offload: str
    """none, optimizer, param or optimizer+param."""
    overlap: bool
    zero: dict[str, Any]
    """The zero_optimization section."""
    on_cpu: bool
    """Ranks run on a CPU: buffers take memory only as far as they are written, and the process itself counts."""

    @property
    def tokens(self) -> int:
        """[tokens] One rank's micro-batch: its slices, where sequences are shared; both sides of an encoder-decoder."""
        return self.micro * self.rows * slice_length(self.sequence + self.targets, self.sharing)

    @property
    def block_tokens(self) -> int:
        """[tokens] Largest part of these that one block sees."""
        longest = max(self.sequence, self.targets)
        return self.micro * self.rows * slice_length(longest, self.sharing)

    @property
    def label_tokens(self) -> int:
        """[tokens] Part of these that has logits."""
        return self.micro * self.rows * slice_length(self.targets or self.sequence, self.sharing)

    @property
    def global_size(self) -> int:
        """[samples] Size of one optimizer step."""
        return self.micro * self.accumulation * self.zero_ranks // self.sharing

    @property
    def zero_ranks(self) -> int:
        """[ranks] Number over which ZeRO partitions and averages gradients: those with the same slices of matrices."""
        return self.world // self.tensor

    @property
    def manifest(self) -> bool:
        """Whether parameters are FP32 and matmuls run in 16 bits under autocast."""
        return self.config.precision.path == "manifest"

    @property
    def checkpointing(self) -> str:
        """none, full, selective, attention, ops or budget."""
        return self.config.model.activation_checkpointing

    @property
    def passes_before(self) -> bool:
        """Whether a forward pass alone precedes the first step: a reference's, an evaluation, the tests of rows and of
        slices, the measurement for an activation budget, or one to compile."""
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

    def size(self, key: str, most: float) -> float:
        """[elements] A size of the zero_optimization section; at most `most` on a CPU: untouched memory is free."""
        given = float(self.zero.get(key, ZERO_DEFAULTS[key]))
        return min(given, most) if self.on_cpu else given

    @property
    def counting_pass(self) -> bool:
        """Whether an extra forward pass counts each expert's tokens first (docs/moe.md)."""
        model = self.config.model
        return self.accumulation > 1 and (model.balance_loss > 0 or model.router_z_loss > 0)

    @property
    def secondary(self) -> int:
        """[ranks] Number by which a second copy of the parameters is divided; 1 where there is none (hpZ)."""
        return min(int(self.zero.get("zero_hpz_partition_size", 1)), self.world) if self.stage == 3 else 1

    @property
    def bf16_optimizer(self) -> bool:
        """ZeRO-1 with BF16 runs on DeepSpeed's BF16_Optimizer, which keeps whole FP32 gradients."""
        return self.stage == 1 and self.compute == "bf16"


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
        optimizer=config.optimizer.name,
        offload=offload(resolved.deepspeed),
        overlap=bool(zero.get("overlap_comm", False)),
        zero=zero,
        on_cpu=on_cpu,
    )
