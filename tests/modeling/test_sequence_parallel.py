"""Models whose sequences, matrices or experts ranks may share, their logits and gradients, and a slice's place."""

import re
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from modeling.expert_parallel import require_shareable_experts
from modeling.sequence_parallel import unshared_reason
from modeling.tensor_parallel import Cut, require_shareable
from tests.modeling import model_cases
from tests.support.jobs.process_group import ProcessGroup
from tests.support.marks import slow
from tests.support.refusals import refused
from training.checkpoint.partitions import Stored

WINDOW = {"sliding_window": 6}
KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {**WINDOW, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
    "gemma3_text": {**WINDOW, **KINDS, "head_dim": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "olmo3": {**WINDOW, **KINDS},
    "cohere2": {**WINDOW, **KINDS},
    "mixtral": WINDOW,
    "starcoder2": WINDOW,
    "gpt2": {},
    "gpt_neox": {},
    "phi3": {"pad_token_id": None},
    "granite": {},
    "smollm3": {"pad_token_id": None},
    "deepseek_v3": {**LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 2},
}
ALWAYS = ("gemma3_text", "mistral")


@pytest.mark.parametrize("apart", [True, False], ids=["documents", "one document"])
@pytest.mark.parametrize("family", [name if name in ALWAYS else slow(name) for name in SHAPES])
def test_slices_have_the_logits_and_gradients_of_the_whole(pair: ProcessGroup, family: str, apart: bool) -> None:
    case = {"family": family, "apart": apart, "ranks": 2, "shape": SHAPES[family]}
    check(pair.run(model_cases.against_the_whole, **case))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "heads", "keys"), [(4, 8, 2), (4, 12, 3), (4, 4, 4), (2, 6, 3)])
def test_key_heads_that_do_not_divide_are_repeated(four: ProcessGroup, ranks: int, heads: int, keys: int) -> None:
    shape = {"num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": 8, **WINDOW, "hidden_size": 48}
    case = {"family": "mistral", "apart": True, "ranks": ranks, "shape": shape}
    check(four.run(model_cases.against_the_whole, **case))


ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "longrope", "rope_theta": 1e6, "factor": 2.0}
    | dict.fromkeys(("short_factor", "long_factor"), [1.0] * 4),
}


def check(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["logits"] < 1e-5
        assert found["gradients"] < 1e-5
        assert found["unused"] == 0.0
        assert found["name"] == "sdpa"


@pytest.mark.parametrize(
    ("family", "shape", "attention", "reason"),
    [
        (
            "llama",
            {"num_attention_heads": 6, "hidden_size": 48},
            "sdpa",
            "6 attention heads do not divide among 4 ranks",
        ),
        ("gemma2", {}, "eager", "its attention is eager, and only sdpa is verified"),
        ("qwen3_next", {}, "sdpa", "it has layers of linear_attention, which need the whole sequence"),
        ("mamba", {}, "sdpa", "its config names no attention heads"),
        ("llama4_text", {"num_attention_heads": 4}, "sdpa", "it has layers of chunked_attention"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "num_attention_heads": 4},
            "sdpa",
            "the frequencies of its rotary embedding (dynamic) depend on the length of its input",
        ),
        (
            "gemma3_text",
            {"rope_parameters": ROPE, "head_dim": 8, "num_attention_heads": 4},
            "sdpa",
            "(longrope) depend on the length",
        ),
        ("llama", {"num_attention_heads": 8}, "sdpa", None),
    ],
)
def test_what_cannot_be_shared_is_known(family: str, shape: dict[str, Any], attention: str, reason: str | None) -> None:
    found = unshared_reason(AutoConfig.for_model(family, **shape), attention, 4)
    assert found is None if reason is None else found is not None and reason in found


def test_a_model_whose_attention_sees_slices_only_is_found(pair: ProcessGroup) -> None:
    """The ranks trade nothing here, as where a model's code does not call the attention it is told to."""
    for found in pair.run(model_cases.sequence_refused, family="llama", shape={}, idle=True):
        assert re.match("parallel.sequence = 2: not supported for model llama: on slices .* differ by .*e-0[12]", found)
    assert pair.run(model_cases.sequence_refused, family="llama", shape={}) == ["", ""]


