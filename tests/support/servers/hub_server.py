"""A Hugging Face hub of one machine: the endpoints that creating a repository and committing a folder need."""

import base64
import hashlib
import json
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from tests.support.servers import threads

TOKEN = "hf_" + "t0ken" * 6
USER = "someone"


@dataclass
class Repo:
    """One model repository."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


class Hub(threads.Server):
    """Repositories by name. `large` has the content of LFS objects by SHA-256; `refuses` a path that answers 403."""

    def __init__(self) -> None:
        super().__init__(Handler)
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        self.refuses = "nothing"

    def environment(self, **more: str) -> dict[str, str]:
        """For a process that is to use this hub as its user. Xet's own protocol is not spoken here, LFS is."""
        clean = {name: value for name, value in os.environ.items() if not name.endswith(("_OFFLINE", "HF_TOKEN"))}
        return clean | {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"} | more


class Handler(threads.Handler):
    """https://huggingface.co/docs/hub/api, as far as it is needed."""

    server: Hub

    def refused(self) -> bool:
        path = self.path.partition("?")[0]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid credentials"}, 401)
        elif path.endswith(self.server.refuses):
            self.answer({"error": f"Forbidden:\nyour token {TOKEN} may not write here"}, 403)
        else:
            return False
        return True

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if self.refused():
            return
        name = "/".join(path.split("/")[3:5])
        if path == "/api/whoami-v2":
            self.answer({"name": USER, "type": "user", "orgs": []})
        elif name not in self.server.repos:
            self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        elif "/tree/" in path:
            files = self.server.repos[name].files
            self.answer([{"type": "file", "path": one, "size": len(files[one]), "oid": "0" * 40} for one in files])
        else:
            self.answer({"id": name, "private": self.server.repos[name].private, "siblings": [], "tags": []})

    def do_POST(self) -> None:
        path, content = self.path.partition("?")[0], self.body()
        if self.refused():
            return
        if path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self.create(json.loads(content))
        elif "/preupload/" in path:
            self.answer({"files": [self.mode(one["path"]) for one in json.loads(content)["files"]]})
        elif path.endswith("/info/lfs/objects/batch"):
            actions = [self.place(one) for one in json.loads(content)["objects"]]
            self.answer({"transfer": "basic", "objects": actions})
        elif "/commit/" in path:
            self.commit("/".join(path.split("/")[3:5]), [json.loads(line) for line in content.splitlines()])

    def do_PUT(self) -> None:
        content = self.body()
        self.server.large[self.path.rpartition("/")[2]] = content
        self.answer({})

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization'] or USER}/{asked['name']}"
        status = 409 if name in self.server.repos else 200
        self.server.repos.setdefault(name, Repo(private=asked.get("visibility") == "private"))
        self.answer({"url": f"{self.server.url}/{name}", "name": name}, status)

    @staticmethod
    def mode(path: str) -> dict[str, Any]:
        mode = "lfs" if path.endswith(".safetensors") else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False}

    def place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {**item, "actions": {"upload": {"href": f"{self.server.url}/large/{item['oid']}"}}}

    def commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        repo = self.server.repos[name]
        for kind, value in ((line["key"], line["value"]) for line in lines):
            if kind == "header":
                repo.messages.append(value["summary"])
            elif kind == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                content = self.server.large[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"] and len(content) == value["size"]
                repo.files[value["path"]] = content
            elif kind == "deletedFile":
                del repo.files[value["path"]]
        oid = hashlib.sha1(json.dumps(lines).encode()).hexdigest()
        self.answer({"commitUrl": f"{self.server.url}/{name}/commit/{oid}", "commitOid": oid, "success": True})


def running() -> AbstractContextManager[Hub]:
    """A hub that answers."""
    return threads.answering(Hub())
