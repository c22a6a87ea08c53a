"""The manifests are what Kubernetes takes and what the run needs; the image holds what train.py imports, not more."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from config import cli
from config.cli import REPOSITORY
from config.machine.processes import free_port
from launch.kubernetes import alive
from tests.support.jobs import launches
from tests.support.jobs.launches import BIN
from tests.support.machines import kubernetes_image as image
from tests.support.machines.kubernetes_checks import (
    API_VERSIONS,
    Document,
    Manifests,
    Pod,
    all_documents,
    arguments,
    check_schema,
    pods,
    problems,
)
from tracking.prometheus.sink import PrometheusSink


def manifests() -> Manifests:
    """All of them, by file."""
    found: Manifests = {}
    for name, document in all_documents():
        found.setdefault(name, []).append(document)
    return found


def test_the_schemas_allow_every_manifest():
    documents = all_documents()
    assert {document["kind"] for _, document in documents} >= {"Job", "PersistentVolumeClaim", "Secret", *API_VERSIONS}
    for _, document in documents:
        check_schema(document)


def test_a_key_that_a_kind_does_not_have_is_found():
    for _, document in all_documents():
        document["spec" if document["kind"] in API_VERSIONS else "metadata"] |= {"suspnd": True}
        with pytest.raises((kubernetes_validate.ValidationError, AssertionError)):
            check_schema(document)


def test_the_manifests_fit_each_other_the_config_and_the_image():
    assert problems(manifests(), uid=image.uid()) == []


def test_a_rollout_server_fits_into_the_pod_of_a_run():
    job = next(document for name, document in all_documents() if name == "job.yaml")
    patched = yaml.safe_load((REPOSITORY / "launch/rollouts/sidecar.yaml").read_text(encoding="utf-8"))
    spec = job["spec"]["template"]["spec"]
    [server] = patched["spec"]["template"]["spec"]["initContainers"]
    assert "initContainers" not in spec and server["restartPolicy"] == "Always"
    spec["initContainers"] = [server]
    check_schema(job)
    assert {mount["name"] for mount in server["volumeMounts"]} <= {volume["name"] for volume in spec["volumes"]}
    assert server["securityContext"] == spec["containers"][0]["securityContext"]


def pod_spec(found: Manifests) -> Document:
    return found["job.yaml"][0]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda m: pod_spec(m).update(terminationGracePeriodSeconds=1200), "grace period is shorter than 1290 s"),
        (lambda m: container(m)["args"].append("run.stpes=3"), "did you mean"),
        (lambda m: container(m)["args"].insert(3, "--nnodes=3"), "--nnodes=3, and 1 pods"),
        (lambda m: container(m)["args"].insert(3, "--nproc-per-node=4"), "another number of processes than of GPUs"),
        (lambda m: container(m)["ports"][0].update(containerPort=9465), "not every port"),
        (lambda m: container(m)["livenessProbe"]["exec"]["command"].__setitem__(-1, "30"), "would strike before"),
        (lambda m: container(m)["env"][-1]["valueFrom"]["secretKeyRef"].update(key="WANDB"), "no such key in the Sec"),
        (lambda m: pod_spec(m)["securityContext"].update(runAsUser=0), "as root"),
        (lambda m: container(m)["env"][0].update(value="/home"), "HOME=/home cannot be written"),
        (lambda m: m["job.yaml"][0]["spec"]["podFailurePolicy"]["rules"].pop(), "not what the exit codes mean"),
        (lambda m: container(m).update(command=["python", "-m", "launch.supervise", "--"]), "would start it again"),
        (lambda m: set_run(m, "9464 ", "9000 "), "network policy: another port"),
        (lambda m: set_run(m, "timeout_minutes: 30", "timeout_minutes: 60"), "would strike before"),
        (lambda m: set_run(m, "0.0.0.0", "127.0.0.1"), "cannot be reached from outside"),
        (lambda m: set_run(m, "dir: /runs", "dir: runs"), "runs is not on a volume that stays"),
    ],
)
def test_what_no_schema_knows_is_found(broken, said):
    found = manifests()
    broken(found)
    told = problems(found, uid=image.uid())
    assert any(said in problem for problem in told), told


def container(found: Manifests) -> Document:
    return pod_spec(found)["containers"][0]


def set_run(found: Manifests, old: str, new: str) -> None:
    data = found["config.yaml"][0]["data"]
    assert old in data["run.yaml"]
    data["run.yaml"] = data["run.yaml"].replace(old, new)


@pytest.mark.parametrize(
    ("ends", "reason", "expected"),
    [(0, "it", 0), (2, "", 2), (74, "it", 74), (75, "it", 143), (75, "run.max_minutes is up", 0), (69, "", 143)],
)
def test_an_operator_that_judges_by_the_exit_code_tries_again_what_may_help(ends, reason, expected, tmp_path):
    told = {"exit": ends, "steps": 1, "end": [ends, reason]} if reason else {"exit": ends}
    job = [sys.executable, "tests/support/jobs/pretend_train.py", "--config", "config/recipes/demo.yaml"]
    job += [f"run.dir={tmp_path}", "run.name=it"]
    line = [sys.executable, "-m", "launch.kubernetes.retryable", "--restarts", "0", "--", *job]
    environment = {**os.environ, "PRETEND": json.dumps([told])}
    done = subprocess.run(line, cwd=REPOSITORY, env=environment, check=False)
    assert done.returncode == expected


def probe(port: int, minutes: float = 60.0) -> int:
    return alive.main(["--port", str(port), "--silent-minutes", str(minutes)])


def test_the_liveness_probe_strikes_only_when_something_is_wrong(capsys, monkeypatch):
    sink = PrometheusSink("it", planned_steps=3, port=0)
    assert sink.url is not None
    port = int(sink.url.split(":")[2].split("/")[0])
    assert probe(port) == 0  # nothing recorded yet: it starts
    sink.write({"event": "note", "step": 0, "time": time.time() - 59 * 60, "tokens": 0, "text": "it"})
    assert probe(port) == 0
    with monkeypatch.context() as proxied:
        proxied.setenv("http_proxy", "http://127.0.0.1:9")
        proxied.setenv("no_proxy", "")
        proxied.setattr(urllib.request, "_opener", None)  # it has the proxies of its first use
        assert probe(port, minutes=58) == 1
    assert "nothing recorded for 59 minutes" in capsys.readouterr().out
    assert scrapes(sink) == 0  # a probe is no scrape: the run's end would take it for Prometheus
    sink.close()
    assert probe(port) == 0  # closed: another rank's pod, or between two starts
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as failing:  # 501 to each GET
        threading.Thread(target=failing.handle_request).start()
        assert probe(failing.server_port) == 1
    monkeypatch.setattr(alive, "ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert probe(silent.getsockname()[1]) == 1
    assert "does not answer" in capsys.readouterr().out


def scrapes(sink: PrometheusSink) -> int:
    """The number of scrapes before this one."""
    text = urllib.request.urlopen(str(sink.url), timeout=10).read().decode()
    return int(float(text.split("\nmantissa_exporter_scrapes ")[1].split()[0]))


@pytest.fixture
def machine():
    """A folder that everyone may enter, for what the image and the volumes hold; only `mounts` belongs to the user."""
    folder = Path(tempfile.mkdtemp(prefix="mantissa-pod-"))
    folder.chmod(0o755)
    image.assemble(folder / "image")
    for name in ("runs", "data", "cache", "tmp", "etc"):
        (folder / name).mkdir()
        if os.geteuid() == 0 and name != "etc":
            os.chown(folder / name, image.uid(), image.uid())
    yield folder
    shutil.rmtree(folder)


def as_user() -> list[str]:
    """Become the image's user, who may read what root has and write nothing of it."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return []
    may_read = ["--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search"]
    return ["setpriv", f"--reuid={image.uid()}", f"--regid={image.uid()}", "--clear-groups", *may_read]


