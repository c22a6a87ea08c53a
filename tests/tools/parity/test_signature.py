"""Whether rounding explains a module's error: it does in sound models, and no planted defect of the table is too small.

The run is a model of transformers cast as DeepSpeed casts, or under the regions of a manifest; defects are put into it
alone. What is planted stays below what the bounds on a module's output, gradients and loss would show.
"""

import copy
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from operator import mul
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from config.schema import AdapterSection, ParitySection
from modeling import linear_cross_entropy
from modeling.activation_checkpointing import apply_activation_checkpointing
from modeling.adapter import adapter_off, add_adapter
from modeling.chunked_head import ChunkedHead
from modeling.objectives.label_prediction import LabelPrediction
from modeling.objectives.objective import Scored
from precision.dtypes import DTYPES
from precision.manifest import Manifest, Rule
from precision.regions import Regions
from precision.tolerance import unit_roundoff
from tests.precision.test_inner_dtypes import by_hand, eager_with, widened_between
from tests.support.models.small_models import small_model
from tests.support.rows import labelled, seq2seq
from tests.tools.parity import step_cases
from tools.parity import recompute
from tools.parity.backward import OwnLoss
from tools.parity.judge_steps import judge_signatures
from tools.parity.recompute import Call, by_halves, distinct_rows, fewer_rows
from tools.parity.rounding import figures, findings, pooled, resolution, size_of
from tools.parity.signature import Signatures

Plant = Callable[[Any], None]
Times = Callable[[torch.Tensor, float], torch.Tensor]
"""Ways to plant a factor: into the values, or into their gradients alone."""
BOUNDS = ParitySection()
VOCABULARY = 250
SCALE = 4096.0
"""Scale of the loss, as FP16 needs it."""
SIZES = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256, "vocab_size": 256}
FP8 = Manifest("bf16", (Rule("fp8", "x", "*_proj", "Linear"), Rule("bf16", "x", "*head*", "Linear")), Path("m.json"))
BF16 = Manifest("bf16", (), Path("m.json"))
LAYER = "model.layers.1"
NORM, ATTENTION, MLP = f"{LAYER}.input_layernorm", f"{LAYER}.self_attn", f"{LAYER}.mlp"
HEAD, EMBEDDING, ROTARY = "lm_head", "model.embed_tokens", "model.rotary_emb"


def trained(family: str, attention: str, seed: int) -> PreTrainedModel:
    """A small model whose weights, norms' and biases included, are not those of a start."""
    sizes = {"n_embd": 64, "vocab_size": 256} if family == "gpt2" else SIZES
    model = small_model(family, attention, **sizes | ({"n_positions": 256} if family == "gpt2" else {})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.5 * parameter.std().nan_to_num(0.1).clamp(min=0.05)
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return model


def cast(model: PreTrainedModel, dtype: torch.dtype = torch.bfloat16) -> None:
    """Cast parameters, and no buffer, as DeepSpeed does."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def twins(make: Callable[[], PreTrainedModel]) -> list[PreTrainedModel]:
    """A reference, and a run that is cast."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    cast(models[1])
    return models


def measured(
    family: str = "llama",
    compute: str = "bf16",
    *,
    plant: Plant | None = None,
    both: Plant | None = None,
    manifest: Manifest | None = None,
    attention: str = "sdpa",
    seed: int = 1,
    tokens: int = 64,
    steps: int = 1,
    objective: LabelPrediction | None = None,
) -> list[dict[str, Any]]:
    """Measurements of some forward passes on random tokens, as in a step.

    plant: what is done to the run; both: to the reference, too, before the run is cast.
    """
    plain = "sdpa" if attention == "flex_attention" else attention  # as in `Reference`
    reference, run = (trained(family, kind, seed) for kind in (plain, attention))
    for model in (reference, run) if both is not None else ():
        both(model)
    regions = None if manifest is None else Regions(run, manifest)
    if manifest is None:
        cast(run, DTYPES[compute])
    if plant is not None:
        plant(run)
    generator, found, objective = torch.Generator().manual_seed(seed), [], objective or LabelPrediction()
    for _ in range(steps):
        signatures = Signatures(reference, run, compute=DTYPES[compute], regions=regions)
        given, labels = (torch.randint(VOCABULARY, (4, tokens), generator=generator) for _ in range(2))
        watch = signatures.watch_loss(LabelPrediction(), {"input_ids": given}, labels, _own(objective))
        with signatures.of_candidate():
            loss = objective.score(run, {"input_ids": given}, labels).loss
            if torch.is_grad_enabled():
                watch(loss)
                (loss * SCALE / labels.numel()).backward()
        found.append(signatures.measured())
    return found


def _own(objective: LabelPrediction) -> OwnLoss:
    return lambda inputs, labels, _, *, forward: objective.score(forward, inputs, labels)


def test_a_pass_of_the_base_alone_is_not_compared_with_the_adapted_reference() -> None:
    """The reference pass that DPO makes before the pass that learns."""
    reference, run = (
        add_adapter(trained("llama", "sdpa", 1), AdapterSection(kind="lora", r=4), seed=0) for _ in range(2)
    )
    with torch.no_grad():
        for name, parameter in [*reference.named_parameters(), *run.named_parameters()]:
            if ".lora_B." in name:
                parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    cast(run)
    signatures = Signatures(reference, run, compute=torch.bfloat16)
    tokens = torch.randint(VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(1))
    with signatures.of_candidate():
        with adapter_off(run):
            run(tokens, use_cache=False)
        run(tokens, use_cache=False)
    assert not named([signatures.measured()])


def test_what_a_model_collects_of_its_modules_is_the_runs_alone() -> None:
    """transformers' hooks are on the reference's modules, too, which are called in the midst of the run's pass."""
    reference, run = twins(lambda: trained("mixtral", "sdpa", 1))
    tokens = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))
    with Signatures(reference, run, compute=torch.bfloat16).of_candidate():
        found = run(tokens, output_router_logits=True, use_cache=False)
    assert len(found.router_logits) == 2


