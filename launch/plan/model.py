"""The sizes of the model that a run config describes, without its weights, and of the teacher it may learn from."""

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
from launch.plan.codes import Codes, coded_layers, codes_of
from launch.plan.counted import Counted, count_activations
from launch.plan.layout import Layout
from modeling.activation_checkpointing import blocks_of
from modeling.adapter import add_adapter, head_weights
from modeling.build import empty_model
from modeling.expert_parallel import expert_count, require_shareable_experts, share_experts
from modeling.parameter_groups import parameter_groups
from modeling.tensor_parallel import cut
from training.tasks.shape import empty_model_of


@dataclass(frozen=True)
class Group:
    """Trained parameters that the optimizer updates together (`modeling.parameter_groups`)."""

    matrix: bool
    """Hidden matrices with a rule of their own."""
    parameters: int
    largest: int
    """[elements] Size of its largest tensor."""
    shared: int = 1
    """[ranks] Number that share these experts, each a part of them."""
    sides: tuple[int, int] = (1, 1)
    """[elements] (shorter, longer) of its largest matrix, one of fused experts; (1, 1) without a rule for matrices."""


@dataclass(frozen=True)
class Stored:
    """One parameter as a rank stores it."""

    elements: int
    """[elements] Fewer than its weights where two are in a byte."""
    width: int | None = None
    """[bytes] Size of an element; None: that of a float."""
    shared: bool = False
    """Whether it is a part of experts that ranks share."""


@dataclass(frozen=True)
class Teacher:
    """A model that only answers."""

    shape: Shape
    width: int
    """[bytes] Size of one of its parameters."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that memory, traffic and FLOPs depend on."""

    architecture: str
    parameters: int
    """[parameters] Shared ones once, those of an adapter included."""
    trained_parameters: int
    """[parameters] Number that have masters, moments and gradients: all, or those of an adapter."""
    largest_trained: int
    """[elements] Size of the largest single tensor that is trained."""
    trained_block: int
    """[parameters] Number that are trained in the largest transformer block."""
    matmul_parameters: int
    """[parameters] Number in a token's matmuls: not embeddings that are only looked up, but the head."""
    trained_matmul: int
    """[parameters] The trained ones of these, for which the backward pass has one more matmul."""
    groups: tuple[Group, ...]
    """Parameters that the optimizer keeps apart."""
    modules: tuple[tuple[Stored, ...], ...]
    """The parameters of each module that has some of its own, shared ones once."""
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    plain_head: bool
    """The logits come from a plain linear layer, so that its loss may be computed in chunks."""
    trained_head: bool
    """Whether that layer is trained."""
    attention: str = "sdpa"
    """transformers' implementation."""
    counted: Counted | None = None
    """Activations that the model keeps; None for a teacher, which keeps none."""
    teacher: Teacher | None = None
    """The model that answers in every micro-batch."""
    codes: Codes | None = None
    """Frozen layers in 4 or 8 bits; None where all weights are floats."""
    counted_attention: float | None = None
    """[FLOP] A token's products inside an encoder-decoder's attention, for which there is no formula."""
    slice: Shape | None = None
    """The part of one of the ranks that share matrices or experts; None where none do."""
    trained_by_all: int = 0
    """[parameters] Number trained on all ranks that share experts, over which ZeRO divides them; 0 where none do."""
    expert_parameters: int = 0
    """[parameters] Size of this rank's experts, where ranks share them."""
    expert_layers: int = 0
    """[layers] Number with such experts."""
    experts: int = 0
    """[experts] Number in such a layer, on all ranks that share them."""
    experts_per_token: int = 0
    columns: int = 0
    """[layers] Number in one block that are cut by rows; gradients of their inputs are summed over ranks."""
    rows: int = 0
    """[layers] Number in one block that are cut by columns; their outputs are summed over ranks."""
    head_share: int = 1
    """[ranks] Number that share the head's rows: logits are gathered, or the softmax's sums made over them."""

    @property
    def own(self) -> Shape:
        """The sizes of the model that one rank computes with."""
        return self.slice or self

    def weight_bytes(self, width: int, *, ranks: int = 1) -> float:
        """[bytes] Size of the weights on one of the ranks that divide them. width: [bytes] of a float."""
        if self.codes is None:
            return width * self.parameters / ranks
        floats = width * (self.parameters - self.codes.parameters)
        return (floats + self.codes.codes) / ranks + self.codes.scales

    @property
    def divided(self) -> int:
        """[parameters] Number with masters and an optimizer's state, which ZeRO divides equally by its ranks."""
        return self.trained_by_all or self.trained_parameters

    @property
    def hidden_matrix_parameters(self) -> int:
        """[parameters] Number trained in matrices other than embeddings and the head: those that Muon updates."""
        return sum(group.parameters for group in self.groups if group.matrix)

    @property
    def has_adapter(self) -> bool:
        """Whether some of its parameters are frozen."""
        return self.trained_parameters < self.parameters

    def attention_flops(self, sequence: int) -> float:
        """[FLOP] Cost of one token inside the attention of all blocks, over the whole square, in the forward pass."""
        if self.counted_attention is not None:
            return self.counted_attention
        return 4.0 * self.layers * self.heads * self.head_dim * sequence

    def forward_flops(self, sequence: int) -> float:
        """[FLOP] Cost of the forward pass of one token: 2 for each parameter in a matmul, and attention."""
        return 2.0 * self.matmul_parameters + self.attention_flops(sequence)

    def flops_per_token(self, sequence: int) -> float:
        """[FLOP] Forward and backward of one token, nothing recomputed.

        6 for each trained parameter in a matmul, 4 for a frozen one, and 12 x layers x heads x head size x sequence for
        attention over the whole square, as in Chowdhery et al. 2022 (PaLM), appendix B; a causal kernel does half.
        """
        return 4.0 * self.matmul_parameters + 2.0 * self.trained_matmul + 3.0 * self.attention_flops(sequence)


