"""Packages of requirements-extras.txt: which settings need them, and the error line for a missing one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec

from config.cli import REPOSITORY
from config.errors import UserError
from config.schema import Config

EXTRAS = REPOSITORY / "requirements-extras.txt"

PACKAGES = {
    "mlflow": ("mlflow-skinny", "SQLAlchemy", "alembic"),
    "opentelemetry.exporter": ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
    "prometheus_client": ("prometheus-client",),
    "wandb_workspaces": ("wandb-workspaces",),
}
"""Module to the packages it needs, if their names differ from it or several are needed."""
DRIVERS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "abfss": "adlfs", "az": "adlfs"}
"""Scheme of a URL to the module that fsspec reads it with."""


def require_extras(config: Config) -> None:
    """Raise UserError for the first setting of a run whose package is not installed."""
    for setting, module in _needed(config):
        require(module, setting)


def require(module: str, what: str) -> None:
    """Raise UserError unless a module is installed. what: the setting or command that needs it."""
    try:
        found = find_spec(module)
    except ModuleNotFoundError:  # its parent package is missing
        found = None
    if found is None:
        raise UserError(f"{what} needs pip install {' '.join(map(_pinned, PACKAGES.get(module, (module,))))}")


def _needed(config: Config) -> Iterator[tuple[str, str]]:
    tracking, (scheme, _, place) = config.tracking, (config.checkpoint.dir or "").partition("://")
    if place and scheme in DRIVERS:
        yield f"checkpoint.dir={scheme}://...", DRIVERS[scheme]
    if config.checkpoint.encryption_key is not None:
        yield "checkpoint.encryption_key", "cryptography"
    if tracking.otlp_endpoint is not None:
        yield f"tracking.otlp_endpoint={tracking.otlp_endpoint}", "opentelemetry.exporter"
    if tracking.prometheus_port is not None:
        yield f"tracking.prometheus_port={tracking.prometheus_port}", "prometheus_client"
    yield from ((f"tracking.sinks={name}", name) for name in tracking.sinks if name not in ("wandb", "csv"))
    if config.adapter.base != "compute":
        yield f"adapter.base={config.adapter.base}", "bitsandbytes"


def _pinned(package: str) -> str:
    """The package as pinned in requirements-extras.txt; without a version if it is not pinned there."""
    found = re.search(rf"^{re.escape(package)}==\S+$", EXTRAS.read_text(encoding="utf-8"), re.MULTILINE)
    return found[0] if found else package
