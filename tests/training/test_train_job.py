"""The whole job through the command line a user types: launchers, resume after a kill, preemption, abort, mistakes."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.training.launches import command, events, finish, start

WHAT_MUST_REPEAT = ("step", "loss", "grad_norm", "lr", "sample_ids_sha256", "tokens", "applied")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all jobs: the corpus is prepared once."""
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def unbroken(folder):
    """The steps of a job under the deepspeed launcher that nothing disturbed, and what it printed."""
    output = finish(command("deepspeed", folder, "unbroken"))
    return trace(folder, "unbroken"), output


def trace(folder, name):
    """What each step of a job was, leaving out times and memory."""
    return [{key: event[key] for key in WHAT_MUST_REPEAT} for event in events(folder, name, "step")]


def test_a_job_leaves_what_a_person_can_look_at(folder, unbroken):
    steps, output = unbroken
    run = folder / "runs" / "unbroken"
    assert [event["step"] for event in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert {"config.yaml", "ds_config.json", "environment.json", "report.md"} <= {path.name for path in run.iterdir()}
    assert (run / "plots" / "run.png").read_bytes().startswith(b"\x89PNG")
    assert "auto" not in (run / "ds_config.json").read_text()
    for expected in ("masters", "float32", "loss", "tok/s", "report", "go on", "deepspeed --num_gpus 2"):
        assert expected in output
    assert [event["status"] for event in events(folder, "unbroken", "run_end")] == ["done"]
    assert len(events(folder, "unbroken", "eval")) == 1


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "python"])
def test_every_launcher_trains_the_same_and_one_process_writes(folder, unbroken, launcher):
    finish(command(launcher, folder, launcher))
    started = events(folder, launcher, "run_start")
    assert [event["world_size"] for event in started] == [1 if launcher == "python" else 2]
    steps = trace(folder, launcher)
    if launcher != "python":
        assert steps == unbroken[0]
    for step, reference in zip(steps, unbroken[0], strict=True):
        assert step["sample_ids_sha256"] == reference["sample_ids_sha256"]
        assert step["loss"] == pytest.approx(reference["loss"], abs=1e-5)
        assert step["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)


def test_a_job_killed_in_the_middle_goes_on_as_if_nothing_had_happened(folder, unbroken):
    job = start(command("torchrun", folder, "killed"))
    path = folder / "runs" / "killed" / "events.jsonl"
    deadline = time.monotonic() + 120
    while not (path.is_file() and events(folder, "killed", "checkpoint")):
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.02)
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate()
    finish(command("torchrun", folder, "killed"))
    resumed = events(folder, "killed", "run_start")[-1]["resumed_from"]
    assert resumed is not None
    latest = {event["step"]: event for event in trace(folder, "killed")}
    assert [latest[step] for step in sorted(latest)] == unbroken[0]


def test_sigterm_saves_and_asks_for_a_restart(folder, unbroken):
    job = start(command("python", folder, "preempted", "run.steps=100000", "checkpoint.every_steps=0"))
    path = folder / "runs" / "preempted" / "events.jsonl"
    deadline = time.monotonic() + 120
    while not (path.is_file() and events(folder, "preempted", "step")):
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 75, output
    last = trace(folder, "preempted")[-1]["step"]
    assert (folder / "runs" / "preempted" / "checkpoints" / "LATEST").read_text() == f"step-{last}\n"
    assert events(folder, "preempted", "run_end")[-1]["status"] == "preempted"


def test_a_run_that_only_skips_stops_with_a_diagnosis_and_a_checkpoint(folder):
    faults = "faults=[{kind: nan_gradient, step: 2}, {kind: inf_gradient, step: 3}]"
    output = finish(command("python", folder, "diverged", faults, "guard.max_consecutive_skips=2"), exit_code=3)
    steps = events(folder, "diverged", "step")
    assert [event["applied"] for event in steps] == [True, False, False]
    assert [event["skipped_total"] for event in steps] == [0, 1, 2]
    assert steps[1]["lr"] == steps[2]["lr"] > steps[0]["lr"]
    assert events(folder, "diverged", "incident")[0]["verdict"] == "ABORT"
    assert (folder / "runs" / "diverged" / "checkpoints" / "step-3" / "state.json").is_file()
    assert "stopped  after step 3: 2 steps in a row were skipped" in output.splitlines()[-1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.config.hiden_size=64", "model.config.hiden_size: a llama config has no such key; did you mean hidden"),
        ("model.architecture=lama", "model.architecture = lama: transformers has no such causal language model"),
        ("data.path=/nowhere", "/nowhere"),
    ],
)  # fmt: skip
def test_a_mistake_found_before_the_process_group_is_one_line_and_exit_code_2(folder, override, message):
    output = finish(command("python", folder, "mistake", override), exit_code=2)
    assert message in output.splitlines()[-1]
    assert output.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in output
    assert not (folder / "runs" / "mistake").exists()
