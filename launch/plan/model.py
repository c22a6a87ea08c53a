"""Sizes of the model described by a run config, without loading weights, and of its teacher, if any."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accelerate import init_empty_weights
from transformers import AutoConfig, AutoTokenizer

from config.errors import UserError, one_line
from config.schema import AdapterSection, Config, ModelSection, OptimizerSection
from config.task import CAUSAL_LM, ENCODER_TASKS, model_class_of
from data.text.tokenizer import ENCODER_TOKENS, SMALLEST_BPE, is_made, vocabulary_size
from launch.plan.counted import Counted, count_activations
from launch.plan.layout import Layout
from modeling.activation_checkpointing import blocks_of
from modeling.adapter import add_adapter, head_weights
from modeling.build import attention_sizes, empty_model
from modeling.expert_parallel import expert_count, require_shareable_experts, share_experts, used_by_token
from modeling.parameter_groups import parameter_groups
from modeling.tensor_parallel import cut
from training.tasks.shape import empty_model_of


@dataclass(frozen=True)
class Group:
    """Trained parameters that the optimizer updates together (`modeling.parameter_groups`)."""

    matrix: bool
    """Whether these are hidden matrices with their own update rule."""
    parameters: int
    largest: int
    """[elements] Size of its largest tensor."""
    shared: int = 1
    """[ranks] Number that share these experts, each holding a part."""
    sides: tuple[int, int] = (1, 1)
    """[elements] (shorter, longer) side of its largest matrix, of a single fused expert; (1, 1) unless `matrix`."""


@dataclass(frozen=True)
class Stored:
    """One parameter as a rank stores it."""

    elements: int
    """[elements] Half the number of weights if a byte holds two of them."""
    width: int | None = None
    """[bytes] Size of an element; None means that of a float."""
    shared: bool = False
    """Whether it belongs to experts shared among ranks."""


@dataclass(frozen=True)
class Teacher:
    shape: Shape
    width: int
    """[bytes] Size of one parameter."""


@dataclass(frozen=True)
class Codes:
    """Sizes of the quantised layers of a frozen base (`adapter.base`).

    NF4 has one scale per 64 weights (Dettmers et al. 2023, QLoRA); `double_quant` stores these scales in 8 bits, with
    one FP32 scale per 256 of them. int8 has one scale per row.
    """

    parameters: int
    """[parameters] Number of weights that the codes represent."""
    codes: float
    """[bytes] Size of the codes, which stage 3 divides among ranks."""
    scales: float
    """[bytes] Size of the scales, which every rank holds in full."""
    largest: int
    """[parameters] Size of the largest layer, whose weights are dequantised while it computes."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that determine memory, traffic and FLOPs."""

    architecture: str
    parameters: int
    """[parameters] Total number, counting shared ones once and including an adapter's."""
    trained_parameters: int
    """[parameters] Number with masters, moments and gradients: all, or those of an adapter."""
    largest_trained: int
    """[elements] Size of the largest trained tensor."""
    trained_block: int
    """[parameters] Trained parameters of the largest transformer block."""
    matmul_parameters: int
    """[parameters] Number used in matmuls per token: includes the head and the experts chosen for the token, excludes
    embeddings that are only looked up."""
    trained_matmul: int
    """[parameters] Trained part of `matmul_parameters`, which needs one more matmul in the backward pass."""
    groups: tuple[Group, ...]
    modules: tuple[tuple[Stored, ...], ...]
    """Own parameters of each module that has any, counting shared ones once."""
    layers: int
    hidden: int
    intermediate: int
    attentions: tuple[tuple[int, int, int], ...]
    """Heads of queries, heads of keys and [elements] head size of each block; one entry if all blocks are alike."""
    vocabulary: int
    plain_head: bool
    """Whether logits come from a plain linear layer, so that the loss may be computed in chunks."""
    trained_head: bool
    """Whether that layer is trained."""
    attention: str = "sdpa"
    """Attention implementation of transformers."""
    counted: Counted | None = None
    """Activations that the model keeps; None for a teacher, which keeps none."""
    teacher: Teacher | None = None
    """Teacher that runs in every micro-batch."""
    codes: Codes | None = None
    """Frozen layers in 4 or 8 bits; None if all weights are floats."""
    counted_attention: float | None = None
    """[FLOP] Attention matmuls per token of an encoder-decoder, for which there is no formula."""
    slice: Shape | None = None
    """Part of the model on one rank, with tensor or expert parallelism; else None."""
    trained_by_all: int = 0
    """[parameters] Number trained by all expert-parallel ranks together, partitioned by ZeRO; 0 without them."""
    expert_parameters: int = 0
    """[parameters] Size of this rank's experts, with expert parallelism."""
    expert_layers: int = 0
    """[layers] Number with such experts."""
    experts: int = 0
    """[experts] Number per such layer, on all ranks together."""
    experts_per_token: int = 0
    columns: int = 0
    """[layers] Column-parallel ones per block (weight rows are split); gradients of their inputs are all-reduced."""
    rows: int = 0
    """[layers] Row-parallel ones per block (weight columns are split); their outputs are all-reduced."""
    head_share: int = 1
    """[ranks] Number that split the head's rows: logits are gathered, or the sums of the softmax are all-reduced."""

    @property
    def own(self) -> Shape:
        """Sizes of the part of the model that one rank computes with."""
        return self.slice or self

    def weight_bytes(self, width: int, *, ranks: int = 1) -> float:
        """[bytes] Size of the weights on one of `ranks` that partition them. width: [bytes] of a float."""
        if self.codes is None:
            return width * self.parameters / ranks
        floats = width * (self.parameters - self.codes.parameters)
        return (floats + self.codes.codes) / ranks + self.codes.scales

    @property
    def divided(self) -> int:
        """[parameters] Number with masters and optimizer state, which ZeRO partitions equally."""
        return self.trained_by_all or self.trained_parameters

    @property
    def hidden_matrix_parameters(self) -> int:
        """[parameters] Trained parameters of matrices other than embeddings and head, which Muon updates."""
        return sum(group.parameters for group in self.groups if group.matrix)

    @property
    def has_adapter(self) -> bool:
        """Whether some parameters are frozen."""
        return self.trained_parameters < self.parameters

    def attention_flops(self, sequence: int) -> float:
        """[FLOP] Attention matmuls of one token in the forward pass, over all blocks and the full square."""
        if self.counted_attention is not None:
            return self.counted_attention
        return 4.0 * self.layers * self.widths()[0] * sequence

    def widths(self, sharing: int = 1) -> tuple[float, float]:
        """[elements] Size of a token's queries and of its keys, on average over blocks, with heads repeated so that
        they divide evenly among `sharing` ranks."""
        blocks = [[math.lcm(heads, sharing) * size for heads in counts] for *counts, size in self.attentions]
        queries, keys = (sum(sizes) / len(sizes) for sizes in zip(*blocks, strict=True))
        return queries, keys

    def forward_flops(self, sequence: int) -> float:
        """[FLOP] Forward pass of one token: 2 per parameter in a matmul, plus attention."""
        return 2.0 * self.matmul_parameters + self.attention_flops(sequence)

    def flops_per_token(self, sequence: int) -> float:
        """[FLOP] Forward and backward pass of one token, without recomputation.

        6 per trained parameter in a matmul, 4 per frozen one, and 12 x layers x heads x head size x sequence for
        attention over the full square, as in Chowdhery et al. 2022 (PaLM), appendix B; a causal kernel does half.
        """
        return 4.0 * self.matmul_parameters + 2.0 * self.trained_matmul + 3.0 * self.attention_flops(sequence)


