"""Models whose experts may be shared, and the way of tokens to them."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from config.errors import UserError
from modeling.expert_parallel import require_shareable_experts, share_experts
from modeling.tensor_parallel import cut


class Alone:
    """A group of one rank."""

    rank, size = 0, 1

    def exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        assert sent == received == [len(rows)]
        return rows


SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SHAPE |= {"num_key_value_heads": 2, "num_local_experts": 4}


def test_dispatched_tokens_have_the_logits_and_gradients_of_the_models_own_pass() -> None:
    config = AutoConfig.for_model("mixtral", **SHAPE)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config)
    shared = AutoModelForCausalLM.from_config(config)
    shared.load_state_dict(plain.state_dict())
    assert share_experts(shared, Alone(), "ep_size_1") == 2
    ids = torch.randint(64, (2, 16))
    for model in (plain, shared):
        model(input_ids=ids).logits.square().sum().backward()
    torch.testing.assert_close(shared(input_ids=ids).logits, plain(input_ids=ids).logits)
    for (name, one), (_, other) in zip(plain.named_parameters(), shared.named_parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-5, msg=name)
        assert (cut(other) is not None) == (".experts." in name)


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
