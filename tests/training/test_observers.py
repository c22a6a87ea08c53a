"""Observers, attribution and manifests on real processes, at every ZeRO stage: none changes a step."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from data.text.prepare import prepare
from tests.support.jobs.process_group import ProcessGroup
from tests.support.marks import slow
from tests.training import observer_cases as cases
from tests.training import reaction_cases
from tests.training.engine import engine_cases
from tests.training.reaction_cases import HIT
from tracking.compare.surviving import read_events

PATHS = {
    **{f"fp32 {stage}": cases.cast("fp32", stage) for stage in range(4)},
    # at ZeRO-0 the config refuses 16 bits, and FP16 in a manifest
    **{f"{dtype} {stage}": cases.cast(dtype, stage) for dtype in ("bf16", "fp16") for stage in (1, 2, 3)},
    **{f"mixed {stage}": cases.manifest("mixed", stage) for stage in (1, 2, 3)},
    **{f"fp8 {stage}": cases.manifest("fp8", stage) for stage in range(4)},
}
ATTENTIONS = ("eager", "flex_attention")
SETTINGS = {
    **PATHS,
    **{
        f"{path}, {attention}": [*PATHS[path], f"model.attention={attention}"]
        for path in ("bf16 2", "fp16 3", "fp32 1")
        for attention in ATTENTIONS
    },
    **{f"{path}, eager": [*PATHS[path], "model.attention=eager"] for path in ("mixed 2", "fp8 3")},
    "mixed 2, flex_attention": [*cases.manifest("flex", 2), "model.attention=flex_attention"],
    **{
        f"{path}, compiled": [*PATHS[path], "model.compile=true"]
        for path in ("fp32 0", "fp32 2", "bf16 1", "bf16 2", "fp16 2")
    },
    **{
        f"{path}, recomputing {kind}": [*PATHS[path], f"model.activation_checkpointing={kind}"]
        for path in ("bf16 2", "bf16 3", "fp8 2")
        for kind in ("full", "selective", "attention", "ops")
    },
    **{
        f"{path}, {name}": [*PATHS[path], *overrides]
        for path in ("bf16 2", "mixed 3")
        for name, overrides in (
            ("mixtral", ["model.name_or_path={folder}/mixtral", "model.balance_loss=0.01"]),
            ("adapter", ["adapter.kind=lora", "adapter.r=4"]),
        )
    },
    "bf16 2, all logits": [*PATHS["bf16 2"], "model.loss=full", "model.loss_chunk_tokens=0"],
    "bf16 2, dropout": [*PATHS["bf16 2"], "model.config={attention_dropout: 0.2}"],
    "bf16 2, compiled, dropout": [
        *PATHS["bf16 2"],
        "model.compile=true",
        "model.activation_checkpointing=full",
        "model.config={attention_dropout: 0.2}",
    ],
}
USUAL = ("bf16 2",)
OBSERVERS = {
    "dtypes": ["precision.verify_every_steps=1"],
    "telemetry and early warnings": ["telemetry.every_steps=1"],
    "corruption checks": ["guard.replica_checks=2", "guard.update_checks=64", "guard.reexecute=every 2"],
    "tracing": ["tracking.otlp_endpoint=http://127.0.0.1:9"],
    "self-check": ["guard.self_check_every=1"],
    "profile": ["profile={start: 2, steps: 1, ranks: [0, 1]}"],
}
PROBE = ["telemetry.every_steps=1", "telemetry.probe=true"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of real width with heavy-tailed weights, a text, and manifests."""
    folder = tmp_path_factory.mktemp("observers")
    cases.heavy_tailed(folder, "base", {**cases.WIDTH, "tie_word_embeddings": True})
    cases.heavy_tailed(folder, "mixtral", {**cases.NARROW, "num_local_experts": 4}, family="mixtral")
    cases.write_text(folder)
    for name, rules in cases.MANIFESTS.items():
        (folder / f"{name}.json").write_text(json.dumps(rules))
    prepare(cases.resolve(str(folder), "prepared", PATHS["fp32 2"]).config.data, progress=False)
    return folder