def start(pod: Pod, machine: Path, values: dict[str, str], replace: dict[str, str], *overrides: str):
    """The pod's command line in the folder of the image, with its environment and nothing else of ours."""

    def here(text: str) -> str:
        for old, new in {**{f"$({name})": value for name, value in values.items()}, **replace}.items():
            text = text.replace(old, new)
        names = ("/runs", "/data", "/cache", "/tmp", "/etc/mantissa")
        return next((f"{machine}{text.replace('/mantissa', '')}" for name in names if text.startswith(name)), text)

    environment = {item["name"]: here(item["value"]) for item in pod.container["env"] if "value" in item}
    environment |= image.environment() | values
    environment |= {"PATH": f"{BIN}:/usr/bin:/bin", "TMPDIR": str(machine / "tmp")}
    line = [here(word) for word in pod.container["command"] + pod.container["args"]] + list(overrides)
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    words = [*as_user(), *line]
    return subprocess.Popen(words, cwd=machine / "image", env=environment, start_new_session=True, **output)


SMALL = [
    *launches.SMALL,
    *("model.activation_checkpointing=none", "data.name=null", "batch.global_size=4", "batch.micro_size=2"),
    *("schedule.warmup_steps=2", "precision.compute=fp32", "deepspeed.config=ds_configs/zero2_fp32.json"),
    *("evaluate.every_steps=0", "generate.tokens=0", "tracking.wandb=disabled"),
]


