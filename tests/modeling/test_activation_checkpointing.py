"""Recomputed activations: the same gradients, bit for bit, from less memory, and no more blocks than a budget takes."""

import copy
import random
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.errors import UserError
from config.launcher import as_launched
from config.load import load_config
from config.schema import AdapterSection, ModelSection, OptimizerSection
from launch.plan.counted import count_activations
from launch.plan.layout import layout_of
from launch.plan.memory import activations
from launch.plan.model import sizes_of
from modeling.activation_checkpointing import apply_activation_checkpointing, blocks_of, is_kept, recompute_blocks
from modeling.activation_checkpointing_budget import GIB, Saved, count_saved, peak, recompute_within_budget, spread
from modeling.build import empty_model
from tests.modeling import model_cases as cases
from tests.support.marks import slow
from tests.support.models.recomputed_models import BLOCKS, FAMILIES, build, bytes_kept, gradients, loss_of, tokens
from tests.support.models.small_run import gathered

MODES = [
    ("full", {"reentrant": False}),
    ("full", {"reentrant": True}),
    ("selective", {"reentrant": False, "every": 3}),
    ("selective", {"reentrant": True, "every": 2}),
    ("attention", {"reentrant": False}),
    ("ops", {"reentrant": False}),
    ("budget", {"reentrant": False}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "attention"), [("llama", "sdpa"), ("llama", "eager"), ("gpt2", "sdpa"), ("gpt_neox", "eager")]
)
def test_gradients_are_those_of_a_pass_that_keeps_everything(family, attention, dtype):
    fresh = build(family, attention=attention, dtype=dtype)
    expected, other = gradients(copy.deepcopy(fresh)), gradients(copy.deepcopy(fresh), seed=4)
    assert any(not torch.equal(other[name], expected[name]) for name in expected)  # dropout is at work
    for mode, options in MODES:
        model = copy.deepcopy(fresh)
        assert apply_activation_checkpointing(model, mode, **options) > 0
        for name, gradient in gradients(model).items():
            assert torch.equal(gradient, expected[name]), (mode, options, name)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_mode_keeps_less_in_the_order_promised(family, attention):
    kept = {}
    fresh = build(family, attention=attention)
    for mode, every in (("none", 2), ("attention", 2), ("ops", 2), ("selective", 3), ("selective", 2), ("full", 2)):
        model = copy.deepcopy(fresh)
        count = apply_activation_checkpointing(model, mode, reentrant=False, every=every)
        assert count == {"none": 0, "selective": -(-BLOCKS // every)}.get(mode, BLOCKS)
        kept[mode, every] = bytes_kept(model, tokens())
    assert kept["full", 2] < 0.25 * kept["none", 2]
    assert kept["full", 2] < kept["selective", 2] < kept["selective", 3] < kept["none", 2]
    assert kept["full", 2] < kept["ops", 2] < kept["attention", 2] < kept["none", 2]
    assert kept["ops", 2] < 0.7 * kept["none", 2]


@pytest.mark.parametrize("mode", ["attention", "ops"])
def test_the_matrix_of_eager_attention_is_not_kept(mode):
    """Twice the tokens keep twice the bytes, where a matrix of all their pairs would keep four times."""
    everything, some = build("llama", attention="eager"), build("llama", attention="eager")
    apply_activation_checkpointing(some, mode, reentrant=False)
    assert bytes_kept(everything, tokens(256)) > 2.5 * bytes_kept(everything, tokens(128))
    mask = 2 * 256 * 256 * 4  # one for all blocks
    assert bytes_kept(some, tokens(256)) - mask < 2.05 * bytes_kept(some, tokens(128))


def test_attention_is_recomputed_in_training_only_and_a_cache_is_written_once():
    model, plain = build("llama", attention_dropout=0.0), build("llama", attention_dropout=0.0)
    assert apply_activation_checkpointing(model, "attention", reentrant=False) == BLOCKS
    calls = []
    for block in model.model.layers:
        block.self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
    loss_of(model, tokens()).backward()
    assert len(calls) == 2 * BLOCKS
    logits = model(input_ids=tokens(), use_cache=True)
    logits.logits.sum().backward()
    assert len(calls) == 3 * BLOCKS
    assert logits.past_key_values.get_seq_length() == 64
    assert torch.equal(logits.logits, plain(input_ids=tokens(), use_cache=True).logits)
    loss_of(model.eval(), tokens()).backward()
    assert len(calls) == 4 * BLOCKS


def test_a_copy_recomputes_its_own_attention():
    model = build("llama")
    apply_activation_checkpointing(model, "attention", reentrant=False)
    twin = copy.deepcopy(model)
    gradients(twin)
    assert all(parameter.grad is not None for parameter in twin.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_fused_attention_with_dropout_is_computed_again():
    """Kept results would leave its random numbers to the next dropout that is computed again."""
    fused, state = torch.ops.aten._scaled_dot_product_flash_attention.default, torch.zeros(1, 1, 2, 8)
    assert is_kept(fused, (state, state, state), {})
    assert is_kept(fused, (state, state, state, 0.0, True), {})
    assert not is_kept(fused, (state, state, state, 0.1), {})
    assert not is_kept(fused, (state, state, state), {"dropout_p": 0.1})
    assert is_kept(torch.ops.aten.mm.default, (state, state), {})
    assert not is_kept(torch.ops.aten.bmm.default, (state, state), {})


def test_what_a_model_does_not_have_is_refused():
    model = build("llama")
    for block in model.model.layers:
        block.self_attn.__class__ = type("Mixer", (type(block.self_attn),), {})
    with pytest.raises(UserError, match="model.activation_checkpointing = attention: no attention"):
        apply_activation_checkpointing(model, "attention", reentrant=False)
    model = build("llama")
    model.model.layers = torch.nn.ModuleList()
    for mode in ("selective", "ops", "budget"):
        with pytest.raises(UserError, match=f"model.activation_checkpointing = {mode}: no blocks"):
            apply_activation_checkpointing(model, mode, reentrant=False)
    model.supports_gradient_checkpointing = False
    with pytest.raises(UserError, match="model.activation_checkpointing = full"):
        apply_activation_checkpointing(model, "full", reentrant=False)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("checkpointing_every=3", "model.checkpointing_every = 3 is only read by"),
        ("activation_memory_gib=3", "model.activation_memory_gib = 3.0 is only read by"),
        ("activation_checkpointing=budget", "model.activation_memory_gib is missing for"),
        ("activation_checkpointing=ops model.checkpointing_reentrant=true", "model.checkpointing_reentrant = true"),
        ("activation_checkpointing=attention model.checkpointing_reentrant=true", "= true cannot be combined with"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(key, words):
    recipe = REPOSITORY / "config/recipes/demo.yaml"
    with pytest.raises(UserError, match=words):
        load_config(recipe, f"model.{key}".split(), None)


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("llama", "eager"), ("gpt2", "sdpa")])
def test_the_planner_says_what_each_mode_keeps(family, attention):
    """Differences from `full` are compared, so that nothing outside of the blocks counts."""
    dropouts = {"llama": ["attention_dropout"], "gpt2": ["resid_pdrop", "attn_pdrop", "embd_pdrop"]}[family]
    fresh = build(family, attention=attention, dtype=torch.bfloat16, **dict.fromkeys(dropouts, 0.0))
    empty = empty_model(ModelSection(attention=attention), fresh.config)
    shape, kept, planned = sizes_of(empty, AdapterSection(), OptimizerSection()), {}, {}
    for mode in ("full", "none", "attention", "ops", "selective"):
        model = copy.deepcopy(fresh)
        apply_activation_checkpointing(model, mode, reentrant=False)
        kept[mode] = bytes_kept(model, tokens())
        overrides = [f"model.activation_checkpointing={mode}", f"model.attention={attention}"]
        overrides += ["data.sequence_length=64", "batch.micro_size=2"]
        resolved = read_command_line(["--config", f"{REPOSITORY}/config/recipes/demo.yaml", *overrides], as_launched(1))
        layout = replace(layout_of(resolved, world=1, on_cpu=False), compute="bf16")
        shape = shape if shape.counted else replace(shape, counted=count_activations(empty, layout))
        planned[mode], _, _ = activations(shape, layout)
    for mode in ("none", "attention", "ops", "selective"):
        assert planned[mode] - planned["full"] == pytest.approx(kept[mode] - kept["full"], rel=0.03)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("stage", "compute", "more"), [(0, "fp32", []), (2, "fp32", cases.MIXED), (3, "bf16", [])])
def test_an_engine_takes_the_same_steps(pair, stage, compute, more):
    layout = {"stage": stage, "compute": compute}
    expected = pair.run(cases.steps, overrides=more, **layout)[0]
    sizes = pair.run(cases.counted, overrides=more, **layout)
    assert sizes[0] == sizes[1]
    none, full = sizes[0]["none"], sizes[0]["full"]
    assert full.total < 0.5 * none.total
    half = peak(none, full, (0, 2)) + 4096  # the rotation's angles are all blocks' together
    for overrides, recomputed in (
        (["model.activation_checkpointing=attention"], []),
        (["model.activation_checkpointing=ops"], [0, 1, 2, 3, 4]),
        (["model.activation_checkpointing=selective", "model.checkpointing_every=3"], [0, 3]),
        (cases.budget(half / GIB), [0, 2]),
    ):
        for result in pair.run(cases.steps, overrides=[*overrides, *more], **layout):
            assert result["recomputed"] == recomputed
            assert (result["losses"], result["norms"]) == (expected["losses"], expected["norms"])
            assert all(torch.equal(master, expected["masters"][name]) for name, master in result["masters"].items())


KINDS = {
    "full": ["model.activation_checkpointing=full"],
    "reentrant": ["model.activation_checkpointing=full", "model.checkpointing_reentrant=true"],
    "selective": ["model.activation_checkpointing=selective"],
    "attention": ["model.activation_checkpointing=attention"],
    "ops": ["model.activation_checkpointing=ops"],
    "budget": cases.budget(1e-4),
}
NOT_IN = {"sequence": {"budget"}, "tensor": {"budget"}}


@pytest.mark.parametrize(
    ("stage", "layout", "tried"),
    [
        (3, "documents", ("full", "reentrant")),
        *(slow(stage, layout, tuple(KINDS)) for stage in range(4) for layout in cases.LAYOUTS),
    ],
)
def test_each_kind_takes_the_same_steps_at_each_stage(pair, tmp_path, stage, layout, tried):
    overrides = [gathered(tmp_path, "fp32")] if stage == 3 else []
    kinds = {kind: KINDS[kind] for kind in tried if kind not in NOT_IN.get(layout, ())}
    for same in pair.run(cases.same_steps, stage=stage, layout=layout, overrides=overrides, kinds=kinds):
        assert same == dict.fromkeys(kinds, True)


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
