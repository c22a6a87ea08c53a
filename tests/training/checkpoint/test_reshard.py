"""A checkpoint of one layout resumes in another: the same masters and moments by name, and the same losses."""

import shutil

import pytest
import torch

from config.cli import REPOSITORY
from data.text.prepare import prepare
from tests.support.jobs import launches
from tests.support.models.small_run import changed_json
from tests.training.checkpoint import reshard_cases as cases
from tests.training.checkpoint import resume_cases as jobs
from tests.training.checkpoint.reshard_cases import ODD, UNTIED
from training.engine.tensors import as_text, checksum

TINY = tuple(
    f"model.config.{key}"
    for key in ("hidden_size=2", "intermediate_size=4", "num_attention_heads=1", "num_key_value_heads=1")
)
ALL_BUT_A_NORM = ("model.embed_tokens.weight",) + tuple(
    f"model.layers.{index}.{name}.weight"
    for index in (0, 1)
    for name in ("input_layernorm", "post_attention_layernorm")
)
"""Frozen, they leave two values in the group that does not decay, and only padding for a second rank."""
MANIFEST = ("precision.path=manifest", "precision.manifest=config/manifests/llama_mixed.json")
FP32_LOSS = 5e-6
"""Nats. Measured: up to 1.0e-6 in 60 steps (docs/elastic.md)."""
OTHER_COMPUTE_LOSS = 1e-3
"""Nats, where either run computes in 16 bits. Measured: up to 1.0e-4 in these three steps."""


