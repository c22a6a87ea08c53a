"""A stand-in for wandb's server, so that wandb's own client can be watched at what it sends.

It answers the requests that the client of the pinned version makes, keeps each run's history, config, alerts and
artifacts, and tells a resuming client what it has. It is not wandb's server: it accepts what that might refuse.
"""

import gzip
import json
import os
import re
import signal
import threading
from contextlib import AbstractContextManager
from typing import Any

from tests.support.jobs.launches import children
from tests.support.servers import threads

PROJECT = {"id": "p1", "name": "p", "entity": {"id": "e1", "name": "team"}}


class StandIn(threads.Server):
    """The client's requests so far, as attributes."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.lock = threading.Lock()
        self.history: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.summary: str = "{}"
        self.run: dict[str, Any] = {}
        self.exit_codes: list[int] = []
        self.preempting = 0
        self.alerts: list[dict[str, Any]] = []
        self.artifacts: list[dict[str, Any]] = []
        self.manifests: list[dict[str, Any]] = []
        self.views: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of a GraphQL response."""
        method = getattr(self, f"on_{operation}", None)
        return method(variables) if method else {}

    def on_Viewer(self, _: dict[str, Any]) -> dict[str, Any]:
        entity = {"id": "u1", "entity": "team", "username": "me", "email": "", "flags": "{}", "admin": False}
        return {"viewer": entity | {"teams": {"edges": [{"node": {"name": "team"}}]}, "apiKeys": {"edges": []}}}

    def on_RunResumeStatus(self, variables: dict[str, Any]) -> dict[str, Any]:
        if not self.run:
            return {"model": PROJECT | {"bucket": None}}
        bucket = {"id": "r1", "name": variables["name"], "displayName": "demo", "summaryMetrics": self.summary}
        bucket |= {"historyTail": json.dumps([json.dumps(row) for row in self.history[-1:]]), "eventsTail": "[]"}
        bucket |= {"historyLineCount": len(self.history), "logLineCount": 0, "eventsLineCount": 0, "tags": []}
        bucket |= {"config": json.dumps(self.config), "wandbConfig": json.dumps({"t": {"4": "3.11"}})}
        return {"model": PROJECT | {"bucket": bucket | {"notes": None, "runInfo": {"args": []}}}}

    def on_UpsertBucket(self, variables: dict[str, Any]) -> dict[str, Any]:
        inserted = not self.run
        self.run |= {key: value for key, value in variables.items() if value is not None}
        self.config |= json.loads(variables.get("config") or "{}")
        self.summary = variables.get("summaryMetrics") or self.summary
        bucket: dict[str, Any] = {"id": "r1", "name": self.run["name"], "displayName": "demo"}
        bucket |= {"project": PROJECT, "historyLineCount": len(self.history)}
        return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}

    def on_NotifyScriptableRunAlert(self, variables: dict[str, Any]) -> dict[str, Any]:
        self.alerts.append(variables)
        return {"notifyScriptableRunAlert": {"success": True}}

    def on_ArtifactType(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"project": None}  # no artifact of that name yet

    def on_CreateArtifact(self, variables: dict[str, Any]) -> dict[str, Any]:
        self.artifacts.append(variables.get("input") or variables)
        artifact = {"id": f"a{len(self.artifacts)}", "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
        return {"createArtifact": {"artifact": artifact}}

    def on_CreateArtifactManifest(self, variables: dict[str, Any]) -> dict[str, Any]:
        upload = {"uploadUrl": f"{self.url}/manifest", "uploadHeaders": []} if variables["includeUpload"] else {}
        return {"createArtifactManifest": {"artifactManifest": {"id": "m1", "file": {"id": "f1", **upload}}}}

    def on_CommitArtifact(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {"commitArtifact": {"artifact": {"id": variables["artifactID"], "digest": "0"}}}

    def on_CreateArtifactFiles(self, variables: dict[str, Any]) -> dict[str, Any]:
        files = variables["input"]["artifactFiles"]
        common = {"uploadUrl": f"{self.url}/file", "uploadHeaders": [], "uploadMultipartUrls": None}
        common["storagePath"] = "s"
        nodes = [common | {"artifact": {"id": file["artifactID"]}, "name": file["name"]} for file in files]
        return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}

    def on_CreateRunFiles(self, variables: dict[str, Any]) -> dict[str, Any]:
        files = [{"name": name, "uploadUrl": f"{self.url}/file"} for name in variables["files"]]
        return {"createRunFiles": {"runID": "r1", "uploadHeaders": [], "files": files}}

    def on_UpsertView2(self, variables: dict[str, Any]) -> dict[str, Any]:
        self.views.append(variables)
        return {"upsertView": {"view": {"id": "v1", "name": variables["name"]}, "inserted": True}}

    def file_stream(self, sent: dict[str, Any]) -> None:
        """History lines go where their offset says, as in wandb's server; the run's end has an exit code."""
        for name, chunk in (sent.get("files") or {}).items():
            if name == "wandb-history.jsonl":
                self.history[chunk["offset"] :] = [json.loads(line) for line in chunk["content"]]
            elif name == "wandb-summary.json":
                self.summary = chunk["content"][-1]
        self.preempting += bool(sent.get("preempting"))
        if sent.get("complete"):
            self.exit_codes.append(sent["exitcode"])


class _Handler(threads.Handler):
    server: StandIn

    def do_GET(self) -> None:
        self.answer({})

    def do_PUT(self) -> None:
        body = self.body()
        if self.path == "/manifest":
            self.server.manifests.append(json.loads(body))
        self.answer({})

    def do_POST(self) -> None:
        body = self.body()
        with self.server.lock:
            self.answer(self._taken(json.loads(body)) if self.path.endswith(("/graphql", "/file_stream")) else {})

    def _taken(self, sent: dict[str, Any]) -> dict[str, Any]:
        if self.path.endswith("/file_stream"):
            self.server.file_stream(sent)
            return {}
        named = re.search(r"(?:query|mutation)\s+(\w+)", sent["query"])
        name = sent.get("operationName") or (named[1] if named else "")
        return {"data": self.server.answer(name, sent.get("variables") or {})}

    def body(self) -> bytes:
        body = super().body()
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.bodies.append(body)
        return body


def stand_in(server: StandIn | None = None) -> AbstractContextManager[Any]:
    """A server that is up for as long as the context lasts."""
    return threads.answering(server or StandIn())


def end_children(pid: int, how: signal.Signals) -> None:
    """Send a signal to what the process has started: of wandb's worker, wandb's own helper."""
    found = children(pid)
    assert found
    for child in found:
        os.kill(child, how)
