"""Memory of the loss: logits and tensors derived from them, by objective; and memory of samplers and a teacher."""

from config.schema import SAMPLING_TASKS
from launch.plan.layout import ZERO_DEFAULTS, Layout
from launch.plan.model import Shape
from modeling import log_probs
from modeling.chunked_head import loss_chunk
from modeling.objectives import divergence

_DIVERGENCE_TENSORS = {"forward_kl": 7, "reverse_kl": 8, "jsd": 11}
"""[FP32 tensors] Peak number per chunk of logits while its divergence from a live teacher is recomputed and
differentiated; counted with the profiler, as in tests/launch/plan/test_tasks.py."""
_CACHED_TENSORS = 7
"""[FP32 tensors] Peak number with cached teacher answers, for any divergence."""


def loss_bytes(shape: Shape, layout: Layout) -> float:
    """[bytes] Peak size of logits and tensors derived from them."""
    logits, width = float(shape.vocabulary * layout.label_tokens), layout.width
    if layout.config.task == "classify":
        return 0.0  # at most one or two values per token
    if layout.config.task in ("dpo", "grpo"):
        # logits and their gradient, plus a chunk in FP32, and a widened copy of it if logits are in 16 bits
        return 2 * width * logits + (8 if width == 2 else 4) * min(logits, log_probs.CHUNK_VALUES)
    if layout.config.task in ("distill", "opd"):
        return _distillation(shape, layout)
    return _label_prediction(shape, layout)


def _label_prediction(shape: Shape, layout: Layout) -> float:
    """[bytes] Memory of a loss over labels.

    Unchunked: logits in their own dtype, their FP32 log-softmax and its gradients; at most three FP32 tensors of
    vocabulary width. Chunked: a chunk's FP32 logits, overwritten by their gradient, plus that gradient in 16 bits (only
    the latter if one kernel computes both); the gradient of a trained head's weight, in FP32 and, once summed, in the
    dtype of the weight; and the gradient of the hidden states.
    """
    tokens = layout.label_tokens
    chunk = loss_chunk(layout.config.model, tokens=tokens, vocabulary=shape.vocabulary, on_cpu=layout.on_cpu)
    chunk = min(chunk, tokens)
    if not chunk or not shape.plain_head:
        return 12.0 * shape.vocabulary * tokens
    sixteen, rows = layout.manifest or layout.width == 2, shape.vocabulary / shape.head_share
    head = rows * shape.hidden if shape.trained_head else 0.0
    fused = runs_fused(shape, layout)
    of_chunk = (2.0 if sixteen and fused else 6.0 if sixteen else 4.0) * rows * chunk
    copy = 2.0 * rows * shape.hidden if layout.manifest else 0.0  # autocast's copy of the weight
    rounded = 2.0 * head if layout.width == 2 else 0.0
    return 4.0 * head + max(of_chunk + copy, rounded) + layout.width * shape.hidden * tokens


def runs_fused(shape: Shape, layout: Layout) -> bool:
    """Whether one kernel computes both the softmax of a chunk and its gradient (modeling/loss_kernel.py)."""
    return not (layout.on_cpu or layout.config.model.kernels == "torch" or shape.head_share > 1)


def _distillation(shape: Shape, layout: Layout) -> float:
    """[bytes] The student's logits, the gradient of finished chunks, the teacher's answers, and a chunk in FP32."""
    logits, width = float(shape.vocabulary * layout.tokens), layout.width
    chunk = min(logits, divergence.CHUNK_VALUES)
    known, tensors = (8 * layout.config.distill.top_k + 4) * float(layout.tokens), _CACHED_TENSORS
    if shape.teacher is not None:
        known = shape.teacher.width * logits
        tensors = _DIVERGENCE_TENSORS[layout.config.distill.loss] + (width == 2)  # widened first
    return known + width * (2 * logits - chunk) + 4 * tensors * chunk


def sampler_bytes(shape: Shape, layout: Layout) -> float:
    """[bytes] Size of the weight copies used for sampling answers and as the reference of the KL divergence. Frozen
    weights are copied only at ZeRO-3."""
    config = layout.config
    if config.task not in SAMPLING_TASKS:
        return 0.0
    copies = 2 if config.grpo.beta and config.adapter.kind == "none" else 1
    return float(copies * layout.width * (shape.parameters if layout.stage == 3 else shape.trained_parameters))


def sampling_moments(shape: Shape, layout: Layout) -> dict[str, dict[str, float]]:
    """Moments before a step's forward pass at which answers are sampled and measured, to the memory they add, by item.
    A vLLM server has its own KV cache, outside this process. The self-gap is measured with the copy, in FP32."""
    section, whole = layout.config.grpo, sampler_bytes(shape, layout)
    if not whole:
        return {}
    rows = min(section.at_once, layout.micro * layout.accumulation) if section.engine != "vllm" else 0
    cache = 2.0 * layout.width * shape.layers * shape.widths()[1] * layout.sequence * rows
    widened = 4.0 * shape.parameters if layout.width == 2 else 0.0
    return {
        # logits, their log-softmax, and its exponential and sums in FP64
        "the sampling of answers": {"KV cache": cache, "logits": 24.0 * shape.vocabulary * rows},
        "the self-gap": {"sampler": whole + widened, "logits": 4.0 * shape.vocabulary * layout.tokens},
    }


def teacher_bytes(shape: Shape, layout: Layout) -> float:
    """[bytes] Size of the teacher's weights on one rank: all, or if sharded its partition plus what is gathered."""
    if shape.teacher is None:
        return 0.0
    whole = float(shape.teacher.width * shape.teacher.shape.parameters)
    if not layout.config.distill.sharded:
        return whole
    return whole / layout.zero_ranks + min(whole, shape.teacher.width * ZERO_DEFAULTS["stage3_max_live_parameters"])
