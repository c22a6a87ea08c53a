"""Whole jobs whose ranks share sequences, matrices or experts: the record of one rank, resume, export, attribution."""

import json
import shutil
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from tests.support.jobs.launches import command, finish, replay
from tests.support.jobs.sharing_jobs import BEGINNING, LENGTH, Jobs
from tests.support.models.small_run import gathered

pytestmark = pytest.mark.slow

KINDS = ("sequence", "tensor", "expert")
EXPERT, TENSOR, SEQUENCE = "parallel.expert=2", "parallel.tensor=2", "parallel.sequence=2"
ZERO1, ZERO3 = (f"deepspeed.config=ds_configs/zero{stage}_fp32.json" for stage in (1, 3))


@pytest.fixture(scope="module", params=KINDS)
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """The run `one` of one rank, the run `two` of two ranks that share, and `first`, its beginning."""
    return Jobs(tmp_path_factory.mktemp("jobs"), request.param).run_one_and_two()


def only(*kinds: str) -> pytest.MarkDecorator:
    """The test is of jobs that share this."""
    return pytest.mark.parametrize("jobs", kinds, indirect=True)


def test_two_ranks_with_halves_train_as_one(jobs: Jobs) -> None:
    jobs.assert_close("two")
    exact = ("tokens", "sample_ids_sha256", "position", "lr", "applied")
    assert jobs.numbers("two", exact)[:-1] == jobs.numbers("one", exact)[:-1]
    if jobs.kind == "sequence":
        assert [event["tokens"] for event in jobs.events("two", "step")] == [8 * LENGTH * n for n in range(1, 7)]
        return
    jobs.assert_equal_telemetry()
    if jobs.kind == "tensor":
        saved = jobs.folder / "runs" / "two" / "checkpoints" / "step-6"
        assert (saved / "rng-rank-0.pt").read_bytes() == (saved / "rng-rank-1.pt").read_bytes(), "they drop out alike"
        for one, two in zip(jobs.events("one", "telemetry"), jobs.events("two", "telemetry"), strict=True):
            assert two["embedding_share"] == pytest.approx(one["embedding_share"], rel=1e-3)
    else:
        for one, two in zip(jobs.events("one", "step"), jobs.events("two", "step"), strict=True):
            routed = {key: value for key, value in one["metrics"].items() if key.startswith("router/")}
            assert len(routed) == 4
            assert {key: two["metrics"][key] for key in routed} == pytest.approx(routed, rel=1e-5)


LAYOUTS: dict[str, dict[str, tuple[list[str], int]]] = {
    "sequence": {"same": ([SEQUENCE], 2), "alone": ([], 1), "apart": (["batch.micro_size=2"], 2)},
    "tensor": {
        "same": ([TENSOR], 2),
        "alone": ([], 1),
        "data": (["batch.micro_size=2", ZERO3], 2),
        "partitioned": ([TENSOR, ZERO3], 2),
    },
    "expert": {
        "same": ([EXPERT], 2),
        "alone": ([], 1),
        "four": (["parallel.expert=4"], 4),
        "two_of_four": ([EXPERT, ZERO1], 4),
        "partitioned": ([ZERO3], 2),
        "partitions_shared": ([EXPERT, ZERO3], 4),
    },
}
"""Name of a run that resumes `first` to its overrides and number of ranks."""


def test_a_resumed_run_is_the_same_to_the_bit_and_another_layout_to_rounding(jobs: Jobs) -> None:
    key = f"parallel.{jobs.kind}"
    for name, (overrides, ranks) in LAYOUTS[jobs.kind].items():
        output = jobs.resume(name, *overrides, ranks=ranks)
        assert (f"{key} 2 -> 1" in output) == (not any(key in item for item in overrides)), output
        jobs.assert_close(name)
    assert jobs.numbers("same") == jobs.numbers("two")
    jobs.run("before", *BEGINNING, ranks=1)
    assert f"{key} 1 -> 2" in jobs.run("before", jobs.shared, ranks=2)
    jobs.assert_close("before")


@pytest.mark.parametrize("kind", ["tensor", "expert"])
def test_the_checkpoint_of_no_update_is_that_of_one_rank(tmp_path: Path, kind: str) -> None:
    """Checksums do not depend on who holds what."""
    jobs = Jobs(tmp_path, kind)
    assert jobs.checksums_of_no_update("one", ranks=1) == jobs.checksums_of_no_update("two", jobs.shared, ranks=2)


