"""Checkpoints that are chosen or passed over, the messages about it, and the runs that may resume from them."""

import copyreg
import json
import pickle
import pickletools
import shutil

import pytest
from deepspeed.runtime.zero.config import ZeroStageEnum

from config.json_text import sealed
from tests.training.checkpoint import checkpoint_cases
from tests.training.checkpoint.checkpoint_cases import flip
from training.checkpoint import commit
from training.checkpoint.choice import candidates
from training.checkpoint.contents import (
    CONFIGS,
    REFERENCE,
    attention_difference,
    identity_difference,
    layout_difference,
)
from training.checkpoint.manifest import MANIFEST, read_manifest
from training.checkpoint.retention import Retention


@pytest.fixture(scope="module")
def original(pair, tmp_path_factory):
    """Checkpoints of steps 1, 2 and 3 of a ZeRO-2 BF16 run on two ranks."""
    folder = tmp_path_factory.mktemp("original") / "checkpoints"
    pair.run(checkpoint_cases.save_steps, folder=str(folder), stage=2, compute="bf16", steps=3)
    return folder


@pytest.fixture
def saved(original, tmp_path):
    """A copy of them to break."""
    return shutil.copytree(original, tmp_path / "checkpoints")


def found(pair, folder, resume="auto", **arguments):
    """The choice of both ranks, and the lines for the record."""
    here, there = pair.run(checkpoint_cases.find, folder=str(folder), resume=resume, **arguments)
    assert here == there
    return here


def test_what_resume_asks_for_is_what_is_loaded(pair, saved, tmp_path):
    leftover = saved / ".step-4.partial"
    leftover.mkdir()
    for resume, expected in [("auto", "step-3"), ("never", ""), (str(saved), "step-3"), (f"{saved}/step-1", "step-1")]:
        assert found(pair, saved, resume) == (expected, [])
    assert not leftover.exists()
    assert found(pair, tmp_path / "empty") == ("", [])
    text, _ = found(pair, saved, f"{tmp_path}/empty")
    assert text.startswith(f"error: run.resume = {tmp_path}/empty: no complete checkpoint there; give ")
    for resume in ("x" * 300, "~nobody-of-this-name/runs"):
        text, _ = found(pair, saved, resume)
        assert text.startswith(f"error: run.resume = {resume}: cannot be read (")


def test_a_damaged_checkpoint_is_passed_over_by_name_and_set_aside(pair, saved):
    flip(saved / "step-3" / "deepspeed" / "mp_rank_00_model_states.pt")
    (saved / "step-2" / "rng-rank-1.pt").unlink()
    name, lines = found(pair, saved)
    assert name == "step-1"
    assert lines[0].startswith(
        f"passed over checkpoint {saved}/step-3: deepspeed/mp_rank_00_model_states.pt has SHA-256 "
    )
    assert lines[1] == f"passed over checkpoint {saved}/step-2: rng-rank-1.pt is missing"
    names = {path.name for path in saved.iterdir()}
    assert names == {"LATEST", "RUN", "step-1", "step-2.damaged", "step-3.damaged"}
    name, lines = found(pair, saved)
    assert name == "step-1" and lines[0].endswith("LATEST names step-3, which is not there") and len(lines) == 1


def test_where_nothing_can_be_used_the_run_does_not_start_anew(pair, saved):
    for step in (1, 2, 3):
        flip(saved / f"step-{step}" / "state.json")
    for _ in range(2):  # a scheduler starts it again
        text, _ = found(pair, saved)
        assert text.startswith(f"error: {saved}/step-3: state.json has SHA-256 ")
        assert "2 older ones cannot be used either" in text


@pytest.fixture(scope="module")
def in_store(pair, tmp_path_factory):
    """A run folder with step 3 of a run, and its store with steps 2 and 3: one is left while the other is replaced."""
    folder = tmp_path_factory.mktemp("stored")
    given = {"folder": str(folder / "checkpoints"), "store": str(folder / "store"), "stage": 2, "compute": "bf16"}
    pair.run(checkpoint_cases.save_steps, steps=3, keep=1, **given)
    assert {path.parent.name for path in folder.glob(f"store/*/{MANIFEST}")} == {"step-2", "step-3"}
    return folder


