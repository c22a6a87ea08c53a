"""Rounding inside a step: sound models show no lower dtype, planted ones show it by name."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling.activation_checkpointing import apply_activation_checkpointing
from modeling.linear_cross_entropy import Head, label_loss_sum, linear_cross_entropy
from modeling.log_probs import token_log_probs
from precision.dtypes import DTYPES, NAMES
from precision.findings import LOSS
from precision.inner_dtypes import KERNEL, LOSS_SUM, NORM, RESIDUAL, ROTARY, ROUTER, SOFTMAX, InnerDtypes
from precision.manifest import Manifest, load_manifest
from precision.observe import ROOT, Observation
from precision.regions import Regions
from tests.support.models.architectures import CASES, Case
from tests.support.models.small_models import small_model

IDS = torch.arange(2 * 16).reshape(2, 16)
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
FUSED = "inside scaled_dot_product_attention, by its kernel"


def sound(family: str, attention: str, path: str, compute: str = "bf16", **config: Any) -> tuple[PreTrainedModel, Any]:
    """A model as a path of `precision.path` has it, and the dtypes that its regions were promised."""
    model = small_model(family, attention, **config).train()
    if path == "manifest":
        return model, Regions(model, Manifest(compute, (), Path("m.json"))).dtypes  # type: ignore[arg-type]
    for parameter in model.parameters():  # as DeepSpeed casts: buffers keep their dtype
        parameter.data = parameter.data.to(DTYPES[compute])
    return model, None


def observed(
    model: PreTrainedModel,
    promised: Any = None,
    loss: Loss = label_loss_sum,
    ids: torch.Tensor = IDS,
    *,
    routers: str | None = None,
) -> dict[str, Any]:
    """The report on forward, loss and backward. routers: what is promised of them; None: as the path has them."""
    with Observation(model) as seen:
        loss(model(ids, use_cache=False).logits, ids).backward()
    usual = NAMES[next(model.parameters()).dtype]  # FP32 under a manifest
    return seen.inner.report(promised, stream=usual, routers=routers or usual)


def lower(report: dict[str, Any]) -> list[tuple[str, str, list[str]]]:
    return [(found["what"], found["computed"], found["modules"]) for found in report["lower"]]


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("path", ["cast", "manifest"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma3_text", "mixtral"])
def test_a_sound_model_computes_nothing_in_a_lower_dtype(family: str, attention: str, path: str, compute: str) -> None:
    model, promised = sound(family, attention, path, compute)
    report = observed(model, promised)
    assert report["lower"] == report["unobserved"] == []
    found = report["computed"]
    norms = {"llama": 5, "gpt2": 5, "qwen3": 9, "gemma3_text": 13, "mixtral": 5}[family]
    kernels = family == "gpt2" and path == "cast"  # its LayerNorm and softmax get 16 bits
    assert found[NORM] == {KERNEL if kernels else "fp32": norms}
    scores = FUSED if attention == "sdpa" else KERNEL if kernels else "fp32"
    assert found[SOFTMAX] == (
        {scores: 2} if family != "mixtral" else {"fp32": 4} if scores == "fp32" else {scores: 2, "fp32": 2}
    )
    assert found[LOSS_SUM] == {"fp32": 1}
    assert found.get(ROTARY) == (None if family == "gpt2" else {"fp32": 1})
    assert found.get(ROUTER) == ({compute if path == "cast" else "fp32": 2} if family == "mixtral" else None)
    assert found[RESIDUAL] == {compute if path == "cast" else "fp32": 2}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.architecture)
def test_no_architecture_computes_anything_in_a_lower_dtype(case: Case) -> None:
    """Architectures of docs/models.md. Blocks show what they add up; Bloom's leave it to what is inside."""
    config = {"pad_token_id": None, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0} | case.config
    dropped = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "dropout": 0.0}
    for path in ("cast", "manifest"):
        for compute in ("bf16", "fp16"):
            report = observed(*sound(case.architecture, "eager", path, compute, **config, **dropped))
            assert report["lower"] == []
            blind = {(entry["what"], len(entry["modules"])) for entry in report["unobserved"]}
            assert blind == ({(RESIDUAL, 2)} if case.architecture == "bloom" else set())