def layout(stage, compute, **options):
    return {"stage": stage, "compute": compute, **options}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_checkpoint_of_other_optimizer_groups_resumes_by_name_or_is_refused(solo, tmp_path, stage):
    saved = solo.run(cases.trained_and_saved, folder=str(tmp_path), layout=layout(stage, "fp32"))[0]
    line, held = solo.run(cases.resumed_with_groups, folder=str(tmp_path), stage=stage, recorded=saved["checksums"])[0]
    if stage == 0:
        assert "its optimizer groups have" in line and "optimizer.groups" in line
    else:
        assert "the optimizer's groups have other parameters" in line
        assert held["checksums"] == saved["checksums"]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("ranks", "before", "after", "common"),
    [
        ("2 -> 1", (0, "fp32"), (2, "fp32"), {}),
        ("1 -> 2", (0, "fp32"), (3, "bf16"), {"overrides": ODD}),
        ("1 -> 2", (0, "fp32"), (1, "bf16"), {"overrides": UNTIED}),
        ("2 -> 1", (1, "fp32"), (0, "fp32"), {"overrides": ODD}),
        ("2 -> 1", (1, "bf16"), (1, "bf16"), {}),
        ("2 -> 1", (1, "bf16"), (2, "fp16"), {"overrides": ODD}),
        ("1 -> 2", (1, "fp16"), (3, "fp16"), {"overrides": UNTIED}),
        ("1 -> 2", (2, "fp32"), (0, "fp32"), {}),
        ("2 -> 1", (2, "bf16"), (1, "fp32"), {"frozen": cases.FROZEN}),
        ("1 -> 2", (2, "fp32"), (2, "fp32"), {"overrides": ODD}),
        ("2 -> 1", (2, "fp16"), (3, "bf16"), {"frozen": cases.FROZEN}),
        ("2 -> 1", (3, "fp32"), (0, "fp32"), {"frozen": cases.FROZEN}),
        ("2 -> 2", (3, "bf16"), (1, "bf16"), {"overrides": ODD}),
        ("2 -> 1", (3, "fp32"), (2, "fp32"), {"overrides": UNTIED}),
        ("1 -> 2", (3, "fp32"), (3, "fp32"), {"overrides": ODD, "frozen": cases.FROZEN}),
        ("1 -> 2", (2, "fp32"), (1, "fp32"), {"overrides": TINY, "frozen": ALL_BUT_A_NORM}),
        ("2 -> 1", (2, "fp32"), (3, "fp32"), {"overrides": (*ODD, "optimizer.name=lamb")}),
        ("1 -> 2", (3, "bf16"), (1, "bf16"), {"overrides": ("optimizer.name=sgd",)}),
        ("2 -> 1", (3, "fp32"), (0, "fp32"), {"overrides": (*UNTIED, "optimizer.name=stable_adamw")}),
        ("1 -> 2", (0, "fp32"), (2, "fp16"), {"overrides": ("optimizer.name=lion",)}),
        ("1 -> 2", (0, "fp32"), (3, "bf16"), {"overrides": (*UNTIED, "optimizer.name=muon")}),
        ("2 -> 1", (2, "bf16"), (1, "fp32"), {"overrides": (*ODD, "optimizer.name=muon")}),
    ],
)
def test_masters_and_moments_carry_over_bit_for_bit(pair, solo, tmp_path, ranks, before, after, common):
    """Into an engine of other weights, before its first step; then the losses of the run that was not stopped."""
    groups, tolerance = {"1": solo, "2": pair}, FP32_LOSS if before[1] == after[1] == "fp32" else OTHER_COMPUTE_LOSS
    layouts = layout(*before, **common), layout(*after, **common, micro=2)
    carried_over(groups[ranks[0]], groups[ranks[-1]], tmp_path, *layouts, tolerance)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (layout(2, "bf16", variant="_offload"), layout(3, "bf16")),
        (layout(1, "bf16"), layout(3, "bf16", variant="_offload")),
        (layout(2, "bf16"), layout(2, "fp32", overrides=MANIFEST)),
        (layout(3, "fp32", overrides=MANIFEST), layout(1, "fp16")),
    ],
)
def test_offload_and_the_manifest_path_carry_over(pair, tmp_path, before, after):
    """An engine that has trained before has its own moments replaced, as a rollback needs it."""
    carried_over(pair, pair, tmp_path, before, after, OTHER_COMPUTE_LOSS, trained_before=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, {"parameter_alignment": True}), (3, {"sub_group_size": 3000, "stage3_param_persistence_threshold": 0})),
        ((3, {"sub_group_size": 3000, "stage3_param_persistence_threshold": 0}), (1, {"parameter_alignment": True})),
    ],
)
def test_gaps_between_parameters_and_groups_cut_in_several_do_not_show(pair, tmp_path, before, after):
    """At ZeRO-1 and 2 each parameter is padded; at ZeRO-3 a group is several tensors and no parameter stays whole."""
    layouts = []
    for stage, settings in (before, after):
        changed = changed_json(tmp_path, f"zero{stage}_bf16", **settings)
        layouts.append(layout(stage, "bf16", overrides=(*ODD, changed)))
    saved, found = carried_over(pair, pair, tmp_path, *layouts, OTHER_COMPUTE_LOSS)
    assert (saved if before[0] == 3 else found)["groups"] > 2


@pytest.mark.parametrize("stage", [1, 3])
def test_before_the_first_update_there_are_no_moments(pair, solo, tmp_path, stage):
    """Moments of an engine that has trained before go back to zero, and Adam counts from one again."""
    saved = pair.run(cases.trained_and_saved, folder=str(tmp_path), layout=layout(stage, "fp32"), first=0)[0]
    arguments = {"folder": str(tmp_path), "layout": layout(2, "fp32"), "recorded": saved["checksums"]}
    found = solo.run(cases.resumed, **arguments, first=0, trained_before=True)[0]
    assert set(saved["checksums"]) == {"master"}
    assert found["updates"] == {0.0} and "after 0 updates" in found["restored"]
    assert all(torch.equal(found["masters"][name], master) for name, master in saved["masters"].items())
    assert not any(bool(moment.any()) for moment in found["exp_avg_sq"].values())
    require_same_losses(saved, found, FP32_LOSS)