@pytest.fixture
def stored(in_store, tmp_path):
    """A copy of both to break."""
    return shutil.copytree(in_store, tmp_path / "copy")


def test_a_store_that_denies_a_download_or_has_only_damage_does_not_start_the_run_anew(pair, stored):
    local, store = stored / "lost", stored / "store"
    text, _ = found(pair, local, store=str(store), denied=True)
    assert text.startswith(f"error: checkpoint.dir = file://{store}/step-3 cannot be fetched to {local}: ")
    assert text.endswith("access denied") and list(local.iterdir()) == []
    flip(store / "step-3" / "state.json")
    name, lines = found(pair, stored / "other", store=str(store))
    assert name == "step-2" and lines[0].startswith(f"passed over checkpoint file://{store}/step-3: ")
    (store / "step-2" / MANIFEST).write_text("{}")
    text, _ = found(pair, local, store=str(store))
    assert text.startswith(f"error: file://{store}/step-") and "(1 older ones cannot be used either)" in text


def test_a_local_copy_that_rotted_is_fetched_again(pair, stored):
    local = stored / "checkpoints"
    flip(local / "step-3" / "state.json")
    name, lines = found(pair, local, store=str(stored / "store"))
    assert name == "step-3" and lines[0].endswith("; checkpoint.dir may have another copy")
    assert found(pair, local) == ("step-3", [])


def test_what_the_store_lacks_stays_in_the_run_folder_by_the_same_rules(pair, tmp_path):
    """It was saved before there was a store, or its upload failed."""
    left, _ = pair.run(checkpoint_cases.save_to_a_store_later, folder=f"{tmp_path}/here", store=f"{tmp_path}/store")
    assert left[2:4] == [[2, 4, 6], [2, 4, 6, 8]]
    assert left[4:] == [[2, 4, 6, 8, 9], [2, 4, 6, 8, 10], [2, 4, 6, 10, 11], [2, 4, 6, 10, 12]]
    assert sorted(int(path.parent.name[5:]) for path in tmp_path.glob(f"store/*/{MANIFEST}")) == [8, 11, 12]


def test_a_damaged_manifest_in_the_store_fails_no_save_that_looks_for_the_best(pair, stored):
    (stored / "store" / "step-0").mkdir()
    (stored / "store" / "step-0" / MANIFEST).write_text("{}")
    given = {"folder": str(stored / "checkpoints"), "store": str(stored / "store"), "stage": 2, "compute": "bf16"}
    pair.run(checkpoint_cases.save_steps, steps=1, best=1, **given)
    assert (stored / "store" / "LATEST").read_text() == "step-1\n"


def test_a_given_checkpoint_has_no_substitute(pair, saved):
    flip(saved / "step-3" / "state.json")
    text, _ = found(pair, saved, f"{saved}/step-3")
    assert text.startswith(f"error: {saved}/step-3: state.json has SHA-256 ")
    assert (saved / "step-3").is_dir()  # the user's own choice is not renamed
    assert found(pair, saved, str(saved))[0] == "step-2"


def test_a_checkpoint_of_another_run_is_refused_by_name(pair, saved):
    text, _ = found(pair, saved, identity={"stage": 3})
    assert text.startswith(
        f"error: {saved}/step-3: stage is 2 there and 3 in this run; use the same stage, or start anew"
    )
    assert len({path.name for path in saved.glob("step-?")}) == 3


def test_a_checkpoint_of_another_version_is_passed_over_and_left_as_it_is(pair, saved):
    state = saved / "step-3" / "state.json"
    content = json.loads(state.read_text())
    content["identity"]["stage"] = 1
    state.write_text(json.dumps(content))
    reseal(saved / "step-3", "state.json")
    name, lines = found(pair, saved, identity={"stage": 2})
    assert name == "step-2" and "step-3: stage is 1 there and 2 in this run" in lines[0]
    assert (saved / "step-3").is_dir()