def model_of(config: Config) -> Any:
    """The model to train on the meta device, without its adapter. Raises UserError for a config that is refused."""
    return empty_model_of(config, _vocabulary(config) if config.model.name_or_path is None else 0)


def _vocabulary(config: Config) -> int:
    """[tokens] Size of the vocabulary, of which a Hugging Face tokenizer is asked. Raises UserError."""
    name = config.data.tokenizer
    if "vocab_size" in config.model.config:
        return int(config.model.config["vocab_size"])
    if is_made(name):
        own = SMALLEST_BPE if name == "bytes" else int(name.removeprefix("bpe:"))
        # beside its own tokens an encoder's tokenizer has some, and an encoder-decoder's one to pad with
        return own + (len(ENCODER_TOKENS) if config.task in ENCODER_TASKS else config.task == "seq2seq")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(Path(name).expanduser()), trust_remote_code=False)
        return vocabulary_size(tokenizer)
    except Exception as error:  # the hub, a gated repository or a file may raise anything
        raise UserError(
            f"data.tokenizer = {name}: cannot be loaded here to count its tokens; "
            f"add model.config.vocab_size=N to the command line ({type(error).__name__})"
        ) from error


def read_shape(config: Config, layout: Layout) -> Shape:
    """The sizes of the model of `config`. Takes seconds, no weights, and no network for a new model.

    Raises UserError for one that is unknown, refused or cannot run without values.
    """
    model = model_of(config)
    shape = sizes_of(model, config.adapter, config.optimizer, model_class=model_class_of(config))
    if layout.tensor > 1:
        own = _slice(model, shape, config.optimizer, ranks=layout.tensor)
        return replace(shape, slice=replace(own, counted=count_activations(model, layout)))
    # where experts are shared and all are used alike, a rank is sent as many tokens as it sends to others
    shape = replace(shape, counted=count_activations(model, layout))
    if layout.expert > 1:
        own = _with_experts_shared(model, shape, config.optimizer, ranks=layout.expert)
        return replace(shape, slice=replace(own, counted=shape.counted))
    if config.distill.teacher is not None and not config.distill.top_k:
        shape = replace(shape, teacher=_teacher(config, vocabulary=shape.vocabulary))
    if not layout.targets:
        return shape
    assert shape.counted is not None
    used = shape.counted.weight_flops / 2  # tokens of one side of an encoder-decoder do not meet the other's weights
    trained = used * shape.trained_matmul / shape.matmul_parameters
    flops = shape.counted.attention_flops
    return replace(shape, matmul_parameters=round(used), trained_matmul=round(trained), counted_attention=flops)


