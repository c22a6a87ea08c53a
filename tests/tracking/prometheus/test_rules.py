"""Alert rules, dashboards and a live run against the real Prometheus server, promtool and amtool."""

import json
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from config.cli import REPOSITORY
from config.machine.processes import free_port
from tests.support.jobs.launches import command, start, wait_until
from tests.support.runs.compare_runs import SCALE, start_fields, step_fields
from tracking.compare.surviving import read_events
from tracking.prometheus.metrics import METRICS, VERDICTS
from tracking.prometheus.sink import PrometheusSink
from tracking.record import Record

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


DASHBOARDS = sorted((MONITORING / "grafana").glob("*.json"))
OF_OTHERS = re.compile(r"(DCGM_FI|node)_\w+|up|ALERTS")
_METRIC = re.compile(r"\b(?:run:)?mantissa_\w+(?::\w+)?")


def tool(*command: str, cwd: Path = MONITORING) -> None:
    """Run a checker that must be content."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def expressions(dashboard: Path) -> Iterator[tuple[str, str]]:
    """(panel title, PromQL) of a dashboard, Grafana's variables replaced as Grafana would."""
    document = json.loads(dashboard.read_text())
    queries = [(p["title"], t["expr"]) for p in document["panels"] for t in p.get("targets", ())]
    queries += [(note["name"], note["target"]["expr"]) for note in document["annotations"]["list"]]
    for title, expression in queries:
        for variable, text in (("$__rate_interval", "1m"), ("$__range", "1h"), ("$run", ".*")):
            expression = expression.replace(variable, text)
        assert "$" not in expression.replace('"$1"', ""), f"{title}: a variable that nobody replaces"
        yield title, expression


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def exported() -> set[str]:
    """Names of all series that a run or a recording rule may have."""
    names = {"mantissa_exporter_scrapes"} | {rule["record"] for rule in rules() if "record" in rule}
    for name, (kind, _, _) in METRICS.items():
        endings = {"Histogram": ("_bucket", "_sum", "_count"), "Summary": ("_sum", "_count")}.get(kind.__name__, ("",))
        names |= {f"mantissa_{name}{ending}" for ending in endings}
    return names


@needs("promtool")
def test_the_rules_fire_when_they_should_and_only_then() -> None:
    tool("promtool", "check", "rules", "rules.yml")
    tool("promtool", "test", "rules", "rules_test.yml")
    tool("promtool", "check", "config", "prometheus.yml")


def test_every_alert_is_tested_both_ways_and_says_what_to_do() -> None:
    tests = yaml.safe_load((MONITORING / "rules_test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", ())]
    for rule in rules():
        if "alert" not in rule:
            continue
        mine = [case for case in cases if case["alertname"] == rule["alert"]]
        assert {bool(case.get("exp_alerts")) for case in mine} == {True, False}, rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() >= {"summary", "description"}
        assert "{{ $labels.run }}" in rule["annotations"]["summary"], f"{rule['alert']}: grouped by run"


@needs("amtool")
def test_the_alertmanager_example_is_valid() -> None:
    tool("amtool", "check-config", "alertmanager.yml")


