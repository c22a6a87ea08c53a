"""The page server: what the overview and a run's page have, that they follow a run, and what cannot be reached."""

import math
import os
import re
import signal
import subprocess
import sys
import urllib.request
from functools import partial
from itertools import pairwise

import pytest

from config.cli import REPOSITORY
from tests.support.jobs.launches import wait_until
from tests.support.page import Page
from tests.support.runs.compare_runs import CONFIG, ENVIRONMENT, RunWriter, merged, write_run
from tests.support.runs.heat_runs import growing, write_heat_run
from tests.support.runs.hostile import HOSTILE, OBEYED
from tests.support.servers.serving import served
from tracking import jsonl, live
from tracking.serve import library
from tracking.serve.command import main


def overflowing(step, fields):
    fields = {"skipped_total": int(step >= 20)}
    return fields | {"loss": math.nan, "grad_norm": math.inf, "applied": False} if step == 20 else fields


INCIDENT = {"event": "incident", "verdict": "SKIP", "reason": "the loss is nan", "modules": []}
INCIDENT["replay"] = "python -m tools.replay runs/a --step 20"
CAUSE = {"event": "nonfinite", "rank": 1, "module": "model.layers.1.mlp", "tensor": "activation", "kind": "nan"}
CAUSE["count"] = 3


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Two seeds, a run with an incident, one that crashed, and one with heat maps."""
    root = tmp_path_factory.mktemp("runs")
    for seed in range(2):
        write_run(root, f"base-s{seed}", config={"run.seed": seed})
    write_run(root, "a", change=overflowing, after={20: [CAUSE, INCIDENT]}, config={"optimizer.learning_rate": 0.01})
    crashed = RunWriter(root, "crashed")
    crashed.run_dir.write_inputs(merged(CONFIG, {"run.steps": 100}), {}, ENVIRONMENT)
    crashed.start()
    crashed.step(1)
    activation = growing([2, 3], limit_step=450, per_100=1.5)
    write_heat_run(root / "sweep", "grows", layers=4, steps=400, activation=activation)
    with served(root) as client:
        yield client


def rows(page):
    """Text of each row of the overview by the run's name."""
    found = {}
    for row in re.findall(r"<tr>(.*?)</tr>", page, re.S)[1:]:
        text = " ".join(re.sub(r"<[^>]+>", " ", row).split())
        name = re.search(r'scope="row"><a [^>]*>(.*?)</a>', row, re.S)
        found[name[1]] = text
    return found


def test_the_overview_has_a_row_for_each_run(client):
    found = rows(client.page("/"))
    assert found.keys() == {"base-s0", "base-s1", "a", "crashed", "sweep/grows"}
    assert "healthy learning_rate 3e-4" in found["base-s0"] and "3.9604 3.4500 40 of 40" in found["base-s0"]
    assert (
        "finished with warnings 1 warning SKIP: the loss is nan" in found["a"]
        and "1 (2.5%)" in found["a"]
        and "learning_rate 0.01" in found["a"]
    )
    assert "killed no process has the run folder" in found["crashed"] and "1 of 100" in found["crashed"]
    assert "5 runs, 1 killed, 1 finished with warnings, 3 healthy" in " ".join(client.page("/").split())


def test_the_overview_is_searched_sorted_and_grouped(client):
    assert rows(client.page("/runs", q="learning_rate=0.01 FINISHED")).keys() == {"a"}
    assert "No run has all of these words" in client.page("/runs", q="nothing like it")
    by_name = list(rows(client.page("/runs", sort="name")))
    assert by_name == sorted(by_name) and list(rows(client.page("/runs", sort="-name"))) == by_name[::-1]
    assert next(iter(rows(client.page("/runs", sort="skips")))) == "a"
    assert next(iter(rows(client.page("/runs", sort="verdict")))) == "crashed"
    grouped = client.page("/runs", group="seed")
    found = rows(grouped)
    assert found["base (2 seeds)"].count("±") == 2 and "seeds 0, 1" in found["base (2 seeds)"]
    assert grouped.count("<polygon") == 1 and len(found) == 4