def eager_with(softmax: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Attention whose scores go through `softmax`; causal."""

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **rest: Any) -> Any:
        groups = module.num_key_value_groups
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
        hidden = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
        weights = softmax((query @ key.mT * scaling).masked_fill(hidden, -1e4)).to(value.dtype)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    return attend


def by_hand(scores: torch.Tensor) -> torch.Tensor:
    scores = scores.to(torch.bfloat16)
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


def widened_between(scores: torch.Tensor) -> torch.Tensor:
    """exp in 16 bits, the sum in FP32."""
    powers = (scores.bfloat16() - scores.bfloat16().amax(-1, keepdim=True)).exp().unsqueeze(0)[0].float()
    return powers / powers.sum(-1, keepdim=True)


def narrowed_first(scores: torch.Tensor) -> torch.Tensor:
    """torch's kernel, on wide scores that are narrowed for it."""
    return scores.float().mul(1.0).bfloat16().softmax(-1)


def widened_again(scores: torch.Tensor) -> torch.Tensor:
    return scores.float().mul(1.0).bfloat16().float().softmax(-1)


@pytest.mark.parametrize("softmax", [by_hand, widened_between, narrowed_first, widened_again])
@pytest.mark.parametrize("path", ["cast", "manifest"])
def test_a_softmax_in_16_bits_is_named(path: str, softmax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, promised = sound("llama", "eager", path)
    sick = model.get_submodule("model.layers.1.self_attn")
    planted, healthy = eager_with(softmax), eager_with(lambda scores: scores.softmax(-1, dtype=torch.float32))

    def attend(module: Any, *args: Any, **kwargs: Any) -> Any:
        return (planted if module is sick else healthy)(module, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "eager", attend)
    report = observed(model, promised)
    assert lower(report) == [(SOFTMAX, "bf16", ["model.layers.1.self_attn"])]
    assert report["computed"][SOFTMAX] == {"fp32": 1, "bf16": 1}


def coarse_norm(module: Any, statistic: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        normed = hidden_states.float() * statistic(hidden_states).float()
        return module.weight * normed.to(hidden_states.dtype)

    return forward


STATISTICS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda x: torch.rsqrt(x.bfloat16().pow(2).mean(-1, keepdim=True) + 1e-6),
    "squares": lambda x: torch.rsqrt(x.bfloat16().square().float().mean(-1, keepdim=True) + 1e-6),
    "product": lambda x: torch.rsqrt((x.bfloat16() * x.bfloat16()).float().mean(-1, keepdim=True) + 1e-6),
    "mean": lambda x: torch.rsqrt(x.float().pow(2).bfloat16().mean(-1, keepdim=True).float() + 1e-6),
    "rounded": lambda x: torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True).bfloat16().float() + 1e-6),
    "norm": lambda x: 1 / (x.bfloat16().norm(dim=-1, keepdim=True).float() / 32**0.5 + 1e-6),
}


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("path", ["cast", "manifest"])
def test_a_norms_statistic_in_16_bits_is_named(path: str, statistic: str) -> None:
    model, promised = sound("llama", "sdpa", path)
    name = "model.layers.0.post_attention_layernorm"
    sick: Any = model.get_submodule(name)
    sick.forward = coarse_norm(sick, STATISTICS[statistic])
    assert lower(observed(model, promised)) == [(NORM, "bf16", [name])]


def test_a_norm_that_a_manifest_puts_into_16_bits_keeps_its_promise(tmp_path: Path) -> None:
    rule = '{"module_class": "*Norm", "compute": "bf16", "reason": "a trial"}'
    (tmp_path / "m.json").write_text(f'{{"default": "bf16", "rules": [{rule}]}}', encoding="utf-8")
    model = small_model("gpt2", "sdpa").train()
    regions = Regions(model, load_manifest(tmp_path / "m.json"))
    assert observed(model, regions.dtypes)["lower"] == []
    assert lower(observed(model)) == [(NORM, "bf16", [name for name, kind in regions.dtypes.items() if "ln_" in name])]


