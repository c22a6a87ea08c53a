"""Models whose experts may be shared."""

import pytest
from transformers import AutoConfig

from config.errors import UserError
from modeling.expert_parallel import require_shareable_experts


@pytest.mark.parametrize(
    ("kind", "ranks", "reason"),
    [
        ("llama", 2, "it is verified for deepseek_v3, glm4_moe, granitemoe, mixtral"),
        ("gpt_oss", 2, "it is verified for "),
        ("mixtral", 3, "its 8 experts do not divide among 3 ranks"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(kind: str, ranks: int, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        require_shareable_experts(AutoConfig.for_model(kind), ranks)
    assert str(caught.value).startswith(f"parallel.expert = {ranks}: not supported for model {kind}: {reason}")
    assert str(caught.value).endswith("; set it to 1")
