"""All contestants of the benchmark as real jobs: they train the same, at ZeRO-2 and 3 and in BF16, and one that does
not is found."""

from dataclasses import replace

import pytest

from lab.benchmark import command as benchmark
from lab.benchmark.contestants import CHECKPOINTING, MANTISSA, PEERS, PRECISIONS, TITAN, Runner
from lab.benchmark.report import compare
from lab.benchmark.spec import Spec
from tests.lab.benchmark.benchmark_cases import benchmarked
from tracking.compare.surviving import read_events

pytestmark = pytest.mark.slow

PRETRAINING = [name for name, peer in PEERS.items() if "pretrain" in peer.tasks and name not in TITAN]
ALL = ",".join([*MANTISSA, *PRETRAINING])  # test_titan.py has torchtitan, test_trl.py TRL
COMPUTES = {"mantissa-fp32": ("fp32", False), "mantissa-fp16": ("fp16", False), "mantissa-manifest": ("fp32", True)}
"""The parameters' dtype, and whether regions of a manifest compute in BF16."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return f"data.cache_dir={tmp_path_factory.mktemp('cache')}"


@pytest.mark.parametrize(
    ("stage", "compute", "contestants", "tolerance"),
    [
        (2, "fp32", ALL, 1e-6),
        (2, "bf16", "mantissa,bare,accelerate,trainer", 1e-3),
        (3, "bf16", "mantissa,bare,trainer", 1e-3),
    ],
)
def test_every_contestant_trains_the_same(stage, compute, contestants, tolerance, tmp_path, cache) -> None:
    found = benchmarked(tmp_path, contestants, cache, stage=stage, compute=compute)
    assert list(found["contestants"]) == contestants.split(",")
    for name, mine in found["contestants"].items():
        assert mine["loss_difference"] < tolerance, name
        assert mine["ratio"]["tokens_per_second"]["median"] > 0
    if (stage, compute) == (2, "bf16"):  # the peers' masters start from rounded weights, and are equal to the last bit
        assert len({mine["loss_difference"] for name, mine in found["contestants"].items() if name in PEERS}) == 1
    assert 0 < found["peak"]["flops"] < 1e14


@pytest.mark.parametrize(("stage", "compute", "ranks"), [(2, "fp32", 2), (3, "bf16", 2), (1, "bf16", 4)])
def test_ranks_that_share_matrices_train_as_deepspeeds_autotp_does(stage, compute, ranks, tmp_path, cache) -> None:
    """Four ranks, two to a matrix: each pair of them has sequences of its own."""
    names, given = "mantissa,mantissa-off,bare,trainer,mantissa-manifest", ["--processes", str(ranks), cache]
    found = benchmarked(tmp_path, names, *given, "parallel.tensor=2", stage=stage, compute=compute)
    assert list(found["contestants"]) == ["mantissa", "mantissa-off", "bare", "mantissa-manifest"]
    assert found["passed_over"].keys() == {"trainer"}
    bare = found["contestants"]["bare"]
    assert bare["loss_difference"] < (1e-6 if compute == "fp32" else 1e-3)
    assert "2 to a matrix (parallel.tensor)" in (tmp_path / "benchmark.md").read_text()


@pytest.mark.parametrize("stage", [1, 3])
def test_mantissas_precisions_do_the_same_work(stage, tmp_path, cache) -> None:
    """Whatever the config's own: each computes as its name says, and follows FP32."""
    names = ["mantissa", *PRECISIONS]
    given = ["--peak-tflops", "1", cache]
    found = benchmarked(tmp_path, ",".join(names), *given, stage=stage, compute="bf16")["contestants"]
    assert found["mantissa-bf16"]["loss_difference"] == 0
    for name in ("mantissa-fp32", "mantissa-fp16", "mantissa-manifest"):
        assert 0 < found[name]["loss_difference"] < 5e-3, name
        start = next(read_events(tmp_path / "runs" / f"{name}-1" / "events.jsonl"))
        regions = set((start["regions"] or {}).values())
        assert (start["compute"], "bf16" in regions, start["zero_stage"]) == (*COMPUTES[name], stage)


def test_modes_of_activation_checkpointing_have_the_same_losses(tmp_path, cache) -> None:
    found = benchmarked(tmp_path, ",".join(CHECKPOINTING), "--peak-tflops", "1", cache)["contestants"]
    assert list(found) == [*CHECKPOINTING] and {mine["loss_difference"] for mine in found.values()} == {0}


def test_a_peer_that_is_given_other_work_is_found(tmp_path, cache) -> None:
    benchmarked(tmp_path, "mantissa,bare", "--peak-tflops", "1", cache)
    spec = Spec.read(tmp_path / "spec.json")
    other = replace(spec, learning_rates=[rate * 1.02 for rate in spec.learning_rates])
    works = {"bare": spec, "other": other}
    runs = {name: [Runner(tmp_path, 2, (), work).run("bare", name)] for name, work in works.items()}
    found = compare(runs, tokens=256, flops_per_token=1.0, peak=1.0, tolerance=benchmark.TOLERANCE["fp32"])
    assert found["contestants"]["bare"]["trains_the_same"] and not found["contestants"]["other"]["trains_the_same"]
