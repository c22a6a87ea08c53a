"""The profiler on real processes: the time adds up, and what was planted is named."""

import gzip
import json

import pytest

from tests.training.profile import profiler_cases as profiling_cases
from tracking.profile.page import profile_page
from tracking.profile.summary import summarise
from tracking.profile.timeline import MODULE, STAGE, STEP, build_timeline
from training.profile.__main__ import main

TOKENS, HIDDEN, INNER, VOCABULARY, BLOCKS = 32, 64, 128, 64, 2  # tokens of a micro-batch of 2 x 16


def _flops(vocabulary: int = VOCABULARY) -> int:
    """FLOPs of the linear layers' forward pass on one micro-batch."""
    weights = BLOCKS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER) + HIDDEN * vocabulary
    return 2 * TOKENS * weights


def test_the_time_adds_up_and_training_is_the_same(pair, tmp_path):
    results = pair.run(profiling_cases.profiled, folder=str(tmp_path), wait=0.5)
    plain = pair.run(profiling_cases.profiled, folder=str(tmp_path / "plain"), start=99)
    for rank, result in enumerate(results):
        summary, total = result["summary"], sum(result["summary"]["steps_seconds"])
        assert sum(summary["host"].values()) == pytest.approx(total, rel=1e-6)
        assert sum(summary["stages"].values()) == pytest.approx(total, rel=1e-6)
        for inside, outside in zip(summary["steps_seconds"], result["clocked"], strict=True):
            assert inside == pytest.approx(outside, rel=0.1, abs=0.05)
        assert summary["host"]["data wait"] == pytest.approx(result["waited"], rel=0.1, abs=0.05)
        assert summary["host"]["communication"] <= summary["communication"]["under_way"] * (1 + 1e-6)
        assert 0 < summary["host"]["optimizer"] < summary["stages"]["optimizer"] * (1 + 1e-6)
        assert summary["unprofiled_steps"] == 2 and summary["unprofiled_step_seconds"] >= 0.05
        assert result["left"] == [] and result["masters"] == plain[rank]["masters"]
        assert result["notes"][0].startswith(f"profiled steps 3 to 4 of rank {rank}: ")
    slow, fast = results[1]["waited"], results[0]["summary"]["host"]["communication"]
    assert slow >= 1.0 and fast >= slow / 2  # waiting for the other rank is communication


@pytest.mark.one_in(2)
@pytest.mark.parametrize("checkpointing", ["none", "full", "reentrant"])
def test_every_matmul_is_counted_under_its_module(solo, tmp_path, checkpointing):
    options = {
        "none": [],
        "full": ["model.activation_checkpointing=full"],
        "reentrant": ["model.activation_checkpointing=full", "model.checkpointing_reentrant=true"],
    }[checkpointing]
    [result] = solo.run(profiling_cases.profiled, folder=str(tmp_path), overrides=options)
    rows = [row for row in result["summary"]["matmuls"] if row["module"].endswith(("_proj", "lm_head"))]
    passes = 2 * 4  # steps and micro-batches
    flops = {phase: sum(row["flops"] for row in rows if row["phase"] == phase) for phase in _phases(rows)}
    assert flops["forward"] == passes * _flops() and flops["backward"] == 2 * passes * _flops()
    counts = {phase: sum(row["count"] for row in rows if row["phase"] == phase) for phase in _phases(rows)}
    assert counts["backward"] == 2 * counts["forward"] == 2 * passes * (7 * BLOCKS + 1)
    assert ("recompute" in flops) is (checkpointing != "none")
    for name in ("lm_head", "model.layers.1.mlp.gate_proj", "model.layers.0.self_attn.o_proj"):
        mine = {phase: sum(r["count"] for r in rows if (r["module"], r["phase"]) == (name, phase)) for phase in flops}
        assert mine["forward"] == passes and mine["backward"] == 2 * passes
        if checkpointing != "none" and name.endswith("gate_proj"):
            assert mine["recompute"] == passes
    assert result["summary"]["fp32_matmuls"] == []  # as it was asked to


