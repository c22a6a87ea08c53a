"""Every mixture of transformers computes its routers' logits in FP32 by default, and chooses by them unrounded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from config.cli import REPOSITORY
from config.schema import AdapterSection
from modeling.adapter import add_adapter, layers_with_factors
from precision.manifest import load_manifest
from precision.regions import Regions
from precision.routers import compute_routers_in_fp32
from tests.support.models.mixtures import EXPERTS, mixture, with_experts

KINDS = with_experts()
EXCEPTIONS = {"doge": "Doge's router stays in the run's dtype"}
"""Architectures whose routers stay in 16 bits, to where docs/moe.md says so."""
ROUND_THEMSELVES = ("nllb-moe", "switch_transformers")
"""Their own code rounds probabilities to the dtype of its input before it chooses."""


class Logits(TorchDispatchMode):
    """Records the dtypes of matmuls with a result per expert, and whether it is rounded before it is chosen by."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.rounded = False
        self._not_chosen = False

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = operator(*args, **(kwargs or {}))
        name = operator.name().partition("::")[2].partition(".")[0]
        if name in ("topk", "argmax", "max", "gather"):
            self._not_chosen = False
        elif isinstance(output, torch.Tensor) and output.shape[-1:] == (EXPERTS,):
            if name in ("mm", "addmm", "bmm"):
                self.dtypes |= {given.dtype for given in args if isinstance(given, torch.Tensor)}
                self._not_chosen = True
            elif name == "_to_copy" and output.dtype == torch.bfloat16:
                self.rounded |= self._not_chosen
        return output


def logits_of(kind: str, model: Any) -> Logits:
    """A forward pass, as recorded."""
    ids = torch.arange(10).unsqueeze(0)
    with Logits() as seen:
        model(input_ids=ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))
    return seen


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_logits_are_fp32_on_both_paths_and_are_not_rounded_before_the_choice(kind: str, tmp_path: Path) -> None:
    model = mixture(kind, KINDS[kind])
    (tmp_path / "bf16.json").write_text('{"default": "bf16"}')
    regions = Regions(model, load_manifest(tmp_path / "bf16.json"))
    found = [logits_of(kind, model)]
    regions.close()
    routers = compute_routers_in_fp32(model.bfloat16())
    found.append(logits_of(kind, model))
    if kind in EXCEPTIONS:
        assert EXCEPTIONS[kind] in (REPOSITORY / "docs/moe.md").read_text(encoding="utf-8")
        assert not routers and [seen.dtypes for seen in found] == [{torch.bfloat16}] * 2
        return
    assert routers and [seen.dtypes for seen in found] == [{torch.float32}] * 2
    assert [seen.rounded for seen in found] == [False, kind in ROUND_THEMSELVES]


@pytest.mark.parametrize("kind", ["deepseek_v3", "mixtral", "qwen3_moe"])
def test_a_router_with_an_adapter_adds_it_in_fp32(kind: str, tmp_path: Path) -> None:
    """`peft` gives factors to routers and fused experts, too, by replacing their parameters while it calls them."""
    model = add_adapter(mixture(kind, KINDS[kind]), AdapterSection(kind="lora", r=2), seed=0)
    (tmp_path / "bf16.json").write_text('{"default": "bf16"}')
    regions = Regions(model, load_manifest(tmp_path / "bf16.json"))
    assert logits_of(kind, model).dtypes == {torch.float32}
    regions.close()
    compute_routers_in_fp32(model.bfloat16())
    assert logits_of(kind, model).dtypes == {torch.float32}
    layer = next(layer for name, layer in layers_with_factors(model).items() if name.endswith("gate.weight"))
    states, outputs = torch.randn(64, layer.in_features, dtype=torch.bfloat16), []
    for size in (0.0, 2.0**-24):  # too little to change a BF16 weight
        torch.nn.init.constant_(layer.lora_B["default"].weight, size)
        outputs.append(layer(states)[0])
    assert float((outputs[0] != outputs[1]).double().mean()) > 0.5