def require_same(pair: ProcessGroup, folder: Path, what: str, observers: Sequence[str]) -> Path:
    """A job that nobody looks at ends on both ranks as the same with the observers, whose run folder is returned."""
    setting = setting_of(what, folder)
    how: dict[str, Any] = {"folder": str(folder), "seconds": 600.0, "flex": "flex" in what}
    unseen = pair.once(cases.job, name=name_of(f"{what} alone"), overrides=setting, observed=False, **how)
    assert all(row["applied"] for row in unseen[0]["steps"]) and len(unseen[0]["steps"]) == cases.STEPS
    assert unseen[0]["chunked"] == ("all logits" not in what)
    name = name_of(f"{what} under {' '.join(observers)}")[:120]
    assert pair.run(cases.job, name=name, overrides=[*setting, *observers], **how) == unseen
    return folder / "runs" / name


def setting_of(what: str, folder: Path) -> list[str]:
    """The overrides of a setting."""
    return [override.replace("{folder}", str(folder)) for override in SETTINGS[what]]


def name_of(what: str) -> str:
    """The name of a run."""
    return "".join(letter if letter.isalnum() else "-" for letter in what)


@pytest.mark.parametrize("what", [what if what in USUAL else slow(what) for what in SETTINGS])
def test_a_step_that_all_observers_look_at_is_the_same_step(pair: ProcessGroup, folder: Path, what: str) -> None:
    observers = [override for name in OBSERVERS for override in OBSERVERS[name]]
    if "compiled" in what:  # which a profile is refused for
        observers = [override for override in observers if not override.startswith("profile")]
    run = require_same(pair, folder, what, observers)
    events = [event["event"] for event in read_events(run / "events.jsonl")]
    assert "corruption" not in events and "warning" not in events
    assert events.count("precision") == events.count("telemetry") == events.count("self_check") == cases.STEPS
    assert (run / "profile").exists() == ("compiled" not in what)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["bf16 2", "mixed 3", "fp8 2"])
def test_a_probe_leaves_the_step_as_it_is(pair: ProcessGroup, folder: Path, what: str) -> None:
    require_same(pair, folder, what, PROBE)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["bf16 2", "bf16 3", "fp16 2", "fp16 3", "mixed 2", "fp32 2, compiled"])
def test_a_job_that_breaks_off_is_the_job_that_nobody_looks_at(pair: ProcessGroup, folder: Path, what: str) -> None:
    """The session that resumes observes a step that the other one does not."""
    require_resumed(pair, folder, what, setting_of(what, folder))


def require_resumed(pair: ProcessGroup, folder: Path, what: str, setting: Sequence[str]) -> None:
    """A job that is not observed at all ends as one that breaks off within its second step, after a checkpoint."""
    how: dict[str, Any] = {"folder": str(folder), "seconds": 1200.0}
    name = name_of(f"{what} broken")
    saved = [*setting, "checkpoint.every_steps=1"]
    whole = pair.run(cases.job, name=name_of(f"{what} whole"), overrides=setting, observed=False, **how)
    assert pair.run(cases.job, name=name, overrides=saved, passes=3, **how)[0]["exit_code"] is None
    assert pair.run(cases.job, name=name, overrides=saved, **how) == whole


SHARDED = [(stage, compute) for stage in (1, 2, 3) for compute in ("fp32", "bf16", "fp16")]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("stage", "compute"), [(0, "fp32"), *SHARDED])
@pytest.mark.parametrize("kind", ["nan_activation", "inf_gradient", "nan_loss"])
def test_the_cause_is_named_by_rank_module_and_tensor_and_the_run_goes_on(pair, stage, compute, kind):
    rank = stage % 2
    arguments = {"stage": stage, "compute": compute, "kind": kind, "rank": rank}
    expected = {
        "nan_activation": (rank, HIT, "activation", "nan", 1),
        "inf_gradient": (rank, f"{HIT}.weight", "gradient", "inf", 1),
        "nan_loss": (rank, "loss", "loss", "nan", 1),
    }[kind]
    clean = pair.once(reaction_cases.clean_losses, stage=stage, compute=compute)
    for index, result in enumerate(pair.run(reaction_cases.attributed, checkpointing="none", **arguments)):
        assert result["found"][0] == expected
        assert {found[0] for found in result["found"]} == {rank}
        assert not result["changed"]
        assert result["losses"][0] == clean[index][0]
        # The random numbers of the second run are given back: the next step draws what it would have drawn.
        if compute != "fp16":
            assert result["losses"][2] == clean[index][2]
        if compute == "fp16":
            assert result["scale"] == 256.0 or result["scale"] == 128.0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("checkpointing", ["reentrant", "hooks"])