def test_rules_and_dashboards_ask_for_nothing_that_is_not_exported() -> None:
    asked = {(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()}
    asked |= {(f"{path.name}: {title}", text) for path in DASHBOARDS for title, text in expressions(path)}
    assert len(DASHBOARDS) == 3
    for where, expression in asked:
        unknown = set(_METRIC.findall(expression)) - exported()
        assert not unknown, f"{where}: {unknown}"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_whole(path: Path) -> None:
    document = json.loads(path.read_text())
    panels = document["panels"]
    assert document["uid"] and len({panel["id"] for panel in panels}) == len(panels)
    assert {variable["name"] for variable in document["templating"]["list"]} == {"datasource", "run"}


@needs("prometheus")
def test_every_query_is_answered_from_a_run(tmp_path: Path) -> None:
    """Every expression parses, and those on a run's own metrics find something."""
    sink = PrometheusSink("demo", planned_steps=100, port=0)
    assert sink.url is not None
    try:
        with prometheus_server(tmp_path, scrape_port=int(sink.url.split(":")[2].split("/")[0])) as server:
            record_everything(Record([sink]))
            wait_until(lambda: server.values("mantissa_exit_code"), seconds=60)
            record_everything(Record([sink]))
            wait_until(lambda: server.values("changes(mantissa_tokens_total[1m]) > 0"), seconds=60)
            wait_until(lambda: server.values("run:mantissa_tokens:rate10m"), seconds=60)
            for path in DASHBOARDS:
                for title, expression in expressions(path):
                    found = server.values(expression)
                    own = OF_OTHERS.search(expression) is None and not expression.startswith("changes(")
                    assert found or not own, f"{path.name}: {title}: {expression} finds nothing"
            command = ["promtool", "check", "metrics"]
            text = urllib.request.urlopen(sink.url, timeout=10).read().decode()
            found = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
            assert found.returncode == 0 and not found.stderr, found.stderr
    finally:
        sink.close()


def record_everything(record: Record) -> None:
    """At least one event of each kind that moves a metric; called twice, every counter grows under a server's eyes."""
    where = {"step": 5, "tokens": 5}
    ranks = {"work_seconds": [0.1, 0.2], "memory_bytes": [10, 20]}
    record.event("run_start", step=0, tokens=0, **start_fields(model="Llama"))
    for applied in (True, False):
        record.event("step", **where, **step_fields(5, applied=applied), by_rank=ranks, data_seconds=0.1)
    for reason in ("overflow", "growth"):
        record.scale(**where, previous=2.0, new=1.0, reason=reason, **SCALE)
    for verdict in VERDICTS:
        record.event("incident", **where, verdict=verdict, reason="", modules=[], replay="")
    record.event("nonfinite", **where, rank=1, module="m", tensor="gradient", kind="nan", count=1)
    record.event("eval", **where, loss=3.0, perplexity=20.0)
    record.event("checkpoint", **where, path="p", seconds=2.0, stall_seconds=0.5, bytes=10, verified=True)
    record.event("fault", **where, kind="nan_loss", rank=0, module=None)
    record.event("note", **where, text="disk full", failed="checkpoint")
    record.event("precision", **where, flop_share={"bf16": 0.9, "fp32": 0.1})
    record.event("run_end", **where, status="done", exit_code=0)


@needs("prometheus")
@pytest.mark.timeout(400)
def test_a_fault_in_a_live_run_fires_the_right_alert(tmp_path: Path) -> None:
    """Two real processes under Prometheus; an activation of rank 1 becomes nan and no reaction is allowed."""
    port = free_port()
    overrides = ["run.steps=4000", "evaluate.every_steps=20", "checkpoint.every_steps=20", "guard.reactions=[abort]"]
    overrides += [f"tracking.prometheus_port={port}", "faults=[{kind: nan_activation, step: 120, rank: 1}]"]
    with prometheus_server(tmp_path, scrape_port=port) as server:
        job = start(command("deepspeed", tmp_path, "faulty", *overrides))
        try:
            wait_until(lambda: server.values("mantissa_step > 20") or job.poll(), seconds=200)
            assert job.poll() is None, job.communicate(timeout=1)[0]
            assert not server.firing(), "all is well so far"
            assert server.values("mantissa_info")[0][0]["world_size"] == "2"
            assert {labels["rank"] for labels, _ in server.values("mantissa_rank_work_seconds")} == {"0", "1"}
            wait_until(server.firing, seconds=100)
            job.communicate(timeout=60)
            alerts = server.firing()
            assert [(alert["alertname"], alert["run"], alert["severity"]) for alert in alerts] == [
                ("MantissaHaltedByNumerics", "faulty", "page")
            ]
            struck = next(e for e in read_events(tmp_path / "runs/faulty/events.jsonl") if e["event"] == "incident")
            known = server.get("/api/v1/alerts")["data"]["alerts"]  # those that only may come to fire are among them
            active = next(a["activeAt"] for a in known if a["labels"]["alertname"] == "MantissaHaltedByNumerics")
            began = datetime.fromisoformat(re.sub(r"(\.\d{6})\d*Z", r"\1+00:00", active))  # it has nanoseconds
            assert 0 <= began.timestamp() - struck["time"] < 4, "a scrape and an evaluation, a second each, and slack"
            assert server.values("last_over_time(mantissa_exit_code[5m])")[0][1] == 3
            assert server.values("last_over_time(mantissa_nonfinite_by_rank_total{rank='1'}[5m])")[0][1] > 0
        finally:
            job.send_signal(signal.SIGTERM)
            job.communicate(timeout=60)


def test_the_page_names_every_metric_and_every_alert() -> None:
    page = (MONITORING.parent / "monitoring.md").read_text()
    for name, (kind, text, _) in METRICS.items():
        assert re.search(rf"\| `mantissa_{name}`.* \| {kind.__name__.lower()} \| {re.escape(text)} \|", page), name
    alerts = {(rule["alert"], rule["labels"]["severity"]) for rule in rules() if "alert" in rule}
    assert set(re.findall(r"\| `(Mantissa\w+)` \| (\w+) \|", page)) == alerts
