"""A budget of activation memory is kept, with no more blocks recomputed than it takes."""

import random
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from config.errors import UserError
from modeling.activation_checkpointing import apply_activation_checkpointing, blocks_of, recompute_blocks
from modeling.activation_checkpointing_budget import GIB, Saved, count_saved, peak, recompute_within_budget, spread
from tests.modeling import activation_checkpointing_cases as cases
from tests.support.models.recomputed_models import BLOCKS, FAMILIES, build, bytes_kept, loss_of, tokens


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_counted_is_what_stays_in_memory(family, attention):
    model = build(family, attention=attention)
    apply_activation_checkpointing(model, "full", reentrant=False)
    before = torch.get_rng_state()
    held = 2 * 64 * 64 * 4 + 3 * 64 * 16 * 4  # mask and angles of rotation: blocks hold them, whoever saves them
    for chosen in ((), (0, 2), range(BLOCKS)):
        recompute_blocks(blocks_of(model), chosen)
        meanwhile: list[int] = []
        saved = count_saved(model, lambda found=meanwhile: found.append(bytes_kept(model, tokens())))
        assert meanwhile[0] < saved.after + 0.1 * sum(saved.blocks) + held  # not what it counts
        assert torch.equal(before, torch.get_rng_state())
        kept = bytes_kept(model, tokens())
        torch.set_rng_state(before)
        assert saved.total <= kept <= saved.total * 1.01 + held
        assert len({size for i, size in enumerate(saved.blocks) if i in chosen}) <= 2
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in blocks_of(model))


def test_blocks_are_spread_evenly_from_the_first():
    for blocks in range(1, 40):
        for number in range(blocks + 1):
            chosen = spread(blocks, number)
            assert len(set(chosen)) == number
            gaps = [after - before for before, after in pairwise([*chosen, blocks])]
            assert not chosen or (chosen[0] == 0 and max(gaps) - min(gaps) <= 1 and sum(gaps) == blocks)


def test_the_peak_is_that_of_a_backward_pass_block_by_block():
    generator = random.Random(0)
    for _ in range(200):
        number = generator.randint(1, 6)
        kept = Saved(5, tuple(generator.randint(50, 99) for _ in range(number)), generator.randint(0, 200))
        recomputed = Saved(5, tuple(generator.randint(1, 20) for _ in range(number)), kept.after)
        chosen = tuple(index for index in range(number) if generator.random() < 0.5)
        there = [recomputed.blocks[i] if i in chosen else kept.blocks[i] for i in range(number)]
        most = 5 + sum(there) + kept.after
        while there:  # the newest block comes first, and is gone when it is done
            here = len(there) - 1
            most = max(most, 5 + sum(there) + (kept.blocks[here] if here in chosen else 0))
            there.pop()
        assert peak(kept, recomputed, chosen) == most


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("gpt2", "eager")])
def test_a_budget_is_kept_and_one_block_less_would_break_it(family, attention):
    model = build(family, attention=attention)
    apply_activation_checkpointing(model, "budget", reentrant=False)
    blocks, forward = blocks_of(model), partial(loss_of, model, tokens())

    recompute_blocks(blocks, ())
    everything = count_saved(model, forward).total
    recompute_blocks(blocks, range(BLOCKS))
    least = count_saved(model, forward).total
    numbers = set()
    for share in (0.45, 0.55, 0.7, 0.85, 0.99, 1.01):
        budget = int(least + share * (everything - least))
        choice = recompute_within_budget(model, budget / GIB, forward=forward)
        assert [block.gradient_checkpointing for block in blocks] == [i in choice.recomputed for i in range(BLOCKS)]
        assert count_saved(model, forward).total <= choice.peak <= budget
        numbers.add(len(choice.recomputed))
        if choice.recomputed:
            recompute_blocks(blocks, spread(BLOCKS, len(choice.recomputed) - 1))
            assert count_saved(model, forward).total > budget
    assert len(numbers) > 3
    with pytest.raises(UserError, match=r"model.activation_memory_gib = 1e-06: .* take 0.000\d+ GiB at least"):
        recompute_within_budget(model, 1e-6, forward=forward)


def test_the_largest_rank_decides():
    model = build("llama")
    apply_activation_checkpointing(model, "budget", reentrant=False)

    forward = partial(loss_of, model, tokens())

    here = recompute_within_budget(model, 1.0, forward=forward)
    assert here.recomputed == ()
    doubled: Any = {"largest": lambda sizes: [2 * size for size in sizes]}
    twice = recompute_within_budget(model, here.peak / GIB, forward=forward, **doubled)
    assert len(twice.recomputed) > 1


def test_gathered_parameters_do_not_count(pair):
    whole, parts = (pair.run(cases.counted, stage=stage, compute="bf16", overrides=[])[0] for stage in (2, 3))
    assert parts["none"] == whole["none"]
    assert parts["full"] == whole["full"]


def test_a_budget_that_nothing_fits_is_refused_on_every_rank(pair):
    for error in pair.run(cases.refused, gib=1e-6):
        assert error.startswith("model.activation_memory_gib = 1e-06: ")
