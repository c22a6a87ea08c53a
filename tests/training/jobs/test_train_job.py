"""The whole job through the command line a user types: launchers, resume after a kill, preemption, abort, mistakes."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from config.cli import REPOSITORY
from config.load import load_config
from config.schema import Config
from tests.support.jobs.launches import (
    LAUNCHERS,
    command,
    events,
    finish,
    last_attempts,
    replay,
    start,
    trace,
    wait_until,
)
from tests.support.marks import slow
from tests.support.models.small_models import small_model
from tools.export_hf.facts import run_facts
from tracking.run_dir import RunDir
from training import build


def test_a_job_leaves_what_a_person_can_look_at(finished, unbroken):
    run, output = finished / "runs" / "it", (finished / "output").read_text()
    assert [event["step"] for event in unbroken] == [1, 2, 3, 4, 5, 6]
    assert unbroken[-1]["loss"] < unbroken[0]["loss"]
    assert {"config.yaml", "ds_config.json", "environment.json", "report.md"} <= {path.name for path in run.iterdir()}
    assert (run / "plots" / "run.png").read_bytes().startswith(b"\x89PNG")
    assert "auto" not in (run / "ds_config.json").read_text()
    for expected in ("masters", "float32", "loss", "tok/s", "report", "resume"):
        assert expected in output
    assert shlex.join(LAUNCHERS["deepspeed"][:-2]) in output
    assert [event["status"] for event in events(finished, "it", "run_end")] == ["done"]
    assert len(events(finished, "it", "eval")) == 1
    # what was left to Mantissa is printed and saved
    assert "DeepSpeed JSON: ds_configs/zero2_fp32.json; attention: sdpa" in output
    assert "  attention: sdpa\n" in (run / "config.yaml").read_text()
    (start,) = events(finished, "it", "run_start")
    assert start["attention"] == "sdpa"
    kinds = ("active_parameters", "trained_parameters", "active_trained_parameters")  # all, without experts or adapter
    assert {start[kind] for kind in kinds} == {start["parameters"]}


def test_a_single_text_file_trains_validates_and_resumes(folder):
    text = folder / "one.txt"
    text.write_text("".join(path.read_text() for path in sorted((REPOSITORY / "data").glob("*.py"))))
    given = ["data.validation_fraction=0.02", f"data.path={text}", "model.attention=eager", "precision.compute=fp32"]
    output = finish(command("python", folder, "one", *given, "run.steps=4"))
    assert "of the longest one are held out" in " ".join(output.split())
    environment = json.loads((folder / "runs/one/environment.json").read_text())
    assert environment["data"]["tail_tokens"] > 32 and environment["data"]["fingerprint"].endswith("+tail")
    output = finish(command("python", folder, "one", *given[:2], "run.steps=6"))
    assert [event["step"] for event in events(folder, "one", "eval")] == [4, 6]
    assert "model.attention eager -> sdpa, which rounds differently" in " ".join(output.split())
    given = [*given[:2], "run.steps=8", "data.hold_out=documents", "evaluate.every_steps=0"]
    output = finish(command("python", folder, "one", *given), exit_code=2)
    assert "data fingerprint" in output


def test_a_run_that_never_evaluates_does_not_after_the_steps_of_also_after(folder):
    """It needs no validation set, and its loss on none would be the best ever."""
    given = ["run.steps=2", "data.validation_fraction=0", "evaluate.every_steps=0", "evaluate.also_after=[1]"]
    finish(command("python", folder, "never", *given))
    assert len(trace(folder, "never")) == 2 and not events(folder, "never", "eval")


def test_a_sample_that_fails_or_is_cut_short_does_not_cost_the_run(folder):
    """A prompt as long as the model's table of positions, then a shorter one with more tokens than are left there."""
    given = ["run.steps=2", "model.architecture=gpt2", "model.config={n_embd: 32, n_layer: 1, n_head: 2}"]
    output = finish(command("python", folder, "learned", *given, f"generate.prompt={'a' * 32}"))
    assert "Traceback" not in output
    (note,) = (event["text"] for event in events(folder, "learned", "note") if "no text" in event["text"])
    assert note == "no text was sampled: its prompt of 32 tokens leaves none of the model's 32 positions"
    output = finish(command("python", folder, "learned", *given, "generate={prompt: def, tokens: 120}"))
    assert [event["status"] for event in events(folder, "learned", "run_end")] == ["done", "done"]
    assert "Sample after 2 steps" in output and (folder / "runs" / "learned" / "report.md").exists()