def carried_over(saving, going, folder, before, after, tolerance, **options):
    """The states of a run of layout `before` that saves and of one of `after` that resumes: the same on every rank."""
    saved = saving.run(cases.trained_and_saved, folder=str(folder), layout=before)[0]
    given = {"folder": str(folder), "layout": after, "recorded": saved["checksums"], **options}
    for found in going.run(cases.resumed, **given):
        require_same(saved, found)
    require_same_losses(saved, found, tolerance)
    return saved, found


def require_same(saved, found):
    """Bit for bit, by name."""
    optimizer = saved["optimizer"]
    for kind in ("masters", *optimizer.states):
        assert saved[kind].keys() == found[kind].keys()
        for name, tensor in saved[kind].items():
            assert torch.equal(found[kind][name], tensor), (kind, name)
    assert any(bool(moment.any()) for moment in saved[optimizer.momentum].values())
    for name, weight in saved["weights"].items():
        if name not in saved["masters"]:
            assert torch.equal(found["weights"][name], weight.to(found["weights"][name].dtype)), name
    assert found["checksums"] == saved["checksums"]
    assert found["updates"] == saved["updates"] == ({3.0} if optimizer.counts_updates else set())
    assert found["states"] == found["groups"]
    assert torch.equal(found["buffer"], saved["buffer"])
    assert sorted(found["settings"]) == sorted(saved["settings"])
    assert {decay for decay, *_ in found["settings"]} == {0.0, 0.1}
    matrices = sum(tensor.dim() == 2 and "layers" in name for name, tensor in saved["masters"].items())
    fewer = (len(optimizer.states) - len(optimizer.states_of(matrix=True))) * matrices
    compared = (1 + len(optimizer.states)) * len(saved["masters"]) - fewer
    after = " after 3 updates" if optimizer.counts_updates else ""
    assert found["restored"] == f"{len(saved['masters'])} masters carried over{after}, {compared} checksums agree"


def require_same_losses(saved, found, tolerance):
    """The losses of the steps that follow agree to `tolerance`, their gradient norms to a few times that."""
    for (loss, norm), (reference, reference_norm) in zip(found["losses"], saved["losses"], strict=True):
        assert loss == pytest.approx(reference, abs=tolerance)
        assert norm == pytest.approx(reference_norm, rel=5 * tolerance)


@pytest.mark.parametrize(
    ("stage", "corrupt", "what"),
    [(1, "master", "the master"), (3, "master", "the master"), (3, "exp_avg_sq", "the optimizer's exp_avg_sq")],
)
def test_a_value_that_is_not_what_was_held_is_found_by_name(pair, solo, tmp_path, stage, corrupt, what):
    """One value of one rank's part, changed by 1e-6 before its file was written and hashed."""
    saved = pair.run(cases.trained_and_saved, folder=str(tmp_path), layout=layout(stage, "bf16"), corrupt=corrupt)[0]
    arguments = {"folder": str(tmp_path), "layout": layout(2, "bf16")}
    text = solo.run(cases.refused, **arguments, recorded=saved["checksums"])[0]
    names = [name for name in saved["masters"] if f": {what} of {name} differs from the saved one" in text]
    assert len(names) == 1 and "use another checkpoint" in text
    for group in (solo, pair):  # what the files hold is what the engine gets: without the record nothing is seen
        assert group.run(cases.refused, **arguments, recorded=None)[0] == ""


def test_a_checkpoint_that_does_not_fit_is_refused(pair, solo, tmp_path):
    saved = pair.run(cases.trained_and_saved, folder=str(tmp_path), layout=layout(2, "bf16"))[0]
    arguments = {"folder": str(tmp_path), "recorded": saved["checksums"]}
    wider = ("model.config.intermediate_size=56",)
    for options, part in (
        ({"frozen": cases.FROZEN}, f"{cases.FROZEN[0]} is frozen in this run and not there"),
        ({"overrides": wider}, "has shape [48, 32], and shape [56, 32] in this run"),
    ):
        assert part in solo.run(cases.refused, **arguments, layout=layout(3, "bf16", **options))[0]
    for states, here in ((("momentum_buffer",), "momentum_buffer"), ((), "nothing")):
        text = solo.run(cases.refused, **arguments, layout=layout(0, "fp32"), states=states)[0]
        assert f"its optimizer kept exp_avg, exp_avg_sq of each parameter, this run's keeps {here}; use" in text
    (tmp_path / "deepspeed" / "mp_rank_00_model_states.pt").unlink()
    texts = pair.run(cases.refused, **arguments, layout=layout(3, "bf16"))
    assert texts[0] == texts[1] and "mp_rank_00_model_states.pt: is missing" in texts[0]


