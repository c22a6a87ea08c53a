"""Routers compute in FP32 whatever their class is called and wherever it keeps its weight."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from precision.manifest import Manifest, is_router
from precision.regions import Regions
from precision.routers import compute_routers_in_fp32
from tests.modeling.test_router_balance import EACH, MORE

EXPERTS = 7
"""No other size of these models, so that a product with as many outputs is a router's."""
COUNTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS)
SIZES = EACH | COUNTS | {"moe_topk": 2, "top_k_experts": 2, "n_group": 1, "topk_group": 1, "enable_moe_block": True}
SIZES |= {"num_dense_layers": 0, "first_k_dense_replace": 0, "global_head_dim": 8, "hidden_size_per_layer_input": 0}
EXCEPTIONS = {"jetmoe"}
"""Named in docs/moe.md."""


def mixtures() -> list[str]:
    """Every causal language model of transformers whose code speaks of experts."""
    found = []
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        spec = importlib.util.find_spec(CONFIG_MAPPING[kind].__module__.replace(".configuration_", ".modeling_"))
        if spec and spec.origin and "xpert" in Path(spec.origin).read_text(encoding="utf-8"):
            found.append(kind)
    return found


def test_every_architecture_has_its_routers_found() -> None:
    """Those that can be built with these sizes; others need sizes of their own."""
    seen, missed = set(), set()
    for kind in mixtures():
        try:
            with torch.device("meta"):
                config = AutoConfig.for_model(kind, **SIZES | MORE.get(kind, {}))
                model = AutoModelForCausalLM.from_config(config)
        except Exception:
            continue
        wide = {module for router in model.modules() if is_router(router) for module in router.modules()}
        for owner in model.modules():
            own = owner.parameters(recurse=False)
            if "Expert" not in type(owner).__name__ and any(item.dim() == 2 and len(item) == EXPERTS for item in own):
                (seen if owner in wide else missed).add(kind)
    assert missed <= EXCEPTIONS and {"afmoe", "deepseek_v3", "gemma4_text", "hunyuan_v1_moe", "mixtral"} <= seen


class Products(TorchDispatchMode):
    """Dtypes of the products with as many outputs as there are experts."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes = set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm) and result.shape[-1] == EXPERTS:
            self.dtypes.add(result.dtype)
        return result


@pytest.mark.parametrize("by", ["cast", "manifest"])
@pytest.mark.parametrize("kind", ["afmoe", "gemma4_text", "hunyuan_v1_moe", "mixtral", "phimoe"])
def test_their_products_are_in_fp32(kind: str, by: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES), dtype=torch.float32)
    regions = Regions(model, Manifest("bf16", (), Path("m.json"))) if by == "manifest" else None
    if regions is None:
        assert len(compute_routers_in_fp32(model.bfloat16())) == SIZES["num_hidden_layers"]
    with Products() as products, torch.no_grad():
        output = model(input_ids=torch.arange(16)[None], use_cache=False).logits
    assert products.dtypes == {torch.float32} and output.isfinite().all()