@pytest.mark.parametrize("mode", ["full", "attention", "ops"])
def test_what_is_compared_is_no_part_of_the_blocks_that_are_recomputed(mode: Any) -> None:
    """The reference multiplies in the midst of a block that keeps its matmuls' results."""
    reference, run, alone = (trained("llama", "sdpa", 1).train() for _ in range(3))
    apply_activation_checkpointing(run, mode, reentrant=False)
    tokens = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))
    with Signatures(reference, run, compute=torch.float32).of_candidate():
        run(tokens, use_cache=False).logits.square().mean().backward()
    alone(tokens, use_cache=False).logits.square().mean().backward()
    for mine, expected in zip(run.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_a_cap_on_the_logits_is_rounded_like_them(compute: str) -> None:
    """The loss is FP32, and the code between the output embedding and it is not."""
    assert named(measured("gemma2", compute, attention="eager")) == ()


def named(steps: list[dict[str, Any]]) -> tuple[str, ...]:
    check = judge_signatures([{"signature": step} for step in steps], BOUNDS)
    assert check.passed == (not check.modules)
    return check.modules


def replaced(name: str, forward: Callable[..., Any]) -> Plant:
    """Puts `forward`, called with a module and what the module is, in place of the module's own."""

    def plant(run: Any) -> None:
        module = run.get_submodule(name)
        module.forward = partial(forward, module)

    return plant


def linear(name: str, factor: float, times: Times = mul) -> Plant:
    def forward(module: Any, given: torch.Tensor) -> torch.Tensor:
        return times(functional.linear(given.float(), module.weight.float()), factor).to(given.dtype)

    return replaced(name, forward)


def norm(factor: float = 1.0, times: Times = mul, *, variance: torch.dtype = torch.float32) -> Plant:
    def forward(module: Any, given: torch.Tensor) -> torch.Tensor:
        wide = given.float()
        mean = wide.pow(2).mean(-1, keepdim=True).to(variance).float()
        return module.weight * times(wide * (mean + module.variance_epsilon).rsqrt(), factor).to(given.dtype)

    return replaced(NORM, forward)


def embedding(factor: float, times: Times = mul) -> Plant:
    def forward(module: Any, ids: torch.Tensor) -> torch.Tensor:
        return times(functional.embedding(ids, module.weight.float()), factor).to(module.weight.dtype)

    return replaced(EMBEDDING, forward)


def mlp(factor: float, times: Times = mul) -> Plant:
    def forward(module: Any, given: torch.Tensor) -> torch.Tensor:
        gate, up = module.gate_proj(given), module.up_proj(given)
        return module.down_proj(times(module.act_fn(gate).float() * up.float(), factor).to(given.dtype))

    return replaced(MLP, forward)


def softmax(function: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """Attention of one layer written out, with another softmax."""

    def plant(run: Any) -> None:
        module = run.get_submodule(ATTENTION)
        ALL_ATTENTION_FUNCTIONS["planted"] = eager_with(function)
        module.config = copy.copy(module.config)
        module.config._attn_implementation = "planted"

    return plant


def scaled_attention(factor: float, times: Times = mul) -> Plant:
    return softmax(lambda scores: times(scores.float().softmax(-1), factor))


def attention_output(factor: float) -> Plant:
    """A wrong constant seen from outside: the module's output, after its last rounding."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        output, *rest = type(module).forward(module, *args, **kwargs)
        return (output * factor, *rest)

    return replaced(ATTENTION, forward)


def _angles_in_bf16(module: Any, states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = position_ids[..., None].bfloat16() * module.inv_freq.bfloat16()
    both = torch.cat((angles, angles), -1)
    return both.cos().to(states.dtype), both.sin().to(states.dtype)


rotary_in_bf16 = replaced(ROTARY, _angles_in_bf16)


SCALED: dict[str, tuple[Callable[..., Plant], str]] = {
    "attention": (scaled_attention, ATTENTION),
    "mlp": (mlp, MLP),
    "linear": (partial(linear, f"{MLP}.up_proj"), f"{MLP}.up_proj"),
    "norm": (norm, NORM),
    "embedding": (embedding, EMBEDDING),
    "head": (partial(linear, HEAD), HEAD),
}
"""A factor within the module by kind, before its result is rounded."""


@pytest.mark.parametrize(
    ("family", "compute", "manifest"),
    [
        ("llama", "bf16", None),
        ("gemma3_text", "fp16", None),
        ("gpt2", "bf16", BF16),
        ("mixtral", "bf16", None),
        ("llama", "bf16", FP8),
    ],
)
def test_rounding_explains_a_sound_model(family: str, compute: str, manifest: Manifest | None) -> None:
    steps = measured(family, compute, manifest=manifest, tokens=16)
    assert named(steps) == ()
    assert all("chooses experts" in why for why in steps[0]["not_measured"].values())
    parts = steps[0]["parts"]
    kinds = {row["kind"] for row in parts}
    assert {"linear", "norm", "attention", "embedding", "composite", "loss"} <= kinds
    backward = {row["kind"] for row in parts if row["part"].startswith("gradient of")}
    assert kinds - backward <= {"rotary", "embedding"}, "a table learns nothing, a tied one is left out"
    assert ("functional" in kinds) == (family == "mixtral")


@pytest.mark.parametrize(
    ("plant", "compute", "module"),
    [
        (attention_output(1.01), "bf16", ATTENTION),
        (attention_output(1.01), "fp16", ATTENTION),
        # of values that are BF16's already, 0.1% more rounds to the same
        *((plant(1.004 if kind == "embedding" else 1.001), "bf16", at) for kind, (plant, at) in SCALED.items()),
        (softmax(by_hand), "bf16", ATTENTION),
        (softmax(widened_between), "fp16", ATTENTION),
        (norm(variance=torch.bfloat16), "bf16", NORM),
        (rotary_in_bf16, "bf16", ROTARY),
        (rotary_in_bf16, "fp32", ROTARY),
    ],
)
def test_an_error_that_is_not_rounding_is_named_alone(plant: Plant, compute: str, module: str) -> None:
    """A factor at 64 tokens and in one step, where the run's loss shows nothing."""
    assert named(measured(compute=compute, plant=plant)) == (module,)


def _scaled(given: torch.Tensor, factor: float) -> torch.Tensor:
    """The values themselves, whose gradient is multiplied."""
    return given.detach() + factor * (given - given.detach())


def _of_a_constant(module: Any, given: torch.Tensor) -> torch.Tensor:
    """A norm whose statistic is a constant in its backward pass: a term of its gradient is missing."""
    wide = given.float()
    root = (wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).rsqrt().detach()
    return module.weight * (wide * root).to(given.dtype)


norm_of_a_constant = replaced(NORM, _of_a_constant)


def _in_pieces(module: Any, given: torch.Tensor) -> torch.Tensor:
    """A linear layer of 16 tokens at a time: autograd adds up its weight's gradients, and rounds each sum."""
    pieces = [functional.linear(rows, module.weight) for rows in given.flatten(0, 1).split(16)]
    return torch.cat(pieces).unflatten(0, given.shape[:-1])


summed_in_pieces = replaced(f"{MLP}.up_proj", _in_pieces)


class InLogits(LabelPrediction):
    """The cross-entropy of one more step: `change` of the logits, in `dtype`, and the softmax written out in it."""

    def __init__(self, dtype: torch.dtype = torch.float32, factor: float = 1.0) -> None:
        super().__init__()
        self._dtype, self._factor = dtype, factor

    def score(self, forward: Any, inputs: dict[str, Any], labels: torch.Tensor) -> Scored:
        """Same signature as the parent."""
        logits = _scaled(forward(**inputs, use_cache=False).logits.to(self._dtype), self._factor).flatten(0, 1)
        logits = logits - logits.amax(-1, keepdim=True).detach()
        targets = logits.gather(1, labels.flatten()[:, None]).squeeze(1)
        return Scored((logits.exp().sum(-1).log() - targets).float().sum())


@pytest.mark.parametrize(
    ("plant", "module"),
    [
        # of values that are BF16's already, 0.1% more rounds to the same
        *(
            pytest.param(plant(1.004 if kind == "embedding" else 1.001, _scaled), at, marks=marks)
            for kind, (plant, at) in SCALED.items()
            for marks in ([] if kind in ("attention", "linear") else [pytest.mark.slow],)
        ),
        (norm_of_a_constant, NORM),
        (summed_in_pieces, f"{MLP}.up_proj"),
    ],
)
def test_a_backward_pass_that_rounding_does_not_explain_is_named_alone(plant: Plant, module: str) -> None:
    steps = measured(plant=plant)
    assert named(steps) == (module,)
    assert {item.part.partition(" of ")[0] for item in findings(pooled(steps))} == {"gradient"}


@pytest.mark.parametrize("objective", [InLogits(torch.bfloat16), InLogits(factor=1.004)])
def test_a_loss_that_rounding_does_not_explain_is_named(objective: LabelPrediction) -> None:
    assert named(measured(objective=InLogits())) == ()
    assert named(measured(objective=objective)) == ("(loss)",)


class Chunked(LabelPrediction):
    """The loss of 16 tokens at a time, as the engine computes it."""

    head: ChunkedHead

    def of(self, run: Any) -> None:
        """Plants the factor into this model."""
        self.head = ChunkedHead(run, chunk_tokens=16)

    def score(self, forward: Any, inputs: dict[str, Any], labels: torch.Tensor) -> Scored:
        """Same signature as the parent."""
        with self.head.loss_of(labels, SCALE / labels.numel()):
            loss = forward(**inputs, use_cache=False).logits.sum()
        return Scored(loss)


@pytest.mark.parametrize("narrow", [False, True])
def test_a_loss_in_chunks_is_measured_with_its_head(narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if narrow:
        right = linear_cross_entropy._softmax_loss

        def in_bf16(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
            half = logits.bfloat16()
            losses = right(half, *rest)
            logits.copy_(half)  # what it leaves there is the gradient
            return losses.float()

        monkeypatch.setattr(linear_cross_entropy, "_softmax_loss", in_bf16)
    objective = Chunked()
    steps = measured(plant=objective.of, objective=objective)
    parts = {row["part"] for row in steps[0]["parts"] if row["module"] == "(loss)"}
    assert parts == {"output", "gradient of what model returned", "gradient of lm_head.weight"}
    assert named(steps) == (("(loss)",) if narrow else ())


def test_a_defect_under_a_manifest_is_named() -> None:
    assert named(measured(manifest=BF16, plant=attention_output(1.01))) == (ATTENTION,)
    assert named(measured(manifest=FP8, plant=norm(1.001))) == (NORM,)


@torch.no_grad()
def test_what_is_changed_in_place_is_not_judged_but_named() -> None:
    """An activation overwrites what the gate's projection returned."""
    steps = measured(plant=replaced(f"{MLP}.act_fn", lambda _, given: given.copy_(functional.silu(given))))
    assert named(steps) == ()
    assert set(steps[0]["not_measured"]) == {f"{MLP}.act_fn", MLP, "(backward pass)"}
    assert "in place" in steps[0]["not_measured"][MLP]


def test_a_cast_in_the_architectures_own_code_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run, plain torch and FP64 share it, and agree; that FP32's error does not shrink with its roundoff shows it."""

    def forward(self: Any, given: torch.Tensor) -> torch.Tensor:
        wide = given.float()
        root = wide.pow(2).mean(-1, keepdim=True).bfloat16().float().add(self.variance_epsilon).rsqrt()
        return self.weight * (wide * root).to(given.dtype)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)
    steps = measured()
    assert len(named(steps)) == 5
    assert all("does not shrink" in item.why for item in findings(pooled(steps)))


def alike(model: Any) -> None:
    """The keys' values hardly differ, so that the gradients of the scores are differences of nearly equal numbers."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight *= 1e-3
            layer.self_attn.v_proj.bias += 1.0


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_a_condition_that_16_bits_do_not_show_is_no_defect(compute: str) -> None:
    """A kernel of attention computes inside in FP32, so that the 16 bits around it round after the cancellation."""
    steps = measured("qwen2", compute, both=alike)
    assert named(steps) == ()
    parts = [part for part in pooled(steps) if part.part == "gradient of what k_proj returned"]
    unknown = [dataclasses.replace(part, sums={**part.sums, "moved": 0.0}) for part in parts]
    assert ["does not shrink" in item.why for item in findings(unknown)] == [True, True]


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_a_softmax_in_16_bits_is_named_where_its_gradients_cancel_too(compute: str) -> None:
    rounds = softmax(lambda scores: torch.softmax(scores.to(DTYPES[compute]), -1))
    found = named(measured("qwen2", compute, both=alike, plant=rounds))
    assert found == (ATTENTION,)


def hard(model: Any) -> None:
    """Each query attends to about one key, and the values hardly differ: most of a score's gradient cancels."""
    with torch.no_grad():
        for layer in model.model.layers:
            for item in layer.self_attn.q_proj.parameters():
                item *= 1000.0
            layer.self_attn.v_proj.weight *= 1e-2
            layer.self_attn.v_proj.bias += 1.0


def test_what_rounding_does_inside_a_kernel_is_measured_in_fp64() -> None:
    """FP16 is no measure of it where it loses the gradient altogether, or gradients are subnormal."""
    for part in pooled(measured("qwen2", "fp16", both=hard)):
        if part.part == "gradient of what q_proj returned":
            moved = math.sqrt(part.sums["moved"] / part.sums["xx"])
            assert 0.2 < moved / size_of(part, "fp32") < 5


def faint(model: Any) -> None:
    """Outputs of the MLPs are below FP16's smallest normal number, 6e-5, where numbers are 6e-8 apart."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight *= 1e-4


@pytest.mark.parametrize("name", ["qwen2", "olmo2"])
def test_rounding_among_subnormal_numbers_is_explained(name: str) -> None:
    found = measured(name, "fp16", both=faint)
    part = next(part for part in pooled(found) if part.module == MLP + ".down_proj" and part.part == "output")
    assert size_of(part, "plan") > 10 * part.roundoff and size_of(part, "fp32") < 1e-6
    assert named(found) == ()


def biased(model: Any) -> None:
    """All tokens share a direction, and small biases what the products make of it."""
    with torch.no_grad():
        model.model.embed_tokens.weight += 4.0
        for linear in (layer.self_attn.k_proj for layer in model.model.layers):
            linear.bias.copy_(4e-4 * linear.weight.sum(1))


def rounded_before_the_bias(run: Any) -> None:
    """DeepSpeed's linear layer, which ZeRO-3 puts in place of torch's."""
    for module in run.modules():
        if isinstance(module, torch.nn.Linear) and module.bias is not None:
            module.forward = lambda given, own=module: functional.linear(given, own.weight) + own.bias


def test_a_product_may_be_rounded_before_its_bias_is_added() -> None:
    """The part of the bias that is lost in that sum has its sign, so that errors do not cancel."""
    sound = measured("qwen2", both=biased, plant=rounded_before_the_bias)
    assert named(sound) == ()
    part = next(part for part in pooled(sound) if part.module.endswith("0.self_attn.k_proj") and part.part == "output")
    assert figures(part, "plan").bias < -1e-4


def fused(run: Any) -> None:
    """Other kernels for the same things: one rounding where the architecture's code has several, another order."""
    for name, module in run.named_modules():
        if isinstance(module, torch.nn.Linear):
            halves = torch.stack(module.weight.float().chunk(2, dim=1))
            module.forward = lambda given, halves=halves: sum(
                functional.linear(part.float(), half) for part, half in zip(given.chunk(2, dim=-1), halves, strict=True)
            ).to(given.dtype)
        elif isinstance(module, LlamaRMSNorm):
            module.forward = lambda given, own=module: functional.rms_norm(
                given.float(), (64,), own.weight.float(), own.variance_epsilon
            ).to(given.dtype)
        elif name.endswith(".mlp"):
            module.forward = lambda given, own=module: own.down_proj(
                (functional.silu(own.gate_proj(given).float()) * own.up_proj(given).float()).to(given.dtype)
            )
    softmax(lambda scores: scores.float().softmax(-1))(run)


def massive(model: Any) -> None:
    """One token makes a channel of the first MLP so large that it has nearly all the energy, as in trained models."""
    layer = model.model.layers[0]
    with torch.no_grad():
        direction = functional.normalize(model.model.embed_tokens.weight[0], dim=0)
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
            linear.weight[3] += 20 * direction


def halved(run: Any) -> None:
    """Each product of the first layer as the sum of two that are rounded, as where two ranks share the matrix."""
    for module in run.model.layers[0].modules():
        if isinstance(module, torch.nn.Linear):
            columns = module.in_features // 2

            def forward(given: torch.Tensor, own: torch.nn.Linear = module, at: int = columns) -> torch.Tensor:
                first = functional.linear(given[..., :at], own.weight[:, :at])
                return first + functional.linear(given[..., at:], own.weight[:, at:])

            module.forward = forward


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_a_token_with_all_the_energy_decides_no_verdict(compute: str) -> None:
    """Its few roundings have no scatter: they were a bias of a sound sum in two halves."""
    down = "model.layers.0.mlp.down_proj"
    sound = measured(compute=compute, both=massive, plant=halved)
    [part] = [part for part in pooled(sound) if (part.module, part.part) == ("model.layers.0.mlp", "into down_proj")]
    assert part.sums["xx"] > 100 * part.sums["rows"] * 0.1, "no token is massive"
    assert named(sound) == ()
    for wrong in (1.001, 0.999):
        scaled = replaced(down, lambda module, given, by=wrong: type(module).forward(module, given) * by)
        assert down in named(measured(compute=compute, both=massive, plant=scaled))


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_other_kernels_for_the_same_are_no_defect(compute: str) -> None:
    steps = measured(compute=compute, plant=fused)
    parts = pooled(steps)
    assert named(steps) == ()
    assert any(figures(part, "run") != figures(part, "plan") for part in parts), "the kernels are the same"


def test_a_block_that_rounds_to_the_dtype_of_a_norm_inside_is_no_defect() -> None:
    """Mamba's, whose residual stream is FP32."""
    assert named(measured("mamba", attention="eager", tokens=16)) == ()


def test_ranks_and_steps_are_judged_together() -> None:
    """Sums add up: six steps find about half of what one finds."""
    one, six = (
        next(resolution(part) for part in pooled(measured(steps=steps)) if part.module == f"{MLP}.up_proj")
        for steps in (1, 6)
    )
    assert one / 4 < six < one / 1.7


@pytest.mark.parametrize(("stage", "compute"), [(3, "bf16"), (2, "fp16")])
def test_a_wrong_constant_in_the_engines_model_is_named(pair: Any, stage: int, compute: str) -> None:
    given = {"stage": stage, "compute": compute, "steps": 2, "overrides": ["precision.loss_scale.initial=1024"]}
    for steps in pair.run(step_cases.measured_steps, plant=partial(step_cases.spoiled, module=ATTENTION), **given):
        assert judge_signatures(steps, BOUNDS).modules == (ATTENTION,)


def test_the_rank_that_is_wrong_is_named(pair: Any) -> None:
    plant = partial(step_cases.spoiled, module=ATTENTION, rank=1)
    for steps in pair.run(step_cases.measured_steps, stage=2, compute="bf16", steps=2, plant=plant):
        check = judge_signatures(steps, BOUNDS)
        assert check.modules == (ATTENTION,)
        assert check.note.startswith(f"on rank 1, {ATTENTION}")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("compute", "loss", "recompute"),
    [("bf16", "chunked", "none"), ("fp16", "full", "full"), ("fp32", "chunked", "full"), ("bf16", "full", "none")],
)
def test_gradients_are_measured_in_the_engine(pair: Any, stage: int, compute: str, loss: str, recompute: str) -> None:
    if stage == 0 and compute != "fp32":
        pytest.skip("masters begin with ZeRO-1")
    plan = [f"model.loss={loss}", "precision.loss_scale.initial=1024", f"model.activation_checkpointing={recompute}"]
    plan += ["model.loss_chunk_tokens=16"] if loss == "chunked" else []
    how = {"stage": stage, "compute": compute, "steps": 2, "overrides": plan}
    for steps in pair.run(step_cases.measured_steps, **how):
        check, signature = judge_signatures(steps, BOUNDS), steps[0]["signature"]
        assert check.passed, check.note
        parts = {(part.module, part.part): part for part in pooled([signature])}
        assert {(f"{MLP}.up_proj", "gradient of weight"), (NORM, "gradient of its input")} <= parts.keys()
        end = "gradient of what model returned" if loss == "chunked" else "gradient of what lm_head returned"
        assert ("(loss)", end) in parts
        assert bool(parts["(loss)", "output"].sums["own_xx"]) == (compute != "fp32")
        assert list(signature["not_measured"]) == ([HEAD] if loss == "chunked" else [])
    plant = partial(step_cases.spoiled, module=ATTENTION, forward=False)
    for steps in pair.run(step_cases.measured_steps, plant=plant, **how):
        assert judge_signatures(steps, BOUNDS).modules == (ATTENTION,)


@pytest.mark.slow
def test_no_alarm_over_many_sound_models(capsys: pytest.CaptureFixture[str]) -> None:
    """Architectures, dtypes, paths, kernels of attention and seeds; the page of the docs has the count."""
    sets, alarms = 0, []
    for family in ("llama", "gpt2", "gemma3_text", "qwen3", "mixtral", "gpt_neox", "opt", "olmo2", "mamba"):
        for compute, manifest in (("bf16", None), ("fp16", None), ("fp32", None), ("bf16", BF16), ("bf16", FP8)):
            if family == "mamba" and manifest or manifest is FP8 and family in ("gpt2", "gpt_neox"):
                continue  # no layer is called so, or no region is
            for attention in ("sdpa", "eager")[family == "mamba" :]:
                given = {"manifest": manifest, "attention": attention, "tokens": 16, "steps": 2, "seed": sets}
                steps, sets = measured(family, compute, **given), sets + 1
                alarms += [(family, compute, attention, manifest, item) for item in findings(pooled(steps))]
    for seed in range(80):
        steps, sets = measured(compute=("bf16", "fp16")[seed % 2], plant=fused, seed=seed, steps=2), sets + 1
        alarms += [("fused", seed, item) for item in findings(pooled(steps))]
    with capsys.disabled():
        print(f"\n{sets} sound models, {len(alarms)} alarms")
    assert alarms == []


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_the_smallest_constant_that_is_found_in_the_backward_pass(compute, capsys) -> None:
    for kind, (plant, module) in {**SCALED, "loss": (None, "(loss)")}.items():
        found = 2.0**-6
        while found > 2.0**-20:
            wrong = 1 + found / 2
            planted = None if plant is None else plant(wrong, _scaled)
            objective = InLogits(factor=wrong) if plant is None else None
            if module not in named(measured(compute=compute, plant=planted, objective=objective, steps=2)):
                break
            found /= 2
        with capsys.disabled():
            print(f"\n{compute} {kind}: {found:.1e} found")
        assert found <= 2 * unit_roundoff(DTYPES[compute])


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_the_smallest_constant_that_is_found(compute: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind, halving the factor until it is not named: near what `resolution` says."""
    for kind, (plant, module) in SCALED.items():
        found = 2.0**-6
        while module in named(measured(compute=compute, plant=plant(1 + found / 2), steps=2)):
            found /= 2
        sound = [part for part in pooled(measured(compute=compute, steps=2)) if part.module == module]
        promised = max(resolution(part) for part in sound if figures(part, "plan").size or kind == "embedding")
        with capsys.disabled():
            print(f"\n{compute} {kind}: {found:.1e} found, {promised:.1e} said")
        least = promised if kind != "embedding" else unit_roundoff(DTYPES[compute])  # less rounds to the same
        assert found <= 4 * least


def test_the_plan_takes_the_runs_kernel_of_attention() -> None:
    """T5's bias of positions is a float that nothing learns in cross-attention: for its gradient torch has another one.

    The last block gets it from the block before. What the same kernel makes in the same dtype is the same to the bit.
    """
    sizes = seq2seq.FAMILIES["t5"] | {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1}
    reference, run = twins(lambda: AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **sizes)))
    source, target = (torch.randint(2, VOCABULARY, (4, length)) for length in (24, 40))
    signatures = Signatures(reference, run, compute=torch.bfloat16)
    with signatures.of_candidate():
        run(input_ids=source, labels=target, use_cache=False).loss.backward()
    step = signatures.measured()
    parts = {item.part: item for item in pooled([step]) if item.module == "decoder.block.1.layer.1.EncDecAttention"}
    for inside in "qkv":
        part = parts[f"gradient of what {inside} returned"]
        assert figures(part, "run") == figures(part, "plan")
    assert named([step]) == ()


def test_half_of_a_gradient_is_not_taken_for_that_of_a_module_that_is_called_twice() -> None:
    """DeBERTa projects content and positions by the same layers; its attention as a whole cannot be followed."""
    shape = AutoConfig.for_model("deberta-v2", **labelled.sizes("deberta-v2"), vocab_size=VOCABULARY)
    reference, run = twins(lambda: AutoModelForSequenceClassification.from_config(shape))
    signatures = Signatures(reference, run, compute=torch.bfloat16)
    with signatures.of_candidate():
        given = torch.randint(1, VOCABULARY, (4, 24), generator=torch.Generator().manual_seed(1))
        run(input_ids=given, labels=torch.tensor([0, 1, 0, 1])).loss.backward()
    step = signatures.measured()
    assert named([step]) == ()
    parts = {(part.module.rpartition(".")[2], part.part) for part in pooled([step])}
    gradients = {(name, f"gradient of {what}") for name in ("query_proj", "value_proj") for what in ("weight", "bias")}
    assert parts & gradients == {item for item in gradients if "value" in item[0]}


@pytest.mark.parametrize("manifest", [None, BF16])
def test_a_head_that_holds_its_bias_twice_is_measured_and_so_is_the_loss(manifest: Manifest | None) -> None:
    shape = AutoConfig.for_model("bert", **labelled.sizes("bert"), vocab_size=VOCABULARY)
    reference, run = twins(lambda: AutoModelForMaskedLM.from_config(shape).eval())
    run = run if manifest is None else copy.deepcopy(reference)
    regions = None if manifest is None else Regions(run, manifest)
    assert run.cls.predictions.bias is run.cls.predictions.decoder.bias
    signatures, objective = Signatures(reference, run, compute=torch.bfloat16, regions=regions), LabelPrediction()
    given, labels = torch.randint(1, VOCABULARY, (2, 4, 24), generator=torch.Generator().manual_seed(1))
    watch = signatures.watch_loss(objective, {"input_ids": given}, labels, _own(objective))
    with signatures.of_candidate():
        loss = objective.score(run, {"input_ids": given}, labels).loss
        watch(loss)
        (loss / labels.numel()).backward()
    step = signatures.measured()
    assert named([step]) == () and step["not_measured"] == {}
    parts = {(part.module, part.part) for part in pooled([step])}
    assert {("cls.predictions", "output"), ("(loss)", "output")} <= parts


def test_rows_of_equal_inputs_count_once() -> None:
    """Layers before any position see a token alone, whose rounding is the same each time."""
    given = torch.randn(5, 8)[[0, 1, 0, 2, 3, 1, 4, 0]].view(2, 4, 8)
    call = Call("layer", (given,), {}, given * 2)
    reduced = distinct_rows(call)
    assert len(reduced.output) == len(reduced.output.unique(dim=0)) == 5
    assert torch.equal(reduced.args[0] * 2, reduced.output)
    assert distinct_rows(reduced) is reduced


def test_the_rows_of_a_large_layer_are_of_all_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sixteenth of the rows of sequences of 16 would be their first tokens, which may all be the same."""
    given, output = torch.randn(64, 16, 8), torch.randn(64, 16, 32)
    given[:, 0] = given[0, 0]
    monkeypatch.setattr(recompute, "MOST_VALUES", output.numel() // 16)
    reduced = distinct_rows(fewer_rows(Call("head", (given,), {}, output)))
    assert len(reduced.args[0]) > 50 and reduced.output.numel() <= recompute.MOST_VALUES


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_the_weights_gradient_of_a_large_layer_is_judged_by_some_of_its_outputs(
    compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "MOST_VALUES", 4 * 64 * 16)
    layer, part = f"{MLP}.up_proj", "gradient of weight"

    def enlarge(run: Any) -> None:
        run.get_submodule(layer).weight.register_hook(lambda gradient: gradient * 1.01)

    sound, wrong = measured(compute=compute), measured(compute=compute, plant=enlarge)
    assert (layer, part) in {(row["module"], row["part"]) for row in sound[0]["parts"]}
    assert named(sound) == () and named(wrong) == (layer,)


@pytest.mark.parametrize("inputs", [1, 2, 5])
def test_sums_in_halves_are_those_of_the_layer(inputs: int) -> None:
    """One input has no halves: the second factor of an adapter of rank 1."""
    weight, given = torch.randn(8, inputs), torch.randn(2, 3, inputs)
    torch.testing.assert_close(by_halves({"weight": weight, "bias": None}, given), functional.linear(given, weight))