@pytest.mark.slow
def test_a_model_that_makes_its_own_masks_is_refused(pair: ProcessGroup) -> None:
    for found in pair.run(model_cases.sequence_refused, family="falcon", shape={"ffn_hidden_size": 48}):
        assert found.startswith("parallel.sequence = 2: not supported for model falcon: it cannot run on slices"), found


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("kind", "given", "ranks", "problem"),
    [
        ("llama", {}, 2, None),
        ("llama", {}, 4, "its 2 key and value heads do not divide among 4 ranks"),
        ("llama", {}, 3, "its 4 attention heads do not divide among 3 ranks"),
        ("llama", {"intermediate_size": 49}, 2, "the 49 inner values of its MLP do not divide among 2 ranks"),
        ("llama", {"attention_dropout": 0.1}, 2, "attention_dropout = 0.1 would drop the same values of every"),
        ("cohere", {"use_qk_norm": True}, 2, "does not sum the gradients of the norms of use_qk_norm = true"),
        ("stablelm", {"qk_layernorm": True}, 2, "does not sum the gradients of the norms of qk_layernorm = true"),
        ("mixtral", {}, 2, "not supported for model mixtral: it is verified for cohere, cohere2, "),
    ],
)
def test_a_model_that_cannot_share_is_refused_by_name(kind, given, ranks, problem) -> None:
    shape = AutoConfig.for_model(kind, **SIZES | given)
    if problem is None:
        require_shareable(shape, ranks)
        return
    said = refused(require_shareable, shape, ranks)
    assert said.startswith(f"parallel.tensor = {ranks}: not supported for model {kind}: ") and problem in said


@pytest.mark.parametrize(
    ("shape", "cut"),
    [((7, 3), Cut(0, (4, 3))), ((3, 8), Cut(1, (2, 2, 4))), ((5,), Cut(0, (3, 2))), ((2, 6), Cut(1, (3, 3)))],
)
def test_slices_make_the_whole_and_the_whole_slices(shape: tuple[int, ...], cut: Cut) -> None:
    """Every range of values, of slices that ZeRO cut into parts of 4 with padding at the end."""
    whole = torch.arange(torch.Size(shape).numel()).float().view(shape) + 1
    slices = [cut.slice_of(whole, rank) for rank in range(len(cut.sizes))]
    assert all(cut.whole(part.shape) == whole.shape for part in slices)
    places = [cut.place(part.shape, rank) for rank, part in enumerate(slices)]
    for part, place in zip(slices, places, strict=True):
        assert torch.equal(whole.view(-1)[place.in_whole(torch.arange(part.numel()))], part.reshape(-1))
    padded = [torch.cat([part.reshape(-1), torch.zeros(-part.numel() % 4)]).split(4) for part in slices]
    stored = [Stored(part.shape, each) for each, part in zip(padded, slices, strict=True)]
    joined = Stored(whole.shape, slices=stored, dimension=cut.dimension)
    assert torch.equal(joined.read(), whole)
    for one, values in ((joined, whole), *zip(stored, slices, strict=True)):
        for start in range(values.numel()):
            for length in range(1, values.numel() - start + 1):
                assert torch.equal(one.values(start, length), values.reshape(-1)[start : start + length])


@pytest.mark.parametrize(
    ("kind", "ranks", "reason"),
    [
        ("llama", 2, "it is verified for deepseek_v3, glm4_moe, granitemoe, mixtral"),
        ("gpt_oss", 2, "it is verified for "),
        ("mixtral", 3, "its 8 experts do not divide among 3 ranks"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(kind: str, ranks: int, reason: str) -> None:
    said = refused(require_shareable_experts, AutoConfig.for_model(kind), ranks)
    assert said.startswith(f"parallel.expert = {ranks}: not supported for model {kind}: {reason}")
    assert said.endswith("; set it to 1")