def flat(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.bfloat16().flatten(0, 1), labels.flatten()


LOSSES: dict[str, Loss] = {
    "sum of exp": lambda x, y: (
        -(x.bfloat16() - x.bfloat16().exp().sum(-1, keepdim=True).log()).gather(-1, y[..., None]).sum()
    ),
    "exp only": lambda x, y: (x.bfloat16().exp_().float().sum(-1).log() - x.gather(-1, y[..., None])[..., 0]).sum(),
    "logsumexp": lambda x, y: (x.bfloat16().logsumexp(-1).float() - x.float().gather(-1, y[..., None])[..., 0]).sum(),
    "log_softmax": lambda x, y: -x.bfloat16().log_softmax(-1).float().gather(-1, y[..., None]).sum(),
    "cross_entropy": lambda x, y: functional.cross_entropy(*flat(x, y), reduction="sum"),
    "narrowed": lambda x, y: functional.cross_entropy(flat(x.float(), y)[0].float(), y.flatten(), reduction="sum"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_in_16_bits_is_named(loss: str) -> None:
    model, _ = sound("llama", "sdpa", "cast")
    if loss == "narrowed":  # on the cast path logits are 16 bits: rounding them again changes nothing
        model.float()
    assert lower(observed(model, loss=LOSSES[loss])) == [(LOSS_SUM, "bf16", [LOSS])]


@pytest.mark.parametrize("kind", ["whole", "chunked", "log probabilities"])
def test_the_losses_of_the_tasks_add_up_in_fp32(kind: str) -> None:
    model, _ = sound("llama", "sdpa", "cast")
    if kind == "chunked":
        head: Any = model.get_output_embeddings()
        head.forward = lambda hidden: linear_cross_entropy(hidden, Head(head.weight, None), IDS, chunk_tokens=8)[0]
        report = observed(model, loss=lambda loss, _: loss)
    elif kind == "whole":
        report = observed(model)
    else:
        report = observed(model, loss=lambda logits, labels: -token_log_probs(logits, labels).sum())
    assert report["computed"][LOSS_SUM] == {"fp32": 1}
    assert report["lower"] == report["unobserved"] == []


def embedding_in_bf16(model: Any) -> None:
    """The first block's input is BF16, and so is the residual stream."""
    embed = model.get_submodule("model.embed_tokens")
    own = embed.forward
    embed.forward = lambda ids: own(ids).bfloat16()


def sum_in_bf16(model: Any) -> None:
    """One block's output is rounded, and the next block continues with it."""
    block = model.get_submodule("model.layers.0")
    own = block.forward
    block.forward = lambda *args, **rest: own(*args, **rest).bfloat16()


@pytest.mark.parametrize(("plant", "named"), [(embedding_in_bf16, [0, 1]), (sum_in_bf16, [1])])
def test_a_residual_stream_in_16_bits_under_a_manifest_is_named(plant: Callable[[Any], None], named: list[int]) -> None:
    model, promised = sound("llama", "sdpa", "manifest")
    plant(model)
    assert lower(observed(model, promised)) == [(RESIDUAL, "bf16", [f"model.layers.{number}" for number in named])]


def test_a_router_below_its_path_is_named() -> None:
    """FP32 is promised by `precision.routers`, and by a manifest without a rule for it."""
    model, _ = sound("mixtral", "sdpa", "cast")
    gates = [f"model.layers.{number}.mlp.gate" for number in (0, 1)]
    assert lower(observed(model)) == []
    assert lower(observed(model, routers="fp32")) == [(ROUTER, "bf16", gates)]
    model, promised = sound("mixtral", "sdpa", "manifest")
    gate: Any = model.get_submodule(gates[1])
    gate.forward = functools.partial(type(gate).forward, gate)  # as the code around it computes
    assert lower(observed(model, promised)) == [(ROUTER, "bf16", [gates[1]])]


def positions_in_bf16(rotary: Any) -> None:
    own = rotary.forward
    rotary.forward = lambda x, position_ids: own(x, position_ids=position_ids.bfloat16())


def frequencies_in_bf16(rotary: Any) -> None:
    rotary.inv_freq = rotary.inv_freq.bfloat16()


def frequencies_rounded_before(rotary: Any) -> None:
    rotary.inv_freq.copy_(rotary.inv_freq.bfloat16())


def angles_in_bf16(rotary: Any) -> None:
    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = (position_ids[..., None].float() * rotary.inv_freq).bfloat16().repeat(1, 1, 2).float()
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    rotary.forward = forward


@pytest.mark.parametrize("plant", [positions_in_bf16, frequencies_in_bf16, frequencies_rounded_before, angles_in_bf16])
@pytest.mark.parametrize("path", ["cast", "manifest"])
def test_a_rotary_table_of_16_bits_is_named(path: str, plant: Callable[[Any], None]) -> None:
    model, promised = sound("llama", "sdpa", path, head_dim=16)
    plant(model.get_submodule("model.rotary_emb"))
    assert lower(observed(model, promised)) == [(ROTARY, "bf16", ["model.rotary_emb"])]


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((2, 16), {"vocab_size": 50_257}),
        ((1, 2048), {"vocab_size": 2048, "num_attention_heads": 1, "num_key_value_heads": 1}),
    ],
)
def test_all_of_it_is_seen_at_the_sizes_of_real_runs(shape, config, monkeypatch) -> None:
    """A vocabulary of 50 thousand, and sequences of 2,048."""
    model, _ = sound("llama", "eager", "cast", head_dim=16, **config)
    ids = torch.arange(shape[0] * shape[1]).reshape(shape)
    assert observed(model, ids=ids)["lower"] == []
    name = "model.layers.1.input_layernorm"
    norm: Any = model.get_submodule(name)
    norm.forward = coarse_norm(norm, STATISTICS["rounded"])
    positions_in_bf16(model.get_submodule("model.rotary_emb"))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "eager", eager_with(narrowed_first))
    assert {what: modules for what, _, modules in lower(observed(model, loss=LOSSES["exp only"], ids=ids))} == {
        SOFTMAX: ["model.layers.0.self_attn", "model.layers.1.self_attn"],
        NORM: [name],
        LOSS_SUM: [LOSS],
        ROTARY: ["model.rotary_emb"],
    }


