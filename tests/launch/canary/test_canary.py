"""A run tried on its first steps beside FP32, started from there, watched, and put back where it turns bad."""

import errno
import json
import re
import shlex
import signal
import subprocess
import sys
from threading import Thread
from unittest.mock import Mock

import pytest
from transformers import LlamaConfig

from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.errors import UserError
from config.launcher import as_launched
from lab.detection.planted import MODULE as MODULE_OF_DEFECTS
from launch.canary import monitor
from launch.canary.command import main
from launch.canary.gate import shares
from launch.canary.monitor import Breach, RunMonitor
from launch.canary.plan import in_fp32, promoted, read_plan
from launch.canary.record import Journal
from launch.job import job_command
from launch.plan import model as plan_model
from precision.manifest import assign, load_manifest
from tests.support.jobs.launches import SMALL, events, finish, output_of, start, wait_until, with_defect
from tools.parity.jobs import plan as parity_plan
from tracking.compare.surviving import read_events
from training.schedule import scheduled_rate

DEMO = str(REPOSITORY / "config/recipes/demo.yaml")
MODULE = "model.layers.1.mlp.down_proj"
PATIENCE = 7200
"""[seconds] Of a canary: on two cores that twenty processes share the gate's first two runs took 14 min."""
WITHOUT_ZERO = ("deepspeed.config=ds_configs/zero0_fp32.json", "precision.compute=fp32")


def given(folder, *overrides):
    """The overrides of a small run of 24 steps, 6 of them the canary's."""
    run = [f"run.dir={folder}/runs", "run.name=it", "run.steps=24", "schedule.warmup_steps=2"]
    size = ["batch.global_size=8", "batch.micro_size=2", "evaluate.every_steps=6", f"data.cache_dir={folder}/cache"]
    quiet = ["checkpoint.every_steps=3", "tracking.wandb=disabled", "generate.tokens=0", "telemetry.every_steps=0"]
    canary = ["canary.steps=6", "parity.points=2", "canary.bounds={validation_delta: 0.05}"]
    return [*SMALL, *run, *size, *quiet, *canary, *overrides]


def plan_of(folder, *overrides, processes=1):
    return read_plan(DEMO, given(folder, *overrides), processes=processes, launch=(), check_launch=())


def test_the_canary_has_the_whole_runs_schedule(tmp_path):
    whole = plan_of(tmp_path).resolved.config
    canary = plan_of(tmp_path, "run.steps=8", "schedule.steps=24").resolved.config
    assert [scheduled_rate(canary, step) for step in range(8)] == [scheduled_rate(whole, step) for step in range(8)]
    assert scheduled_rate(canary, 7) != scheduled_rate(plan_of(tmp_path, "run.steps=8").resolved.config, 7)
    with pytest.raises(SystemExit):
        plan_of(tmp_path, "schedule.steps=23")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["canary.steps=24"], "canary.steps = 24 leaves none of run.steps = 24"),
        (["canary.data_share=0.5"], "canary.data_share = 0.5 sets the canary's length, as canary.steps = 6"),
        (["checkpoint.dir=memory://there"], "checkpoint.dir: the canary goes back only within the run folder"),
        (["canary.bounds={module_eror: 1}"], "canary.bounds.module_eror is no key of parity:"),
        (["parallel.tensor=2", "canary.ranks=4", *WITHOUT_ZERO], "canary.ranks = 4: ranks that share matrices without"),
        (["parallel.expert=2"], "parallel.expert = 2: the FP32 twin is verified with all experts on each rank; set it"),
    ],
)
def test_mistakes_are_one_line_and_start_nothing(tmp_path, refusal, overrides, said):
    assert said in refusal(main, ["--config", DEMO, "--processes", "2", *given(tmp_path, *overrides)])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("of_parity", [False, True])