def test_a_checkpoint_of_another_model_names_the_parameter(pair, saved):
    for text in pair.run(checkpoint_cases.load_into_another_model, path=str(saved / "step-3")):
        name = "model.layers.0.mlp.gate_proj.weight"
        assert text.startswith(f"{saved}/step-3: {name} has shape [48, 32] there and [64, 32] in this run")


def reseal(path, name=None, without=(), **fields):
    """Write the manifest again: for one changed file, without some fields, with others."""
    from config.files import file_sha256

    manifest = read_manifest(path)
    if name is not None:
        manifest["files"][name] |= {"sha256": file_sha256(path / name), "bytes": (path / name).stat().st_size}
    manifest = {key: value for key, value in {**manifest, **fields}.items() if key not in without}
    (path / MANIFEST).write_text(sealed(manifest))


NO_NAMES = (b"s\xf4ep-3\n", b"", bytes(4096), b"../step-3", b"/etc/passwd\n", b".step-9.partial\n")
LATEST = {
    **dict.fromkeys(NO_NAMES, "no checkpoint"),
    b"step-9\n": "step-9, which is not there",
    b"step-1\n": "step-1, an older one (run.resume=",
}


@pytest.mark.parametrize("content", LATEST)
def test_latest_is_a_hint_and_one_line_says_where_it_is_not_followed(pair, saved, content):
    (saved / "LATEST").write_bytes(content)
    name, lines = found(pair, saved)
    assert name == "step-3" and len(lines) == 1
    assert lines[0].startswith(f"took {saved}/step-3, the newest complete checkpoint: LATEST names {LATEST[content]}")


def test_a_run_that_went_back_stays_there_before_and_after_its_next_save(pair, saved):
    """Recorded at once in RUN, and sealed into what is saved later: neither LATEST nor RUN need survive."""
    assert found(pair, saved, f"{saved}/step-1")[0] == "step-1"
    name, lines = found(pair, saved)
    assert name == "step-1" and lines[0].endswith("step-3, step-2: from before the run went back")
    pair.run(checkpoint_cases.go_back_and_save, folder=str(saved), to="step-1")
    assert read_manifest(saved / "step-2")["went_back"] == 1
    for name in ("LATEST", "RUN"):
        (saved / name).unlink()
        assert candidates(saved)[0].name == "step-2"
    name, lines = found(pair, saved)
    assert name == "step-2" and lines[0].endswith("step-3: from before the run went back")


@pytest.mark.parametrize("last", ["step-2", "step-3"])
def test_a_run_that_went_back_before_that_was_sealed_is_still_followed(pair, saved, last):
    """Without the field LATEST counts, where it names what was written last."""
    for step, second in ((1, 1), (2, 9 if last == "step-2" else 2), (3, 3)):
        written = f"2026-01-01T00:00:0{second}.000+00:00"
        reseal(saved / f"step-{step}", without=("run", "went_back"), written=written)
    (saved / "RUN").unlink()
    (saved / "LATEST").write_text("step-2\n")
    name, lines = found(pair, saved)
    assert name == last and len(lines) == 1
    assert ("step-3: from before the run went back" in lines[0]) is (last == "step-2")


def test_a_checkpoint_that_the_run_abandoned_takes_no_place_of_its_own(pair, saved):
    assert found(pair, saved, f"{saved}/step-1")[0] == "step-1"
    reseal(saved / "step-3", went_back=1)
    for keep in (Retention(2), Retention(2, every=2)):
        assert keep.to_delete(saved, saved / "step-3") == [saved / "step-2"]


def test_a_run_that_goes_back_to_a_copy_of_its_own_checkpoint_abandons_only_what_came_after(pair, saved, tmp_path):
    copy = shutil.copytree(saved / "step-1", tmp_path / "elsewhere" / "step-1")
    for _ in range(2):  # a scheduler repeats the command
        assert found(pair, saved, str(copy))[0] == "step-1"
    assert found(pair, saved)[0] == "step-1"
    reseal(saved / "step-3", went_back=1)
    assert Retention(1, every=1).to_delete(saved, saved / "step-3") == [saved / "step-2"]


