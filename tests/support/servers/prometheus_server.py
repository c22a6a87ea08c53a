"""A real Prometheus server for a test, on a free port of the loopback interface."""

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from config.cli import REPOSITORY
from config.machine.processes import free_port
from tests.support.jobs.launches import wait_until

MONITORING = REPOSITORY / "docs/monitoring"


def needs(program: str) -> pytest.MarkDecorator:
    reason = f"{program} is not installed: apt-get install prometheus"
    return pytest.mark.skipif(shutil.which(program) is None, reason=reason)


class PrometheusServer:
    """A server that is queried over HTTP."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **arguments: str) -> dict[str, Any]:
        """The JSON answer, also of a refused query."""
        query = urllib.parse.urlencode(arguments)
        try:
            with urllib.request.urlopen(f"{self._url}{path}?{query}", timeout=10) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return json.load(error)

    def values(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series of an instant query."""
        answer = self.get("/api/v1/query", query=expression)
        assert answer["status"] == "success", answer
        return [(series["metric"], float(series["value"][1])) for series in answer["data"]["result"]]

    def firing(self) -> list[dict[str, str]]:
        alerts = self.get("/api/v1/alerts")["data"]["alerts"]
        return [alert["labels"] for alert in alerts if alert["state"] == "firing"]


@contextmanager
def prometheus_server(folder: Path, *, scrape_port: int) -> Iterator[PrometheusServer]:
    """Scrapes `scrape_port` and evaluates the rules of docs/monitoring every second."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(MONITORING / "rules.yml")],
        "scrape_configs": [{"job_name": "mantissa", "static_configs": [{"targets": [f"127.0.0.1:{scrape_port}"]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        server = PrometheusServer(f"http://{address}")
        wait_until(lambda: _ready(server), seconds=60)
        yield server
    finally:
        process.terminate()
        process.wait(30)


def _ready(server: PrometheusServer) -> bool:
    try:
        return server.get("/api/v1/query", query="1")["status"] == "success"
    except (urllib.error.URLError, ValueError):
        return False