def model_of(config: Config) -> Any:
    """The model to train, on the meta device and without its adapter. Raises UserError for a rejected config."""
    return empty_model_of(config, _vocabulary(config) if config.model.name_or_path is None else 0)


def adapted_model_of(config: Config) -> Any:
    """The model to train, on the meta device and with its adapter, if any. Raises UserError for a rejected config."""
    model = model_of(config)
    with init_empty_weights(include_buffers=False):
        return add_adapter(model, config.adapter, seed=0, model_class=model_class_of(config))


def _vocabulary(config: Config) -> int:
    """[tokens] Size of the vocabulary, from the config or the tokenizer. Raises UserError."""
    name = config.data.tokenizer
    if "vocab_size" in config.model.config:
        return int(config.model.config["vocab_size"])
    if is_made(name):
        own = SMALLEST_BPE if name == "bytes" else int(name.removeprefix("bpe:"))
        # the tokenizer of an encoder has extra tokens, that of an encoder-decoder a padding token
        return own + (len(ENCODER_TOKENS) if config.task in ENCODER_TASKS else config.task == "seq2seq")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(Path(name).expanduser()), trust_remote_code=False)
        return vocabulary_size(tokenizer)
    except Exception as error:  # the hub, a gated repository or a bad file may raise anything
        raise UserError(
            f"data.tokenizer = {name}: cannot be loaded here to count its tokens; "
            f"add model.config.vocab_size=N to the command line ({type(error).__name__})"
        ) from error


