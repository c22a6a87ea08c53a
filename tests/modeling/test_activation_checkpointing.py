"""Recomputed activations: the same gradients, bit for bit, from less memory."""

import copy
from dataclasses import replace

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
from modeling.activation_checkpointing import apply_activation_checkpointing, is_kept
from modeling.activation_checkpointing_budget import GIB, peak
from modeling.build import empty_model
from tests.modeling import activation_checkpointing_cases as cases
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
    """Else its random numbers would go to the next dropout that is."""
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
        ("activation_memory_gib=3", "model.activation_memory_gib = 3 is only read by"),
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
    """As differences from `full`, so that nothing outside of the blocks counts."""
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