@pytest.mark.parametrize(
    ("launcher", "processes", "expected"),
    [
        ("deepspeed --hostfile {}", None, 4),
        ("deepspeed -H {} --include a:0@b", None, 2),
        ("torchrun --standalone --nproc_per_node 1", None, 1),
        ("torchrun --nnodes=2 --nproc-per-node=2", 4, 4),
        ("python -m launch.supervise -- deepspeed --hostfile {}", 4, 4),
        ("python start_ranks.py", 2, 2),
        ("srun", 2, 2),
        ("srun", None, "--launch: 'srun' does not say how many processes it starts; add --processes N"),
        ("torchrun --nproc_per_node gpu", None, "does not say how many processes it starts; add --processes N"),
        ("deepspeed --hostfile {}", 2, "starts 4, not 2 processes; leave --processes out or correct it"),
    ],
)
def test_a_launcher_says_how_many_processes_it_starts(tmp_path, launcher, processes, expected, of_parity):
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=3\nb slots=1\n", encoding="utf-8")
    words, more = launcher.format(hosts).split(), given(tmp_path)

    def plan(**launchers):
        if of_parity:
            return parity_plan(DEMO, more, folder=tmp_path, steps=6, processes=processes, launcher=words)
        return read_plan(DEMO, more, **{"processes": processes, "launch": words, "check_launch": (), **launchers})

    if isinstance(expected, int):
        assert plan().processes == expected
        return
    with pytest.raises(UserError, match=re.escape(expected)):
        plan()
    if processes is not None and not of_parity:
        with pytest.raises(UserError, match="^--check-launch: .* starts 4, not 2 processes"):
            plan(launch=(), check_launch=words)


def test_a_share_of_the_data_is_a_number_of_the_runs_steps(tmp_path):
    """The verdict's line says which share of the run's and of the corpus they were."""

    def steps(*overrides):
        plan = plan_of(tmp_path, "canary.steps=null", *overrides)
        assert plan.first_checkpoint.name == f"step-{plan.steps}"
        return plan.steps

    assert [steps(f"canary.data_share={share}") for share in (0.001, 0.07, 0.25, 0.5)] == [1, 2, 6, 12]
    assert steps("run.steps=100", "canary.data_share=0.07") == 7  # 7.000000000000001 in FP64
    assert steps("run.steps=100") == 50
    said, fields = shares(plan_of(tmp_path), {"tokens": 1536, "epoch_tokens": 100_000})
    assert said == "25% of the run's, 1,536 tokens, 1.54% of an epoch"
    assert fields == {"tokens": 1536, "share_of_run": 0.25, "share_of_epoch": 0.01536}
    said, fields = shares(plan_of(tmp_path), {"tokens": 1536, "epoch_tokens": None})  # its environment.json was lost
    assert said == "25% of the run's, 1,536 tokens" and fields["share_of_epoch"] is None


@pytest.mark.parametrize("later", ["guard.spike_sigmas=6", "profile={start: 10, steps: 2}"])
def test_what_begins_after_the_canary_does_not_refuse_it(tmp_path, later):
    plan = plan_of(tmp_path, "run.steps=200", later)
    assert read_command_line([*plan.arguments, *plan.first_steps], as_launched(1)).config.run.steps == 6
    jobs = parity_plan(DEMO, given(tmp_path, "run.steps=200", later), folder=tmp_path, steps=6, processes=1)
    assert jobs.resolved.config.run.steps == 6


def test_a_run_that_is_there_is_not_taken_over(tmp_path, refusal):
    run = tmp_path / "runs/it"
    run.mkdir(parents=True)
    (run / "events.jsonl").touch()
    assert "was started without a canary" in refusal(main, ["--config", DEMO, *given(tmp_path)])
    assert not (tmp_path / "runs/it-canary").exists()


def test_a_fallback_is_a_run_that_resolves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cast = plan_of(tmp_path).resolved
    there = plan_of(tmp_path, *promoted(cast, [MODULE], tmp_path)[0]).resolved
    assert (there.compute, there.config.precision.path) == ("fp32", "manifest")
    written = json.loads((tmp_path / "promoted.json").read_text(encoding="utf-8"))
    assert written["default"] == "bf16" and [rule["match"] for rule in written["rules"]] == [MODULE]
    mixed = plan_of(tmp_path, "precision.manifest=config/manifests/llama_mixed.json").resolved
    plan_of(tmp_path, *promoted(mixed, [MODULE], tmp_path)[0])
    rules = json.loads((tmp_path / "promoted.json").read_text(encoding="utf-8"))["rules"]
    assert [(rule["match"], rule["compute"]) for rule in rules][1:] == [("lm_head", "fp32"), (MODULE, "fp32")]
    split = plan_of(tmp_path, "precision.masters=split").resolved
    plan_of(tmp_path, *promoted(split, [MODULE], tmp_path)[0])
    of_16_bits = plan_of(tmp_path, "model.attention=flash_attention_2").resolved
    for resolved in (cast, mixed, there, split, of_16_bits):
        plain = plan_of(tmp_path, *in_fp32(resolved, tmp_path)).resolved
        assert (plain.compute, plain.config.precision.manifest, plain.zero_stage) == ("fp32", None, 2)
        assert plain.config.model.attention == "auto"


