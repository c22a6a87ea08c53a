"""The sizes of the model that a run config describes, without its weights.

The model is built on torch's meta device, where tensors have shapes and no memory, by transformers and accelerate. So
the parameters of every architecture are counted and not computed by a formula that may lag behind transformers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.errors import UserError, one_line
from config.schema import Config
from config.task import ENCODER_TASKS

_BYTES_VOCABULARY = 257  # data.tokenizer = bytes: 256 bytes and the end of a document


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that memory, traffic and FLOPs depend on."""

    architecture: str
    parameters: int
    """[parameters] Shared ones once."""
    largest_parameter: int
    """[elements] Of the largest single tensor."""
    block_parameters: int
    """[parameters] Of one transformer block."""
    matmul_parameters: int
    """[parameters] In a token's matmuls: not embeddings that are only looked up, but the head."""
    hidden_matrix_parameters: int
    """[parameters] In 2-D weights other than embeddings and the head: those that Muon updates."""
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
    exact: bool
    """Whether the activation formulas were verified for this kind of block: a plain attention and one MLP."""
    attention: str = "sdpa"
    """What model.attention = auto becomes."""

    def flops_per_token(self, sequence: int) -> float:
        """[FLOP] Forward and backward of one token, nothing recomputed.

        6 for each parameter in a matmul, and 12 x layers x heads x head size x sequence for attention over the whole
        square, as in Chowdhery et al. 2022 (PaLM), appendix B; a causal kernel does half of the latter.
        """
        return 6.0 * self.matmul_parameters + 12.0 * self.layers * self.heads * self.head_dim * sequence


def read_shape(config: Config) -> Shape:
    """The sizes of the model of `config`. Takes seconds, no weights, and no network for a new model.

    Raises UserError: the architecture is unknown, its config is refused, or the vocabulary cannot be determined.
    """
    if config.task in ENCODER_TASKS:
        raise UserError(f"task = {config.task}: is not planned; only causal language models are")
    return shape_of(_hugging_face_config(config), trust_remote_code=config.model.trust_remote_code)


def shape_of(hugging_face: Any, *, trust_remote_code: bool = False) -> Shape:
    """The sizes of the model of a Hugging Face config. Raises UserError when it cannot be built."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(hugging_face, trust_remote_code=trust_remote_code)
        model.tie_weights()
    except (ImportError, ValueError, OSError) as error:
        raise UserError(
            f"model.architecture = {hugging_face.model_type}: cannot be built: {one_line(error)}"
        ) from error
    text = hugging_face.get_text_config()
    block = _block(model, text.num_hidden_layers)
    names = {name.rpartition(".")[2] for name, _ in block.named_modules()}
    hidden, heads = text.hidden_size, text.num_attention_heads
    norms = {name.rpartition(".")[2]: type(module).__name__ for name, module in block.named_modules()}
    norms = {name: kind for name, kind in norms.items() if "Norm" in kind}
    vocabulary_table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    looked_up = 0 if head is not None and head.weight is vocabulary_table else vocabulary_table.numel()
    looked_up += sum(
        module.weight.numel()
        for module in model.modules()
        if type(module).__name__ == "Embedding" and module.weight is not vocabulary_table
    )
    parameters = sum(item.numel() for item in model.parameters())
    gated = bool(names & {"gate_proj", "gate_up_proj"})
    return Shape(
        architecture=hugging_face.model_type,
        parameters=parameters,
        largest_parameter=max(item.numel() for item in model.parameters()),
        block_parameters=sum(item.numel() for item in block.parameters()),
        matmul_parameters=parameters - looked_up,
        hidden_matrix_parameters=_hidden_matrices(model),
        layers=text.num_hidden_layers,
        hidden=hidden,
        intermediate=getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or hidden // heads,
        vocabulary=text.vocab_size,
        gated=gated,
        activation=getattr(text, "hidden_act", None) or getattr(text, "activation_function", None) or "silu",
        rms_norm=any("RMS" in kind for kind in norms.values()),
        norms=sum(name not in ("q_norm", "k_norm") for name in norms),
        head_norms=bool(names & {"q_norm", "k_norm"}),
        dropout=any(type(module).__name__ == "Dropout" and module.p > 0 for module in block.modules()),
        exact="experts" not in names and (gated or hugging_face.model_type == "gpt2"),
        attention=str(model.config._attn_implementation),
    )


def _hidden_matrices(model: Any) -> int:
    """Parameters of the group `matrix` of `modeling.parameter_groups`."""
    beside = [module for module in model.modules() if type(module).__name__ == "Embedding"]
    beside.append(model.get_output_embeddings())
    apart = {id(item) for module in beside if module is not None for item in module.parameters(recurse=False)}
    return sum(item.numel() for item in model.parameters() if item.dim() == 2 and id(item) not in apart)


def _block(model: Any, layers: int) -> Any:
    """The first transformer block."""
    lists = [module for module in model.modules() if type(module).__name__ == "ModuleList" and len(module) == layers]
    if not lists:
        raise UserError(f"model.architecture = {model.config.model_type}: has no list of {layers} blocks to plan for")
    return lists[0][0]


def _hugging_face_config(config: Config) -> Any:
    from transformers import AutoConfig

    model = config.model
    try:
        if model.name_or_path is not None:
            name = str(Path(model.name_or_path).expanduser())
            found = AutoConfig.from_pretrained(name, trust_remote_code=model.trust_remote_code)
            found.update(model.config)
        else:
            given = {"vocab_size": model.config.get("vocab_size") or vocabulary_size(config.data.tokenizer)}
            defaults = AutoConfig.for_model(str(model.architecture))
            if hasattr(defaults, "max_position_embeddings"):
                given["max_position_embeddings"] = config.data.sequence_length
            found = AutoConfig.for_model(str(model.architecture), **{**given, **model.config})
    except (OSError, ValueError, TypeError, ZeroDivisionError) as error:
        source = model.name_or_path or model.architecture
        raise UserError(f"model {source}: its config cannot be read: {one_line(error)}") from error
    found.use_cache = False
    return found


def vocabulary_size(tokenizer: str) -> int:
    """[tokens] Vocabulary size of data.tokenizer; a Hugging Face tokenizer is loaded, from the hub if need be.

    Raises UserError: it cannot be loaded.
    """
    if tokenizer == "bytes":
        return _BYTES_VOCABULARY
    trained = re.fullmatch(r"bpe:(\d+)", tokenizer)
    if trained:
        return int(trained[1])
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(str(Path(tokenizer).expanduser()), trust_remote_code=False)
    except Exception as error:  # the hub, a gated repository or a file may raise anything
        raise UserError(
            f"data.tokenizer = {tokenizer}: cannot be loaded here to count its tokens; "
            f"add model.config.vocab_size=N to the command line ({type(error).__name__})"
        ) from error
    return max(len(found), max(found.get_vocab().values()) + 1)
