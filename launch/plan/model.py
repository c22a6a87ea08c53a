"""The sizes of the model that a run config describes, without its weights, and of the teacher it may learn from."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from config.adapter import head_weights
from config.errors import UserError, one_line
from config.optimizers import OPTIMIZERS, has_matrices, is_decayed, unmatched_group
from config.schema import AdapterSection, Config, OptimizerSection
from config.task import CAUSAL_LM, ENCODER_TASKS, model_class_of
from launch.plan.build import adapted, hugging_face_config, new_model, saved_config
from launch.plan.codes import Codes, coded_layers, codes_of
from launch.plan.counted import Counted, count_activations

if TYPE_CHECKING:
    from launch.plan.layout import Layout


@dataclass(frozen=True)
class Group:
    """Trained parameters that the optimizer updates together (`modeling.parameter_groups`)."""

    matrix: bool
    """Hidden matrices with a rule of their own."""
    parameters: int
    largest: int
    """[elements] Of its largest tensor."""
    shared: int = 1
    """[ranks] That share these experts, a part of them each."""
    sides: tuple[int, int] = (1, 1)
    """[elements] (shorter, longer) of its largest matrix, of which fused experts have one each; (1, 1) where the
    optimizer has no rule for matrices."""


@dataclass(frozen=True)
class Stored:
    """One parameter as a rank stores it."""

    elements: int
    """[elements] Fewer than its weights where two are in a byte."""
    width: int | None = None
    """[bytes] Of an element; None: of one that is a float."""
    shared: bool = False
    """Of experts that ranks share, a part of which this is."""


@dataclass(frozen=True)
class Teacher:
    """A model that only answers."""

    shape: Shape
    width: int
    """[bytes] Of one of its parameters."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that memory, traffic and FLOPs depend on."""

    architecture: str
    parameters: int
    """[parameters] Shared ones once, those of an adapter included."""
    trained_parameters: int
    """[parameters] That have masters, moments and gradients: all, or those of an adapter."""
    largest_parameter: int
    """[elements] Of the largest single tensor."""
    largest_trained: int
    """[elements] Of the largest single tensor that is trained."""
    block_parameters: int
    """[parameters] Of one transformer block."""
    trained_block: int
    """[parameters] Of these trained."""
    matmul_parameters: int
    """[parameters] In a token's matmuls: not embeddings that are only looked up, but the head."""
    trained_matmul: int
    """[parameters] Of these trained, so that the backward pass has a matmul more for them."""
    groups: tuple[Group, ...]
    """That the optimizer keeps apart."""
    modules: tuple[tuple[Stored, ...], ...]
    """The parameters of each module that has some of its own, shared ones once."""
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    gated: bool
    """Whether the MLP multiplies a gate with its second input."""
    activation: str
    """transformers' name of the MLP's activation function."""
    rms_norm: bool
    """Norms without a mean, computed step by step in FP32; else torch's layer norm."""
    norms: int
    """[norms] Of the whole hidden state, in one block."""
    head_norms: bool
    """Queries and keys are normalised head by head."""
    dropout: bool
    """Whether dropout keeps masks."""
    plain_head: bool
    """The logits come from a plain linear layer, so that its loss may be computed in chunks."""
    trained_head: bool
    """Whether that layer is trained."""
    exact: bool
    """Whether the activation formulas were verified for this kind of block: a plain attention and one MLP."""
    attention: str = "sdpa"
    """What model.attention = auto becomes."""
    counted: Counted | None = None
    """Activations that were counted, in place of formulas."""
    teacher: Teacher | None = None
    """That answers in every micro-batch."""
    codes: Codes | None = None
    """Frozen layers in 4 or 8 bits; None where all weights are floats."""
    counted_attention: float | None = None
    """[FLOP] Of a token's products inside attention where no formula knows them: an encoder-decoder's."""
    slice: Shape | None = None
    """What one of the ranks that share matrices or experts has; None where none do."""
    trained_by_all: int = 0
    """[parameters] Trained on all ranks that share experts, over all of which ZeRO divides them; 0 where none do."""
    expert_parameters: int = 0
    """[parameters] Of the experts that this rank has, where ranks share them."""
    expert_layers: int = 0
    """[layers] With such experts."""
    experts: int = 0
    """[experts] Of such a layer, on all ranks that share them."""
    experts_per_token: int = 0
    columns: int = 0
    """[layers] Of one block whose matrices are cut by rows, so that gradients of their inputs are summed over ranks."""
    rows: int = 0
    """[layers] Of one block whose matrices are cut by columns, so that their outputs are summed."""
    head_share: int = 1
    """[ranks] That share the head's rows: logits are gathered, or the softmax's sums made over them."""

    @property
    def own(self) -> Shape:
        """What one rank computes with."""
        return self.slice or self

    def weight_bytes(self, width: int, *, ranks: int = 1) -> float:
        """[bytes] Of all weights on one of the ranks that divide them. width: [bytes] of one that is a float."""
        if self.codes is None:
            return width * self.parameters / ranks
        floats = width * (self.parameters - self.codes.parameters)
        return (floats + self.codes.codes) / ranks + self.codes.scales

    @property
    def divided(self) -> int:
        """[parameters] With masters and an optimizer's state, of which each of ZeRO's ranks has an equal part."""
        return self.trained_by_all or self.trained_parameters

    @property
    def hidden_matrix_parameters(self) -> int:
        """[parameters] Trained, in matrices other than embeddings and the head: those that Muon updates."""
        return sum(group.parameters for group in self.groups if group.matrix)

    @property
    def has_adapter(self) -> bool:
        """Whether some of its parameters are frozen."""
        return self.trained_parameters < self.parameters

    def attention_flops(self, sequence: int) -> float:
        """[FLOP] Of one token inside the attention of all blocks, over the whole square, in the forward pass."""
        if self.counted_attention is not None:
            return self.counted_attention
        return 4.0 * self.layers * self.heads * self.head_dim * sequence

    def forward_flops(self, sequence: int) -> float:
        """[FLOP] Of the forward pass of one token: 2 for each parameter in a matmul, and attention's."""
        return 2.0 * self.matmul_parameters + self.attention_flops(sequence)

    def flops_per_token(self, sequence: int) -> float:
        """[FLOP] Forward and backward of one token, nothing recomputed.

        6 for each trained parameter in a matmul, 4 for a frozen one, whose gradient nobody needs, and 12 x layers x
        heads x head size x sequence for attention over the whole square, as in Chowdhery et al. 2022 (PaLM), appendix
        B; a causal kernel does half of the latter.
        """
        return 4.0 * self.matmul_parameters + 2.0 * self.trained_matmul + 3.0 * self.attention_flops(sequence)


