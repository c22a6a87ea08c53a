"""Models whose experts may be shared."""

import pytest
from transformers import AutoConfig

from modeling.expert_parallel import require_shareable_experts
from tests.support.refusals import refused


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