def train_and_ask_to_stop(machine: Path, both: list[Pod]) -> list[int]:
    """Run pods beside each other, a CPU rank each, ask the last one to stop once they train; their exit codes."""
    (machine / "etc/run.yaml").write_text(manifests()["config.yaml"][0]["data"]["run.yaml"])
    metrics, master = str(free_port()), str(free_port())
    replace = {"--nproc-per-node=8": "--nproc-per-node=1", "mantissa-leader-0-0.mantissa": "127.0.0.1", "29500": master}
    overrides = [*SMALL, f"data.path={machine}/image/config", f"run.dir={machine}/runs", "run.steps=100000"]
    overrides += [f"data.cache_dir={machine}/data/prepared", f"tracking.prometheus_port={metrics}"]
    jobs = []
    for rank, pod in enumerate(both):
        values = {"NODE_RANK": str(rank), "PET_MASTER_PORT": master}
        jobs.append(start(pod, machine, values, replace, *overrides))
    readers = ThreadPoolExecutor(len(jobs))
    outputs = [readers.submit(job.stdout.read) for job in jobs]
    try:
        path = both[0].container["readinessProbe"]["httpGet"]["path"]
        wait_for(f"http://127.0.0.1:{metrics}{path}", "mantissa_step{", jobs)
        line = [word.replace("9464", metrics) for word in both[0].container["livenessProbe"]["exec"]["command"]]
        environment = image.environment() | {"PATH": f"{BIN}:/usr/bin:/bin"}
        done = subprocess.run([*as_user(), *line], cwd=machine / "image", env=environment, check=False)
        assert done.returncode == 0
        jobs[-1].send_signal(signal.SIGTERM)
        return [job.wait(timeout=120) for job in jobs]
    finally:
        for _ in range(2):  # the second one kills what the first did not end
            for job in jobs:
                if job.poll() is None:
                    job.terminate()
                    time.sleep(1)
        print(*(output.result(timeout=10) for output in outputs), sep="\n")


def saved(machine: Path) -> bool:
    """Whether the run says that it was asked to stop, and has a checkpoint; the image has to be untouched."""
    if as_user():
        assert not [one for one in (machine / "image").rglob("*") if one.stat().st_uid == image.uid()]
    events = (machine / "runs/llama_8b/events.jsonl").read_text()
    last = [json.loads(text) for text in events.splitlines()][-1]
    latest = machine / "runs/llama_8b/checkpoints/LATEST"
    return (last["event"], last["exit_code"]) == ("run_end", cli.PREEMPTED) and latest.is_file()


@pytest.mark.slow
def test_the_pod_of_the_job_trains_as_the_images_user_and_saves_when_asked_to_stop(machine):
    """On a root that it may not write; both probes ask meanwhile."""
    job = next(pod for pod in pods(manifests()) if pod.name == "job")
    assert train_and_ask_to_stop(machine, [job]) == [cli.PREEMPTED]
    assert saved(machine)


def wait_for(url: str, line: str, jobs: list[Any]) -> None:
    """Until the readiness probe is answered, with a line that begins so: the run has started."""

    def answered() -> bool:
        assert all(job.poll() is None for job in jobs)
        with suppress(urllib.error.URLError, ConnectionError):
            answer = urllib.request.urlopen(url, timeout=5)
            return answer.status == 200 and f"\n{line}" in answer.read().decode()
        return False

    launches.wait_until(answered, seconds=300)


def test_the_image_is_made_of_what_is_needed_to_train_and_nothing_to_test(machine):
    line = [sys.executable, "train.py", "--config", "config/recipes/demo.yaml", "--show-config"]
    done = subprocess.run([*as_user(), *line], cwd=machine / "image", capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "name: demo" in done.stdout, done.stderr
    inside = {path.relative_to(machine / "image").parts[0] for path in (machine / "image").rglob("*")}
    assert not inside & {"tests", "runs", ".git", ".venv", "wandb"}
    read = {path.name for path in (machine / "image/docs").rglob("*.*")}  # by tools.audit and tracking.wandb.view
    assert read == {"precision-matrix.md", "saved_view.yaml"}
    secrets = REPOSITORY / "launch/kubernetes/secret.yaml"
    assert not image.sent(secrets) and not image.sent(REPOSITORY / ".git/config")
    assert image.sent(REPOSITORY / "requirements.txt")
    assert not image.sent(REPOSITORY / "requirements-dev.txt")
    installs = [rest for _, word, rest in image.instructions() if word == "RUN" and "pip install" in rest]
    assert len(installs) == 1 and "requirements-extras.txt" in installs[0] and "-dev" not in installs[0]


def test_the_command_lines_start_the_supervisor_itself():
    """The supervisor is PID 1: a shell before it would keep SIGTERM to itself."""
    for pod in pods(manifests()):
        assert arguments(pod)[0][0] == "python" and "entrypoint" not in pod.container
