"""Every kind of fine-tuning resumes bit for bit, and is seen by the judge, the probe, the meters and attribution."""

from pathlib import Path
from typing import Any

import pytest

from config.cli import REPOSITORY
from config.command_line import read_command_line
from tests.support.jobs.launches import events
from tests.support.jobs.task_jobs import JOBS, overrides_of
from tests.support.marks import some_slow
from tests.support.rows.chats import write_base
from tests.training.checkpoint import resume_cases
from tests.training.checkpoint.resume_cases import FP16, OVERFLOW
from tools.parity.steps import Recomputed
from training.attribution import attribute
from training.checkpoint.partitions import open_saved_model
from training.distributed import World
from training.session import run_dir_of, session
from training.tasks.task import prepare
from training.telemetry import Telemetry

NOISE = "sft={neftune_alpha: 5, loss: row}"
VARIANTS = {
    "sft, padded": ("sft", [*FP16, "deepspeed.stage=1", "data.packing=none", NOISE]),
    "sft, DoRA": ("sft", [*FP16, "deepspeed.stage=2", "adapter={kind: dora, r: 4}"]),
    "sft, LoRA and a head": (
        "sft, LoRA",
        ["adapter={kind: lora, r: 4, dropout: 0.1, modules_to_save: [lm_head]}", NOISE],
    ),
    "dpo, an SFT term": ("dpo", ["preference.sft_weight=0.1"]),
    "distill, likeliest": ("distill", ["deepspeed.stage=3", "distill.top_k=8"]),
    "classify, DoRA": ("classify, regression", ["deepspeed.stage=2", "adapter={kind: dora, r: 4}"]),
    "seq2seq, FP32": ("seq2seq", ["precision.compute=fp32", "deepspeed.stage=0"]),
    "seq2seq, DoRA": ("seq2seq", ["adapter={kind: dora, r: 4, alpha: 8, modules_to_save: [lm_head]}"]),
}
"""Jobs beside those of JOBS: another job, and what is other than there."""


def job_of(folder: Path, what: str) -> list[str]:
    """Overrides of a job with dropout that overflows in its third step where it computes in FP16."""
    name, more = VARIANTS.get(what, (what, []))
    if JOBS[name].quantised:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    overrides = [*overrides_of(folder, name, dropout=True), *more, "data.workers=1"]
    return [*overrides, *FP16, *OVERFLOW] if "precision.compute=fp16" in overrides else overrides


@pytest.mark.parametrize("what", some_slow([*JOBS, *VARIANTS], "sft, padded", "dpo, LoRA", "mlm"))
def test_a_job_that_breaks_off_ends_as_one_that_does_not(pair, every_task, what):
    """The rows are less than 10 steps: the jobs go through them more than once, and break in the middle of a step."""
    overrides = [*job_of(every_task, what), "checkpoint.every_steps=2", "evaluate={every_steps: 5, batches: 1}"]
    prepare(resume_cases.resolve(str(every_task), "prepared", [*overrides, "faults=[]"]).config, progress=False)
    skipped = [3] if OVERFLOW[0] in overrides else []
    resume_cases.ends_as_whole(pair, every_task, what, overrides, breaks=(13,), skipped=skipped, seconds=400.0)
    name = resume_cases.name_of(what)
    saved = open_saved_model(every_task / "runs" / name / "checkpoints" / "step-10" / "deepspeed")
    own = [tensor for tensor in saved.tensors if "lora_" in tensor or "modules_to_save" in tensor]
    assert own == (list(saved.tensors) if any("adapter=" in item for item in overrides) else [])
    evaluated = events(every_task, name, "eval")
    assert len(evaluated) == 2
    if "classify" in what:
        of_a_number = "classify.kind=regression" in overrides
        measured = {"pearson", "rmse"} if of_a_number else {"accuracy", "macro_f1", "matthews"}
        assert [event["metrics"].keys() for event in evaluated] == [measured] * 2
    perplexities = {event["perplexity"] for event in evaluated}
    if any(word in what for word in ("classify", "dpo", "distill")) or NOISE in overrides:  # no mean over tokens
        assert perplexities == {None}
    else:
        assert min(perplexities) > 1
    if "seq2seq" in what:
        notes = [event["text"] for event in events(every_task, name, "note") if "evaluate.batches" in event["text"]]
        assert len(notes) == 1 and "evaluate.batches = 1: an evaluation uses 8 of the 11 held-out" in notes[0]


