"""Packages and hubs that a run may need: each that is missing is one line, and costs seconds."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from config import extras, hub
from config.cli import REPOSITORY
from config.errors import UserError
from config.load import load_config
from tests.support.refusals import refused

DEMO = REPOSITORY / "config/recipes/demo.yaml"
GIVEN = ["model.architecture=null", "model.config={}", "model.name_or_path=gpt2"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["checkpoint.dir=s3://bucket/runs"], r"checkpoint\.dir=s3://\.\.\. needs pip install s3fs==\d[\d.]+"),
        (["checkpoint.dir=gs://bucket/runs"], r"checkpoint\.dir=gs://\.\.\. needs pip install gcsfs"),
        (["checkpoint.encryption_key=env:KEY"], r"checkpoint\.encryption_key needs pip install cryptography==\d[\d.]+"),
        (
            ["tracking.otlp_endpoint=http://localhost:4318"],
            r"tracking\.otlp_endpoint=http://localhost:4318 needs pip install opentelemetry-sdk==\d[\d.]+ "
            r"opentelemetry-exporter-otlp-proto-http==\d[\d.]+",
        ),
        (["tracking.prometheus_port=9100"], r"tracking\.prometheus_port=9100 needs pip install prometheus-client==\d"),
        (
            ["tracking.sinks=[csv, mlflow]"],
            r"tracking\.sinks=mlflow needs pip install mlflow-skinny==\d[\d.]+ SQLAlchemy==\d[\d.]+ alembic==\d[\d.]+",
        ),
        (["tracking.sinks=[wandb, trackio]"], r"tracking\.sinks=trackio needs pip install trackio"),
        ([*GIVEN, "adapter={kind: lora, base: nf4}"], r"adapter\.base=nf4 needs pip install bitsandbytes==\d"),
    ],
)
def test_a_missing_package_is_asked_for_in_one_line(settings: list[str], message: str, monkeypatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    config = load_config(DEMO, settings, None)
    with pytest.raises(UserError, match=rf"^{message}[\d.]*$"):
        extras.require_extras(config)


def test_packages_that_are_installed_are_not_asked_for() -> None:
    settings = ["checkpoint.dir=s3://bucket/runs", "tracking.prometheus_port=9100", "tracking.sinks=[csv, mlflow]"]
    extras.require_extras(load_config(DEMO, settings, None))


def test_a_module_of_a_package_that_is_not_there_is_missing() -> None:
    with pytest.raises(UserError, match="x needs pip install no_such_package.part"):
        extras.require("no_such_package.part", "x")


def test_a_plain_run_needs_none_of_them(monkeypatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    extras.require_extras(load_config(DEMO, [], None))
    modules = ["s3fs", "cryptography", "prometheus_client", "tensorboard", "mlflow", "sqlalchemy", "alembic"]
    modules += ["wandb_workspaces", "bitsandbytes", "pynvml", "opentelemetry"]
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({modules}, None)); "
        "import train, training.build, training.finish, training.loop, training.session"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_line_names_the_pins_of_the_requirements() -> None:
    text = extras.EXTRAS.read_text(encoding="utf-8")
    unpinned = {"gcsfs", "adlfs"}
    named = {name for names in extras.PACKAGES.values() for name in names} | set(extras.DRIVERS.values()) - unpinned
    assert [name for name in sorted(named) if f"\n{name}==" not in text] == []


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
