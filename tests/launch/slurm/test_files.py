"""The Slurm scripts without a Slurm: their shell, what they refuse, and what is decided when a job has ended."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from launch.slurm.restart import main, requeue_decision
from launch.supervise import Session
from tests.support.jobs.launches import BIN
from tracking.jsonl import encode

FOLDER = REPOSITORY / "launch" / "slurm"
SCRIPTS = sorted([*FOLDER.glob("*.sbatch"), *FOLDER.glob("*.sh")])
ASKED_TO_STOP = "asked to stop by SIGTERM or SIGUSR1"
PRINT_PLACE = '#!/bin/sh\necho $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE; echo "$@"\n'


def bash(folder: Path, script: str, *words: str, **environment: object) -> subprocess.CompletedProcess[str]:
    """Run one of the scripts, with `folder` first on the PATH."""
    settings = {key: str(value) for key, value in environment.items()}
    settings["PATH"] = f"{folder}:{BIN}:{os.environ['PATH']}"
    command = ["bash", str(FOLDER / script), *words]
    return subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, timeout=30, check=False)


def python_that_tells(folder: Path, text: str = PRINT_PLACE) -> None:
    """A python that prints what it was told, in place of a training job."""
    (folder / "python").write_text(text)
    (folder / "python").chmod(0o755)


def test_shellcheck_has_nothing_to_say():
    command = [BIN / "shellcheck", "--external-sources", *SCRIPTS]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert len(SCRIPTS) == 5 and done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", ["train.sbatch", "sweep.sbatch", "rollouts.sbatch"])
def test_every_job_can_be_requeued_and_is_warned(script):
    options = [line.split(maxsplit=1)[1] for line in (FOLDER / script).read_text().splitlines() if "#SBATCH" in line]
    assert {"--requeue", "--open-mode=append", "--signal=B:USR1@300"} <= set(options)


@pytest.mark.parametrize(
    ("tasks", "node", "task", "local", "expected"),
    [
        ("8(x3),4", 2, 20, 4, "20 28 4 8"),
        ("8(x3),4", 3, 27, 3, "27 28 3 4"),
        ("3,1(x2),2", 1, 3, 0, "3 7 0 1"),
        ("3,1(x2),2", 3, 6, 1, "6 7 1 2"),
        ("2", 0, 0, 0, "0 2 0 2"),
    ],
)
def test_a_task_is_told_which_rank_it_is(tmp_path, tasks, node, task, local, expected):
    python_that_tells(tmp_path)
    world = int(expected.split()[1])
    place = {"SLURM_PROCID": task, "SLURM_NODEID": node, "SLURM_LOCALID": local, "SLURM_STEP_NUM_TASKS": world}
    words = ["--config", "a b", "x={k: 1}"]
    settings = {"SLURM_STEP_TASKS_PER_NODE": tasks, "MANTISSA_PROCESSES": 1, "MANTISSA_LOGS": tmp_path}
    done = bash(tmp_path, "task.sh", *words, **place, **settings)
    assert done.returncode == 0, done.stderr
    told = done.stdout if task == 0 else (tmp_path / f"task-{task}.log").read_text()
    assert told.splitlines() == [expected, "train.py --config a b x={k: 1}"]


@pytest.mark.parametrize(("visible", "local"), [("3", "0"), ("0,1", "1"), ("", "1")])
def test_a_task_that_sees_one_gpu_takes_the_first_it_sees(tmp_path, visible, local):
    python_that_tells(tmp_path)
    place = {"SLURM_PROCID": 1, "SLURM_NODEID": 0, "SLURM_LOCALID": 1, "SLURM_STEP_NUM_TASKS": 2}
    place |= {"SLURM_STEP_TASKS_PER_NODE": "2", "MANTISSA_PROCESSES": 1, "MANTISSA_LOGS": tmp_path}
    bash(tmp_path, "task.sh", **place, CUDA_VISIBLE_DEVICES=visible)
    assert (tmp_path / "task-1.log").read_text().split()[2] == local


def test_a_node_is_given_to_torchrun(tmp_path):
    python_that_tells(tmp_path)
    place = {"SLURM_PROCID": 0, "SLURM_NODEID": 0, "SLURM_STEP_NUM_NODES": 3, "MASTER_ADDR": "n1", "MASTER_PORT": 10007}
    done = bash(tmp_path, "task.sh", "--config", "F", **place, MANTISSA_PROCESSES=8, MANTISSA_LOGS=tmp_path)
    assert "torch.distributed.run --nnodes 3 --node-rank 0 --nproc-per-node 8 --master-addr n1" in done.stdout
    assert done.stdout.endswith("train.py --config F\n")


@pytest.mark.parametrize("script", ["train.sbatch", "sweep.sbatch", "rollouts.sbatch"])
def test_sbatch_called_elsewhere_is_refused(tmp_path, script):
    done = bash(tmp_path, script, SLURM_SUBMIT_DIR=tmp_path)
    assert done.returncode == 2 and "call sbatch in Mantissa's folder" in done.stderr


FAKE_PYTHON = """#!/bin/sh
case "$*" in
*"restart begin"*) echo 0 ;;
*"restart end"*) echo 0 end done ;;
*launch.rollouts*) echo "$CUDA_VISIBLE_DEVICES $*" >server; trap 'echo ended >>server; exit' TERM; sleep 60 & wait ;;
esac
"""


@pytest.mark.parametrize(
    ("tasks", "gpus", "visible", "server", "ranks"),
    [
        (3, 4, {}, "3", "1"),
        (1, 4, {}, "3", "3"),
        (1, 2, {"CUDA_VISIBLE_DEVICES": "4,5"}, "5", "1"),
    ],
)
def test_a_rollout_server_stands_beside_the_run_and_ends_with_it(tmp_path, tasks, gpus, visible, server, ranks):
    for path in ("train.py", *(f"launch/slurm/{name}" for name in ("common.sh", "train.sbatch", "rollouts.sbatch"))):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / path, tmp_path / path)
    python_that_tells(tmp_path, FAKE_PYTHON)
    for name, text in {
        "scontrol": "echo n1",
        "srun": 'while ! [ -f server ]; do sleep 0.1; done; echo "$MANTISSA_PROCESSES $@" >run',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_SUBMIT_DIR": tmp_path, "SLURM_JOB_ID": 7, "SLURM_JOB_NUM_NODES": 1, "SLURM_JOB_NODELIST": "n1"}
    job |= {"SLURM_NTASKS_PER_NODE": tasks, "SLURM_GPUS_ON_NODE": gpus, "SLURM_JOB_PARTITION": "p", **visible}
    job["SLURM_CPUS_ON_NODE"] = 4
    done = bash(tmp_path, "rollouts.sbatch", "--config", "F", **job, MANTISSA_VLLM=tmp_path / "python")
    assert done.returncode == 0, done.stderr
    told, end = (tmp_path / "server").read_text().splitlines()
    words = "--config F grpo.engine=vllm grpo.urls=[http://127.0.0.1:30007]"
    assert told.startswith(f"{server} -m launch.rollouts --python") and told.endswith(words) and end == "ended"
    run = (tmp_path / "run").read_text()
    assert run.startswith(f"{ranks} ") and run.endswith(f"task.sh {words}\n")
    refused = bash(tmp_path, "rollouts.sbatch", "--config", "F", **job)
    assert refused.returncode == 2 and "MANTISSA_VLLM has to name the Python" in refused.stderr


def test_sweep_runs_its_trial_and_passes_its_exit_code_on(tmp_path):
    for path in ("train.py", "launch/slurm/common.sh"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / path, tmp_path / path)
    python_that_tells(tmp_path, '#!/bin/sh\necho "$@"\nexit 3\n')
    job = {"SLURM_SUBMIT_DIR": tmp_path, "SLURM_JOB_ID": 7, "SLURM_JOB_NUM_NODES": 1, "SLURM_JOB_NODELIST": "n1"}
    done = bash(tmp_path, "sweep.sbatch", "runs/tried", **job, SLURM_ARRAY_TASK_ID=5)
    assert (done.returncode, done.stderr) == (3, "")
    assert "-m launch.sweep --trial 5 runs/tried" in done.stdout
    assert bash(tmp_path, "sweep.sbatch", "runs/tried", **job).returncode == 2


@pytest.mark.parametrize(
    ("session", "code", "expected", "again", "said"),
    [
        (Session(furthest=6, saved=6, exit_code=0), 0, 0, False, "done"),
        (Session(furthest=6, saved=6, exit_code=0), 1, 1, False, "done, then ended with exit code 1"),
        (Session(), 2, 2, False, "wrong"),
        (Session(furthest=6, saved=6, exit_code=3), 3, 3, False, "numerics"),
        (Session(furthest=6, saved=6, exit_code=3), 1, 3, False, "numerics"),
        (Session(furthest=6, saved=6, exit_code=71), 1, 71, False, "drain the node"),
        (Session(furthest=6, saved=4, exit_code=74), 1, 74, False, "cannot be written"),
        (Session(furthest=6, saved=6, exit_code=75, reason=ASKED_TO_STOP), 1, 75, True, "asked"),
        (Session(furthest=6, saved=6, exit_code=75, reason="run.max_minutes is up"), 75, 75, False, "max_minutes"),
        (Session(furthest=6, saved=4), 137, 137, True, "killed by SIGKILL after it saved step 4"),
        (Session(furthest=6, saved=4), 69, 69, True, "exit code 69 after it saved step 4"),
        (Session(furthest=6), 137, 137, False, "would not get further"),
        (Session(), 1, 1, False, "would not get further"),
    ],
)
def test_what_is_requeued(session, code, expected, again, said):
    ended, requeue, why = requeue_decision(session, code)
    assert (ended, requeue) == (expected, again)
    assert said in why


def test_time_that_is_up_is_not_requeued_when_another_rank_noticed_first():
    session = Session(furthest=6, saved=6, exit_code=75, reason="another rank was asked to stop", seconds=3608.0)
    assert [requeue_decision(session, 75, minutes)[1] for minutes in (60, 90, None)] == [False, True, True]


def test_a_restart_resumes_once_this_job_has_saved(tmp_path, capsys):
    """Checkpoints of an earlier run do not count: with run.resume=never or PATH they would be continued."""
    words = ["--", "--config", str(REPOSITORY / "config/recipes/demo.yaml"), f"run.dir={tmp_path}", "run.name=a"]
    saved = {"event": "checkpoint", "path": "a", "seconds": 1.0, "stall_seconds": 0.1, "bytes": 9, "verified": True}

    def begin(restarts: int, *more: str) -> str:
        assert main(["begin", "--restarts", str(restarts), "--first", str(tmp_path / "first"), *words, *more]) == 0
        return capsys.readouterr().out.strip()

    def wrote(step: int) -> str:
        with events.open("ab") as file:
            file.write(encode({**saved, "step": step, "tokens": 4 * step, "time": float(step)}))
        return f"{events.stat().st_ino}:{events.stat().st_size}"

    assert begin(1) == begin(0) == "0:0"
    events = tmp_path / "a/events.jsonl"
    events.parent.mkdir()
    earlier = wrote(2)
    assert begin(0) == begin(1) == earlier
    assert main(["end", "--mark", earlier, "--code", "69", *words]) == 0
    assert capsys.readouterr().out.startswith("69 end ")
    mark = wrote(4)
    assert begin(1) == f"{mark} run.resume=auto"
    assert begin(2, f"run.resume={tmp_path}/b/checkpoints/step-1").endswith(" run.resume=auto")  # pruned since
    assert main(["end", "--mark", earlier, "--code", "69", *words]) == 0
    assert capsys.readouterr().out.startswith("69 requeue ")
    events.rename(tmp_path / "renamed by run.resume=never")
    assert begin(1) == "0:0"
    mark = wrote(1)
    assert begin(2) == f"{mark} run.resume=auto"


def test_a_mistake_in_the_config_is_one_line(refusal):
    refusal(main, ["begin", "--", "--config", str(REPOSITORY / "config/recipes/demo.yaml"), "run.nam=x"], quiet=True)