def test_the_page_of_a_run_has_its_state_curves_and_incidents(client):
    page = client.page("/run", key="a")
    assert "finished with warnings</b> since step 20" in page and INCIDENT["replay"] in page
    assert "40 of 40" in page and "2^16" in page
    found = client.data("/run/curves", key="a")
    [run] = found["drawn"]["runs"]
    assert found["steps"] == 40 and run["curve"]["loss"][19] is None and run["curve"]["step"][-1] == 40
    flops = 6 * 12_345_678 * run["curve"]["tokens_per_second"][0] / 2  # on each of two devices
    assert run["curve"]["utilisation"][0] == pytest.approx(100 * flops / 989.4e12, rel=0.01)
    incidents = client.page("/run/incidents", key="a")
    assert incidents.count("<code>python -m tools.replay runs/a --step 20</code>") == 1
    assert "3 nan in the activation of model.layers.1.mlp on rank 1" in incidents
    assert {mark["kind"] for mark in run["marks"]} >= {"incident", "nonfinite", "skip"}


def test_heat_maps_are_folded_and_unfolded_on_request(client):
    about = client.data("/run/heat", key="sweep/grows")
    lines = {panel["key"]: panel["line"] for panel in about["panels"]}
    assert lines["activation"].startswith("layers 2-3 down_proj: activations at ") and about["measured"] == 40
    kinds = client.data("/run/heat", key="sweep/grows", panel="activation", fold="kinds")
    assert "model.layers.*.mlp.down_proj" in kinds["names"] and len(kinds["values"]) == len(kinds["rows"]) < 20
    opened = client.data(
        "/run/heat", key="sweep/grows", panel="activation", fold="kinds", open=["model.layers.*.mlp.down_proj"]
    )
    assert len(opened["rows"]) == len(kinds["rows"]) + 4
    assert len(client.data("/run/heat", key="sweep/grows", panel="gradient", fold="blocks")["rows"]) == 7
    assert client.data("/run/heat", key="a")["panels"][0]["line"].startswith("first in layer 1 mlp")
    assert client.ask("/run/heat?key=a&panel=drift")[0] == 400


def test_a_selection_opens_as_a_comparison_and_a_run_as_its_report(client):
    page = client.page("/compare", run=["base-s0", "a"])
    assert "base-s0" in page and "diverge at step 20" in page
    status, headers, body = client.ask("/run/report?key=a")
    assert status == 200 and "non-finite steps" in body.decode()
    assert "sandbox" in headers["Content-Security-Policy"]
    assert client.ask("/compare")[0] == 400
    assert client.ask("/compare?" + "&".join(f"run={n}" for n in range(30)))[0] == 400


def test_the_pages_follow_a_run_that_trains(tmp_path):
    writer = RunWriter(tmp_path, "live")
    writer.run_dir.write_inputs(CONFIG, {}, {})
    writer.start()
    for step in range(1, 11):
        writer.step(step)
    with served(tmp_path) as client:
        assert "10 of 40" in client.page("/runs") and client.data("/run/curves", key="live")["steps"] == 10
        _, headers, _ = client.ask("/runs")
        writer.step(11)
        writer.step(8, loss=7.0)  # rolled back
        with writer.run_dir.events.open("ab") as file:
            file.write(b'{"event":"step","step":9,"ti')  # is being written
        client.library.look()
        assert client.ask("/runs", If_None_Match=headers["ETag"])[0] == 200
        [run] = client.data("/run/curves", key="live")["drawn"]["runs"]
        assert run["curve"]["step"] == list(range(1, 9)) and run["curve"]["loss"][-1] == 7.0
        assert "8 of 40" in client.page("/runs")
        write_run(tmp_path, "second")
        client.library._looked -= library._LOOK_S
        client.library.look()
        assert rows(client.page("/")).keys() == {"live", "second"}


