"""A benchmark's work in torchtitan's terms, and the work that it cannot be given; torchtitan itself is not needed."""

import re
from dataclasses import replace
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig

from config.errors import UserError
from lab.benchmark.command import read_bounds
from lab.benchmark.contestants import Runner, parted
from lab.benchmark.spec import Spec
from tests.lab.benchmark.benchmark_cases import RECIPE

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4}
OPTIMIZER = {"learning_rate": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "gradient_clipping": 1.0}


def work(folder, config, **changed) -> Spec:
    """A spec on a model that is written to `folder`, of which torchtitan needs the configuration only."""
    config.save_pretrained(folder)
    document = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
    spec = Spec(
        model=str(folder),
        attention="sdpa",
        activation_checkpointing="none",
        reentrant=False,
        tokens="",
        steps=2,
        warm_up=1,
        deepspeed=document,
        optimizer=OPTIMIZER,
        offload="none",
        learning_rates=[1e-3, 1e-3],
        seed=0,
    )
    return replace(spec, **changed)


LLAMA = LlamaConfig(**SIZES)
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
FP16: dict[str, Any] = {"deepspeed": {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}}


@pytest.mark.parametrize(
    ("config", "changed", "said"),
    [
        (GPT2Config(n_embd=8, n_head=2, n_layer=1), {}, "supports only llama of its models, not gpt2"),
        (LlamaConfig(**SIZES, attention_bias=True), {}, "attention_bias = False, this one True"),
        (LlamaConfig(**SIZES, rope_parameters=LINEAR), {}, "this one's are linear"),
        (LLAMA, FP16, "has no fp16"),
        (LLAMA, {"offload": "optimizer"}, "not the optimizer alone"),
        (LLAMA, {"activation_checkpointing": "selective"}, "no activation checkpointing like selective"),
    ],
)
def test_work_that_it_cannot_be_given_is_left_to_the_others(config, changed, said, tmp_path) -> None:
    runner = Runner(tmp_path, 1, ("--config", RECIPE), work(tmp_path, config, **changed))
    chosen, skipped = parted(["mantissa", "torchtitan"], runner.refusal, "train this")
    assert chosen == ["mantissa"] and said in skipped["torchtitan"]
    with pytest.raises(UserError, match=re.escape(said)):
        read_bounds(["mantissa/torchtitan=1"], chosen, skipped)
    with pytest.raises(UserError, match="none of them can train this"):
        parted(["torchtitan"], runner.refusal, "train this")