CAUSES = {
    "sequence": ("model.layers.1.mlp", {"slice": 2, "slices": 2}, "slice 2 of 2 of its sequences"),
    "tensor": ("model.layers.1.mlp.up_proj", {"tensor_slice": 2, "tensor_slices": 2}, "slice 2 of 2 of its matrices"),
    "expert": ("model.layers.0.mlp.experts", {}, ""),
}


@pytest.mark.parametrize("kind", CAUSES)
def test_a_value_that_is_not_finite_is_blamed_on_the_rank_and_slice_where_it_began(tmp_path: Path, kind: str) -> None:
    jobs, (module, slices, said) = Jobs(tmp_path, kind), CAUSES[kind]
    fault = f"faults=[{{kind: nan_activation, step: 3, rank: 1, module: {module}}}]"
    output = jobs.run("bad", jobs.shared, fault, "run.steps=4", ranks=2)
    cause = jobs.events("bad", "nonfinite")[0]
    assert {"rank": 1, "module": module, **slices}.items() <= cause.items()
    assert not said or f"on rank 1 ({said})" in output


@only("tensor", "expert")
def test_an_export_has_all_of_it_and_starts_another_run(jobs: Jobs, tmp_path: Path) -> None:
    """The run is in BF16; the vocabulary is odd, so that a head's slices differ."""
    jobs.assert_equal_exports("one", "two", tmp_path)
    given = [f"model={{name_or_path: {tmp_path}/two, architecture: null, config: {{}}}}", "precision.compute=bf16"]
    given += ["deepspeed.config=ds_configs/zero1_bf16.json", "evaluate.every_steps=0"]
    jobs.run("half", *given, ranks=1)
    jobs.run("halves", jobs.shared, *given, ranks=2)
    for single, shared in zip(jobs.numbers("half")[:-1], jobs.numbers("halves")[:-1], strict=True):
        assert shared == pytest.approx(single, rel=2e-2)


@pytest.mark.parametrize("name", ["muon", "lamb"])
def test_an_optimizer_of_whole_parameters_resumes_on_another_layout_and_is_exported(tmp_path: Path, name: str) -> None:
    jobs, given = Jobs(tmp_path, "expert"), (f"optimizer.name={name}", "optimizer.learning_rate=0.005")
    jobs.run_one_and_two(*given)
    jobs.assert_close("two")
    for again in ("same", "alone", "partitions_shared", "partitioned"):
        overrides, ranks = LAYOUTS["expert"][again]
        jobs.resume(again, *given, *overrides, ranks=ranks)
        jobs.assert_close(again)
    assert jobs.numbers("same") == jobs.numbers("two")
    jobs.assert_equal_exports("one", "two", tmp_path)


def test_16_bit_weights_are_their_masters_after_a_resume(tmp_path: Path) -> None:
    """DeepSpeed's file of weights has the experts of rank 0 only."""
    jobs = Jobs(tmp_path, "expert")
    for stage in (1, 2, 3):
        given = [EXPERT, "precision.compute=bf16", f"deepspeed.config=ds_configs/zero{stage}_bf16.json"]
        jobs.run(f"whole{stage}", *given, ranks=2)
        jobs.run(f"half{stage}", *given, *BEGINNING, ranks=2)
        jobs.run(f"half{stage}", *given, ranks=2)
        assert jobs.numbers(f"half{stage}") == jobs.numbers(f"whole{stage}")


@only("expert")
def test_partitioned_experts_are_resumed_resharded_and_exported(jobs: Jobs, tmp_path: Path) -> None:
    partitioned = gathered(tmp_path, "fp32")
    jobs.run("apart", EXPERT, partitioned, ranks=4)
    jobs.run("begun", EXPERT, partitioned, *BEGINNING, ranks=4)
    shutil.copytree(jobs.folder / "runs" / "begun", jobs.folder / "runs" / "again")
    assert "checksums agree" not in jobs.run("again", EXPERT, partitioned, ranks=4)
    for name, overrides, ranks in (
        ("by_four", ["parallel.expert=4", partitioned], 4),
        ("by_none", [partitioned], 2),
        ("by_one", [], 1),
        ("in_groups", [EXPERT], 2),
    ):
        jobs.resume(name, *overrides, ranks=ranks, of="begun")
        jobs.assert_close(name)
    jobs.assert_close("again")
    assert jobs.numbers("again") == jobs.numbers("apart")
    jobs.assert_equal_exports("one", "apart", tmp_path)


