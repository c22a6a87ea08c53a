"""The embedded sampler on every architecture: an answer does not depend on those beside it, which may end before it."""

from dataclasses import replace
from operator import attrgetter

import numpy as np
import pytest
import torch

from config.errors import UserError
from config.schema import GrpoSection, ModelSection
from modeling.build import build_model, model_config
from tests.support.models.architectures import CASES, Case
from training.distributed import World
from training.rollouts.transformers_sampler import Request, TransformersSampler

ENDS, LONGEST = (5, 7, 9), 24


def sampler_of(case: Case) -> TransformersSampler:
    section = ModelSection(architecture=case.architecture, config=case.config)
    model = build_model(section, model_config(section, vocab_size=48, sequence_length=64), seed=0).eval()
    grpo = replace(GrpoSection(), max_new_tokens=LONGEST, at_once=16)
    return TransformersSampler(model, grpo, World(0, 1, 0, torch.device("cpu")), ends=ENDS)


def test_a_model_without_a_cache_of_keys_is_refused() -> None:
    with pytest.raises(UserError, match="^task = grpo: cannot sample from mamba, which has no past_key_values$"):
        sampler_of(next(case for case in CASES if case.architecture == "mamba"))


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.architecture != "mamba"], ids=attrgetter("architecture")
)
def test_an_answer_is_the_same_alone_and_beside_others_that_end(case: Case) -> None:
    sampler, batches, draw = sampler_of(case), [], np.random.default_rng(0)
    sampler.model.register_forward_pre_hook(
        lambda _, args, given: batches.append(len(given["input_ids"])), with_kwargs=True
    )
    asked = [Request(draw.integers(10, 40, draw.integers(3, 9)), f"1/{number}") for number in range(16)]
    beside = sampler.sample(asked, version="v")
    assert len(batches) == LONGEST and batches[0] == 16 and batches[-1] <= 8, "those that ended leave the batch"
    for request, answer in zip(asked, beside, strict=True):
        [alone] = sampler.sample([request], version="v")
        assert answer.ids.tolist() == alone.ids.tolist() and answer.ended == alone.ended
        assert np.abs(answer.log_probs - alone.log_probs).max() < 2e-6
        assert answer.ended == (answer.ids[-1] in ENDS) and not np.isin(answer.ids[:-1], ENDS).any()
    sampler.require_whole(beside)
