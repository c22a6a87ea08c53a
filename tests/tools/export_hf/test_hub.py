"""Uploads through the real huggingface_hub to a hub on this machine; what is wrong is told before an export starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from tests.support.servers.hub_server import TOKEN, Hub, Repo, running

# Its settings are read when huggingface_hub is imported, so each case is a process of its own.
PROGRAM = """
import sys
from pathlib import Path
from config.errors import UserError
from tools.export_hf import hub
try:
    repo = hub.find_repo(sys.argv[1], private=sys.argv[2] == "private")
    print(hub.upload(repo, Path(sys.argv[3]), message="a message"))
except UserError as error:
    sys.exit(f"error: {error}")
assert "torch" not in sys.modules
"""


def push(hub: Hub, folder: Path, name: str, visibility: str, **environment: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "README.md").write_text("---\ntags: [mantissa]\n---\n")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    arguments = [name, visibility, str(folder)]
    variables = hub.environment(HF_HOME=str(folder.with_name("home")), **environment)
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("visibility", "private"), [("private", True), ("public", False)])
def test_a_new_repository_is_created_and_gets_every_file(tmp_path: Path, visibility: str, private: bool) -> None:
    with running() as hub:
        done = push(hub, tmp_path / "out", "team/new", visibility)
        assert done.returncode == 0, done.stderr
        assert hub.repos["team/new"].private is private and hub.repos["team/new"].messages == ["a message"]
        assert hub.repos["team/new"].files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
        assert list(hub.large.values()) == [(tmp_path / "out/model.safetensors").read_bytes()]


@pytest.mark.parametrize(
    ("name", "environment", "message"),
    [
        ("a/b/c", {}, "--push-to-hub a/b/c: not a repository's name (Repo id must be in the form"),
        ("a", {"HF_HUB_OFFLINE": "1"}, "--push-to-hub a: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set; unset it"),
        ("a", {"TRANSFORMERS_OFFLINE": "1"}, "--push-to-hub a: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set; unset"),
        ("a", {"HF_TOKEN": ""}, "--push-to-hub a: there is no token; set HF_TOKEN, or log in with `hf auth login`"),
        ("a", {"HF_TOKEN": "hf_wrong"}, "Invalid user token. The token from HF_TOKEN environment variable is invalid"),
        ("a", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9: [Errno 111] Connection refused; check the"),
        ("team/open", {}, "--push-to-hub team/open: is public already; make it private on the hub"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_is_sent(
    tmp_path: Path, name: str, environment: dict[str, str], message: str
) -> None:
    with running() as hub:
        hub.repos["team/open"] = Repo(private=False)
        done = push(hub, tmp_path / "out", name, "private", **environment)
        assert list(hub.repos) == ["team/open"] and not hub.repos["team/open"].files
    assert done.returncode == 1 and message in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and TOKEN not in done.stderr


def test_the_token_is_not_in_what_the_hub_answers(tmp_path: Path) -> None:
    with running() as hub:
        hub.refuses = "/repos/create"
        done = push(hub, tmp_path / "out", "team/new", "private")
    assert done.returncode == 1 and "Forbidden: your token *** may not write here" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and TOKEN not in done.stderr
    assert f"the export is whole in {tmp_path}/out; upload it with `hf upload team/new {tmp_path}/out`" in done.stderr