def _phases(rows: list[dict]) -> set[str]:
    return {row["phase"] for row in rows}


def test_a_module_in_fp32_that_is_unintended_is_named(solo, tmp_path):
    planted = "model.layers.1.mlp.up_proj"
    [result] = solo.run(profiling_cases.profiled, folder=str(tmp_path), compute="bf16", planted=planted)
    summary = result["summary"]
    [row] = summary["fp32_matmuls"]
    assert row["module"] == planted
    assert row["wanted"] is False and row["phases"] == ["backward", "forward"] and row["count"] == 3 * 8
    share = HIDDEN * INNER / (_flops() / 2 / TOKENS)
    assert row["share_of_matmul_flops"] == pytest.approx(share, rel=0.05)
    assert f"| `{planted}` | **unintended** |" in result["page"]
    assert summary["host"]["matmul fp32"] > 0 and summary["host"]["matmul bf16"] > 0
    assert {"fp32 -> bf16", "bf16 -> fp32"} <= {cast["kind"] for cast in summary["casts"] if cast["module"] == planted}


def test_one_that_the_manifest_asks_for_is_told_apart(solo, tmp_path):
    wanted, planted = "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.v_proj"
    manifest = {"default": "bf16", "rules": [{"match": wanted, "compute": "fp32", "reason": "a test"}]}
    [result] = solo.run(profiling_cases.profiled, folder=str(tmp_path), manifest=manifest, planted=planted)
    rows = result["summary"]["fp32_matmuls"]
    assert {row["module"]: row["wanted"] for row in rows if row["module"].endswith("_proj")} == {
        wanted: True,
        planted: False,
    }
    assert f"| `{wanted}` | in the manifest |" in result["page"]


def test_an_odd_vocabulary_is_named(solo, tmp_path):
    [result] = solo.run(profiling_cases.profiled, folder=str(tmp_path), vocabulary=67)
    bad = [row for row in result["summary"]["misfits"] if row["multiple_of"] < 8]
    assert [(row["module"], row["size"], row["next_good"], row["next_best"]) for row in bad] == [
        ("lm_head", 67, 72, 128)
    ]
    assert bad[0]["count"] == 3 * 8
    assert "| `lm_head` | 67 | **1** | 72 or 128 |" in result["page"]


def test_a_disk_that_refuses_costs_a_note(solo, tmp_path):
    [result] = solo.run(profiling_cases.unwritable, folder=str(tmp_path))
    assert result["summary"] is None and result["left"] == []
    assert result["notes"][0].startswith("the profile could not be written: ")


def test_a_run_that_ends_early_leaves_what_it_has(solo, tmp_path):
    [result] = solo.run(profiling_cases.profiled, folder=str(tmp_path), steps=9)
    assert result["summary"]["steps"] == [3, 4] and len(result["summary"]["steps_seconds"]) == 2
    assert result["left"] == []