@pytest.mark.parametrize(
    ("what", "part", "named"),
    [("sft, LoRA", "base", "base model"), ("dpo", "base", "base model"), ("distill", "teacher", "teacher")],
)
def test_another_base_or_teacher_is_not_resumed_with(pair, every_task, what, part, named):
    given = {"folder": str(every_task), "name": resume_cases.name_of(f"other {part} of {what}")}
    overrides = [*job_of(every_task, what), "checkpoint.every_steps=2"]
    pair.run(resume_cases.job, overrides=overrides, passes=13, **given)
    write_base(every_task / "other", seed=2)
    other = [item.replace(f"{every_task}/{part}", f"{every_task}/other") for item in overrides]
    with pytest.raises(AssertionError, match=f"the {named} is sha256:.* there and sha256:.* in this run"):
        pair.run(resume_cases.job, overrides=other, passes=1, **given)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_an_adapter_resumes_on_fewer_ranks(pair, solo, folder, stage):
    overrides = resume_cases.task_job(folder, "precision.compute=fp32")
    overrides += ["adapter={kind: lora, r: 4}", f"deepspeed.stage={stage}", "model.config={}"]
    two, one = f"two{stage}", f"fewer{stage}"
    [whole, _] = pair.run(resume_cases.job, folder=str(folder), name=two, overrides=overrides, passes=None)
    pair.run(resume_cases.job, folder=str(folder), name=one, overrides=overrides, passes=12)
    [fewer] = solo.run(resume_cases.job, folder=str(folder), name=one, overrides=overrides, passes=None)
    assert whole["exit_code"] == fewer["exit_code"] == 0
    assert resume_cases.sessions_resumed(str(folder), one) == 1
    records = zip(resume_cases.last_by_step(str(folder), two), resume_cases.last_by_step(str(folder), one), strict=True)
    for mine, theirs in records:
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["tokens"] == theirs["tokens"]


def looked_at(world: World, *, arguments: list[str]) -> dict[str, Any]:
    """A step beside its FP32 reference, the telemetry of the second, and the causes of a third that is not finite."""
    resolved = read_command_line(["--config", str(REPOSITORY / "config/recipes/demo.yaml"), *arguments])
    with session(resolved, world=world) as opened:
        engine, batches = opened.engine, opened.batches
        judged = Recomputed(opened, run_dir_of(resolved)).parity.step(batches.next_step(), applied=0)
        meter, batch = Telemetry(engine, probe=resolved.zero_stage < 3), batches.next_step()
        with meter.watching(batch):
            outcome = engine.forward_backward(batch, step=2)
        engine.health(outcome)
        meter.measure()
        seen = meter.finish(applied=False)
        engine.discard_gradients()
        batch = batches.next_step()
        outcome = engine.forward_backward(batch, step=3)
        assert not engine.health(outcome).finite
        causes = [(rank, cause.module) for rank, cause in attribute(engine, batch, outcome, step=3)]
        return {"judged": judged, "seen": seen, "causes": causes}


@pytest.mark.parametrize("what", some_slow(JOBS, "sft, NF4", "dpo, LoRA", "distill", "classify, regression"))
def test_a_step_is_compared_with_fp32_measured_and_its_cause_named(pair, every_task, what):
    fault = f"faults=[{{kind: nan_activation, step: 3, rank: 1, module: {JOBS[what].module}}}]"
    arguments = [*overrides_of(every_task, what, dropout=True), "data.workers=1", f"run.dir={every_task}/runs", fault]
    alone = ["--config", "config/recipes/demo.yaml", *arguments, "faults=[]"]  # ranks of faults are those of a pair
    prepare(read_command_line(alone).config, progress=False)
    found, _ = pair.run(looked_at, arguments=arguments, seconds=400.0)
    judged, adapted = found["judged"], any("adapter=" in item for item in arguments)
    # with numbers around 300 to predict, labels in BF16 would be wrong by a third of their spread
    near = 1e-4 if "regression" in what else 0.01
    assert judged["loss"] == pytest.approx(judged["reference_loss"], rel=near)
    assert max(judged["drift"].values()) == found["seen"]["drift"]["maximum"] == 0
    assert max(judged["update_error"].values()) < 1e-3
    # a bias of attention's keys changes nothing, so its gradient is rounding
    probe = {name: row["cosine"] for name, row in (found["seen"]["probe"] or {}).items() if "key.bias" not in name}
    assert min((cosine for cosine in probe.values() if cosine), default=1.0) > 0.9, probe
    for names in (judged["parameters"], probe) if adapted else ():
        assert all(".lora_" in name or "modules_to_save" in name for name in names)
    assert found["causes"][0] == (1, JOBS[what].module)