def test_an_unchanged_table_is_not_sent_again(client):
    _, headers, _ = client.ask("/run/curves?key=a")
    status, _, body = client.ask("/run/curves?key=a", If_None_Match=headers["ETag"])
    assert status == 304 and body == b""


@pytest.mark.parametrize(
    "path",
    [
        *("/../../etc/passwd", "/static/../server.py", "/static/..%2fserver.py", "/static//etc/passwd", "//etc/passwd"),
        *("/run?key=../outside", "/run?key=/etc", "/run?key=a/../a", "/run?key=", "/run", "/run?key=a%00", "/nothing"),
        *("/run/report?key=..%2foutside", "/run/curves?key=%2e%2e/outside", "/static/templates/base.html"),
    ],
)
def test_no_path_leads_elsewhere(client, path):
    assert client.ask(path)[0] == 404


def test_links_that_lead_out_of_the_folder_are_not_followed(tmp_path):
    outside = write_run(tmp_path / "elsewhere", "outside").path
    root = tmp_path / "runs"
    mine = write_run(root, "mine").path
    (root / "linked").symlink_to(outside)
    (root / "half").mkdir()
    (root / "half" / "events.jsonl").symlink_to(outside / "events.jsonl")
    secret = tmp_path / "secret.yaml"
    secret.write_text("run: {name: x, hypothesis: a secret text}\n")
    (mine / "config.yaml").unlink()
    (mine / "config.yaml").symlink_to(secret)
    with served(root) as client:
        assert rows(client.page("/")).keys() == {"mine"}
        assert "a secret text" not in client.page("/") + client.page("/run", key="mine")
        for path in ("/run/report?key=mine", "/compare?run=mine"):
            status, _, body = client.ask(path)
            assert status == 400 and b"leads out of the runs' folder" in body


def test_only_reading_is_answered_and_only_under_its_own_name(client):
    for method, status in (
        ("POST", 403),
        ("PUT", 501),
        ("DELETE", 501),
        ("PATCH", 501),
        ("OPTIONS", 501),
        ("HEAD", 501),
    ):
        assert client.ask("/", method=method)[0] == status
    for host, status in (("evil.test", 421), (f"localhost:{client.port}", 200), ("127.0.0.1", 200), ("", 421)):
        assert client.ask("/", Host=host)[0] == status
    _, headers, _ = client.ask("/")
    policy = headers["Content-Security-Policy"]
    assert (
        "default-src 'none'" in policy
        and "script-src 'self';" in policy
        and headers["X-Content-Type-Options"] == "nosniff"
    )


def test_serving_changes_nothing_in_the_folder(tmp_path):
    folder = write_heat_run(tmp_path, "a", layers=2, steps=40)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}
    with served(tmp_path) as client:
        for path in ("/", "/runs", "/run", "/run/state", "/run/curves", "/run/heat", "/run/sections", "/run/report"):
            client.page(path, key=folder.name)
        client.page("/compare", run="a")
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("said", HOSTILE.values(), ids=HOSTILE)
def test_texts_of_a_run_are_text(tmp_path, said):
    name = said.replace("/", "|").replace("\n", " ").replace("\r", " ")
    incident = INCIDENT | {"reason": said, "replay": said, "verdict": said}
    config = {"run.hypothesis": said, "optimizer.name": said, "data.source": said}
    write_run(tmp_path, name, after={20: [CAUSE | {"module": said}, incident]}, config=config)
    write_run(tmp_path, "other")
    with served(tmp_path) as client:
        parts = ("/run", "/run/state", "/run/incidents", "/run/sections")
        pages = [client.page("/"), *(client.page(part, key=name) for part in parts)]
        assert client.data("/run/curves", key=name)["drawn"] and client.data("/run/heat", key=name)["panels"]
    for page in pages:
        assert "<img" not in page and "alert(1)</script>" not in page and "<script>" not in page
        names = {name for _, names in Page(page).tags for name in names}
        assert names.isdisjoint({"onmouseover", "onerror"}) and not OBEYED.search(page)