def read_shape(config: Config, layout: Layout) -> Shape:
    """The sizes of the model in `config`. Takes seconds; needs no weights, and no network for a model from scratch.
    Raises UserError if the model is unknown, rejected or cannot run without values."""
    model = model_of(config)
    shape = sizes_of(model, config.adapter, config.optimizer, model_class=model_class_of(config))
    if layout.tensor > 1:
        own = _slice(model, shape, config.optimizer, ranks=layout.tensor)
        return replace(shape, slice=replace(own, counted=count_activations(model, layout)))
    # with expert parallelism and balanced experts, a rank receives as many tokens as it sends
    shape = replace(shape, counted=count_activations(model, layout))
    if layout.expert > 1:
        own = _with_experts_shared(model, shape, config.optimizer, ranks=layout.expert)
        return replace(shape, slice=replace(own, counted=shape.counted))
    if config.distill.teacher is not None and not config.distill.top_k:
        shape = replace(shape, teacher=_teacher(config, vocabulary=shape.vocabulary))
    if not layout.targets:
        return shape
    assert shape.counted is not None
    used = shape.counted.weight_flops / 2  # each token passes only the encoder's or only the decoder's weights
    trained = used * shape.trained_matmul / shape.matmul_parameters
    flops = shape.counted.attention_flops
    return replace(shape, matmul_parameters=round(used), trained_matmul=round(trained), counted_attention=flops)


