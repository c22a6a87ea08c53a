"""Saves while training continues hold the state at the call; full disks leave the last good checkpoint."""

import errno
import fcntl
import io
import math
import os
import subprocess

import pytest
import torch

from tests.support.jobs.launches import command, finish
from tests.support.marks import slow
from tests.training.checkpoint import checkpoint_cases
from tracking.compare.surviving import read_events
from training.checkpoint.choice import newest
from training.checkpoint.retention import Retention, is_read_locked, read_lock
from training.checkpoint.writer import host_copy

MANIFEST = ["precision.path=manifest", "precision.manifest=config/manifests/bf16.json"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("stage", "compute", "variant", "overrides"),
    [
        (0, "fp32", "", []),
        (1, "fp16", "", []),
        (2, "bf16", "", []),
        (2, "bf16", "_offload", []),
        (3, "bf16", "", []),
        (3, "fp16", "", []),
        (2, "fp32", "", MANIFEST),
    ],
)
def test_the_checkpoint_holds_the_step_it_was_taken_at(pair, tmp_path, stage, compute, variant, overrides):
    """Two steps are made before the first byte is written; going back gives the masters and moments of the call."""
    for result in pair.run(
        checkpoint_cases.train_while_it_is_written,
        folder=str(tmp_path),
        stage=stage,
        compute=compute,
        variant=variant,
        overrides=["precision.loss_scale.initial=256", *overrides],
    ):
        assert not result["published before a byte was written"]
        assert result["steps"] == [2] and result["state"] == {"guard": 1}
        assert result["back"] == result["then"] != result["later"]
        assert result["forth"] == result["later"]


@pytest.mark.parametrize(("background", "stall"), [(True, 0.3), (False, 0.4)])
def test_a_save_waits_for_the_last_one_and_where_nothing_is_copied_for_its_own_end(pair, tmp_path, background, stall):
    for result in pair.run(checkpoint_cases.save_into_a_save, folder=str(tmp_path), background=background):
        assert result["there"] == [not background, True]
        assert result["stalls"][0] > stall


def test_a_copy_shares_what_was_shared_and_nothing_with_what_it_is_of():
    whole = torch.arange(12.0)
    state = {"a": whole[2:6].view(2, 2), "b": [whole, (whole[::3],)], "c": torch.zeros(0), "d": "text", "e": None}
    before = io.BytesIO()
    torch.save(state, before)
    copied = host_copy(state)
    whole.zero_()
    after = io.BytesIO()
    torch.save(copied, after)
    assert after.getvalue() == before.getvalue()
    copied["b"][0][2] = 77.0
    assert copied["a"][0, 0] == 77.0 and whole[2] == 0.0


def test_what_stays(solo, tmp_path):
    """The newest two, each fifth step, the best two; a loss that is nan or was not measured is never among the best."""
    losses = [5.0, 1.5, math.nan, None, 3.0, 1.0, 2.0, 4.0, None, 9.0, 8.0, 7.0]
    keep = Retention(2, every=5, best=2)
    stays = solo.run(
        checkpoint_cases.losses_and_what_stays, folder=str(tmp_path), losses=dict(enumerate(losses, 1)), keep=keep
    )[0]
    assert sorted(int(name[5:]) for name in stays) == [2, 5, 6, 10, 11, 12]


def test_what_is_being_read_stays(solo, tmp_path):
    def save(*steps):
        arguments = {"folder": str(tmp_path), "losses": dict.fromkeys(steps), "keep": Retention(1)}
        return solo.run(checkpoint_cases.losses_and_what_stays, **arguments)[0]

    assert save(1, 2) == ["step-2"]
    with read_lock(tmp_path / "step-2"):
        assert is_read_locked(tmp_path / "step-2")
        assert save(3, 4) == ["step-2", "step-4"]
    assert not is_read_locked(tmp_path / "step-2")
    assert save(5) == ["step-5"]


def test_what_is_being_read_stays_on_nfs(tmp_path, monkeypatch):
    """It emulates flock by locks on ranges of bytes, and gives an exclusive one only to a file open for writing."""
    local = fcntl.flock

    def of_nfs(file, operation):
        access = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        if operation & fcntl.LOCK_EX and access == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        local(file, operation)

    (tmp_path / "manifest.json").write_text("{}")
    monkeypatch.setattr(fcntl, "flock", of_nfs)
    with read_lock(tmp_path):
        assert is_read_locked(tmp_path)
    assert not is_read_locked(tmp_path)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB; needs the right to mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_rank_that_may_not_write_more_stops_the_save_on_all(pair, tmp_path):
    results = pair.run(checkpoint_cases.save_where_it_fails, folder=str(tmp_path / "checkpoints"), limit=20_000)
    check(results, tmp_path / "checkpoints")
    assert "rank 1 cannot write deepspeed/" in results[0]["error"] and "File too large" in results[0]["error"]