def test_the_checksum_knows_no_cuts_but_every_value_and_its_place():
    values = torch.randn(200_003, generator=torch.Generator().manual_seed(1))
    bits = values.view(torch.int32).long().tolist()
    by_hand = as_text([sum(bits), sum((place + 1) * bit for place, bit in enumerate(bits))])
    assert as_text(checksum(values, 0)) == by_hand
    for cut in (1, 65_536, 100_000):
        assert as_text(checksum(values[:cut], 0) + checksum(values[cut:], cut)) == by_hand
    changed = values.clone()
    changed.view(torch.int32)[150_000] ^= 1
    swapped = values.clone()
    swapped[[3, 170_000]] = values[[170_000, 3]]
    for other in (changed, swapped, values.roll(1)):
        assert as_text(checksum(other, 0)) != by_hand
    assert as_text(checksum(torch.tensor([0.0]), 0)) != as_text(checksum(torch.tensor([-0.0]), 0))


def test_a_job_goes_on_with_other_ranks_and_other_zero_stages(pair, solo, tmp_path):
    """Two ranks save, one resumes at ZeRO-3 and saves, four resume at ZeRO-1; compared with two that never stopped."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(300)))
    overrides = ["checkpoint.every_steps=1", "checkpoint.keep=9", "model.config.attention_dropout=0.0"]
    layouts = [[f"deepspeed.config=ds_configs/zero{stage}_fp32.json", "precision.compute=fp32"] for stage in (2, 3, 1)]
    prepare(jobs.resolve(str(tmp_path), "whole", overrides + layouts[0]).config.data, progress=False)
    arguments = {"folder": str(tmp_path), "passes": None}
    pair.run(jobs.job, **arguments, name="whole", overrides=overrides + layouts[0])
    broken_off(tmp_path / "runs/whole", tmp_path / "runs/broken", after=3)
    solo.run(jobs.job, **arguments, name="broken", overrides=overrides + layouts[1])
    broken_off(tmp_path / "runs/broken", tmp_path / "runs/broken", after=6)
    command = ["python", str(REPOSITORY / "train.py"), "--config", str(tmp_path / "runs/broken/config.yaml")]
    launches.finish([*command, *layouts[2]], ranks=4)

    begun = launches.events(tmp_path, "broken", "run_start")
    assert [(event["world_size"], event["zero_stage"], event["step"]) for event in begun] == [
        (2, 2, 0),
        (1, 3, 3),
        (4, 1, 6),
    ]
    notes = [event["text"] for event in launches.events(tmp_path, "broken", "note")]
    assert sum("63 checksums agree" in text for text in notes) == 2
    broken, whole = (jobs.last_by_step(str(tmp_path), name) for name in ("broken", "whole"))
    for found, reference in zip(broken, whole, strict=True):
        assert found["loss"] == pytest.approx(reference.pop("loss"), abs=FP32_LOSS)
        assert found["grad_norm"] == pytest.approx(reference.pop("grad_norm"), rel=5 * FP32_LOSS)
        assert {key: found[key] for key in reference} == reference  # sample ids among them


def broken_off(run, copy, *, after):
    """The run folder as it was when a job was killed right after it had saved this step."""
    if copy != run:
        shutil.copytree(run, copy)
    for path in (copy / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > after:
            shutil.rmtree(path)
    (copy / "checkpoints" / "LATEST").write_text(f"step-{after}\n")