def test_a_folder_whose_name_is_no_utf_8_is_a_run(tmp_path):
    name = os.fsdecode(b"caf\xe9 & <b>")
    write_run(tmp_path, name)
    with served(tmp_path) as client:
        assert "caf\\udce9 &amp; &lt;b&gt;" in client.page("/")
        assert client.data("/run/curves", key=name)["steps"] == 40


def test_damaged_runs_do_not_stop_the_others(tmp_path):
    write_run(tmp_path, "good")
    for name, content in (
        ("empty", b""),
        ("noise", bytes(range(256)) * 50),
        ("torn", b'{"event":"run_start"}\n{"event":"step","step":"x"}\n{"event":"incident","step":1,"time":1}\n'),
        ("deep", b'{"event":"note","text":' + b"[" * 100_000 + b"\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_bytes(content)
        (tmp_path / name / "config.yaml").write_bytes(b"run: [1, 2\n" if name == "noise" else b"run: 5\n")
    with served(tmp_path) as client:
        assert len(rows(client.page("/"))) == 5
        for name in ("empty", "noise", "torn", "deep"):
            assert client.ask(f"/run?key={name}")[0] == 200
            assert client.ask(f"/run/curves?key={name}")[0] in (200, 400)
            assert client.ask(f"/run/heat?key={name}")[0] in (200, 400)
            assert client.ask(f"/run/report?key={name}")[0] == 400


def test_the_overview_reads_a_long_run_without_its_telemetry_and_draws_a_few_places(tmp_path, monkeypatch):
    folder = write_heat_run(tmp_path, "a", layers=8, steps=600, every=3)
    monkeypatch.setattr(jsonl, "_CHUNK", 1 << 12)  # a telemetry event is larger
    entry = library.read_entry(folder)
    assert entry.facts.counts["run_start"] == entry.facts.counts["run_end"] == 1 and entry.facts.newest["step"] == 600
    steps = entry.curve[:, 0].tolist()
    assert 40 <= len(steps) <= 61 and steps[0] == 1 and steps[-1] == 600
    assert max(after - before for before, after in pairwise(steps)) <= 30


def test_a_long_run_is_sketched_while_it_is_read(tmp_path, monkeypatch):
    write_heat_run(tmp_path, "a", layers=2, steps=2500, every=100)
    monkeypatch.setattr(live, "SOON", 1000)
    with served(tmp_path) as client:
        first = client.data("/run/curves", key="a")
        [run] = first["drawn"]["runs"]
        assert first["sketch"] and 500 < first["steps"] <= 1001
        assert run["curve"]["step"][0] == 1 and run["curve"]["step"][-1] == 2500
        wait_until(lambda: not client.data("/run/curves", key="a")["sketch"], seconds=60)
        assert client.data("/run/curves", key="a")["steps"] == 2500


def test_the_command_serves_until_it_is_interrupted(tmp_path):
    write_run(tmp_path, "mine")
    command = [sys.executable, "-m", "tracking.serve", str(tmp_path), "--port", "0"]
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's job in the background ignores it
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, preexec_fn=listens) as server:
        try:
            address = re.search(r"http://127\.0\.0\.1:\d+/", server.stdout.readline())[0]
            with urllib.request.urlopen(address) as answer:
                assert answer.status == 200
            server.send_signal(signal.SIGINT)
            assert server.wait(20) == 0
        finally:
            server.kill()


def test_a_mistake_is_one_line(tmp_path, refusal):
    assert "there is no such folder" in refusal(main, [str(tmp_path / "none")])
    refusal(main, [str(tmp_path), "--port", "99999999"])
    assert "choose another" in refusal(main, [str(tmp_path), "--host", "no.such.host.test"])