def _gpu_trace() -> dict:
    """A step of 1000 us as a GPU's trace has it: launches on two threads, kernels behind them, on two streams."""

    def host(name, kind, start, duration, thread=1, **arguments):
        event = {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": duration, "tid": thread, "pid": 1}
        return event | {"args": arguments}

    def op(name, start, duration, types, dims, thread=1, **more):
        arguments = {"Input type": types, "Input Dims": dims, **more}
        return host(name, "cpu_op", start, duration, thread, **arguments)

    def kernel(name, start, duration, stream, correlation):
        return host(name, "kernel", start, duration, stream, correlation=correlation)

    half = ["c10::Half", "c10::Half"]
    full = ["float", "float"]
    shapes = [[128, 64], [64, 100]]
    return {
        "traceEvents": [
            host(f"{STEP}7", "user_annotation", 0, 1000),
            host(f"{STAGE}forward_backward", "user_annotation", 0, 800),
            host(f"{MODULE}head", "user_annotation", 10, 90),
            op("aten::mm", 20, 30, half, shapes, **{"External id": 5}),
            host("cudaLaunchKernel", "cuda_runtime", 30, 10, correlation=1),
            op("aten::copy_", 60, 20, ["c10::Half", "float"], [[10], [10]]),
            host("cudaLaunchKernel", "cuda_runtime", 65, 5, correlation=2),
            op("autograd::engine::evaluate_function: MmBackward0", 200, 100, [], [], thread=2),
            op("aten::mm", 210, 40, full, shapes, thread=2),
            host("cudaLaunchKernel", "cuda_runtime", 215, 5, thread=2, correlation=3),
            {"ph": "s", "id": 9, "cat": "fwdbwd", "tid": 1, "ts": 20, "pid": 1},
            {"ph": "f", "id": 9, "cat": "fwdbwd", "tid": 2, "ts": 200, "pid": 1, "bp": "e"},
            host("c10d::allreduce_", "cpu_op", 320, 10),
            host(f"{STAGE}optimizer", "user_annotation", 850, 100),
            host("cudaLaunchKernel", "cuda_runtime", 860, 5, correlation=4),
            kernel("gemm_fp16", 100, 200, 70, 1),
            kernel("copy", 300, 50, 70, 2),
            kernel("gemm_fp32", 400, 300, 70, 3),
            kernel("ncclDevKernel_AllReduce", 500, 300, 71, 99),
            kernel("adam", 900, 150, 70, 4),  # 50 us of it after the step
        ]
    }


def test_a_gpu_is_counted_by_its_kernels():
    facts = {"steps": [7], "rank": 0, "compute": "fp16"}
    summary = summarise(build_timeline(_gpu_trace()), facts)
    assert summary["device_time"]["categories"] == pytest.approx(
        {
            "matmul fp16": 200e-6,
            "matmul fp32": 300e-6,
            "casts": 50e-6,
            "communication": 300e-6,
            "optimizer": 100e-6,
            "idle": 250e-6,  # 0 to 100, 350 to 400, 800 to 900
        }
    )
    assert summary["device_time"]["busy_seconds"] == pytest.approx(750e-6)
    assert sum(summary["host"].values()) == pytest.approx(1000e-6)
    assert summary["host"]["communication"] == pytest.approx(10e-6)
    [fallback] = summary["fp32_matmuls"]
    assert (fallback["module"], fallback["seconds"], fallback["wanted"]) == ("head", pytest.approx(300e-6), False)
    assert fallback["share_of_matmul_time"] == pytest.approx(0.6) and fallback["phases"] == ["backward"]
    assert summary["casts"][0]["seconds"] == pytest.approx(50e-6)
    said = profile_page(summary, "trace")
    assert "The GPU was busy 75% of the time." in said
    verdict = said.split("\n\n")[1:3]
    assert verdict[0] == "**matmul fp32 30%, communication 30%, idle 25%** of the time."
    assert "- Unintended matmuls in FP32: `head`." in verdict[1]


def test_a_trace_is_summed_up_again_from_the_command_line(tmp_path, capsys):
    trace = tmp_path / "rank-0.pt.trace.json.gz"
    with gzip.open(trace, "wt") as file:
        json.dump(_gpu_trace(), file)
    (tmp_path / "rank-0.json").write_text(json.dumps({"steps": [7], "rank": 3, "compute": "fp16"}))
    assert main([str(trace)]) == 0
    assert "rank 3" in capsys.readouterr().out and "`head`" in (tmp_path / "rank-0.md").read_text()
    with gzip.open(trace, "wt") as file:
        json.dump({"traceEvents": []}, file)
    assert main([str(trace)]) == 2 and "holds no step" in capsys.readouterr().err
    assert main([str(tmp_path / "none.gz")]) == 2 and "no such trace" in capsys.readouterr().err