def _slice(model: Any, whole: Shape, optimizer: OptimizerSection, *, ranks: int) -> Shape:
    """The slice of each rank that shares the matrices of a model (on the meta device, changed in place).

    They are cut by transformers' tp_plan, as DeepSpeed cuts them. Raises UserError for a model without one, which
    DeepSpeed cuts by the names of its layers.
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
    parts = {name: getattr(whole, name) // ranks for name in ("heads", "kv_heads", "intermediate")}
    parts |= {"columns": found["colwise"], "rows": found["rowwise"], "head_share": ranks if cut_head else 1}
    return replace(own, **parts, head_dim=whole.head_dim)


def _with_experts_shared(model: Any, whole: Shape, optimizer: OptimizerSection, *, ranks: int) -> Shape:
    """The part of each rank that shares the experts of a model, which is changed in place. Raises UserError."""
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
    """Leave a rank's slice of a linear layer's parameters."""
    for name in ("weight", "bias"):
        whole = getattr(layer, name)
        if whole is not None and (by_rows or name == "weight"):
            size = list(whole.shape)
            size[0 if by_rows else 1] //= ranks
            setattr(layer, name, type(whole)(whole.detach().new_empty(size)))


def sizes_of(
    model: Any, adapter: AdapterSection, optimizer: OptimizerSection, *, model_class: str = CAUSAL_LM
) -> Shape:
    """The sizes of a model on the meta device, which gets its adapter. Raises UserError for one that does not fit."""
    text, blocks = model.config.get_text_config(), blocks_of(model)
    if not blocks:
        raise UserError(f"model.architecture = {model.config.model_type}: has no blocks to plan for")
    block = max(blocks, key=lambda one: sum(item.numel() for item in one.parameters()))
    hidden, heads = text.hidden_size, text.num_attention_heads
    looked_up, codes = _embeddings(model), codes_of(model, adapter)
    coded = {id(layer.weight) for layer in coded_layers(model, adapter)}
    if adapter.kind != "none":
        with init_empty_weights(include_buffers=False):
            add_adapter(model, adapter, seed=0, model_class=model_class)
    parameters = {name: (item, item.numel()) for name, item in model.named_parameters()}
    # of a module that is trained whole the original is kept and not used
    used = {name: item for name, item in parameters.items() if ".original_module." not in name}
    matmuls = [(item, size) for item, size in used.values() if id(item) not in looked_up | _embeddings(model)]
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
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or hidden // heads,
        vocabulary=text.vocab_size,
        plain_head=plain,
        trained_head=plain and head.weight.requires_grad,
        attention=str(model.config._attn_implementation),
        codes=codes,
    )


def _modules(model: Any, coded: set[int], *, halved: bool) -> Iterator[tuple[Stored, ...]]:
    """The parameters of each module. coded: ids of those that hold codes, of bytes. halved: two are in one."""
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
    """ids of the weights of embeddings, but for one that is the head's as well."""
    return _tables(model) - head_weights(model)


def _tables(model: Any) -> set[int]:
    """ids of the weights of embeddings."""
    return {id(module.weight) for module in model.modules() if type(module).__name__ == "Embedding"}


def _groups(model: Any, section: OptimizerSection, *, ranks: int = 1) -> Iterator[Group]:
    """Sizes of the groups of `modeling.parameter_groups`; of experts that `ranks` ranks share, those of the whole ones.

    Raises UserError for a group of the config without parameters.
    """
    for group in parameter_groups(model, section):
        shapes = [how.whole(item.shape) if (how := cut(item)) else item.shape for item in group["params"]]
        sizes = [shape.numel() for shape in shapes]
        short, long = sorted(max((shape[-2:] for shape in shapes), key=math.prod)) if group["matrix"] else (1, 1)
        yield Group(group["matrix"], sum(sizes), max(sizes), ranks if "moe" in group else 1, (short, long))


_INTERMEDIATE = ("intermediate_size", "n_inner", "d_ff", "encoder_ffn_dim")
"""Names of the width inside the MLP."""


def _teacher(config: Config, *, vocabulary: int) -> Teacher:
    section, where = config.distill, f"distill.teacher = {config.distill.teacher}"
    try:
        found = AutoConfig.from_pretrained(str(section.teacher), trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: cannot be loaded ({one_line(error)})") from error
    own = found.get_text_config().vocab_size
    if own != vocabulary:
        problem = f"has a vocabulary of {own} tokens, the student one of {vocabulary}"
        raise UserError(f"{where}: {problem}; choose a teacher with the student's tokenizer")
    saved = str(getattr(found, "dtype", None)).removeprefix("torch.")
    width = {"auto": 2 if saved in ("bfloat16", "float16") else 4, "fp32": 4}.get(section.dtype, 2)
    of_teacher = ModelSection(name_or_path=section.teacher, trust_remote_code=config.model.trust_remote_code)
    return Teacher(sizes_of(empty_model(of_teacher, found), AdapterSection(), OptimizerSection()), width)