@pytest.mark.parametrize(("stage", "ends"), [(2, False), (3, True)])
def test_only_a_pass_that_other_ranks_may_wait_in_ends_with_its_error(monkeypatch, stage, ends):
    """Such as a rank's own lack of memory at ZeRO-3: the others would take its next collective for one of theirs."""

    def failing(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    for name, made in (("sample_text", failing), ("load_tokenizer", MagicMock()), ("leading_tokens", MagicMock())):
        monkeypatch.setattr(build, name, made)
    world = SimpleNamespace(tensor=None, experts=None, device=None, gather_objects=lambda value: [value])
    engine = SimpleNamespace(stage=stage, world=world, model=MagicMock())
    notes = []
    with pytest.raises(torch.OutOfMemoryError) if ends else nullcontext():
        assert build.sampled(MagicMock(config=Config()), engine, MagicMock(), MagicMock(note=notes.append)) == ""
    assert notes == ([] if ends else ["no text was sampled: CUDA out of memory"])


@pytest.mark.parametrize("launcher", ["accelerate", "python"])
def test_every_launcher_trains_the_same_and_one_process_writes(folder, unbroken, launcher):
    """tests/launch/test_supervise.py has torchrun, test_start.py the deepspeed launcher."""
    finish(command(launcher, folder, launcher))
    started = events(folder, launcher, "run_start")
    assert [event["world_size"] for event in started] == [1 if launcher == "python" else 2]
    steps = trace(folder, launcher)
    if launcher != "python":
        assert steps == unbroken
    for step, reference in zip(steps, unbroken, strict=True):
        assert step["sample_ids_sha256"] == reference["sample_ids_sha256"]
        assert step["loss"] == pytest.approx(reference["loss"], abs=1e-5)
        assert step["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)


def test_a_job_killed_in_the_middle_goes_on_as_if_nothing_had_happened(folder, unbroken):
    job = start(command("python", folder, "killed"), ranks=2)
    path = folder / "runs" / "killed" / "events.jsonl"
    wait_until(lambda: path.is_file() and events(folder, "killed", "checkpoint"), seconds=120)
    job.kill()
    job.communicate()
    finish(command("python", folder, "killed"), ranks=2)
    resumed = events(folder, "killed", "run_start")[-1]["resumed_from"]
    assert resumed is not None
    assert last_attempts(folder, "killed") == unbroken


def test_sigterm_saves_and_asks_for_a_restart(folder, unbroken):
    job = start(command("python", folder, "preempted", "run.steps=100000", "checkpoint.every_steps=0"))
    path = folder / "runs" / "preempted" / "events.jsonl"
    wait_until(lambda: path.is_file() and events(folder, "preempted", "step"), seconds=120)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 75, output
    last = trace(folder, "preempted")[-1]["step"]
    assert (folder / "runs" / "preempted" / "checkpoints" / "LATEST").read_text() == f"step-{last}\n"
    assert events(folder, "preempted", "run_end")[-1]["status"] == "preempted"


def test_a_run_whose_time_is_up_saves_and_asks_for_a_restart(folder):
    """Every rank looks at its own clock; the first whose time is up stops all of them after the same step."""
    overrides = ["run.steps=100000", "run.max_minutes=0.05", "checkpoint.every_steps=0", "evaluate.every_steps=0"]
    output = finish(command("python", folder, "timed", *overrides), exit_code=75)
    last = trace(folder, "timed")[-1]["step"]
    assert (folder / "runs" / "timed" / "checkpoints" / "LATEST").read_text() == f"step-{last}\n"
    end = events(folder, "timed", "run_end")[-1]
    assert (end["status"], end["reason"]) == ("preempted", "run.max_minutes is up")
    assert "run.max_minutes is up" in output
    (note,) = events(folder, "timed", "note")
    assert (note["text"], note["step"], note["saving"]) == ("run.max_minutes is up; saving", last, True)


def test_a_run_that_only_skips_stops_with_a_diagnosis_and_a_checkpoint(folder):
    faults = "faults=[{kind: nan_gradient, step: 2}, {kind: inf_gradient, step: 3}]"
    output = finish(
        command("python", folder, "diverged", faults, "guard.max_consecutive_skips=2", "guard.reactions=[skip,abort]"),
        exit_code=3,
    )
    steps = events(folder, "diverged", "step")
    assert [event["applied"] for event in steps] == [True, False, False]
    assert [event["skipped_total"] for event in steps] == [0, 1, 2]
    assert steps[1]["lr"] == steps[2]["lr"] > steps[0]["lr"]
    assert events(folder, "diverged", "incident")[-1]["verdict"] == "ABORT"
    assert (folder / "runs" / "diverged" / "checkpoints" / "step-3" / "state.json").is_file()
    assert "verdict  failed since step 3: 2 steps in a row were skipped" in output.splitlines()[-1]


def test_a_rollback_leaves_the_offending_batch_out_and_the_run_ends_well(folder):
    overrides = ["faults=[{kind: nan_loss, step: 4}, {kind: lost_update, step: 6}]"]
    finish(command("python", folder, "rolled", *overrides, "guard.reactions=[rollback, abort]"))
    steps = events(folder, "rolled", "step")
    assert [event["step"] for event in steps] == [1, 2, 3, 4, 3, 4, 5, 6]
    # An update that is lost on purpose is no incident.
    assert [event["applied"] for event in steps] == [True, True, True, False, True, False, True, True]
    # Back to the checkpoint of step 2, whose next batches were 2 and 3; number 3 broke the run.
    assert [event["position"] for event in steps] == [0, 1, 2, 3, 4, 5, 6, 7]
    (incident,) = events(folder, "rolled", "incident")
    assert incident["verdict"] == "ROLLBACK" and incident["rolled_back_to"].endswith("step-2")
    assert [event["kind"] for event in events(folder, "rolled", "fault")] == ["nan_loss", "lost_update"]
    named = events(folder, "rolled", "nonfinite")[0]
    assert (named["rank"], named["module"], named["tensor"], named["kind"]) == (0, "loss", "loss", "nan")
    assert steps[4]["lr"] == steps[2]["lr"]
    before = sorted((folder / "runs" / "rolled").rglob("*"))
    output = replay(folder, "rolled", 4)
    assert output.count("as recorded") == 4 and "recorded:" not in output
    assert "cause: rank 0, loss: 1 nan in its loss" in output
    assert output.splitlines()[-1] == "reproduced"
    assert sorted((folder / "runs" / "rolled").rglob("*")) == before


@pytest.mark.parametrize("launched", [True, slow(False)])
def test_a_replay_goes_on_from_the_nearest_checkpoint_on_as_many_processes(finished, launched):
    """The tool starts the processes itself unless a launcher has."""
    output = replay(finished, "it", 6, ranks=2 if launched else 1)
    assert "checkpoints/step-4, 2 steps to go" in output
    assert output.count("as recorded") == 2
    assert "no such step; its events end at step 6" in replay(finished, "it", 60, exit_code=2)


def test_a_replay_judges_by_the_warnings_of_telemetry_as_the_run_did(folder):
    """Step 2 is made again from the seed, step 4 from a checkpoint that knows the earlier warnings."""
    given = ["telemetry.every_steps=1", "warnings.attention_logit=0.0001", "guard.warnings=[attention_logit]"]
    finish(command("python", folder, "warned", *given, "evaluate.every_steps=0"))
    assert [event["applied"] for event in events(folder, "warned", "step")].count(False) >= 1
    for step in (2, 4):
        assert replay(folder, "warned", step).splitlines()[-1] == "reproduced"


def test_a_replay_compares_with_plain_torch_what_the_run_compared(folder):
    """Step 3 is one of those that a session compares, step 5 is not, also where it is the first after a checkpoint."""
    flip = "{{kind: flipped_bit, place: gradient, module: model.layers.0.mlp.up_proj, bit: 27, step: {}}}"
    given = [f"faults=[{flip.format(3)}, {flip.format(5)}]", "guard.warnings=[self_check]", "guard.reactions=[skip]"]
    finish(command("python", folder, "checked", *given, "guard.self_check_every=500", "evaluate.every_steps=0"))
    assert {event["step"] for event in events(folder, "checked", "self_check")} & {3, 5} == {3}
    assert [event["applied"] for event in events(folder, "checked", "step")][2:5] == [False, True, True]
    for step in (3, 5):
        assert replay(folder, "checked", step).splitlines()[-1] == "reproduced"


def test_a_replay_says_which_step_came_out_differently(folder, finished):
    copy = folder / "runs" / "doctored"
    shutil.copytree(finished / "runs" / "it", copy)
    lines = (copy / "events.jsonl").read_text().splitlines()
    doctored = [line.replace('"grad_norm":', '"grad_norm":1') if '"step":5' in line else line for line in lines]
    (copy / "events.jsonl").write_text("\n".join(doctored) + "\n")
    with (copy / "config.yaml").open("a", encoding="utf-8") as config:
        config.write("defects: []\n")  # as runs before version 0.3.0 have recorded it
    output = replay(folder, "doctored", 6, exit_code=3, ranks=2)
    assert "recorded: grad_norm" in output and "not reproduced" in output


def test_the_blamed_module_is_promoted_and_the_checkpoint_remembers_it(folder):
    manifest = folder / "mixed.json"
    rule = {"match": "*.layers.1.mlp.up_proj", "compute": "bf16", "reason": "a test"}
    manifest.write_text(json.dumps({"default": "fp32", "rules": [rule]}))
    hit = "faults=[{kind: nan_activation, step: 3, module: model.layers.1.mlp.up_proj}]"
    overrides = [hit, "guard.reactions=[promote]", "precision.path=manifest", f"precision.manifest={manifest}"]
    finish(command("python", folder, "promoted", *overrides))
    incident = events(folder, "promoted", "incident")[0]
    assert (incident["verdict"], incident["promoted_to"]) == ("PROMOTE", "fp32")
    share = events(folder, "promoted", "precision")[0]["flop_share"]
    assert set(share) == {"bf16", "fp32"} and 0 < share["bf16"] < 0.2
    assert incident["modules"] == ["model.layers.1.mlp.up_proj"]
    finish(command("python", folder, "promoted", "run.steps=8", *overrides))
    before, after = (
        event["regions"]["model.layers.1.mlp.up_proj"] for event in events(folder, "promoted", "run_start")
    )
    assert (before, after) == ("bf16", "fp32")
    on_probation = [*overrides, "run.steps=8", "guard.probation_steps=3"]
    finish(command("python", folder, "demoted", *on_probation))
    taken_back = [event for event in events(folder, "demoted", "note") if "taken back" in event["text"]]
    assert [event["step"] for event in taken_back] == [6]  # refused at 3, clean at 4, 5 and 6
    finish(command("python", folder, "demoted", *on_probation, "run.steps=9"))
    regions = [event["regions"]["model.layers.1.mlp.up_proj"] for event in events(folder, "demoted", "run_start")]
    assert regions == ["bf16", "bf16"]


def test_a_manifest_is_recorded_as_it_was_trained_and_a_replay_refuses_another(folder):
    manifest, run = folder / "edited.json", folder / "runs/edited"
    rules = [{"match": f"*.layers.1.mlp.{name}_proj", "compute": "bf16", "reason": name} for name in ("up", "down")]
    manifest.write_text(json.dumps({"$schema": "x", "default": "fp32", "rules": rules}))
    given = ["run.steps=2", "schedule.warmup_steps=0", "precision.path=manifest", f"precision.manifest={manifest}"]
    finish(command("python", folder, "edited", *given, "checkpoint.every_steps=2"))
    edits = [rules[0] | {"reason": "other words"}, rules[1]], [rules[0], rules[1] | {"compute": "fp16"}], rules[:1]
    for edited, code in zip(edits, (0, 2, 2), strict=True):
        manifest.write_text(json.dumps({"default": "fp32", "rules": edited}))
        said = replay(folder, "edited", 2, exit_code=code)
        assert (f"{manifest}: rules[1] is not what the step was made with" in said) == (code == 2)
    config = load_config(run / "config.yaml", [], None, started=True)
    facts = run_facts(RunDir(run), run / "checkpoints/step-2", config, {})
    assert facts["precision"]["manifest"] == {"default": "fp32", "rules": rules}


FP16 = ["deepspeed.config=ds_configs/zero1_fp16.json", "precision.compute=fp16"]


def test_a_model_beyond_fp16_is_told_so_at_its_first_step_and_fails_its_report(folder):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = small_model("llama", **shape, num_key_value_heads=2, vocab_size=257)
    for name, factor in (("gate", 50.0), ("up", 50.0), ("down", 50_000.0)):
        model.get_submodule(f"model.layers.1.mlp.{name}_proj").weight.data *= factor
    model.save_pretrained(folder / "wide")
    wide = f"model={{name_or_path: {folder}/wide, architecture: null, config: {{}}}}"
    given = [*FP16, wide, "evaluate.every_steps=0"]
    output = finish(command("python", folder, "beyond", *given), exit_code=3, ranks=2)
    assert "was applied: an activation of model.layers.1.mlp.down_proj exceeds FP16's 65,504" in output
    assert "no loss scale helps; use precision.compute=bf16" in output.splitlines()[-1]
    assert events(folder, "beyond", "scale") == []
    first = events(folder, "beyond", "nonfinite")[0]
    assert (first["kind"], first["dtype"]) == ("inf", "float16")
    page = (folder / "runs" / "beyond" / "report.md").read_text()
    verdicts = {row.split("|")[1].strip(): row for row in page.splitlines() if row.startswith("| ")}
    assert all("fail" in verdicts[name] for name in ("overflow rate", "job success", "non-finite steps"))


@pytest.mark.parametrize("skipped", [slow(3), 4])
def test_a_run_whose_last_steps_were_skipped_has_not_done_what_it_was_asked(folder, skipped):
    """More than half of its steps."""
    name, steps = f"stalled-{skipped}", range(7 - skipped, 7)
    faults = "faults=[" + ", ".join(f"{{kind: nan_gradient, step: {step}}}" for step in steps) + "]"
    output = finish(command("python", folder, name, faults), exit_code=3 if skipped > 3 else 0)
    told = f"verdict  not learning since step {7 - skipped}: the last {skipped} of 6 steps were skipped"
    assert (told in output) == (skipped > 3)
    assert events(folder, name, "run_end")[-1]["status"] == ("aborted" if skipped > 3 else "done")


def test_an_overflow_at_the_smallest_scale_is_a_verdict_with_a_diagnosis(folder):
    scale = ["precision.loss_scale.initial=4", "precision.loss_scale.minimum=2", "precision.loss_scale.hysteresis=1"]
    faults = "faults=[" + ", ".join(f"{{kind: inf_gradient, step: {step}}}" for step in (2, 3)) + "]"
    output = finish(command("python", folder, "smallest", *FP16, *scale, faults, "guard.reactions=[skip]"), exit_code=3)
    assert "verdict  failed since step 3: gradients overflow at the smallest loss scale" in output.splitlines()[-1]
    changes = [(event["from"], event["to"], event["reason"]) for event in events(folder, "smallest", "scale")]
    assert changes == [(4.0, 2.0, "overflow")]
    assert {"lr", "momentum_norm"} <= events(folder, "smallest", "scale")[0].keys()
    blamed = [event["module"] for event in events(folder, "smallest", "nonfinite")]
    assert blamed == ["model.embed_tokens.weight"] * 2
    assert (folder / "runs" / "smallest" / "checkpoints" / "step-3" / "state.json").is_file()


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


def test_lost_connections_of_a_rank_print_no_stacks():
    """torch reads the level of its warnings when it is imported, which must not be before it is set."""
    program = (
        "import os, sys, train\n"
        "try: train.main(['--config', 'nowhere.yaml'])\n"
        "except SystemExit: print(os.environ['TORCH_CPP_LOG_LEVEL'], 'torch' in sys.modules)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["ERROR", "False"]