def read_shape(config: Config, layout: Layout) -> Shape:
    """The sizes of the model of `config`. Takes seconds, no weights, and no network for a new model.

    Raises UserError: the architecture or a target module is unknown, its config is refused, the vocabulary cannot be
    determined, or the task's models are not counted.
    """
    trusted = config.model.trust_remote_code
    model = new_model(
        hugging_face_config(config),
        model_class=model_class_of(config),
        eager=config.model.attention == "eager",
        trust_remote_code=trusted,
    )
    encoder = config.task in ENCODER_TASKS
    shape = _measured(model, config.adapter, config.optimizer, model_class=model_class_of(config))
    if layout.tensor > 1:
        shape = replace(shape, slice=_slice(model, shape, config.optimizer, ranks=layout.tensor))
    if layout.expert > 1:  # where all experts are used alike, a rank's are sent as many tokens as it sends to all
        counted = count_activations(model, _blocks(model), layout, encoder=encoder)
        own = _with_experts_shared(model, shape, config.optimizer, ranks=layout.expert)
        own = replace(own, counted=counted, exact=counted is not None)
        return replace(shape, slice=own, counted=counted, exact=own.exact)
    if config.distill.teacher is not None and not config.distill.top_k:
        shape = replace(shape, teacher=_teacher(config, vocabulary=shape.vocabulary))
    if shape.exact and not shape.has_adapter and not encoder and not layout.targets:
        return shape
    counted = count_activations(model, _blocks(model), layout, encoder=encoder)
    if layout.targets:
        shape = _of_both_sides(shape, counted)
    return replace(shape, counted=counted, exact=shape.exact or counted is not None)


def _of_both_sides(shape: Shape, counted: Counted | None) -> Shape:
    """The sizes of an encoder-decoder, whose tokens of one side do not meet the weights of the other.

    Raises UserError where its code cannot run without values.
    """
    if counted is None:
        fix = "try a step with the longest rows"
        raise UserError(f"task = seq2seq: launch.plan cannot count {shape.architecture} without its values; {fix}")
    used = counted.weight_flops / 2
    trained = used * shape.trained_matmul / shape.matmul_parameters
    flops = counted.attention_flops
    return replace(shape, matmul_parameters=round(used), trained_matmul=round(trained), counted_attention=flops)