def test_a_model_without_experts_is_refused_in_one_line(tmp_path: Path) -> None:
    output = finish(command("python", tmp_path, "dense", EXPERT), ranks=2, exit_code=2)
    assert "parallel.expert = 2: not supported for model llama: it is verified for " in output


def test_a_manifest_is_kept_promoted_from_resumed_and_replayed(tmp_path: Path) -> None:
    """Regions and incident are those of one rank, losses to rounding; resumed and replayed to the bit."""
    jobs = Jobs(tmp_path, "tensor")
    given = ["precision.path=manifest", f"precision.manifest={REPOSITORY}/config/manifests/llama_mixed.json"]
    given += ["precision.loss_scale.initial=1024", "guard.reactions=[promote]"]
    given += ["faults=[{kind: nan_activation, step: 3, module: model.layers.1.self_attn.q_proj}]"]
    jobs.run_one_and_two(*given)
    for name, overrides, ranks in (("same", [TENSOR], 2), ("alone", [], 1)):
        shutil.copytree(tmp_path / "runs" / "first", tmp_path / "runs" / name)
        assert ("parallel.tensor 2 -> 1" in jobs.run(name, *given, *overrides, ranks=ranks)) == (name == "alone")
    one, two = (jobs.events(name, "run_start")[0]["regions"] for name in ("one", "two"))
    assert two == one and {"fp16", "bf16", "fp32"} <= set(two.values())
    for name in ("one", "two"):
        [incident] = jobs.events(name, "incident")
        layer = "model.layers.1.self_attn"
        assert (incident["verdict"], incident["modules"]) == ("PROMOTE", [layer, f"{layer}.q_proj"])
        assert {event["module"] for event in jobs.events(name, "nonfinite")} == {f"{layer}.q_proj"}
        assert {"fp16", "bf16", "fp32"} == jobs.events(name, "precision")[0]["flop_share"].keys()
    assert jobs.numbers("same") == jobs.numbers("two")
    for name in ("two", "alone"):
        for found, expected in zip(jobs.numbers(name), jobs.numbers("one"), strict=True):
            assert found == pytest.approx(expected, rel=2e-2, nan_ok=True)
    said = replay(tmp_path, "two", 6, ranks=2)
    assert "as recorded" in said and "recorded:" not in said, said


def test_the_fp64_oracle_and_a_replay_agree_with_the_record(jobs: Jobs) -> None:
    """The oracle runs every sequence alone in plain torch, and shares no code with the engine."""
    name = "two"
    if jobs.kind == "expert":  # the oracle computes no balancing loss
        jobs.run(name := "unbalanced", jobs.shared, "model.balance_loss=0", ranks=2)
    said = finish(["python", "-m", "tools.parity", "--oracle", str(jobs.folder / "runs" / name)])
    assert "6 steps as the oracle computed them" in said
    said = replay(jobs.folder, "two", 4, ranks=2)
    assert said.count("as recorded") == 4 and said.rstrip().endswith("\nreproduced"), said
    shutil.copytree(jobs.folder / "runs" / "first", jobs.folder / "runs" / "mixed")
    jobs.run("mixed", ranks=2)
    refused = replay(jobs.folder, "mixed", 2, exit_code=2, ranks=2)
    assert f"with parallel.{jobs.kind} = 1; the step was made with 2" in refused


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_answers_are_learned_as_by_one_rank(tmp_path: Path, packing: str) -> None:
    rows = [{"prompt": f"{n} plus {n} is", "completion": f" {2 * n}" + "." * (n % 9)} for n in range(120)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    given = ["data.source=jsonl", f"data.path={tmp_path}/rows.jsonl", "task=sft", f"data.packing={packing}"]
    given += ["data.document_masking=false", "checkpoint.every_steps=0", "generate.tokens=0"]
    jobs = Jobs(tmp_path, "sequence")
    jobs.run("one", *given, ranks=1)
    jobs.run("two", SEQUENCE, *given, ranks=2)
    jobs.assert_close("two")
    assert jobs.numbers("two", ("tokens",))[:-1] == jobs.numbers("one", ("tokens",))[:-1]