def rule(match, compute, **more):
    return {"match": match, "compute": compute, "reason": "a try", **more}


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize(
    ("rules", "lowers_norms"),
    [
        (None, True),
        ([rule(f"{MODULE}*", "fp16"), rule("lm_head", "fp32")], False),
        ([rule("*mlp.*", "fp8", module_class="Linear"), rule("*", "bf16", module_class="*Norm")], True),
    ],
)
def test_whatever_is_blamed_a_promoted_manifest_is_one_that_a_run_takes(
    tmp_path, monkeypatch, rules, lowers_norms, adapter
):
    """Embeddings are left out, norms have a rule only where one lowers them, and rules without effect go."""
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"default": "bf16", "rules": rules or []}), encoding="utf-8")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(**shape, num_key_value_heads=2, vocab_size=260).save_pretrained(tmp_path)
    base = [f"model.name_or_path={tmp_path}", "model.architecture=null", "model.config={}", f"adapter.kind={adapter}"]
    resolved = plan_of(tmp_path, *base, *([f"precision.manifest={own}"] if rules else [])).resolved
    model = plan_model.adapted_model_of(resolved.config)
    monkeypatch.setattr(plan_model, "adapted_model_of", lambda config: model)
    before = assign(load_manifest(own), model)
    modules = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    promotable = set()
    for blamed in [[name] for name in modules] + [modules]:
        try:
            _, names = promoted(resolved, blamed, tmp_path)
        except UserError as error:
            assert "no region of a manifest that computes in less than FP32" in str(error)
            continue
        promotable.update(names)
        after = assign(load_manifest(tmp_path / "promoted.json"), model)
        assert {after[name].compute for name in names if name in after} <= {"fp32"}
        beside = [one for one in before if not any(one.startswith(name) or name.startswith(one) for name in names)]
        assert [after[name].compute for name in beside] == [before[name].compute for name in beside]
        if names == ["model.layers.0"]:
            assert {given.compute for name, given in after.items() if name.startswith("model.layers.0.")} == {"fp32"}
    linear = MODULE if adapter == "none" else f"{MODULE}.base_layer"
    assert {MODULE, linear, f"{linear}.weight", "model.layers.0"} <= promotable
    assert not {"", "model.embed_tokens", "model.embed_tokens.weight", "model.rotary_emb"} & promotable
    assert ("model.norm" in promotable) == lowers_norms


@pytest.mark.parametrize(
    ("overrides", "module", "why"),
    [
        (["model.compile=true"], MODULE, "model.compile = true is not verified with"),
        ([], "model.embed_tokens", "model.embed_tokens: no region of a manifest that computes in less than FP32"),
    ],
)
def test_a_fallback_that_is_refused_gives_way_to_the_next(tmp_path, overrides, module, why):
    """Compiled blocks take no manifest, and an embedding is no region."""
    plan = plan_of(tmp_path, *overrides)
    journal = Journal.read(plan.folder, "it")
    journal.add("gate", 6, "parity", judged=str(plan.first_checkpoint))
    for _ in ("breach", "another, after it was started again"):
        chosen = RunMonitor(plan, journal)._fall_back(Breach(9, "bad", [module]))
        if chosen is None:
            break
        assert plan.refusal(chosen) is None and "precision.compute=fp32" in chosen
    told = [(event["event"], event["to"]) for event in journal.events[1:]]
    assert told == [("refused", "promote"), ("fallback", "fp32")]
    assert f"no fallback to promote: {why}" in journal.events[1]["text"]


def test_a_fallback_on_several_processes_is_a_run_that_resolves(tmp_path):
    for name, given in (("alone", []), ("shared", ["parallel.tensor=2"])):
        other = plan_of(tmp_path / name, *given, processes=2)
        assert other.refusal(promoted(other.resolved, [MODULE], tmp_path)[0]) is None


