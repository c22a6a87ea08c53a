"""The manifests of launch/kubernetes, and whether the schemas of Kubernetes, JobSet and Kubeflow allow them.

Jobs, pods and the other built-in kinds are held against the JSON schemas that kubernetes-validate carries, the kinds
of JobSet and Kubeflow against their typed clients, with the Jobs and pods inside them against the former again.
"""

import json
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import jsonschema
import yaml
from kubernetes_validate.utils import latest_version, schema_contents
from referencing import Registry, Resource

from config.cli import REPOSITORY

FOLDER = REPOSITORY / "launch/kubernetes"
NEWEST = latest_version()
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


def schema_problems(document: Document) -> Iterator[str]:
    """The violations of the schemas; empty when there are none."""
    kind = document.get("kind")
    return _custom(document, kind) if kind in API_VERSIONS else _built_in(document)


def _built_in(document: Document) -> Iterator[str]:
    try:
        validator = _validator(document["kind"], document["apiVersion"])
    except (KeyError, FileNotFoundError) as error:
        yield f"no such kind: {error}"
        return
    yield from (f"{error.json_path}: {error.message}" for error in validator.iter_errors(document))


@cache
def _validator(kind: str, api_version: str) -> jsonschema.Draft202012Validator:
    """As kubernetes_validate.validate makes one, kept: it would read 2 MB each time."""
    group, _, version = api_version.rpartition("/")
    name = f"{kind.lower()}-{group.partition('.')[0] + '-' if group else ''}{version}.json"
    folder = f"kubernetes-json-schema/v{NEWEST}-local-strict"
    schema = schema_contents(f"{folder}/{name}", NEWEST)
    definitions = Resource.from_contents(schema_contents(f"{folder}/_definitions.json", NEWEST))
    registry: Any = definitions @ (Resource.from_contents(schema) @ Registry())
    return jsonschema.Draft202012Validator(schema, registry=registry)


def _custom(document: Document, kind: str) -> Iterator[str]:
    document = json.loads(json.dumps(document))
    if document.get("apiVersion") != API_VERSIONS[kind]:
        yield f"apiVersion: {document.get('apiVersion')} is not {API_VERSIONS[kind]}"
    yield from _built_in({"apiVersion": "v1", "kind": "ConfigMap", "metadata": document.get("metadata", {})})
    yield from _wrong_choices(document)
    yield from _inner(document)
    read_back = _through_openapi(document) if kind == "PyTorchJob" else _through_pydantic(document, kind)
    if read_back != document:
        yield f"{kind}: its typed client keeps {read_back} of {document}"


def _through_openapi(document: Document) -> Document:
    from kubeflow.training import ApiClient

    client = ApiClient()
    response = SimpleNamespace(data=json.dumps(document))
    return client.sanitize_for_serialization(client.deserialize(response, "KubeflowOrgV1PyTorchJob"))


def _through_pydantic(document: Document, kind: str) -> Document:
    from kubeflow_trainer_api import models

    typed = getattr(models, TYPED[kind])
    return typed.model_validate(document).model_dump(mode="json", by_alias=True, exclude_none=True)


def _inner(value: Any) -> Iterator[str]:
    """Hold the Jobs and pods inside against the built-in schemas, and take them out."""
    if isinstance(value, list):
        for item in value:
            yield from _inner(item)
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        if key != "template" or not isinstance(item, dict) or "replicatedJobs" in item.get("spec", {}):
            yield from _inner(item)
        elif "containers" in item.get("spec", {}):
            yield from _built_in({"apiVersion": "v1", "kind": "PodTemplate", "template": item})
            value[key] = {}
        else:
            extra = {name: part for name, part in item.items() if name not in ("apiVersion", "kind")}
            yield from _built_in({"apiVersion": "batch/v1", "kind": "Job", **extra})
            value[key] = {}


def _wrong_choices(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _wrong_choices(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _wrong_choices(item, key)
    elif key in CHOICES and value not in CHOICES[key]:
        yield f"{key}: {value} is not one of {', '.join(sorted(CHOICES[key]))}"
