"""Manifests of launch/kubernetes against schemas of Kubernetes, JobSet and Kubeflow, and rules that no schema knows.

Jobs, pods and the other built-in kinds are held against the JSON schemas of kubernetes-validate, the kinds of JobSet
and Kubeflow against their typed clients, with the Jobs and pods inside them against the former again. The rules are
about ports, grace periods, exit codes, secrets and command lines.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from kubernetes_validate import utils

from config import cli
from config.cli import REPOSITORY
from config.command_line import parse
from config.errors import UserError
from config.launcher import as_launched
from config.resolved import Resolved, resolve_run
from launch.kubernetes import alive
from tracking.prometheus.metrics import METRICS

FOLDER = REPOSITORY / "launch/kubernetes"
NEWEST = utils.latest_version()
OLDEST = "1.31"
"""Versions of Kubernetes in use."""
validate = partial(utils.validate, strict=True)
utils.schema_contents = cache(utils.schema_contents)  # or it would read 2 MB each time
Document = dict[str, Any]

TYPED = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}
"""Classes of kubeflow_trainer_api.models. Its import takes two seconds: not for tests that do not look at manifests."""
API_VERSIONS = {
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "TrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "PyTorchJob": "kubeflow.org/v1",
}
# Values that the typed clients leave open.
CHOICES = {
    "action": {"FailJob", "Ignore", "Count", "FailIndex", "FailJobSet", "RestartJobSet"},
    "restartPolicy": {"Never", "OnFailure", "Always", "ExitCode"},
    "cleanPodPolicy": {"All", "Running", "None"},
    "onJobFailureReasons": {"PodFailurePolicy", "BackoffLimitExceeded", "DeadlineExceeded"},
}


def all_documents() -> list[tuple[str, Document]]:
    """(file, document) of every manifest; anchors are resolved, and nothing in them is shared."""
    return json.loads(_all_documents())


@cache
def _all_documents() -> str:
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.yaml"))}
    return json.dumps([(name, document) for name, text in texts.items() for document in yaml.safe_load_all(text)])


def check_schema(document: Document) -> None:
    """Raise ValidationError or AssertionError where a schema does not allow the document."""
    kind = document["kind"]
    if kind not in API_VERSIONS:
        validate(document, NEWEST)
        validate(document, OLDEST)
        return
    assert document["apiVersion"] == API_VERSIONS[kind]
    validate({"apiVersion": "v1", "kind": "ConfigMap", "metadata": document["metadata"]}, NEWEST)
    _check_choices(document)
    _check_inside(document)
    read_back = _through_openapi(document) if kind == "PyTorchJob" else _through_pydantic(document, kind)
    assert read_back == document, f"the typed client of {kind} keeps another document"


def _through_openapi(document: Document) -> Document:
    from kubeflow.training import ApiClient

    client = ApiClient()
    response = SimpleNamespace(data=json.dumps(document))
    return client.sanitize_for_serialization(client.deserialize(response, "KubeflowOrgV1PyTorchJob"))


def _through_pydantic(document: Document, kind: str) -> Document:
    from kubeflow_trainer_api import models

    typed = getattr(models, TYPED[kind])
    return typed.model_validate(document).model_dump(mode="json", by_alias=True, exclude_none=True)


def _check_inside(value: Any) -> None:
    """Hold the Jobs and pods inside against the built-in schemas, and take them out."""
    for item in value if isinstance(value, list) else ():
        _check_inside(item)
    for name, item in value.items() if isinstance(value, dict) else ():
        if name != "template" or "replicatedJobs" in item["spec"]:
            _check_inside(item)
            continue
        if "containers" in item["spec"]:
            validate({"apiVersion": "v1", "kind": "PodTemplate", "template": item}, NEWEST)
        else:
            validate({**item, "apiVersion": "batch/v1", "kind": "Job"}, NEWEST)
        value[name] = {}


def _check_choices(value: Any, key: str = "") -> None:
    for item in value if isinstance(value, list) else ():
        _check_choices(item, key)
    for name, item in value.items() if isinstance(value, dict) else ():
        _check_choices(item, name)
    assert key not in CHOICES or isinstance(value, list) or value in CHOICES[key], f"{key}: {value}"


Manifests = dict[str, list[Document]]
REPORT_SECONDS = 30
BYTES = {"Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True)
class Pod:
    """One pod template and what its owner says about it."""

    name: str
    metadata: Document
    spec: Document
    nodes: int
    processes: int | None
    """Processes a node that the owner, and not the command line, sets."""
    leads: bool
    """Whether rank 0 is in it, and in no other pod of the template."""
    policy: Document | None
    """podFailurePolicy of its Job."""

    @property
    def container(self) -> Document:
        """Its only one."""
        return self.spec["containers"][0]


def pods(manifests: Manifests) -> Iterator[Pod]:
    def pod(name: str, owner: Document, nodes: int, leads: bool, policy: Document | None, processes: Any = None) -> Pod:
        template = owner["template"]
        return Pod(name, template["metadata"], template["spec"], nodes, processes, leads, policy)

    job = manifests["job.yaml"][0]["spec"]
    yield pod("job", job, 1, True, job["podFailurePolicy"])
    jobs = manifests["jobset.yaml"][0]["spec"]["replicatedJobs"]
    nodes = sum(item["replicas"] for item in jobs)
    for item in jobs:
        job = item["template"]["spec"]
        yield pod(f"jobset {item['name']}", job, nodes, item is jobs[0], job["podFailurePolicy"])
    roles = manifests["pytorchjob.yaml"][0]["spec"]["pytorchReplicaSpecs"]
    nodes = sum(role["replicas"] for role in roles.values())
    for name in ("Master", "Worker"):
        yield pod(f"pytorchjob {name}", roles[name], nodes, name == "Master", None)
    runtime, train = manifests["trainjob.yaml"]
    job = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    trainer = train["spec"]["trainer"]
    yield pod("trainjob", job, trainer["numNodes"], False, job["podFailurePolicy"], trainer["numProcPerNode"])


def problems(manifests: Manifests, *, uid: int) -> list[str]:
    """The faults of these manifests taken together. uid: the user of the image."""
    try:
        run = _read(manifests["config.yaml"][0]["data"]["run.yaml"])
        found = [f"{pod.name}: {problem}" for pod in pods(manifests) for problem in _pod(pod, manifests, run, uid)]
        found += _together(manifests, run)
    except (KeyError, IndexError, ValueError) as error:
        return [f"missing: {error}"]
    return found


def arguments(pod: Pod) -> tuple[list[str], list[str], list[str]]:
    """(supervisor with its options, torchrun with its options, train.py's arguments)."""
    line = pod.container["command"] + pod.container["args"]
    split, script = line.index("--"), line.index("train.py")
    return line[:split], line[split + 1 : script], line[script + 1 :]


def options(pod: Pod) -> dict[str, str]:
    """torchrun's options, each written --name=value."""
    return dict(word.split("=", 1) for word in arguments(pod)[1][1:])


def resolve(pod: Pod, run: str) -> Resolved:
    """The run as rank 0 of this pod's job would read it. Raises UserError as train.py would end."""
    found = _resolve(tuple(arguments(pod)[2]), run, _per_node(pod), pod.nodes)
    if isinstance(found, UserError):
        raise found
    return found


def _per_node(pod: Pod) -> int:
    return pod.processes or int(options(pod)["--nproc-per-node"])


@cache
def _resolve(train: tuple[str, ...], run: str, per_node: int, nodes: int) -> Resolved | UserError:
    environment = as_launched(1) | {"WORLD_SIZE": str(per_node * nodes), "LOCAL_WORLD_SIZE": str(per_node)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            given = parse(train)
            given.config = f"{folder}/{Path(given.config).name}"
            Path(given.config).write_text(run)
            return resolve_run(given, environment)
        except UserError as error:
            return error


_read = cache(yaml.safe_load)


def _pod(pod: Pod, manifests: Manifests, run: Document, uid: int) -> Iterator[str]:
    yield from _command(pod, manifests["config.yaml"][0]["data"]["run.yaml"])
    yield from _volumes(pod, run)
    yield from _time(pod, run)
    yield from _secrets(pod, manifests)
    yield from _safety(pod, uid)
    yield from _failures(pod)
    if pod.container.get("ports"):
        yield from _metrics(pod, run)


def _command(pod: Pod, run: str) -> Iterator[str]:
    supervisor, _, _ = arguments(pod)
    try:
        resolved = resolve(pod, run)
    except UserError as error:
        yield str(error)
        return
    gpus = int(pod.container["resources"]["limits"]["nvidia.com/gpu"])
    if _per_node(pod) != gpus:
        yield f"another number of processes than of GPUs, {gpus}"
    if pod.processes is None and int(options(pod)["--nnodes"]) != pod.nodes:
        yield f"--nnodes={options(pod)['--nnodes']}, and {pod.nodes} pods"
    if pod.nodes > 1 and ("--restarts", "0") not in zip(supervisor, supervisor[1:], strict=False):
        yield "one pod alone cannot start again"
    if resolved.config.run.resume != "auto":
        yield "a new pod would not go on from the newest checkpoint"


def _volumes(pod: Pod, run: Document) -> Iterator[str]:
    volumes = {item["name"]: item for item in pod.spec["volumes"]}
    mounts = {item["mountPath"]: item for item in pod.container["volumeMounts"]}
    at = {path: volumes[item["name"]] for path, item in mounts.items()}
    memory = _bytes(pod.container["resources"]["limits"]["memory"])
    if not 0 < _bytes(at["/dev/shm"]["emptyDir"]["sizeLimit"]) < memory / 2:
        yield "/dev/shm is no memory of a stated size below half of the pod's"
    shared = [path for path, volume in at.items() if "persistentVolumeClaim" in volume]
    for path in (run["run"]["dir"], run["data"]["cache_dir"]):
        if not _under(path, shared):
            yield f"{path} is not on a volume that stays"
    writable = [path for path, item in mounts.items() if not item.get("readOnly")]
    for item in pod.container["env"]:
        if str(item.get("value", "")).startswith("/") and not _under(item["value"], writable):
            yield f"{item['name']}={item['value']} cannot be written"


def _time(pod: Pod, run: Document) -> Iterator[str]:
    if not pod.leads and "annotations" not in pod.metadata:
        return
    told = pod.metadata["annotations"]
    evaluation, save, step = (int(told[f"longest-{what}-seconds"]) for what in ("evaluation", "save", "step"))
    needed = max(evaluation, save) + step + save + REPORT_SECONDS
    if pod.spec["terminationGracePeriodSeconds"] < needed:
        yield f"the grace period is shorter than {needed} s"
    probe = pod.container["livenessProbe"]
    line = probe["exec"]["command"]
    silent = 60 * float(line[line.index("--silent-minutes") + 1])
    if silent <= max(60 * run["run"]["timeout_minutes"] + 15, evaluation + save + step):
        yield "the liveness probe would strike before Mantissa itself, or in an evaluation or save"
    if probe["timeoutSeconds"] <= alive.ANSWER_SECONDS:
        yield "the liveness probe is cut off before it can say why"


def _secrets(pod: Pod, manifests: Manifests) -> Iterator[str]:
    secret = manifests["secret.example.yaml"][0]
    for item in pod.container["env"]:
        reference = item.get("valueFrom", {}).get("secretKeyRef")
        if reference and (
            reference["name"] != secret["metadata"]["name"]
            or reference["key"] not in secret["stringData"]
            or reference["key"] != item["name"]
        ):
            yield f"{item['name']}: no such key in the Secret"


def _safety(pod: Pod, uid: int) -> Iterator[str]:
    user = pod.spec["securityContext"]
    if not user["runAsNonRoot"] or {user[name] for name in ("runAsUser", "runAsGroup", "fsGroup")} != {uid}:
        yield "runs as another user than the image's, or as root"


def _failures(pod: Pod) -> Iterator[str]:
    if pod.policy is None:
        if "launch.kubernetes.retryable" not in arguments(pod)[0]:
            yield "the operator would take 75 for final"
        return
    if " --time-up-code 0" not in " ".join(arguments(pod)[0]):
        yield "run.max_minutes would start it again"
    final = [cli.CONFIG_ERROR, cli.DIVERGED, cli.BROKEN, cli.UNSAVED]
    codes = {"containerName": pod.container["name"], "operator": "In"}
    rules = [
        {"action": "FailJob", "onExitCodes": codes | {"values": final}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": codes | {"values": [cli.PREEMPTED]}},
    ]
    if pod.policy["rules"] != rules or pod.spec["restartPolicy"] != "Never":
        yield "podFailurePolicy is not what the exit codes mean"


def _metrics(pod: Pod, run: Document) -> Iterator[str]:
    port = run["tracking"]["prometheus_port"]
    if run["tracking"]["prometheus_address"] in ("127.0.0.1", "localhost"):
        yield "the metrics cannot be reached from outside the pod"
    told = pod.metadata["annotations"]
    ports = {item["name"]: item["containerPort"] for item in pod.container["ports"]}
    line = pod.container["livenessProbe"]["exec"]["command"]
    if {ports["metrics"], int(told["prometheus.io/port"]), int(line[line.index("--port") + 1])} != {port}:
        yield f"not every port is tracking.prometheus_port, {port}"
    for name in ("startupProbe", "readinessProbe"):
        probe = pod.container.get(name)
        if probe is None:
            continue
        path, _, metric = probe["httpGet"]["path"].partition("?name[]=mantissa_")
        if path != "/metrics" or metric not in METRICS or probe["httpGet"]["port"] not in ports:
            yield f"{name} asks for what is not there"
        if not pod.leads:
            yield f"{name}: this pod may have no metrics"


def _together(manifests: Manifests, run: Document) -> Iterator[str]:
    policy = manifests["network-policy.yaml"][0]["spec"]
    _, monitoring = policy["ingress"]
    if [item["port"] for item in monitoring["ports"]] != [run["tracking"]["prometheus_port"]]:
        yield "network policy: another port"
    jobset = manifests["jobset.yaml"][0]
    name, leader = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]
    line = leader["template"]["spec"]["template"]["spec"]["containers"][0]["args"]
    if f"--master-addr={name}-{leader['name']}-0-0.{name}" not in line or leader["replicas"] != 1:
        yield "jobset: --master-addr is not the leader's name"
    if len({pod.container["image"] for pod in pods(manifests)}) != 1:
        yield "images differ"


def _bytes(text: Any) -> float:
    return float(text[:-2]) * BYTES[text[-2:]]


def _under(path: str, folders: list[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)
