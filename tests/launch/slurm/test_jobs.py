"""Real jobs under a real Slurm: two machines, slurmctld, two slurmd, munge."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs import launches
from tests.support.machines.slurm_cluster import SKIP, Cluster, slurm_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(SKIP), reason=SKIP)]
SBATCH = "launch/slurm/train.sbatch"
TWO_NODES = ["--nodes=2", "--ntasks-per-node=1"]
LONG = ["run.steps=300", "checkpoint.every_steps=40", "tracking.log_every_steps=50", "evaluate.every_steps=300"]


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """The folder of all runs and their corpus."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def unbroken(work) -> list[tuple]:
    """The steps of the long job, by torchrun on one machine, never stopped."""
    launches.finish(launches.command("torchrun", work, "unbroken", *LONG))
    return steps(work, "unbroken")


def arguments(work: Path, name: str, *overrides: str) -> list[str]:
    return launches.command("python", work, name, *overrides)[2:]


def steps(work: Path, name: str) -> list[tuple]:
    """Step, loss bit for bit, gradient norm and samples of every step, the later line of a repeated one."""
    found = {event["step"]: event for event in launches.events(work, name, "step")}
    return [(step, found[step]["loss"], found[step]["grad_norm"], found[step]["sample_ids_sha256"]) for step in found]


def reached(work: Path, name: str, step: int) -> bool:
    path = work / "runs" / name / "events.jsonl"
    return path.exists() and any(event["step"] >= step for event in launches.events(work, name, "step"))


def ended(cluster: Cluster, number: int, state: str, code: str, restarts: str) -> str:
    """The log of a job, once it has ended so."""
    job, log = cluster.ended(number), cluster.log(number)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == (state, code, restarts), log
    return log


def sessions(work: Path, name: str) -> list[dict]:
    return launches.events(work, name, "run_start")


@pytest.mark.parametrize("options", [TWO_NODES, ["--nodes=1", "--ntasks-per-node=2"]], ids=["two nodes", "two tasks"])
def test_a_job_has_the_losses_of_one_host(cluster, work, options):
    if not (work / "runs" / "alone").exists():
        launches.finish(launches.command("torchrun", work, "alone"))
    name = f"slurm-{options[0][-1]}"
    number = cluster.submit(*options, SBATCH, *arguments(work, name))
    log = ended(cluster, number, "COMPLETED", "0:0", "0")
    assert len(steps(work, name)) == 6 and steps(work, name) == steps(work, "alone")
    assert f"start 1, {options[0][-1]} node(s)" in log and "slurm: done (exit code 0)" in log
    assert (cluster.logs_of(number) / "task-1.log").is_file()  # a healthy rank writes nothing into it
    (again,) = [shlex.split(line)[1:] for line in log.splitlines() if line.startswith("resume ")]
    assert again[:1] == ["sbatch"] and {*options, SBATCH} < set(again)
    assert cluster.ended(cluster.submit(*again[1:]))["JobState"] == "COMPLETED"
    assert sessions(work, name)[-1]["step"] == 6


def test_a_torchrun_on_each_node(cluster, work):
    command = launches.command("torchrun", work, "four-alone")
    command[command.index("--nproc_per_node") + 1] = "4"
    launches.finish(command)
    job = cluster.ended(cluster.submit(*TWO_NODES, "--gpus-per-node=2", SBATCH, *arguments(work, "four")))
    log = cluster.log(int(job["JobId"]))
    assert job["JobState"] == "COMPLETED", log
    assert steps(work, "four") == steps(work, "four-alone") and "ZeRO-2, 4 processes" in log


def warned(cluster: Cluster, number: int) -> None:
    """Send the signal of --signal=B:USR1@300, which Slurm sends 300 s before the limit."""
    cluster.ask("scancel", "--batch", "--signal=USR1", str(number), check=True)


def requeued(cluster: Cluster, number: int) -> None:
    cluster.ask("scontrol", "requeue", str(number), check=True)


def displaced(cluster: Cluster, number: int) -> None:
    """A job of a partition that goes before this one's."""
    cluster.ask("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")


def terminated(cluster: Cluster, number: int) -> None:
    """One rank gets SIGTERM from elsewhere."""
    cluster.ask("scancel", "--signal=TERM", f"{number}.0", check=True)


