"""A sweep as a job array under a real Slurm: every trial once, one that is told to stop is requeued and goes on."""

import json
import sys
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from tests.launch.sweep.test_sweep import FAST, RATE, SLOW, record, results, starts, sweep_file
from tests.support.machines.slurm_cluster import SKIP, slurm_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(SKIP), reason=SKIP)]


def status(folder: Path, index: int) -> str:
    """The recorded status of a trial."""
    try:
        return record(folder, index)["status"]
    except FileNotFoundError:
        return "waiting"


def test_an_array_runs_every_trial_once_and_goes_on_with_what_it_was_told_to_stop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    slow = SLOW | {"optimizer.eps": 1.0}
    path = sweep_file(folder, trials=[slow, FAST, {RATE: 1e-4}], grid=None, slots=2)
    sweep = [sys.executable, "-m", "launch.sweep"]
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:

        def ask(*words: object) -> str:
            return cluster.ask("env", f"PYTHONPATH={REPOSITORY}", *sweep, *map(str, words), check=True)

        output = ask(path, "--slurm", "--", "--parsable", f"--output={cluster.folder}/%a.out")
        number = output.split()[0]
        logs = lambda: "".join(log.read_text() for log in cluster.folder.glob("[012].out"))  # noqa: E731
        cluster.until(lambda: len(starts(folder, 0)) == 1, "trial 0 runs", why=logs)
        cluster.until(lambda: status(folder, 2) == "done", "trial 2 is done", why=logs)
        assert status(folder, 0) == "running"
        cluster.ask("scancel", "--signal=USR1", "--batch", f"{number}_0", check=True)
        cluster.until(lambda: status(folder, 0) == "stopped", "trial 0 is stopped", why=logs)

        def over() -> bool:
            if status(folder, 0) == "stopped":  # Slurm holds a requeued job back for two minutes
                cluster.ask("scontrol", "update", f"JobId={number}_0", "StartTime=now")
            return status(folder, 0) == "done"

        cluster.until(over, "trial 0 is done", seconds=120, why=logs)
        assert [len(starts(folder, index)) for index in range(3)] == [2, 1, 1], logs()
        assert "all trials have ended" in cluster.ask("bash", "-c", f"{' '.join(sweep)} {path} --slurm 2>&1")
    assert [trial["status"] for trial in results(folder)["trials"]] == ["done"] * 3
    assert json.loads((folder / "runs/it/sweep.json").read_text())["slots"] == 2