def test_a_full_disk_leaves_the_last_checkpoint_and_no_half_of_another(pair, small_disk):
    folder = small_disk / "checkpoints"
    results = pair.run(checkpoint_cases.save_where_it_fails, folder=str(folder))
    check(results, folder)
    assert "No space left on device" in results[0]["error"]


def test_a_folder_that_became_read_only_is_named(pair, small_disk):
    folder = small_disk / "checkpoints"
    pair.run(checkpoint_cases.save_steps, folder=str(folder), stage=2, compute="bf16", steps=1)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for error in pair.run(checkpoint_cases.failing_save, folder=str(folder)):
        assert error.startswith(f"checkpoint {folder}/step-2 was not saved: ")
        assert "Read-only file system" in error
    assert pair.run(checkpoint_cases.find, folder=str(folder), resume="auto") == [("step-1", [])] * 2


def test_a_process_that_may_open_no_further_file_saves_again_when_it_may(solo, tmp_path):
    first, second, third = solo.run(checkpoint_cases.save_without_descriptors, folder=str(tmp_path))[0]
    assert "Too many open files" in second and "\n" not in second
    assert first.startswith("Saved(") and third.startswith("Saved(")
    assert newest(tmp_path).name == "step-3"


@pytest.mark.parametrize(
    ("stage", "compute", "split", "rank", "named"),
    [
        (2, "bf16", False, 1, "rank 1: optimizer_state_dict/single_partition_of_fp32_groups/"),
        slow(0, "fp32", False, 0, "rank 0: module/"),
        slow(1, "bf16", False, 1, "rank 1: "),
        slow(3, "bf16", False, 0, "rank 0: "),
        slow(3, "fp32", False, 1, "rank 1: "),
        slow(2, "bf16", True, 0, "rank 0: "),
    ],
)
def test_masters_that_are_not_finite_are_never_saved(pair, tmp_path, stage, compute, split, rank, named):
    given = {"folder": str(tmp_path), "stage": stage, "compute": compute, "split": split, "rank": rank}
    for error, found in pair.run(checkpoint_cases.spoiled_save, **given):
        assert error.startswith(f"checkpoint {tmp_path}/step-2 was not saved: {named}")
        assert error.endswith(".pt is not finite")
        assert found == str(tmp_path / "step-1")
    assert (tmp_path / "LATEST").read_text() == "step-1\n"


def test_everything_is_on_disk_before_a_name_points_at_it(solo, tmp_path):
    """The order of flushes and renames, as the operating system was asked for them: a power cut keeps that order."""
    asked = solo.run(checkpoint_cases.flushes_and_renames, folder=str(tmp_path / "checkpoints"))[0]
    partial = ".step-1.partial"
    published = asked.index(("rename", partial, "step-1"))
    flushed = {name for what, name, *_ in asked[:published] if what == "flush"}
    files = {
        f"{partial}/{path.relative_to(tmp_path / 'checkpoints' / 'step-1')}" for path in tmp_path.rglob("step-1/**/*")
    }
    assert files | {partial} <= flushed
    assert asked[published + 1 :] == [
        ("flush", "."),
        ("flush", ".LATEST.partial"),
        ("rename", ".LATEST.partial", "LATEST"),
        ("flush", "."),
    ]


@pytest.mark.parametrize(
    ("failing", "noted", "code", "step", "kept", "reason"),
    [
        ((2, 4), (2, 4), 0, 9, ["step-6", "step-8", "step-9"], ""),
        (range(2, 10), (2, 4, 6), 74, 7, [], "3 saves in a row failed: checkpoint "),
        ((9,), (9,), 74, 9, ["step-4", "step-6", "step-8"], "step-9 was not saved"),
    ],
)
def test_training_goes_on_without_a_save_and_stops_when_they_keep_failing(
    solo, tmp_path, failing, noted, code, step, kept, reason
):
    """The third failure in a row ends the run when it is known; one of the last save is an exit code."""
    [result] = solo.run(checkpoint_cases.loop_with_failures, folder=str(tmp_path), failing=failing)
    ending, notes = result["ending"], result["notes"]
    assert (ending.exit_code, ending.progress.step, result["saved"]) == (code, step, kept)
    assert reason in ending.reason
    assert [f"step-{at} was not saved" in note for at, note in zip(noted, notes, strict=True)] == [True] * len(noted)


def test_a_rollback_without_a_checkpoint_is_an_incident_that_ends_the_run(solo, tmp_path):
    """The guard counts on the save of step 4, whose failure is not known yet."""
    further = ["faults=[{kind: nan_loss, step: 5}]", "guard.reactions=[rollback]"]
    [result] = solo.run(checkpoint_cases.loop_with_failures, folder=str(tmp_path), failing=(2, 4), further=further)
    [(verdict, reason)] = result["incidents"]
    assert verdict == "ABORT" and reason.endswith("; no checkpoint can be loaded: there is none")
    assert (result["ending"].exit_code, result["ending"].reason, result["saved"]) == (3, reason, ["step-5"])