def test_a_checkpoint_under_another_name_is_passed_over(pair, saved):
    (saved / "step-3").rename(saved / "step-40")
    name, lines = found(pair, saved)
    assert name == "step-2"
    assert lines[0].startswith(f"passed over checkpoint {saved}/step-40: manifest.json is of step 3; rename the folder")
    (saved / "step-40").rename(saved / "step-3")
    assert found(pair, saved)[0] == "step-3"


def test_a_checkpoint_of_another_run_with_the_same_identity_is_passed_over_unless_it_is_asked_for(
    pair, saved, tmp_path
):
    other = tmp_path / "other"
    pair.run(checkpoint_cases.save_steps, folder=str(other), stage=2, compute="bf16", steps=4)
    shutil.copytree(other / "step-4", saved / "step-4")
    name, lines = found(pair, saved)
    assert name == "step-3" and len(lines) == 1
    assert f"{saved}/step-4: manifest.json is of another run, tried " in lines[0] and "run.resume=" in lines[0]
    assert found(pair, saved, f"{saved}/step-4")[0] == "step-4"
    assert found(pair, saved, f"{other}/step-4")[0] == "step-4"
    assert found(pair, tmp_path / "branch", str(other))[0] == "step-4"


def test_a_checkpoint_without_a_run_is_of_any_run(pair, saved):
    reseal(saved / "step-3", without=("run", "went_back"))
    assert found(pair, saved) == ("step-3", [])


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b"{" + b'"a":[' * 900 + b"]" * 900 + b"}"])
def test_a_deeply_nested_manifest_is_damage(pair, saved, content):
    (saved / "step-3" / MANIFEST).write_bytes(content)
    name, lines = found(pair, saved)
    assert name == "step-2" and lines[0].endswith("step-3: manifest.json is not a complete manifest")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"files": {"../LATEST": {"sha256": "0" * 64, "bytes": 7, "rank": 0}}}, "an entry '../LATEST' that is not a"),
        ({"files": {"state.json": {"bytes": 7}}}, "an entry 'state.json' that is not a"),
        ({"files": {}}, "does not list state.json"),
        ({"step": "3"}, "has no step as docs/checkpoints.md describes it"),
    ],
)
def test_a_sealed_manifest_that_is_none_of_ours_is_damage(pair, saved, fields, reason):
    reseal(saved / "step-3", **fields)
    name, lines = found(pair, saved)
    assert name == "step-2" and reason in lines[0]


@pytest.mark.parametrize("whole", [True, False], ids=["new one sealed", "new one not sealed"])
def test_a_kill_between_the_two_renames_of_a_save_loses_neither(saved, whole):
    (saved / "step-3").rename(saved / ".step-3.replaced")
    shutil.copytree(saved / "step-2", saved / ".step-3.partial")
    if not whole:
        (saved / ".step-3.partial" / MANIFEST).unlink()
    commit.recover(saved)
    assert {path.name for path in saved.iterdir()} == {"LATEST", "RUN", "step-1", "step-2", "step-3"}
    assert read_manifest(saved / "step-3")["step"] == (2 if whole else 3)


def test_leftovers_of_a_kill_are_cleaned_away(saved):
    for name in (".step-4.partial", ".step-1.dropped", ".step-3.replaced"):
        (saved / name).mkdir()
        (saved / name / "file").write_text("x")
    for name in (".LATEST.partial", ".RUN.123.partial"):
        (saved / name).write_text("ste")
    commit.recover(saved)
    assert {path.name for path in saved.iterdir()} == {"LATEST", "RUN", "step-1", "step-2", "step-3"}


