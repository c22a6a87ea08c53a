"""The module that is blamed is the one that was broken, in every way a number stops being finite."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from modeling.activation_checkpointing import apply_activation_checkpointing
from modeling.linear_cross_entropy import label_loss_sum
from precision.findings import LOSS, MOST_FINDINGS, Finding, check_parameters
from precision.nonfinite import Inspector
from tests.support.models.small_models import VOCABULARY, small_model

INF, NAN = math.inf, math.nan
SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}


def llama(*, tied: bool = False, recompute: str = "none") -> PreTrainedModel:
    return recomputing(small_model("llama", **SHAPE, tie_word_embeddings=tied), recompute)


def gpt2(*, recompute: str = "none") -> PreTrainedModel:
    dropout = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.1)
    return recomputing(small_model("gpt2", **SHAPE, **dropout), recompute)


def recomputing(model: PreTrainedModel, how: str) -> PreTrainedModel:
    model.train()
    if how != "none":
        apply_activation_checkpointing(model, "full", reentrant=how == "reentrant")
    return model


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed))


def run(model: nn.Module, inspector: Inspector, *, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """One micro-batch, as the engine runs it."""
    ids = tokens(seed)
    logits = model(input_ids=ids, use_cache=False).logits
    loss = label_loss_sum(logits, ids)
    inspector.check_loss(loss)
    (loss * scale).backward()
    return loss


def inspect(model: nn.Module, **options: object) -> list[Finding]:
    with Inspector(model) as inspector:
        run(model, inspector, **options)
    return inspector.findings


def findings(model: nn.Module, *inputs: torch.Tensor, scale: float | None = 1.0) -> list[Finding]:
    """After a pass on these inputs, or on tokens. scale: of the sum that goes backward; None: none does."""
    with Inspector(model) as inspector:
        output = model(*inputs) if inputs else model(input_ids=tokens(), use_cache=False)
        if scale is not None:
            (output.sum() * scale).backward()
    return inspector.findings


class SpoiledGradient(torch.autograd.Function):
    """The identity, with a backward that writes a value into the gradient."""

    @staticmethod
    def forward(ctx, tensor, value):
        ctx.value = value
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient.view(-1)[:2] = ctx.value
        return gradient, None


def spoil_output(model: nn.Module, name: str, value: float) -> None:
    """Make the module's forward compute 3 wrong values from now on, as a bug of its own would."""
    forward = model.get_submodule(name).forward

    def spoiled(*args, **kwargs):
        output = forward(*args, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        where = torch.zeros(first.shape, dtype=torch.bool)
        where.view(-1)[:3] = True
        first = first.masked_fill(where, value)
        return (first, *output[1:]) if isinstance(output, tuple) else first

    model.get_submodule(name).forward = spoiled


def spoil_gradient(model: nn.Module, name: str, value: float) -> None:
    """Make the module's backward return an input gradient with 2 wrong values from now on."""
    forward = model.get_submodule(name).forward
    model.get_submodule(name).forward = lambda hidden, *args, **kwargs: forward(
        SpoiledGradient.apply(hidden, value), *args, **kwargs
    )


RECOMPUTE = pytest.mark.parametrize("recompute", ["none", "plain", "reentrant"])


@RECOMPUTE
@pytest.mark.parametrize("model", [llama, gpt2])
def test_a_healthy_pass_has_no_findings_and_the_same_gradients_to_rounding(model, recompute):
    plain, inspected = model(recompute=recompute), model(recompute=recompute)
    ids = tokens()
    torch.manual_seed(1)  # GPT-2 has dropout
    label_loss_sum(plain(input_ids=ids, use_cache=False).logits, ids).backward()
    torch.manual_seed(1)
    assert inspect(inspected) == []
    for (name, mine), (_, other) in zip(inspected.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-5, msg=name)


@RECOMPUTE
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize(
    ("model", "module"),
    [
        (llama, "model.layers.1.mlp.down_proj"),
        (llama, "model.layers.0.self_attn.q_proj"),
        (llama, "model.layers.2.self_attn"),
        (llama, "model.layers.1.mlp"),
        (llama, "model.layers.1"),
        (llama, "model.embed_tokens"),
        (llama, "lm_head"),
        (gpt2, "transformer.h.1.mlp.act"),
        (gpt2, "transformer.h.2.attn"),
    ],
)
def test_the_first_bad_activation_is_blamed_on_its_module(model, module, value, recompute):
    broken = model(recompute=recompute)
    spoil_output(broken, module, value)
    (finding,) = inspect(broken)
    assert (finding.module, finding.tensor, finding.kind) == (module, "activation", "nan" if value != value else "inf")
    assert (finding.count, finding.order, finding.micro_batch) == (3, 0, 0)
    assert 0 < finding.largest_finite < 100


@RECOMPUTE
@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.parametrize(
    ("model", "module"),
    [
        (llama, "model.layers.1.mlp.down_proj"),
        (llama, "model.layers.0.self_attn.v_proj"),
        (llama, "model.layers.1.mlp"),
        (llama, "model.layers.2.input_layernorm"),
        (llama, "model.layers.1"),
        (llama, "lm_head"),
        (gpt2, "transformer.h.1.mlp.c_proj"),
        (gpt2, "transformer.h.2.attn"),
    ],
)
def test_the_first_bad_gradient_is_blamed_on_its_module(model, module, value, recompute):
    broken = model(recompute=recompute)
    spoil_gradient(broken, module, value)
    first, *others = inspect(broken)
    assert (first.module, first.tensor, first.kind) == (module, "gradient", "nan" if value != value else "inf")
    assert first.count == 2 and others == []


@RECOMPUTE
def test_scores_that_overflow_inside_attention_are_blamed_on_attention(recompute):
    """Queries and keys of 1e25 are finite, their product is not; o_proj is only handed what came of it."""
    model = llama(recompute=recompute)
    model.config._attn_implementation = "eager"
    for projection in ("q_proj", "k_proj"):
        spoil_output(model, f"model.layers.1.self_attn.{projection}", 1e25)
    first, *others = inspect(model)
    assert (first.module, first.tensor, first.kind) == ("model.layers.1.self_attn", "activation", "nan")
    assert first.seen == "given to model.layers.1.self_attn.o_proj" and others == []


class Chain(nn.Module):
    """A block that overflows in its own code between two submodules."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.factor = factor

    def forward(self, hidden: torch.Tensor, extras: dict | None = None) -> dict[str, object]:
        hidden = self.first(hidden) * self.factor * self.factor
        beside = {"note": "not a tensor", "nothing": None, "pair": (hidden, [hidden.sum()])}
        return {"hidden": self.second(hidden), **beside}


class Outer(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner = Chain(factor)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden, extras={"unused": 1})["hidden"]


def test_code_between_submodules_is_blamed_on_the_module_that_holds_them():
    (finding,) = findings(Outer(1e30), torch.ones(2, 4))
    assert (finding.module, finding.tensor, finding.seen) == ("inner", "activation", "given to inner.second")


def test_a_backward_of_code_between_submodules_is_blamed_the_same_way():
    model = Outer(1e15)  # 1e30 forward, finite; the gradient of 1e10 gets it again: 1e40
    with torch.no_grad():
        model.inner.first.weight.mul_(1e-20)
        model.inner.first.bias.zero_()
    first, *others = findings(model, torch.ones(2, 4), scale=1e10)
    assert (first.module, first.tensor, first.kind) == ("inner", "gradient", "inf")
    assert first.seen == "flowing into inner.first" and others == []


@pytest.mark.parametrize("value", [INF, NAN])
def test_a_loss_that_is_not_finite_over_finite_logits_is_the_loss(value):
    model = llama()
    with Inspector(model) as inspector:
        loss = label_loss_sum(model(input_ids=tokens(), use_cache=False).logits, tokens()) * value
        inspector.check_loss(loss)
        loss.backward()
    (finding,) = inspector.findings
    assert finding == Finding(LOSS, "loss", "nan" if value != value else "inf", 1, None, "float32", 0, 0, "")


def test_a_loss_scale_that_is_too_large_is_blamed_on_the_way_into_the_model():
    (finding,) = inspect(llama(), scale=1e39)
    assert (finding.module, finding.tensor, finding.kind) == (LOSS, "gradient", "inf")
    assert finding.seen == "flowing into LlamaForCausalLM"


@RECOMPUTE
def test_a_bad_weight_is_named_before_the_module_it_spoils(recompute):
    model = llama(recompute=recompute)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 2] = NAN
    weight, module = inspect(model)
    assert (weight.module, weight.tensor, weight.count) == ("model.layers.1.mlp.up_proj.weight", "parameter", 1)
    assert (module.module, module.tensor, module.order) == ("model.layers.1.mlp.up_proj", "activation", 1)
    checked = check_parameters(model.named_parameters())
    assert [(found.module, found.count) for found in checked] == [("model.layers.1.mlp.up_proj.weight", 1)]
    assert len(check_parameters((name, weight * NAN) for name, weight in model.named_parameters())) == MOST_FINDINGS


@RECOMPUTE
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_a_bad_parameter_gradient_has_its_full_name_whenever_it_was_injected(recompute, tied, late):
    """A hook placed after the Inspector's, as an injected fault's is, must not be overlooked."""
    model = llama(tied=tied, recompute=recompute)
    target = model.model.embed_tokens.weight if tied else model.model.layers[1].self_attn.k_proj.weight

    def spoil(gradient):
        spoiled = gradient.clone()
        spoiled[0, 0] = INF
        return spoiled

    handle = None if late else target.register_hook(spoil)
    with Inspector(model) as inspector:
        for _ in range(2):
            ids = tokens()
            loss = label_loss_sum(model(input_ids=ids, use_cache=False).logits, ids)
            handle = handle or target.register_hook(spoil)
            loss.backward()
            handle.remove()
            handle = None if late else target.register_hook(spoil)
    (finding,) = inspector.findings
    expected = "model.embed_tokens.weight" if tied else "model.layers.1.self_attn.k_proj.weight"
    assert (finding.module, finding.tensor, finding.kind, finding.count) == (expected, "gradient", "inf", 1)
    assert finding.micro_batch == 0


def test_the_micro_batch_is_counted_and_later_causes_come_later():
    model = llama()
    with Inspector(model) as inspector:
        with torch.no_grad():
            model(input_ids=tokens(), use_cache=False)  # to count what experts get: no micro-batch
        run(model, inspector)
        spoil_gradient(model, "model.layers.2.mlp", NAN)
        run(model, inspector, seed=1)
        spoil_output(model, "model.layers.0.mlp", INF)
        run(model, inspector, seed=2)
    assert [(found.module, found.tensor, found.micro_batch, found.order) for found in inspector.findings] == [
        ("model.layers.2.mlp", "gradient", 1, 0),
        ("model.layers.0.mlp", "activation", 2, 1),
    ]


class Twice(nn.Module):
    """One layer used twice: only the second time does it overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.after = nn.Linear(4, 4, bias=False), nn.Identity()
        nn.init.constant_(self.shared.weight, 1e20)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.after(self.shared(self.shared(hidden)))


def test_a_module_called_twice_is_judged_call_by_call():
    (finding,) = findings(Twice(), torch.ones(1, 4), scale=None)
    assert (finding.module, finding.kind, finding.count, finding.largest_finite) == ("shared", "inf", 4, None)


class HandsOn(nn.Module):
    """Submodules that return their input, or their submodule's output, as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Identity(), nn.Sequential(nn.Linear(4, 4)), nn.Dropout(0.0), nn.ReLU(inplace=True))
        self.head = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(hidden))


def test_modules_that_hand_a_tensor_on_are_not_blamed_for_it():
    model = HandsOn()
    spoil_gradient(model, "head", INF)
    (finding,) = findings(model, torch.ones(2, 4, requires_grad=True))
    assert (finding.module, finding.tensor) == ("head", "gradient")


def test_an_additive_mask_is_no_error():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.attend = nn.Module()
            self.attend.forward = lambda hidden, bias, attention_mask: functional.scaled_dot_product_attention(
                hidden, hidden, hidden, attn_mask=bias + attention_mask
            )

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            bias = torch.full((2, 2), -INF).triu(1)
            return self.attend(self.linear(hidden), bias, attention_mask=bias + torch.eye(2))

    assert findings(Masked(), torch.ones(1, 2, 4)) == []


def test_a_real_overflow_in_half_precision_is_found_where_it_happens():
    """70000 does not fit float16; the down projection is the first to reach it."""
    model = llama().half()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(60000.0)
        model.model.layers[1].mlp.up_proj.weight.fill_(50.0)
        model.model.layers[1].mlp.gate_proj.weight.abs_().fill_(1.0)
    (finding,) = findings(model, scale=None)
    assert (finding.module, finding.tensor, finding.kind) == ("model.layers.1.mlp.down_proj", "activation", "inf")
    assert finding.overflowed and finding.dtype == "float16"


@pytest.mark.parametrize("recompute", ["none", "reentrant", "hooks"])
def test_an_overflow_of_a_single_value_shows_in_what_it_was_made_from(recompute):
    """One channel of one token is 40000 before a sum with 30000: what is left of the sum is small."""
    model = llama(recompute=recompute).half()

    def massive(module: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        values = output.clone()
        values[0, 3, 5] = 40000.0 if module is model.model.embed_tokens else 30000.0
        return values

    model.model.embed_tokens.register_forward_hook(massive)
    model.model.layers[1].mlp.register_forward_hook(massive)
    (finding,) = findings(model, scale=None)
    assert (finding.module, finding.count, finding.overflowed) == ("model.layers.1", 1, True)
    assert finding.largest_finite == 40000.0


def hooks(model: nn.Module) -> int:
    modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())
    return modules + sum(len(p._backward_hooks or ()) for p in model.parameters())


def test_nothing_stays_installed_even_after_an_exception():
    model = llama()
    with Inspector(model) as inspector:
        assert hooks(model) > 0
        run(model, inspector)
        logits = model(input_ids=tokens(), use_cache=False).logits
    assert hooks(model) == 0
    (logits * NAN).sum().backward()
    assert hooks(model) == 0 and inspector.findings == []
    spoil_output(model, "model.layers.1", NAN)
    good = model.model.layers[2].forward
    model.model.layers[2].forward = None
    with Inspector(model) as inspector:
        with pytest.raises(TypeError):
            run(model, inspector)
        model.model.layers[2].forward = good
        run(model, inspector)
    assert hooks(model) == 0
    assert [finding.module for finding in inspector.findings] == ["model.layers.1"]