def test_a_rollback_keeps_the_validation_loss_of_the_checkpoint_that_it_saves_again(solo, tmp_path):
    further = ["faults=[{kind: nan_loss, step: 6}]", "guard.reactions=[rollback]"]
    further += ["checkpoint.every_steps=4", "evaluate.every_steps=4"]
    [result] = solo.run(checkpoint_cases.loop_with_failures, folder=str(tmp_path), failing=(), further=further)
    assert [verdict for verdict, _ in result["incidents"]] == ["ROLLBACK"]
    assert result["losses"].keys() == {"step-4", "step-8", "step-9"} and None not in result["losses"].values()


def test_a_run_that_is_preempted_at_its_last_step_is_done(solo, tmp_path):
    further = ["run.steps=1", "schedule.warmup_steps=0", "run.max_minutes=1e-9", "evaluate.every_steps=1"]
    [result] = solo.run(checkpoint_cases.loop_with_failures, folder=str(tmp_path), failing=(), further=further)
    assert result["ending"].exit_code == 0 and result["losses"]["step-1"] > 0


@pytest.mark.parametrize("best", [slow(0), 1])
def test_an_evaluation_that_a_preemption_left_out_is_made_up(pair, tmp_path, best):
    """So that nothing tells the run from one that was not stopped, checkpoint.keep_best's choice included."""
    keep = Retention(1, best=best)
    [whole, _] = pair.run(checkpoint_cases.train_in_sessions, folder=f"{tmp_path}/1", sessions=1, keep=keep)
    [parted, _] = pair.run(checkpoint_cases.train_in_sessions, folder=f"{tmp_path}/4", sessions=4, keep=keep)
    assert (whole["codes"], parted["codes"]) == ([0], [75, 75, 75, 0])
    assert [step for step, _ in whole["eval"]] == [1, 2, 3, 4]
    assert (parted["step"], parted["eval"]) == (whole["step"], whole["eval"])
    assert parted["losses"]["step-4"] == whole["losses"]["step-4"]
    if best:
        assert min(loss for _, loss in whole["eval"]) in parted["losses"].values()


def test_a_job_on_a_full_disk_goes_on_to_its_end_and_says_what_is_missing(small_disk, tmp_path):
    """The disk has room for one checkpoint: those of steps 4 and 6 fail."""
    output = finish(command("python", tmp_path, "full", f"run.dir={small_disk}"), exit_code=74)
    reason = f"checkpoint {small_disk}/full/checkpoints/step-6 was not saved: rank 0 cannot write "
    assert output.splitlines()[-1].startswith(f"verdict  failed since step 6: {reason}")
    assert "No space left on device" in output.splitlines()[-1]
    assert "Traceback" not in output
    assert newest(small_disk / "full" / "checkpoints").name == "step-2"
    recorded = list(read_events(small_disk / "full" / "events.jsonl"))
    assert [event["step"] for event in recorded if event["event"] == "checkpoint"] == [2]
    assert sum(event["event"] == "note" for event in recorded) == 2
    assert recorded[-1]["exit_code"] == 74


def check(results, folder):
    """Both ranks failed alike, kept step 1, and saved again when they could."""
    for result in results:
        assert result["error"] == results[0]["error"]
        assert result["error"].startswith(f"checkpoint {folder}/")
        assert "\n" not in result["error"]
        assert result["names"] == ["LATEST", "RUN", "step-1"]
        assert result["failures"] == (1, 0)
        assert result["found"] == "step-1"
        assert result["step"] == 3 and result["same"]


def test_a_save_is_read_back(pair, tmp_path):
    for result in pair.run(checkpoint_cases.read_back, folder=str(tmp_path), corrupt=False):
        assert (result["verified"], result["found"], result["failures"]) == ([True, True], "step-2", 0)


def test_a_save_that_does_not_read_back_is_set_aside(pair, tmp_path):
    for result in pair.run(checkpoint_cases.read_back, folder=str(tmp_path), corrupt=True):
        shard = "deepspeed/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
        assert f"step-2 differs from what was written and is set aside: {shard} has SHA-256 " in result["last"]
        assert (result["verified"], result["found"]) == ([True, False], "step-1")
        assert (result["any"], result["failures"]) == (True, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"LATEST", "RUN", "step-1", "step-2.damaged"}
    assert (tmp_path / "LATEST").read_text() == "step-1\n"


def test_the_network_of_saves_is_connected_before_the_data_are_prepared(solo):
    """NCCL may reach other machines where gloo does not, and the first save may be the run's last act."""
    (line,) = solo.run(checkpoint_cases.opened_without_network)
    assert "rank 0 on " in line and "by gloo, which saves need" in line and "set GLOO_SOCKET_IFNAME" in line
    assert "\n" not in line and "nosuch0" in line