@pytest.mark.parametrize("stage", [2, 3])
def test_the_cause_is_found_behind_recomputed_activations(pair, stage, checkpointing):
    arguments = {"stage": stage, "compute": "bf16", "kind": "nan_activation", "rank": 1}
    for result in pair.run(reaction_cases.attributed, checkpointing=checkpointing, **arguments):
        assert result["found"][0] == (1, HIT, "activation", "nan", 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("stage", "compute"), [(0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "bf16"), (3, "fp32")])
def test_a_weight_that_was_bad_before_the_step_is_named(pair, stage, compute):
    for found in pair.run(reaction_cases.poisoned_parameter, stage=stage, compute=compute):
        named = [entry for entry in found if entry[2] == "parameter"]
        ranks = [1] if stage == 3 else [0, 1]
        assert named == [(rank, f"{HIT}.weight", "parameter", "nan", 1) for rank in ranks]
        assert found[0] == named[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_attribution_holds_one_whole_gradient_at_a_time(pair, stage) -> None:
    assert pair.run(reaction_cases.whole_at_once, stage=stage) == [1, 1]


def test_padding_of_partitions_is_no_weight(pair) -> None:
    """DeepSpeed leaves it as the allocator hands it out, for frozen weights such as an adapter's base."""
    for found in pair.run(reaction_cases.stained_padding):
        assert found == [(0, HIT)]


MIXED = {
    "default": "bf16",
    "rules": [
        {"match": "*.q_proj", "compute": "fp16", "reason": "mantissa"},
        {"match": "*.gate_proj", "compute": "fp32", "reason": "an island"},
    ],
}
FP16 = {
    "default": "fp16",
    "rules": [
        {"match": "*.mlp.*", "compute": "bf16", "reason": "range"},
        {"match": "lm_head", "compute": "fp32", "reason": "logits"},
    ],
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("manifest", [MIXED, FP16], ids=["bf16 ambient", "fp16 ambient"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_mixed_manifest_follows_fp32(pair, tmp_path, stage, manifest, checkpointing):
    overrides = ["precision.loss_scale.initial=256", "precision.loss_scale.window=2"]
    expected = pair.once(engine_cases.steps_of, stage=2, compute="fp32", steps=6, overrides=[])[0]
    overrides.append(f"model.activation_checkpointing={checkpointing}")
    arguments = {"stage": stage, "folder": str(tmp_path), "manifest": manifest, "overrides": overrides}
    for result in pair.run(reaction_cases.manifest_steps, **arguments):
        for (loss, norm, _, applied), reference in zip(result["rows"], expected, strict=True):
            assert applied
            assert loss == pytest.approx(reference["loss"], rel=2e-2)
            assert norm == pytest.approx(reference["grad_norm"], rel=3e-2)
        assert result["rows"][-1][2] > 256.0  # the scale grew
        assert set(result["share"]) == {"fp32", "bf16", "fp16"}
        assert math.isclose(sum(result["share"].values()), 1.0)
        assert result["computed"] == ({"bf16"}, {"fp32"})
        assert result["masters"] == {"torch.float32"}


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_disagree_stop_the_run_and_are_named(pair, stage):
    for message in pair.run(reaction_cases.disagreement, stage=stage, what="scale"):
        assert message == "the loss scale differs between ranks: rank 0 has 256.0, rank 1 has 128.0"
    for message in pair.run(reaction_cases.disagreement, stage=stage, what="count"):
        assert message == "the count of applied steps differs between ranks: rank 0 has 7.0, rank 1 has 8.0"
    for message in pair.run(reaction_cases.disagreement, stage=stage, what="nothing"):
        assert message == ""