@pytest.mark.parametrize(
    ("stop", "processes"),
    [(warned, "1"), (requeued, "1"), (displaced, "1"), (terminated, "1"), (warned, "2"), (requeued, "2")],
)
def test_a_preempted_job_goes_on_as_if_it_had_not_been(cluster, work, unbroken, monkeypatch, stop, processes):
    name = f"{stop.__name__}-{processes}"
    options = TWO_NODES if processes == "1" else ["--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=2"]
    monkeypatch.setitem(cluster.environment, "MANTISSA_PROCESSES", processes)
    number = cluster.submit(*options, SBATCH, *arguments(work, name, *LONG, "run.resume=never"))
    cluster.until(lambda: reached(work, name, 50), "step 50", seconds=200, why=lambda: cluster.log(number))
    stop(cluster, number)
    log = ended(cluster, number, "COMPLETED", "0:0", "1")
    ends = launches.events(work, name, "run_end")
    assert [(end["status"], end["exit_code"]) for end in ends] == [("preempted", 75), ("done", 0)], log
    assert 50 <= ends[0]["step"] < 300 and len(sessions(work, name)) == 2
    assert steps(work, name) == unbroken
    assert "start 1," in log and "start 2," in log  # the log is appended to


def test_a_killed_rank_is_named_and_the_job_goes_on(cluster, work, unbroken):
    number = cluster.submit(*TWO_NODES, SBATCH, *arguments(work, "killed", *LONG))
    cluster.until(lambda: reached(work, "killed", 90), "step 90", seconds=200, why=lambda: cluster.log(number))
    cluster.machines["right"].run("sh", "-c", "kill -KILL $(pgrep -f '^python train.py')")  # of its own processes
    log = ended(cluster, number, "COMPLETED", "0:0", "1")
    assert "error: rank 1 (pid " in log and "requeued" in log
    assert steps(work, "killed") == unbroken


def test_a_job_is_requeued_so_often_and_no_more(cluster, work, monkeypatch):
    monkeypatch.setitem(cluster.environment, "MANTISSA_MAX_RESTARTS", "0")
    number = cluster.submit(*TWO_NODES, SBATCH, *arguments(work, "once", *LONG))
    cluster.until(lambda: reached(work, "once", 10), "step 10", seconds=200, why=lambda: cluster.log(number))
    warned(cluster, number)
    assert "not requeued, there were 0 restarts" in ended(cluster, number, "FAILED", "75:0", "0")


def test_a_cancelled_job_saves_and_stays_cancelled(cluster, work):
    number = cluster.submit(*TWO_NODES, SBATCH, *arguments(work, "cancelled", *LONG))
    cluster.until(lambda: reached(work, "cancelled", 10), "step 10", seconds=200, why=lambda: cluster.log(number))
    cluster.ask("scancel", str(number))
    job = cluster.ended(number)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0"), cluster.log(number)
    assert launches.events(work, "cancelled", "run_end")[-1]["exit_code"] == 75


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.learning_rat=1", "did you mean optimizer.learning_rate?"),  # seen before any rank starts
        ("batch.global_size=6", "batch.global_size = 6"),  # seen by the ranks, which know how many they are
    ],
)
def test_a_mistake_is_not_requeued(cluster, work, override, said):
    number = cluster.submit(*TWO_NODES, SBATCH, *arguments(work, "mistake", override))
    log = ended(cluster, number, "FAILED", "2:0", "0")
    assert "error: " in log and said in log and "Traceback" not in log


def test_each_element_of_an_array_has_a_run_of_its_own_and_is_requeued_alone(cluster, work):
    """The last element's own number is that of the whole array."""
    number = cluster.submit("--array=0-1", SBATCH, *arguments(work, "array-%a", *LONG, "run.seed=%a"))
    both = [f"{number}_0", f"{number}_1"]
    cluster.until(lambda: reached(work, "array-0", 20) and reached(work, "array-1", 20), "step 20", seconds=200)
    cluster.ask("scancel", "--batch", "--signal=USR1", both[1], check=True)
    jobs = [cluster.ended(one) for one in both]
    assert [(job["JobState"], job["Restarts"]) for job in jobs] == [("COMPLETED", "0"), ("COMPLETED", "1")]
    assert [len(sessions(work, f"array-{index}")) for index in (0, 1)] == [1, 2]
    assert [len(steps(work, f"array-{index}")) for index in (0, 1)] == [300, 300]
    assert steps(work, "array-0") != steps(work, "array-1")


def test_an_array_of_one_run_is_refused(cluster, work):
    number = cluster.submit("--array=0", SBATCH, *arguments(work, "same"))
    assert cluster.ended(number)["ExitCode"] == "2:0"
    assert "put %a into run.name" in cluster.log(number)