def test_a_last_checkpoint_that_cannot_be_copied_is_not_checked(tmp_path, monkeypatch):
    """The run has filled the disk: nothing that the canary waits for will happen."""
    plan = plan_of(tmp_path)
    journal = Journal.read(plan.folder, "it")
    journal.add("gate", 6, "parity", judged=str(plan.first_checkpoint))
    (plan.run_folder / "checkpoints/step-9").mkdir(parents=True)
    (plan.run_folder / "checkpoints/step-9/manifest.json").touch()
    monkeypatch.setattr(monitor.shutil, "copytree", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    popen = subprocess.Popen
    ends = [sys.executable, "-c", "raise SystemExit(74)"]
    monkeypatch.setattr(monitor.subprocess, "Popen", lambda *_, **__: popen(ends))
    ended = list[object]()
    session = Thread(target=lambda: ended.append(RunMonitor(plan, journal)._session([], "auto")), daemon=True)
    session.start()
    session.join(60)
    assert ended == [(74, None)]
    assert "step 9 could not be compared with FP32: it cannot be copied" in journal.events[-1]["text"]


def test_a_journal_outlives_a_line_that_was_cut_off(tmp_path):
    journal = Journal.read(tmp_path / "c", "it")
    journal.add("gate", 6, "parity", verdict="parity")
    with journal.path.open("a", encoding="utf-8") as file:
        file.write('{"event": "che')
    again = Journal.read(tmp_path / "c", "it")
    assert [event["text"] for event in again.events] == ["parity"]
    again.add("started", 6, "starts", resume="auto")
    assert (tmp_path / "c/canary.md").read_text(encoding="utf-8") == "# Canary of it\n\n- parity\n- starts\n"
    assert [event["text"] for event in Journal.read(tmp_path / "c", "it").events] == ["parity", "starts"]


def job(folder, *overrides, processes=1, defect=""):
    """defect: in the canary's runs and checks, as `permanent` takes it."""
    program = [sys.executable, "-m", "launch.canary", "--config", DEMO, "--processes", str(processes)]
    if defect:
        launcher = shlex.join(job_command(["-m", MODULE_OF_DEFECTS, defect], processes=processes))
        program += ["--launch", launcher, "--check-launch", launcher]
    return [*program, *given(folder, *overrides)]


def story(folder):
    """Kind and step of each event of the canary."""
    journal = Journal.read(folder / "runs/it-canary", "it")
    return [(event["event"], event["step"]) for event in journal.events], journal


@pytest.mark.slow
def test_a_run_that_turns_bad_goes_back_and_on_with_the_module_in_fp32(tmp_path):
    """Until its defect begins it is, bit for bit, the run that was never tried."""
    defect = f"{{kind: coarse_half, module: {MODULE}, from_step: 14}}"
    plain = given(tmp_path, "run.name=plain")
    finish(with_defect(defect, ["python", str(REPOSITORY / "train.py"), "--config", DEMO, *plain]))
    finish(job(tmp_path, defect=defect), seconds=PATIENCE)
    told, journal = story(tmp_path)
    kinds = [kind for kind, _ in told]
    assert kinds[:2] == ["gate", "started"] and kinds[-1] == "end"
    assert kinds.count("breach") == kinds.count("fallback") == kinds.count("rolled_back") == 1
    fallback = journal.last("fallback")
    assert fallback["to"] == "promote" and MODULE in fallback["text"] and fallback["step"] < 14
    assert told[-1] == ("end", 24) and journal.last("end")["exit_code"] == 0
    losses = {event["step"]: event["loss"] for event in events(tmp_path, "plain", "step")}
    first = [event for event in events(tmp_path, "it", "step") if event["step"] <= 13][:7]
    assert [event["loss"] for event in first] == [losses[event["step"]] for event in first]
    assert [event["step"] for event in first] == list(range(7, 14))
    report = (tmp_path / "runs/it/report.md").read_text(encoding="utf-8")
    assert "## Canary" in report and f"fallback: {MODULE} in FP32 from here on" in report
    read_command_line(["--config", str(tmp_path / "runs/it/config.yaml")], {})  # what it started from is there


@pytest.mark.slow
def test_a_canary_on_fewer_ranks_leaves_its_state_to_all_of_the_run(tmp_path):
    """Canary, twin and checks are one process each; the whole run resumes their checkpoint on two."""
    share = ("canary.steps=null", "canary.data_share=0.25")
    finish(job(tmp_path, *share, "canary.ranks=1", "run.name=fewer", processes=2), seconds=PATIENCE)
    journal = Journal.read(tmp_path / "runs/fewer-canary", "fewer")
    gate = journal.last("gate")
    assert gate["verdict"] == "parity" and "6 steps (25% of the run's, 1,536 tokens, " in gate["text"]
    assert 0 < gate["share_of_epoch"] < 1 and gate["share_of_run"] == 0.25
    assert [event["held"] for event in journal.events if event["event"] == "check"].count(True) >= 1
    assert (journal.events[-1]["event"], journal.events[-1]["step"]) == ("end", 24)
    (start,) = events(tmp_path, "fewer", "run_start")
    assert (start["world_size"], start["step"]) == (2, 6) and start["resumed_from"].endswith("/step-6")
    assert [event["step"] for event in events(tmp_path, "fewer", "step")] == list(range(7, 25))
    gated = next(read_events(tmp_path / "runs/fewer-canary/gate/runs/candidate-seed-0/events.jsonl"))
    assert gated["world_size"] == 1


@pytest.mark.slow
def test_what_no_precision_cures_ends_with_exit_code_3_and_a_checkpoint_that_held(tmp_path):
    defect = f"{{kind: coarse_output, module: {MODULE}, from_step: 14}}"
    finish(job(tmp_path, defect=defect), exit_code=3, seconds=PATIENCE)
    told, journal = story(tmp_path)
    assert [event["to"] for event in journal.events if event["event"] == "fallback"] == ["promote", "fp32"]
    assert [kind for kind, _ in told].count("breach") == 3
    assert told[-1][0] == "end" and told[-1][1] < 14


@pytest.mark.slow
def test_a_canary_without_parity_starts_nothing(tmp_path):
    finish(job(tmp_path, defect=f"{{kind: coarse_output, module: {MODULE}}}"), exit_code=3, seconds=PATIENCE)
    told, journal = story(tmp_path)
    assert [kind for kind, _ in told] == ["gate"]
    assert "module_error" in journal.events[0]["text"] and not (tmp_path / "runs/it").exists()


@pytest.mark.slow
def test_a_canary_ends_with_its_budget_or_on_request_and_leaves_no_job(tmp_path):
    finish(job(tmp_path, "canary.device_hours=0.0005"), exit_code=3, seconds=PATIENCE)
    process = start(job(tmp_path, "canary.steps=4000", "run.steps=4001"))
    first = tmp_path / "runs/it-canary/gate/runs/candidate-seed-0/events.jsonl"
    wait_until(lambda: first.exists() and '"step":' in first.read_text(encoding="utf-8"), seconds=PATIENCE)
    process.send_signal(signal.SIGTERM)
    output_of(process, exit_code=75, seconds=120)
    told, journal = story(tmp_path)
    assert [event["verdict"] for event in journal.events] == ["none", "none"] and {kind for kind, _ in told} == {"gate"}
    assert "canary.device_hours = 0.0005" in journal.events[0]["text"] and not (tmp_path / "runs/it").exists()


@pytest.mark.slow
def test_a_stop_saves_and_the_same_command_goes_on(tmp_path):
    more = ["run.steps=4000", "checkpoint.every_steps=500", "canary.check_every=1000"]
    process = start(job(tmp_path, *more))
    record = tmp_path / "runs/it/events.jsonl"
    wait_until(lambda: record.exists() and record.read_text(encoding="utf-8").count('"step":') > 40, seconds=PATIENCE)
    process.send_signal(signal.SIGTERM)
    output_of(process, exit_code=75, seconds=300)
    stopped = events(tmp_path, "it", "step")[-1]["step"]
    finish(job(tmp_path, "run.steps=4000", "checkpoint.every_steps=500", f"run.steps={stopped + 5}"), seconds=PATIENCE)
    told, journal = story(tmp_path)
    assert [kind for kind, _ in told].count("gate") == 1 and told[-1] == ("end", stopped + 5)
    assert events(tmp_path, "it", "step")[-5]["step"] == stopped + 1