def test_the_newest_are_kept_and_the_rest_dropped(saved):
    assert Retention(2).to_delete(saved, saved / "step-3") == [saved / "step-1"]
    # went back behind step 3, which is of another past
    assert Retention(1).to_delete(saved, saved / "step-2") == [saved / "step-1"]
    commit.drop(saved / "step-1")
    assert {path.name for path in saved.iterdir()} == {"LATEST", "RUN", "step-2", "step-3"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("stage", "compute"), [(3, "bf16"), (1, "fp16"), (2, "bf16")])
def test_the_clipping_of_the_config_holds_after_a_load(pair, tmp_path, stage, compute):
    """DeepSpeed takes the saved run's at ZeRO-1 and 2: gradients of norm 1 would not be clipped to 0.01."""
    for rows in pair.run(checkpoint_cases.clipping_after_load, stage=stage, compute=compute, folder=str(tmp_path)):
        for row in rows:
            assert row["applied"]
            assert row["grad_norm"] > 0.1
            assert max(row["update_error"].values()) < 1e-3


def test_another_attention_may_resume_and_is_named_where_it_is_known():
    saved, now = {"model.attention": "sdpa"}, {"model.attention": "eager"}
    assert identity_difference(saved, now) is None and layout_difference(saved, now) is None
    assert attention_difference(saved, now) == "model.attention sdpa -> eager, which rounds differently"
    assert attention_difference(saved, saved) is None
    assert attention_difference({}, now) is None  # a checkpoint of an earlier version


def test_another_number_of_ranks_to_a_sequence_may_resume_and_is_named():
    one, two = {"parallel.sequence": 1}, {"parallel.sequence": 2}
    assert identity_difference(one, two) is None
    assert layout_difference(one, two) == "parallel.sequence 1 -> 2"
    assert layout_difference({}, one) is None  # a checkpoint of an earlier version


def test_a_base_whose_commit_was_never_recorded_resumes():
    now = {"the base model": "sha256:ab12"}
    assert identity_difference({"the base model": "me/base@None"}, now) is None  # a checkpoint of an earlier version
    assert "the base model is sha256:cd34 there" in (identity_difference({"the base model": "sha256:cd34"}, now) or "")


@pytest.mark.parametrize("key", [REFERENCE, CONFIGS])
def test_what_one_of_two_runs_lacks_is_not_compared(key):
    """Neither with a checkpoint of an earlier version, nor where grpo.beta is 0 in one of them."""
    now, none = {key: "sha256:ab12"}, {key: None}
    for saved, current in ((now, now), (now, none), (none, now), ({"the base model": None}, now)):
        assert identity_difference(saved, current) is None
    assert f"{key} is sha256:cd34 there" in (identity_difference({key: "sha256:cd34"}, now) or "")


def test_a_run_that_trained_on_all_of_its_text_is_told_how_to_resume():
    saved, now = {"data fingerprint": "ab12"}, {"data fingerprint": "ab12+tail"}
    assert "set data.hold_out=documents" in (identity_difference(saved, now) or "")
    other = identity_difference(now, {"data fingerprint": "cd34+tail"}) or ""
    assert "data.hold_out" not in other and "use the same data.* keys and files, as in the run's config.yaml" in other


def test_rows_that_were_grouped_across_epochs_are_not_resumed():
    now = {"grouping of rows by length": "within an epoch"}
    refused = identity_difference({}, now)  # a checkpoint of an earlier version
    assert refused is not None and refused.startswith("grouping of rows by length is across epochs there and within an")
    assert identity_difference(now, now) is None and identity_difference({}, {"task": "pretrain"}) is None


def test_a_zero_stage_is_saved_by_its_value():
    """Debian 12's Python 3.11.2 would save a call of getattr, and no checkpoint could be read again."""
    named = [argument for _, argument, _ in pickletools.genops(pickle.dumps(ZeroStageEnum.weights, 2))]
    assert not any("getattr" in str(argument) for argument in named)
    assert pickle.loads(pickle.dumps(ZeroStageEnum.weights)) is ZeroStageEnum.weights
    assert ZeroStageEnum in copyreg.dispatch_table  # the fix, on a Python that needs none
