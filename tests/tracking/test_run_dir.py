"""A run folder is made, renamed and filled without half-writing anything; environment.json holds no secret."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from config.cli import REPOSITORY
from config.files import write_atomically
from config.version import VERSION
from tests.support.refusals import refused
from tracking.environment import environment, safe_variables
from tracking.run_dir import RunDir


def test_a_fresh_run_renames_the_earlier_ones(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for content in ("a", "b", "c"):
        run_dir = RunDir.create(root, "demo", fresh=True)
        assert not run_dir.events.exists()
        run_dir.events.write_text(content)
    folders = {path.name: (path / "events.jsonl").read_text() for path in root.iterdir()}
    assert folders == {"demo.1": "a", "demo.2": "b", "demo": "c"}


def test_a_resumed_run_uses_the_folder_as_it_is(tmp_path: Path) -> None:
    RunDir.create(tmp_path, "demo", fresh=False).events.write_text("kept")
    again = RunDir.create(tmp_path, "demo", fresh=False)
    assert again.events.read_text() == "kept" and again.checkpoints.is_dir() and again.name == "demo"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/abs", "a/"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    assert "run.name" in refused(RunDir.create, tmp_path, name, fresh=False)


def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root, name, key in (
        (tmp_path / "file", "demo", "run.dir"),
        (tmp_path, "file", "run.name"),
        (tmp_path / "absent" / "runs", "demo", "does not exist"),
        (tmp_path / "file" / "runs", "demo", "run.dir"),
    ):
        assert key in refused(RunDir.create, root, name, fresh=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_parent_is_a_user_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert "may write" in refused(RunDir.create, tmp_path / "runs", "demo", fresh=False)
    finally:
        tmp_path.chmod(0o700)


def test_a_file_system_that_refuses_is_a_user_error() -> None:
    assert "run.dir" in refused(RunDir.create, Path("/proc/self"), "demo", fresh=False)


def test_inputs_are_written_and_the_earlier_ones_kept(run_dir: RunDir) -> None:
    first = {"optimizer": {"betas": (0.9, 0.95), "eps": 1e-8}}
    for start, config in enumerate((first, first, {"optimizer": {"eps": 1e-6}}), start=1):
        run_dir.write_inputs(config, {"bf16": {"enabled": True}}, {"start": start})
    names = {path.name for path in run_dir.path.iterdir() if path.is_file()}
    assert names == {
        *("config.yaml", "config.1.yaml", "ds_config.json"),
        *("environment.json", "environment.1.json", "environment.2.json"),
    }
    kept = yaml.safe_load((run_dir.path / "config.1.yaml").read_text())
    assert kept == {"optimizer": {"betas": [0.9, 0.95], "eps": 1e-8}}
    assert yaml.safe_load(run_dir.config.read_text()) == {"optimizer": {"eps": 1e-6}}
    assert json.loads((run_dir.path / "environment.2.json").read_text()) == {"start": 2}


def test_a_failed_write_leaves_the_old_file_and_no_remains(tmp_path: Path) -> None:
    target = tmp_path / "config.yaml"
    write_atomically(target, b"old")
    with pytest.raises(TypeError):
        write_atomically(target, "not bytes")  # type: ignore[arg-type]
    assert target.read_bytes() == b"old" and list(tmp_path.iterdir()) == [target]


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    target = tmp_path / "big.json"
    code = (
        "import itertools, sys; from pathlib import Path; from tracking.run_dir import write_atomically\n"
        "for n in itertools.count(): write_atomically(Path(sys.argv[1]), bytes([65 + n % 26]) * 2_000_000)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(target)])
    try:
        while not target.exists():
            time.sleep(0.01)
        for _ in range(30):
            content = target.read_bytes()
            assert len(content) == 2_000_000 and content == content[:1] * len(content)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert len(target.read_bytes()) == 2_000_000


_SECRET = "hunter2hunter2"


def test_it_tells_versions_machine_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "demo.yaml", "run.steps=5"])
    facts = environment({"world_size": 2, "devices": ["cpu", "cpu"]})
    assert json.loads(json.dumps(facts)) == facts
    assert facts["versions"]["mantissa"] == VERSION
    assert facts["versions"]["torch"] == version("torch") and facts["versions"]["deepspeed"] == version("deepspeed")
    assert facts["cpu"]["usable_cores"] >= 1 and facts["memory_bytes"] > 2**28
    assert facts["command_line"] == ["train.py", "--config", "demo.yaml", "run.steps=5"]
    assert (facts["world_size"], facts["devices"]) == (2, ["cpu", "cpu"])


def test_the_commit_is_that_of_the_code_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, check=False)
    git = environment({})["git"]
    assert (git["commit"] if git else "") == head.stdout.strip()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment({})["git"] is None


def test_only_named_variables_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HOME_MADE", "SLURM_JWT"):
        monkeypatch.setenv(name, _SECRET)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    facts = environment({})
    assert facts["variables"]["OMP_NUM_THREADS"] == "3" and facts["variables"]["NCCL_DEBUG"] == "INFO"
    assert _SECRET not in json.dumps(facts)


def test_a_login_in_an_allowed_variable_is_hidden() -> None:
    assert safe_variables({"NCCL_NET": f"tcp://me:{_SECRET}@host:1"}) == {"NCCL_NET": "tcp://***@host:1"}
