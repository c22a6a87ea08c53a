"""A hub that does not answer costs seconds, and a model that is nowhere else is one line."""

import os
import socket
import time
from pathlib import Path

import pytest

from config import hub
from config.load import load_config
from tests.support.refusals import refused

SCRATCH = "model: {architecture: llama}\n"


def settle(folder: Path, text: str) -> None:
    path = folder / "run.yaml"
    path.write_text(text)
    hub.settle_hub(load_config(path, [], None))


@pytest.fixture(autouse=True)
def _nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_a_model_that_is_nowhere_else_is_one_line(tmp_path: Path) -> None:
    said = refused(settle, tmp_path, "model: {name_or_path: org/model}\n")
    assert said.startswith("model.name_or_path = org/model: is neither a folder nor in the cache, and the hub, http")
    assert "Connection refused" in said and said.endswith(
        "connect, set HF_ENDPOINT or https_proxy, or give a model folder"
    )


def test_a_mistyped_folder_is_told_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "exported" / "demo").mkdir(parents=True)
    said = refused(settle, tmp_path, "model: {name_or_path: exported/dmeo}\n")
    assert said.endswith("did you mean exported/demo?")


@pytest.mark.parametrize("text", ["model: {name_or_path: org/model}\n", SCRATCH + "data: {tokenizer: org/tokens}\n"])
def test_what_may_be_kept_here_is_read_without_asking_the_hub(tmp_path: Path, text: str) -> None:
    kept = tmp_path / "cache" / "hub" / "models--org--model" / "snapshots" / "abc" / "config.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    settle(tmp_path, text)
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_run_without_names_of_the_hub_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_why_unreachable", lambda: pytest.fail("asked"))
    (tmp_path / "weights").mkdir()
    settle(tmp_path, SCRATCH)
    settle(tmp_path, "model: {name_or_path: weights}\ndata: {tokenizer: model}\n")


def test_a_hub_that_never_answers_is_waited_for_briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(hub, "_SECONDS", 0.3)
        began = time.monotonic()
        assert "cannot be reached" in refused(settle, tmp_path, "model: {name_or_path: org/model}\n")
        assert time.monotonic() - began < 3
