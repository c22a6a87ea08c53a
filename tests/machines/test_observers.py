"""A thousand steps under observers that hang, lie, stop and die are those of a run that nobody observes."""

import os
import resource
import signal
import statistics
import threading
from pathlib import Path

import pytest

from config.machine.processes import free_port
from tests.support.jobs.forked import Job
from tests.support.jobs.launches import children, command, events, start, trace, wait_until
from tests.support.models import bad_observers
from tests.support.models.bad_observers import Seen
from tests.support.servers.store_server import CREDENTIALS, s3_server
from tracking.compare.surviving import read_events

STEPS = 1000
MOST_DESCRIPTORS = 128


def job_of(folder: Path, name: str, *overrides: str) -> list[str]:
    common = [f"run.steps={STEPS}", "checkpoint.every_steps=100", "evaluate.every_steps=250", "generate.tokens=0"]
    common += ["data.sequence_length=16", "tracking.log_every_steps=100"]
    return command("python", folder, name, *common, *overrides)


@pytest.mark.machines
def test_a_thousand_steps_under_bad_observers_are_those_of_an_unobserved_run(tmp_path, monkeypatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    plain = start(job_of(tmp_path, "alone"), ranks=2)
    output, _ = plain.communicate(timeout=900)
    assert plain.returncode == 0, output

    seen, port = Seen(), free_port()
    with s3_server() as store, bad_observers.bad_collector(seen) as collector:
        store.direct.create_bucket(Bucket="jobs")
        client = "config_kwargs: {read_timeout: 2, connect_timeout: 2, retries: {max_attempts: 0}}"
        given = [
            *(f"tracking.prometheus_port={port}", f"tracking.otlp_endpoint={collector}", "tracking.wandb=offline"),
            *("checkpoint.dir=s3://jobs/mine", "checkpoint.max_failures=100"),
            f"checkpoint.storage_options={{endpoint_url: '{store.proxy.url}', {client}}}",
        ]
        job = start(job_of(tmp_path, "observed", *given), ranks=2)
        assert isinstance(job, Job)
        path = tmp_path / "runs/observed/events.jsonl"
        with bad_observers.metrics_clients(port, seen):
            watch = Watch(job, path)
            wait_for_step(job, path, 50)
            for pid in job.pids:  # what clients hold open would take all of these
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (MOST_DESCRIPTORS, MOST_DESCRIPTORS))
            (worker,) = [pid for pid in children(job.pid) if b"tracking.wandb.worker" in command_line(pid)]
            os.kill(worker, signal.SIGSTOP)
            for kind in ("hang", 500, "cut before", "done, then cut", 503, "cut inside"):
                store.proxy.fail("PUT|GET", kind)  # fewer than the tries of one operation
            wait_for_step(job, path, 600)
            os.kill(worker, signal.SIGKILL)
            store.proxy.fail("PUT .*step-7.*state.json", 403, times=1000)  # the save of step 700 fails
            output, _ = job.communicate(timeout=900)
            watch.close()
    assert job.exit_codes == [0, 0], output
    assert trace(tmp_path, "observed") == trace(tmp_path, "alone")
    assert [event["step"] for event in events(tmp_path, "observed", "step")] == list(range(1, STEPS + 1))
    notes = [event["text"] for event in events(tmp_path, "observed", "note")]
    print(f"\nobservers: {seen}\nnotes: {notes}\n{watch.report()}")
    for name in ("alone", "observed"):
        seconds = [event["step_seconds"] for event in events(tmp_path, name, "step")][50:]
        print(f"median step of the run {name}: {1000 * statistics.median(seconds):.1f} ms")
    assert seen.held > 300 and seen.scrapes > 5 and len(seen.collected) == len(bad_observers.ANSWERS)
    assert sum("wandb" in note for note in notes) == 1 and sum("spans are lost" in note for note in notes) == 1
    assert sum("step-700 was not saved" in note for note in notes) == 1 and len(notes) == 3
    for name, (early, late) in watch.growth().items():
        assert late <= early + 3, f"{name}: {early} early in the run, {late} late\n{watch.report()}"


def wait_for_step(job: Job, path: Path, step: int) -> None:
    wait_until(lambda: job.poll() is not None or newest_step(path) >= step, seconds=600)
    assert job.poll() is None, job.communicate(timeout=1)[0]


def newest_step(path: Path) -> int:
    if not path.exists():
        return 0
    return max((event["step"] for event in read_events(path) if event["event"] == "step"), default=0)


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


class Watch:
    """Counts the file descriptors and threads of every rank while the job runs."""

    def __init__(self, job: Job, path: Path) -> None:
        self._job, self._path = job, path
        self._samples: list[tuple[int, dict[str, int]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def growth(self) -> dict[str, tuple[int, int]]:
        """The maximum of each figure in steps 100 to 400, and in the last 300."""
        early = [sample for step, sample in self._samples if 100 <= step < 400]
        late = [sample for step, sample in self._samples if STEPS - 300 <= step < STEPS]
        return {name: (max(s[name] for s in early), max(s[name] for s in late)) for name in early[0]}

    def report(self) -> str:
        grown = (f"{name}: {early} early, {late} late" for name, (early, late) in self.growth().items())
        return f"{len(self._samples)} samples; {'; '.join(grown)}"

    def _run(self) -> None:
        while not self._over.wait(0.3) and self._job.poll() is None:
            step = newest_step(self._path)
            try:
                sample = {
                    f"{what} of rank {rank}": len(list(Path(f"/proc/{pid}/{folder}").iterdir()))
                    for rank, pid in enumerate(self._job.pids)
                    for what, folder in (("descriptors", "fd"), ("threads", "task"))
                }
            except OSError:
                return
            self._samples.append((step, sample))
