"""Packages that single settings need: each is asked for in one line, and a run without these settings imports none."""

import subprocess
import sys

import pytest

from config import extras
from config.cli import REPOSITORY
from config.errors import UserError
from config.load import load_config

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