def _slice(model: Any, whole: Shape, optimizer: OptimizerSection, *, ranks: int) -> Shape:
    """Sizes of one rank's slice under tensor parallelism. model: on the meta device, modified in place.

    Matrices are split by transformers' tp_plan, as in DeepSpeed. Raises UserError for a model without one, which
    DeepSpeed splits by the names of its layers.
    """
    plan = getattr(model, "tp_plan", None) or {}
    if not plan:
        problem = f"launch.plan does not know how model {whole.architecture} is cut: transformers has no tp_plan for it"
        raise UserError(f"parallel.tensor = {ranks}: {problem}; set it to 1")
    head, found = model.get_output_embeddings(), {"colwise": 0, "rowwise": 0}
    block = dict(blocks_of(model)[0].named_modules())
    cut_head = False
    for name, module in list(model.named_modules()):
        style = next((kind for pattern, kind in plan.items() if fnmatchcase(name, f"*{pattern}")), "")
        kind, tied = style.partition("_")[0], id(getattr(module, "weight", None)) in _tables(model)
        if kind not in found or type(module).__name__ != "Linear" or tied:
            continue
        found[kind] += any(module is item for item in block.values())
        cut_head = cut_head or module is head
        _cut(module, ranks, by_rows=kind == "colwise")
    own = sizes_of(model, AdapterSection(), optimizer)
    return replace(
        own,
        attentions=tuple((heads // ranks, keys // ranks, size) for heads, keys, size in whole.attentions),
        intermediate=whole.intermediate // ranks,
        columns=found["colwise"],
        rows=found["rowwise"],
        head_share=ranks if cut_head else 1,
    )


def _with_experts_shared(model: Any, whole: Shape, optimizer: OptimizerSection, *, ranks: int) -> Shape:
    """Sizes of one rank's part under expert parallelism. model: modified in place. Raises UserError."""
    require_shareable_experts(model.config, ranks)
    layers = share_experts(model, SimpleNamespace(rank=0, size=ranks), "experts")
    own = sizes_of(model, AdapterSection(), optimizer)
    text = model.config.get_text_config()
    return replace(
        own,
        groups=tuple(_groups(model, optimizer, ranks=ranks)),
        trained_by_all=whole.trained_parameters,
        expert_parameters=sum(tensor.elements for module in own.modules for tensor in module if tensor.shared),
        expert_layers=layers,
        experts=expert_count(text) or 0,
        experts_per_token=int(getattr(text, "num_experts_per_tok", None) or 1),
    )


def _cut(layer: Any, ranks: int, *, by_rows: bool) -> None:
    """Shrink a linear layer's parameters to one rank's slice."""
    for name in ("weight", "bias"):
        whole = getattr(layer, name)
        if whole is not None and (by_rows or name == "weight"):
            size = list(whole.shape)
            size[0 if by_rows else 1] //= ranks
            setattr(layer, name, type(whole)(whole.detach().new_empty(size)))


def sizes_of(
    model: Any, adapter: AdapterSection, optimizer: OptimizerSection, *, model_class: str = CAUSAL_LM
) -> Shape:
    """The sizes of a model on the meta device, to which the adapter is added. Raises UserError if it does not fit."""
    text, blocks = model.config.get_text_config(), blocks_of(model)
    if not blocks:
        raise UserError(f"model.architecture = {model.config.model_type}: has no blocks to plan for")
    block = max(blocks, key=lambda one: sum(item.numel() for item in one.parameters()))
    hidden = text.hidden_size
    looked_up, codes = _embeddings(model), codes_of(model, adapter)
    coded = {id(layer.weight) for layer in coded_layers(model, adapter)}
    with init_empty_weights(include_buffers=False):
        add_adapter(model, adapter, seed=0, model_class=model_class)
    looked_up |= _embeddings(model)
    parameters = {name: (item, item.numel()) for name, item in model.named_parameters()}
    # a fully trained module keeps an unused copy of its original
    used = {name: item for name, item in parameters.items() if ".original_module." not in name}
    matmuls = [
        (item, used_by_token(how.whole(item.shape) if (how := cut(item)) else item.shape, text))
        for item, _ in used.values()
        if id(item) not in looked_up
    ]
    inside = list(block.parameters())
    trained = [size for item, size in parameters.values() if item.requires_grad]
    head = model.get_output_embeddings()
    plain = type(head).__name__ == "Linear" and type(head).__module__.startswith("torch.")
    return Shape(
        architecture=model.config.model_type,
        parameters=sum(size for _, size in parameters.values()),
        trained_parameters=sum(trained),
        largest_trained=max(trained),
        trained_block=sum(item.numel() for item in inside if item.requires_grad),
        matmul_parameters=sum(size for _, size in matmuls),
        trained_matmul=sum(size for item, size in matmuls if item.requires_grad),
        groups=tuple(_groups(model, optimizer)),
        modules=tuple(_modules(model, coded, halved=adapter.base == "nf4")),
        layers=len(blocks),
        hidden=hidden,
        intermediate=next((size for name in _INTERMEDIATE if (size := getattr(text, name, None))), 4 * hidden),
        attentions=attention_sizes(text),
        vocabulary=text.vocab_size,
        plain_head=plain,
        trained_head=plain and head.weight.requires_grad,
        attention=str(model.config._attn_implementation),
        codes=codes,
    )


_BLOCK, _SCALES = 64, 256
"""[weights] Number per scale, and [scales] number per scale of scales."""


def coded_layers(model: Any, section: AdapterSection) -> list[Any]:
    """Layers to quantise in a model without its adapter: linear ones, except the head and fully trained modules."""
    head = model.get_output_embeddings()
    return [
        module
        for name, module in model.named_modules()
        if section.base != "compute"
        and type(module).__name__ in ("Linear", "Conv1D")
        and module is not head
        and not any(name.endswith(one) for one in section.modules_to_save)
    ]


def codes_of(model: Any, section: AdapterSection) -> Codes | None:
    """Sizes of `coded_layers`; None if the base is not quantised."""
    if section.base == "compute":
        return None
    shapes = [
        # GPT-2's weights are (inputs, outputs) and are transposed before quantisation
        tuple(layer.weight.shape[:: -1 if type(layer).__name__ == "Conv1D" else 1])
        for layer in coded_layers(model, section)
    ]
    sizes = [math.prod(shape) for shape in shapes]
    blocks = sum(math.ceil(size / _BLOCK) for size in sizes)
    rows = sum(shape[0] for shape in shapes)
    if section.base == "int8":
        codes, scales = float(sum(sizes)), 4.0 * rows
    elif section.double_quant:
        codes, scales = sum(sizes) / 2, blocks + 4.0 * sum(math.ceil(size / _BLOCK / _SCALES) for size in sizes)
    else:
        codes, scales = sum(sizes) / 2, 4.0 * blocks
    return Codes(sum(sizes), codes, scales, max(sizes, default=0))


def _modules(model: Any, coded: set[int], *, halved: bool) -> Iterator[tuple[Stored, ...]]:
    """Parameters by module. coded: ids of quantised ones, stored as bytes. halved: whether a byte holds two weights."""
    seen: set[int] = set()
    for module in model.modules():
        own = [item for item in module.parameters(recurse=False) if id(item) not in seen]
        seen |= {id(item) for item in own}
        if own:
            yield tuple(
                Stored(-(-item.numel() // 2) if halved else item.numel(), 1)
                if id(item) in coded
                else Stored(item.numel(), shared=cut(item) is not None)
                for item in own
            )


def _embeddings(model: Any) -> set[int]:
    """ids of embedding weights, except one that is tied to the head."""
    return _tables(model) - head_weights(model)


def _tables(model: Any) -> set[int]:
    """ids of embedding weights."""
    return {id(module.weight) for module in model.modules() if type(module).__name__ == "Embedding"}


def _groups(model: Any, section: OptimizerSection, *, ranks: int = 1) -> Iterator[Group]:
    """Sizes of the groups of `modeling.parameter_groups`; experts shared by `ranks` ranks count in full. Raises
    UserError if a group in the config has no parameters."""
    for group in parameter_groups(model, section):
        shapes = [how.whole(item.shape) if (how := cut(item)) else item.shape for item in group["params"]]
        sizes = [shape.numel() for shape in shapes]
        short, long = sorted(max((shape[-2:] for shape in shapes), key=math.prod)) if group["matrix"] else (1, 1)
        yield Group(group["matrix"], sum(sizes), max(sizes), ranks if "moe" in group else 1, (short, long))


_INTERMEDIATE = ("intermediate_size", "n_inner", "d_ff", "encoder_ffn_dim")
"""Names of the MLP width in configs of transformers."""


def _teacher(config: Config, *, vocabulary: int) -> Teacher:
    section, where = config.distill, f"distill.teacher = {config.distill.teacher}"
    try:
        found = AutoConfig.from_pretrained(str(section.teacher), trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: cannot be loaded ({one_line(error)})") from error
    own = found.get_text_config().vocab_size
    if own != vocabulary:
        problem = f"has a vocabulary of {own} tokens, the student one of {vocabulary}"
        fix = "choose a teacher with as many, since models of one tokenizer may pad it differently"
        raise UserError(f"{where}: {problem}; {fix}")
    saved = str(getattr(found, "dtype", None)).removeprefix("torch.")
    width = {"auto": 2 if saved in ("bfloat16", "float16") else 4, "fp32": 4}.get(section.dtype, 2)
    of_teacher = ModelSection(name_or_path=section.teacher, trust_remote_code=config.model.trust_remote_code)
    return Teacher(sizes_of(empty_model(of_teacher, found), AdapterSection(), OptimizerSection()), width)
