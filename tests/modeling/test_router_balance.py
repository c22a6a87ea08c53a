"""Experts are counted as each architecture's own routers choose them, or their balance is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from config.errors import UserError
from config.schema import ModelSection
from modeling.router_balance import _VERIFIED, RouterBalance, router_balance
from tests.support.models.mixtures import EACH, EXPERTS, MORE, sources
from tests.support.models.small_models import VOCABULARY

SECTION = ModelSection(balance_loss=0.1)


def small(kind: str) -> Any:
    """A model in training mode whose routers prefer some experts, by weights and by a choice bias if any."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **EACH | MORE.get(kind, {}))).train()
    for name, values in [*model.named_parameters(), *model.named_buffers()]:
        if "correction_bias" in name or (values.dim() == 2 and values.shape[0] == EXPERTS):
            values.data.normal_(0.0, 0.5)
    return model


def mixtures() -> list[str]:
    """Every causal language model of transformers that records its routers' logits."""
    found = sources(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return [kind for kind, source in found.items() if '"router_logits": ' in source]


@pytest.mark.parametrize("kind", ["qwen3_5_moe_text" if kind == "qwen3_5_moe" else kind for kind in sorted(_VERIFIED)])
def test_what_is_counted_went_to_the_experts(kind: str) -> None:
    model, given = small(kind), []
    if kind == "jamba" and not any(type(module).__name__ == "JambaTopKRouter" for module in model.modules()):
        pytest.skip("this version of transformers has no router in it, which is refused")

    def see(module: Any, args: tuple, kwargs: Any) -> None:
        if kind == "jetmoe":  # tokens by expert
            given.append(torch.tensor(args[1]))
        else:
            given.append(torch.bincount(kwargs.get("top_k_index", args[1]).flatten(), minlength=EXPERTS))

    for name, module in model.named_modules():
        if type(module).__name__.endswith("Experts") and (kind != "jetmoe" or name.endswith("input_linear")):
            module.register_forward_pre_hook(see, with_kwargs=True)
    router = router_balance(model, SECTION)
    assert router is not None
    ids = torch.randint(VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(1))
    router.watching(model)(input_ids=ids)
    counts = router.counts()
    assert given and torch.equal(counts.long(), torch.stack(given))
    assert counts.min(1).values.ne(counts.max(1).values).all()
    balance, parts = router.loss(counts)
    expected = [
        EXPERTS * (row / ids.numel() * logits.softmax(-1).mean(0)).sum()
        for (logits, _), row in zip(router.routed, counts.float(), strict=True)
    ]
    torch.testing.assert_close(parts[0].float(), torch.stack(expected).mean().detach())
    balance.backward()
    assert all(float(module.weight.grad.abs().max()) > 0 for module in router._routers if hasattr(module, "weight"))


class _Sizes(TorchDispatchMode):
    """Sees the number of elements of every tensor that an operator returns."""

    largest = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **kwargs or {})
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return out


def test_counting_makes_no_tensor_of_tokens_by_experts() -> None:
    logits = torch.randn(1000, 64, generator=torch.Generator().manual_seed(1))
    router = RouterBalance(torch.nn.Module(), balance=0.1, z=0.0)  # type: ignore[arg-type]
    router.routed = [(logits, logits.topk(4).indices), (-logits, logits.neg().topk(4).indices)]
    with _Sizes() as seen:
        counts = router.counts()
    assert seen.largest == 4 * 1000
    assert counts.dtype == torch.float64 and counts.sum(1).tolist() == [4000, 4000]
    assert counts[0].long().equal(router.routed[0][1].flatten().bincount(minlength=64))


@pytest.mark.parametrize("kind", [kind for kind in mixtures() if kind.removesuffix("_text") not in _VERIFIED])
def test_a_balance_that_is_not_defined_is_refused(kind: str) -> None:
    config = SimpleNamespace(model_type=kind, get_text_config=lambda: SimpleNamespace(model_type=kind))
    model: Any = SimpleNamespace(config=config)
    with pytest.raises(UserError, match=f"model.balance_loss = 0.1: not supported for model {kind}: no router"):
        router_balance(model, SECTION)