@pytest.mark.parametrize(("mode", "reentrant"), [("full", False), ("full", True), ("ops", False)])
def test_recomputation_shows_the_same(mode: Any, reentrant: bool) -> None:
    model, _ = sound("llama", "eager", "cast")
    norm: Any = model.get_submodule("model.layers.1.input_layernorm")
    norm.forward = coarse_norm(norm, STATISTICS["all"])
    plain = observed(model)
    assert lower(plain) == [(NORM, "bf16", ["model.layers.1.input_layernorm"])]
    apply_activation_checkpointing(model, mode, reentrant=reentrant)
    assert observed(model) == plain


def test_what_shows_no_operator_is_said_and_not_guessed() -> None:
    class Opaque(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(x.numpy() / 2)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] / 2

    model, _ = sound("llama", "sdpa", "cast")
    model.float()
    norm: Any = model.get_submodule("model.norm")
    norm.forward = Opaque.apply
    with Observation(model) as seen:
        model(IDS, use_cache=False)
    unobserved = {entry["what"]: entry for entry in seen.inner.report(compiled=True)["unobserved"]}
    assert unobserved[NORM]["modules"] == ["model.norm"] and "a kernel of its own" in unobserved[NORM]["why"]
    assert "compiled graph" in unobserved["compiled blocks"]["why"]
    assert LOSS_SUM in unobserved and SOFTMAX not in unobserved
    inner = InnerDtypes(model, root=ROOT)
    inner.ran.add("model.layers.0.self_attn")
    inner.see_attention("model.layers.0.self_attn", "flex_attention")
    entry = inner.report()["unobserved"][0]
    assert (entry["what"], entry["modules"]) == (SOFTMAX, ["model.layers.0.self_attn"])
    assert "flex_attention" in entry["why"]


def test_a_norm_may_follow_one_that_returns_16_bits() -> None:
    """A value narrowed as one module's output is the next one's input; its statistic was not narrowed."""
    model, _ = sound("llama", "sdpa", "cast")
    norm: Any = model.get_submodule("model.layers.0.input_layernorm")
    embed: Any = model.get_submodule("model.embed_tokens")
    own = embed.forward
    embed.forward = lambda ids: own(ids).float().mul(1.0).bfloat16()
    assert norm is not None and observed(model)["lower"] == []
