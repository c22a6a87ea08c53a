"""The manifests of launch/kubernetes, and whether the schemas of Kubernetes, JobSet and Kubeflow allow them.

Jobs, pods and the other built-in kinds are held against the JSON schemas of kubernetes-validate, the kinds of JobSet
and Kubeflow against their typed clients, with the Jobs and pods inside them against the former again.
"""

import json
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import yaml
from kubernetes_validate import utils

from config.cli import REPOSITORY

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