def _slice(model: Any, whole: Shape, optimizer: OptimizerSection, *, ranks: int) -> Shape:
    """What each of so many ranks has that share the matrices of a model (on the meta device, changed in place).

    They are cut by transformers' tp_plan, as DeepSpeed cuts them. Raises UserError for a model without one, which
    DeepSpeed cuts by the names of its layers.
    """
    plan = getattr(model, "tp_plan", None) or {}
    if not plan:
        raise UserError(
            f"parallel.tensor = {ranks}: launch.plan does not know how model {whole.architecture} is cut, since "
            "transformers has no tp_plan for it; set it to 1"
        )
    head, found = model.get_output_embeddings(), {"colwise": 0, "rowwise": 0}
    block = dict(_blocks(model)[0].named_modules())
    cut_head = False
    for name, module in list(model.named_modules()):
        style = next((kind for pattern, kind in plan.items() if fnmatchcase(name, f"*{pattern}")), "")
        kind, tied = style.partition("_")[0], id(getattr(module, "weight", None)) in _tables(model)
        if kind not in found or type(module).__name__ != "Linear" or tied:
            continue
        found[kind] += any(module is item for item in block.values())
        cut_head = cut_head or module is head
        _cut(module, ranks, by_rows=kind == "colwise")
    own = _measured(model, AdapterSection(), optimizer)
    parts = {name: getattr(whole, name) // ranks for name in ("heads", "kv_heads", "intermediate")}
    return replace(
        own,
        **parts,
        head_dim=whole.head_dim,
        columns=found["colwise"],
        rows=found["rowwise"],
        head_share=ranks if cut_head else 1,
    )


def _with_experts_shared(model: Any, whole: Shape, optimizer: OptimizerSection, *, ranks: int) -> Shape:
    """What each of so many ranks has that share the experts of a model (on the meta device, changed in place).

    Raises UserError for a model whose experts are not in tensors of three dimensions, or are not divided by `ranks`.
    """
    found = [
        module
        for module in model.modules()
        if type(module).__name__.endswith("Experts")
        and any(item.dim() == 3 for item in module.parameters(recurse=False))
    ]
    shared = frozenset(id(item) for module in found for item in module.parameters(recurse=False))
    groups, experts, count = tuple(_groups(model, optimizer, shared=shared, ranks=ranks)), 0, 0
    own_ids: set[int] = set()
    for module in found:
        for name, item in module.named_parameters(recurse=False):
            if item.shape[0] % ranks:
                raise UserError(
                    f"parallel.expert = {ranks}: does not divide the {item.shape[0]} experts of model "
                    f"{whole.architecture}; set it to a divisor"
                )
            own = item.detach().new_empty([item.shape[0] // ranks, *item.shape[1:]])
            experts, count = experts + own.numel(), item.shape[0]
            setattr(module, name, type(item)(own))
            own_ids.add(id(getattr(module, name)))
    if not found:
        raise UserError(f"parallel.expert = {ranks}: model {whole.architecture} has no fused experts; set it to 1")
    text = model.config.get_text_config()
    return replace(
        _measured(model, AdapterSection(), optimizer),
        groups=groups,  # whole ones: ZeRO divides them by all ranks
        trained_by_all=whole.trained_parameters,
        expert_parameters=experts,
        expert_layers=len(found),
        experts=count,
        modules=tuple(_modules(model, set(), halved=False, shared=own_ids)),
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


def shape_of(hugging_face: Any, optimizer: OptimizerSection | None = None) -> Shape:
    """The sizes of the causal language model of a Hugging Face config. Raises UserError when it cannot be built."""
    return _measured(new_model(hugging_face), AdapterSection(), optimizer or OptimizerSection())


def _measured(
    model: Any, adapter: AdapterSection, optimizer: OptimizerSection, *, model_class: str = CAUSAL_LM
) -> Shape:
    """The sizes of a model on the meta device, which gets its adapter. Raises UserError for one that does not fit."""
    text, blocks = model.config.get_text_config(), _blocks(model)
    block = max(blocks, key=lambda one: sum(item.numel() for item in one.parameters()))
    names = {name.rpartition(".")[2] for name, _ in block.named_modules()}
    hidden, heads = text.hidden_size, text.num_attention_heads
    norms = {name.rpartition(".")[2]: type(module).__name__ for name, module in block.named_modules()}
    norms = {name: kind for name, kind in norms.items() if "Norm" in kind}
    gated = bool(names & {"gate_proj", "gate_up_proj"})
    dropout = any(type(module).__name__ == "Dropout" and module.p > 0 for module in block.modules())
    looked_up, codes = _embeddings(model), codes_of(model, adapter)
    coded = {id(layer.weight) for layer in coded_layers(model, adapter)}
    if adapter.kind != "none":
        adapted(model, adapter, model_class=model_class)
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
        largest_parameter=max(size for _, size in parameters.values()),
        largest_trained=max(trained),
        block_parameters=sum(item.numel() for item in inside),
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
        gated=gated,
        activation=getattr(text, "hidden_act", None) or getattr(text, "activation_function", None) or "silu",
        rms_norm=any("RMS" in kind for kind in norms.values()),
        norms=sum(name not in ("q_norm", "k_norm") for name in norms),
        head_norms=bool(names & {"q_norm", "k_norm"}),
        dropout=dropout,
        plain_head=plain,
        trained_head=plain and head.weight.requires_grad,
        exact="experts" not in names and (gated or model.config.model_type == "gpt2"),
        attention=str(model.config._attn_implementation),
        codes=codes,
    )


def _modules(
    model: Any, coded: set[int], *, halved: bool, shared: Collection[int] = ()
) -> Iterator[tuple[Stored, ...]]:
    """The parameters of each module. coded: ids of those that hold codes, of bytes. halved: two are in one. shared: ids
    of experts that ranks share."""
    seen: set[int] = set()
    for module in model.modules():
        own = [item for item in module.parameters(recurse=False) if id(item) not in seen]
        seen |= {id(item) for item in own}
        if own:
            yield tuple(
                Stored(-(-item.numel() // 2) if halved else item.numel(), 1)
                if id(item) in coded
                else Stored(item.numel(), shared=id(item) in shared)
                for item in own
            )


def _embeddings(model: Any) -> set[int]:
    """ids of the weights of embeddings, but for one that is the head's as well."""
    return _tables(model) - head_weights(model)


def _tables(model: Any) -> set[int]:
    """ids of the weights of embeddings."""
    return {id(module.weight) for module in model.modules() if type(module).__name__ == "Embedding"}


def _groups(
    model: Any, section: OptimizerSection, *, shared: frozenset[int] = frozenset(), ranks: int = 1
) -> list[Group]:
    """Sizes of the groups of `modeling.parameter_groups`. Raises UserError for one of the config without parameters.

    shared: ids of the experts that so many ranks share.
    """
    embeddings = _tables(model)
    of_head = head_weights(model)
    splits = OPTIMIZERS[section.name].splits_matrices
    owners = dict(model.named_modules())
    found: dict[tuple[Any, ...], list[Any]] = {}
    for name, item in model.named_parameters():
        if item.requires_grad:
            decays = is_decayed(name, item.dim()) and id(item) not in embeddings
            owner = type(owners[name.rpartition(".")[0]]).__name__
            matrix = splits and decays and has_matrices(name, item.dim(), owner) and id(item) not in of_head
            own = max((i for i, group in enumerate(section.groups) if fnmatchcase(name, group.match)), default=-1)
            found.setdefault((not matrix, not decays, own, id(item) in shared), []).append(item)
    for index, group in enumerate(section.groups):
        if not any(own == index for *_, own, _ in found):
            raise unmatched_group(group.match, next(name for name, p in model.named_parameters() if p.requires_grad))
    groups = []
    for key in sorted(found):
        sizes = [item.numel() for item in found[key]]
        sides = sorted(max((item.shape[-2:] for item in found[key]), key=math.prod)) if not key[0] else (1, 1)
        groups.append(Group(not key[0], sum(sizes), max(sizes), ranks if key[-1] else 1, (sides[0], sides[1])))
    return groups


_INTERMEDIATE = ("intermediate_size", "n_inner", "d_ff", "encoder_ffn_dim")
"""Names of the width inside the MLP."""


def _blocks(model: Any) -> list[Any]:
    """The transformer blocks, those of an encoder first."""
    shape = model.config.get_text_config()
    if not model.config.is_encoder_decoder:
        return _list_of(model, shape.num_hidden_layers)
    names = ("num_decoder_layers", "decoder_layers")
    decoders = next((number for name in names if (number := getattr(shape, name, None))), shape.num_hidden_layers)
    return _list_of(model.get_encoder(), shape.num_hidden_layers) + _list_of(model.get_decoder(), decoders)


def _list_of(model: Any, layers: int) -> list[Any]:
    lists = [module for module in model.modules() if type(module).__name__ == "ModuleList" and len(module) == layers]
    if not lists:
        raise UserError(f"model.architecture = {model.config.model_type}: has no list of {layers} blocks to plan for")
    return list(lists[0])


def _teacher(config: Config, *, vocabulary: int) -> Teacher:
    section, trusted = config.distill, config.model.trust_remote_code
    try:
        found = saved_config(str(section.teacher), trust_remote_code=trusted)
    except (OSError, ValueError) as error:
        raise UserError(f"distill.teacher = {section.teacher}: cannot be loaded ({one_line(error)})") from error
    own = found.get_text_config().vocab_size
    if own != vocabulary:
        raise UserError(
            f"distill.teacher = {section.teacher}: has a vocabulary of {own} tokens, the student one of {vocabulary}; "
            "choose a teacher with the student's tokenizer"
        )
    saved = str(getattr(found, "dtype", None)).removeprefix("torch.")
    width = {"auto": 2 if saved in ("bfloat16", "float16") else 4, "fp32": 4}.get(section.dtype, 2)
    model = new_model(found, model_class=CAUSAL_LM, trust_remote_code=trusted)
    return Teacher(_measured(model, AdapterSection(), OptimizerSection()), width)
