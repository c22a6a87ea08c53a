"""A Slurm cluster of two machines on one: munged and slurmctld on `left`, a slurmd on each.

The machines are those of machines.py; what runs on them ends with them.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.jobs.launches import BIN
from tests.support.machines import machines
from tests.support.machines.machines import ADDRESSES, Machine, two_machines

DAEMONS = [name for name in ("munged", "slurmctld", "slurmd") if shutil.which(name, path="/usr/sbin") is None]
CONFIGURATION = """
ClusterName=two
SlurmctldHost=left({address})
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmdTimeout=20
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=60
ReturnToService=2
MpiDefault=none
GresTypes=gpu
NodeName=left NodeAddr={left} CPUs=2 RealMemory=2000 Gres=gpu:2
NodeName=right NodeAddr={right} CPUs=2 RealMemory=2000 Gres=gpu:2
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9
"""


SKIP = machines.SKIP or (f"not installed: {', '.join(DAEMONS)}; apt-get install slurm-wlm munge" if DAEMONS else "")


class Cluster:
    """The cluster, as its users on `left` see it."""

    def __init__(self, folder: Path, both: dict[str, Machine]) -> None:
        """Start the daemons in their machines and wait until both nodes are idle."""
        self.folder, self.machines = folder, both
        for name in ("state", "spool-left", "spool-right"):
            (folder / name).mkdir()
        values = {"folder": folder, "address": ADDRESSES["left"], **ADDRESSES}
        (folder / "slurm.conf").write_text(CONFIGURATION.format(**values))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # v2 wants systemd
        # Two files that pass for GPUs: Slurm hands them out, torch sees none.
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n")
        for index in (0, 1):
            (folder / f"gpu{index}").touch()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "OMP"))},
            "PATH": f"{BIN}:{os.environ['PATH']}:/usr/sbin",
            "SLURM_CONF": str(folder / "slurm.conf"),
            "MANTISSA_LOGS": str(folder),
        }
        munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket"]
        munged += [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self.start("left", *munged)
        self.until(lambda: (folder / "munge.socket").exists(), "munged is up")
        self.start("left", "slurmctld", "-D")
        for name in both:
            self.start(name, "slurmd", "-D", "-N", name)
        self.until(lambda: self.ask("sinfo", "-h", "-o", "%D %t").strip() == "2 idle", "both nodes are idle")

    def start(self, machine: str, *words: str) -> subprocess.Popen[bytes]:
        """A daemon on a machine; it ends with it."""
        log = (self.folder / f"{words[0]}-{machine}.out").open("ab")
        command = self.machines[machine].command(*words)
        return subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def ask(self, *words: str, check: bool = False) -> str:
        """The output of a command run on `left`."""
        command = self.machines["left"].command(*words)
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert not (check and done.returncode), (words, done.stderr)
        return done.stdout

    def submit(self, *words: str) -> int:
        """`sbatch` in the repository's folder; the job's number. Its log is in self.folder/N.out."""
        output = ["--output", f"{self.folder}/%j.out"]
        return int(self.ask("sbatch", "--parsable", *output, *words, check=True).strip())

    def job(self, number: int | str) -> dict[str, str]:
        """The fields that `scontrol show job` prints for a job."""
        text = self.ask("scontrol", "show", "job", "-o", str(number), check=True)
        return dict(part.split("=", 1) for part in text.split() if "=" in part)

    def log(self, number: int | str) -> str:
        path = self.folder / f"{number}.out"
        return path.read_text() if path.exists() else ""

    def logs_of(self, number: int) -> Path:
        """The folder with the logs of a job's tasks."""
        return self.folder / f"slurm-{number}"

    def ended(self, number: int | str, *, seconds: float = 600) -> dict[str, str]:
        """The job once it has ended for good. One that is held back after a requeue is let go."""

        def over() -> bool:
            job = self.job(number)
            if job["JobState"] == "PENDING" and job["Reason"] == "BeginTime":
                self.ask("scontrol", "update", f"JobId={number}", "StartTime=now")
            return job["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "PREEMPTED", "REQUEUED")

        self.until(over, f"job {number} has ended", seconds=seconds, why=lambda: self.log(number))
        return self.job(number)

    def until(self, condition, what: str, *, seconds: float = 40, why=lambda: "") -> None:
        ends = time.monotonic() + seconds
        while not condition():
            late = time.monotonic() > ends
            assert not late, f"not within {seconds:g} s: {what}\n{why()}\n{self.ask('squeue')}{self.logs()}"
            time.sleep(0.3)

    def logs(self) -> str:
        """The last lines of the daemons."""
        texts = [(path.name, path.read_text(errors="replace")) for path in sorted(self.folder.glob("*d*.log"))]
        return "\n".join(f"--- {name}\n" + "\n".join(text.splitlines()[-12:]) for name, text in texts)


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """The cluster, up; gone afterwards with all its processes."""
    with two_machines(folder) as both:
        yield Cluster(folder, both)
