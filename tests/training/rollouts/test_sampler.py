"""The embedded sampler on every architecture: an answer does not depend on those beside it, which may end before it."""

from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch

from config.errors import UserError
from config.schema import GrpoSection, ModelSection
from modeling.build import build_model, model_config
from tests.support.models.architectures import CASES, Case
from tests.support.models.flash_on_cpu import flash_on_cpu
from training.distributed import World
from training.rollouts.continuous_sampler import ContinuousSampler
from training.rollouts.transformers_sampler import Request, TransformersSampler

ENDS, LONGEST = (5, 7, 9), 24


CONTINUOUS = ("gpt2", "llama", "gemma3_text", "mixtral", "gpt_oss")
"""Some of the architectures that transformers batches continuously."""


def sampler_of(case: Case, kind: type[TransformersSampler] = TransformersSampler, **keys: Any) -> TransformersSampler:
    section = ModelSection(architecture=case.architecture, config=case.config)
    model = build_model(section, model_config(section, vocab_size=48, sequence_length=64), seed=0).eval()
    grpo = replace(GrpoSection(), **({"max_new_tokens": LONGEST, "at_once": 16} | keys))
    return kind(model, grpo, World(0, 1, 0, torch.device("cpu")), ends=ENDS)


def requests() -> list[Request]:
    draw = np.random.default_rng(0)
    return [Request(draw.integers(10, 40, draw.integers(3, 9)), f"1/{number}") for number in range(16)]


def test_a_model_without_a_cache_of_keys_is_refused() -> None:
    with pytest.raises(UserError, match="^task = grpo: cannot sample from mamba, which has no past_key_values$"):
        sampler_of(next(case for case in CASES if case.architecture == "mamba"))


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.architecture != "mamba"], ids=attrgetter("architecture")
)
def test_an_answer_is_the_same_alone_and_beside_others_that_end(case: Case) -> None:
    sampler, batches = sampler_of(case), []
    sampler.model.register_forward_pre_hook(
        lambda _, args, given: batches.append(len(given["input_ids"])), with_kwargs=True
    )
    asked = requests()
    beside = sampler.sample(asked, version="v")
    assert len(batches) == LONGEST and batches[0] == 16 and batches[-1] <= 8, "those that ended leave the batch"
    for request, answer in zip(asked, beside, strict=True):
        [alone] = sampler.sample([request], version="v")
        assert answer.ids.tolist() == alone.ids.tolist() and answer.ended == alone.ended
        assert np.abs(answer.log_probs - alone.log_probs).max() < 2e-6
        assert answer.ended == (answer.ids[-1] in ENDS) and not np.isin(answer.ids[:-1], ENDS).any()
    sampler.require_whole(beside)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.architecture in CONTINUOUS], ids=attrgetter("architecture")
)
def test_continuous_batches_give_the_same_answers(case: Case) -> None:
    asked = requests()
    expected = sampler_of(case, temperature=0.7).sample(asked, version="v")
    continuous, batches = sampler_of(case, ContinuousSampler, temperature=0.7, at_once=8), []
    attention = continuous.model.config._attn_implementation
    continuous.model.register_forward_pre_hook(
        lambda _, args, given: batches.append(len(given["logits_indices"])), with_kwargs=True
    )
    found = continuous.sample(asked, version="v")
    assert max(batches) == 8 and len(batches) < 2 * LONGEST, "an answer that ends makes room for the next"
    for own, theirs in zip(expected, found, strict=True):
        assert own.ids.tolist() == theirs.ids.tolist() and own.ended == theirs.ended
        assert np.abs(own.log_probs - theirs.log_probs).max() < 2e-6
    assert continuous.model.config._attn_implementation == attention
    assert continuous.sample([], version="v") == [], "a rank may have no held-out prompt in a batch"
    again = continuous.sample(asked[3:], version="v")
    assert [answer.ids.tolist() for answer in again] == [answer.ids.tolist() for answer in expected[3:]]


@torch.no_grad()
def test_the_pass_in_fp32_does_not_attend_by_a_kernel_for_16_bits() -> None:
    sampler, ids = sampler_of(next(case for case in CASES if case.architecture == "llama")), torch.arange(12)[None]
    config = sampler.model.bfloat16().config
    expected = sampler.in_fp32()(input_ids=ids, use_cache=False).logits
    with flash_on_cpu():
        config._attn_implementation_internal = "flash_attention_2"
        assert sampler.model(input_ids=ids, use_cache=False).logits.dtype == torch.bfloat16
        assert torch.equal(sampler.in_fp32()(input_ids=ids, use_cache=False).logits, expected)
    assert config._attn_implementation == "flash_attention_2" and expected.dtype == torch.float32


@pytest.mark.parametrize("architecture", ["falcon", "qwen3_next", "deepseek_v3"])
def test_a_model_that_transformers_cannot_batch_continuously_is_refused_in_one_line(architecture: str) -> None:
    sampler = sampler_of(next(case for case in CASES if case.architecture == architecture), ContinuousSampler)
    with pytest.raises(UserError, match=f"^grpo.engine = continuous: .* {architecture} .*; set it to transformers$"):
        sampler.sample(requests(), version="v")
