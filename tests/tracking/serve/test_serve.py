"""The page server: the overview, its CSV and a run's page, that they follow a run, and what cannot be reached."""

import csv
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import urllib.request
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from tests.support.jobs.launches import wait_until
from tests.support.page import Page
from tests.support.runs.compare_runs import CONFIG, ENVIRONMENT, RunWriter, merged, start_fields, write_run
from tests.support.runs.heat_runs import growing, write_heat_run
from tests.support.runs.hostile import HOSTILE, OBEYED, SECRETS
from tests.support.runs.report_runs import session
from tests.support.servers.serving import served
from tests.tracking.test_verdict import folder_of
from tracking import jsonl, live
from tracking.serve import library
from tracking.serve.command import main
from tracking.serve.notes import LONGEST_NOTE, MOST_BYTES, MOST_TAGS, NOTES
from tracking.serve.overview import Asked as Question
from tracking.serve.overview import differing, export, short_names, table
from tracking.serve.run_page import incidents
from tracking.summary import read_run


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


def test_the_page_lists_all_that_is_counted_as_a_warning(tmp_path):
    """A fault of the machine, and a validation whose step a resume did again."""
    again = {"event": "reexecution", "outcome": "transient", "ranks": [1], "hosts": ["a"], "why": "other bits"}
    evaluated = {"event": "eval", "loss": math.nan, "perplexity": None}
    resumed = {"event": "run_start", "at": 15, **start_fields(resumed_from="step-15")}
    after = {20: [{**again, "suspicion": "", "seconds": 1.0}, evaluated, resumed]}
    run = read_run(write_run(tmp_path, "warned", after=after).path)
    assert [found["what"] for found in incidents(run)] == ["run again:", "validation loss nan"]
    assert run.verdict.warnings == 2 and all(math.isfinite(loss) for loss in run.evaluations[3])


def test_an_incident_has_the_causes_of_its_own_attempt(tmp_path):
    """A step that was not finite, then rolled back and attempted again with a finite loss that jumped."""
    with session(tmp_path / "a") as run:
        run.steps(15)
        run.steps(1, loss=math.nan, applied=False)
        run.event("nonfinite", rank=0, module="layers.1.mlp", tensor="activation", kind="nan", count=3)
        run.incident("ROLLBACK", rolled_back_to="step-10", position=30)
        run.step = 10
        run.steps(5)
        run.steps(1, loss=40.0, applied=False)
        run.incident("ABORT", reason="the loss 40 jumped")
        run.end("aborted", 3)
    run = read_run(tmp_path / "a")
    causes = {found["what"]: found["causes"] for found in incidents(run)}
    assert causes == {"ROLLBACK:": ["3 nan in the activation of layers.1.mlp on rank 0"], "ABORT:": []}
    assert run.evidence.refused["reason"] == "the loss 40 jumped"


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
    writer.steps(1, 10)
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
    ):
        assert client.ask("/", method=method)[0] == status
    for host, status in (("evil.test", 421), ("127.0.0.1", 200), ("", 421)):
        assert client.ask("/", Host=host)[0] == status
    for host in (f"localhost:{client.port}", "LocalHost", "[::1]", f"[::1]:{client.port}"):
        assert client.ask("/", Host=host)[0] == 200
    _, headers, body = client.ask("/")
    status, same, nothing = client.ask("/", method="HEAD")
    assert (status, same["Content-Length"], nothing) == (200, headers["Content-Length"], b"") and body
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


def entries_of(root: Path):
    with served(root) as client:
        return client.library.entries()


def shown(entries, **asked):
    """The lines of the table by the run's name."""
    return {line["name"]: line for line in table(entries, Question(**asked), now=1.8e9)["lines"]}


def test_settings_are_ranked_by_how_many_values_they_take_the_rate_and_the_seed_first(tmp_path):
    rates = (3e-4, 5e-5, 3e-4, 3e-4)
    for number, rate in enumerate(rates):
        config = {"optimizer.learning_rate": rate, "run.seed": number % 2, "data.sequence_length": 128 * 2**number}
        config |= {"precision.compute": "fp16"} if number == 3 else {}
        config |= {"run.hypothesis": f"no setting {number}"}
        write_run(tmp_path, f"r{number}", config=config)
    (tmp_path / "r0" / "config.yaml").write_text("run: {name: r0}\n")  # an older run lacks most settings
    found = entries_of(tmp_path)
    assert differing(found) == ["optimizer.learning_rate", "run.seed", "data.sequence_length", "precision.compute"]
    assert shown(found)["r1"]["settings"][0] == ("learning_rate", "5e-5")
    assert shown(found)["r3"]["settings"] == [
        ("learning_rate", "3e-4"),
        ("seed", "1"),
        ("sequence_length", "1024"),
        ("compute", "fp16"),
    ]


def test_a_name_of_a_setting_is_as_long_as_it_has_to_be():
    keys = ["evaluate.every_steps", "checkpoint.every_steps", "run.seed", "steps", "run.steps"]
    assert list(short_names(keys).values()) == [
        *("evaluate.every_steps", "checkpoint.every_steps", "seed"),
        *("steps", "run.steps"),
    ]


def test_curves_share_a_scale_that_a_run_which_diverged_does_not_set(tmp_path):
    write_run(tmp_path, "sound", change=lambda step, _: {"loss": 5 - step / 20})
    write_run(tmp_path, "lower", change=lambda step, _: {"loss": 4 - step / 20})
    write_run(tmp_path, "hot", change=lambda step, _: {"loss": 5.0 if step < 20 else 900.0})
    found = entries_of(tmp_path)
    whole, lines = table(found, Question(), now=1.8e9), shown(found)
    assert re.fullmatch(r"2\.0000 to 4\.8\d+", whole["scale"])
    heights = {
        name: [float(pair.split(",")[1]) for pair in line["spark"]["points"].split()] for name, line in lines.items()
    }
    assert heights["lower"][0] > heights["sound"][0] + 5 and heights["lower"][-1] > heights["sound"][-1] + 5
    assert min(heights["hot"]) == heights["hot"][-1] == 3.0, "at the upper edge"
    assert lines["sound"]["spark"]["mark"] is None and 50 < lines["hot"]["spark"]["mark"] < 75, "about step 20 of 40"
    with served(tmp_path) as client:
        page = client.page("/")
    assert page.count('<line class="mark"') == 1 and ">diverged</text>" in page


def test_a_run_with_another_objective_does_not_flatten_the_others(tmp_path):
    for name, level in (("a", 4.0), ("b", 5.0), ("other", 1e30)):
        write_run(tmp_path, name, change=lambda step, _, level=level: {"loss": level * (1 - step / 100)})
    assert table(entries_of(tmp_path), Question(), now=1.8e9)["scale"] == "2.4000 to 4.8500"


def test_a_curve_ends_where_the_run_did_and_a_loss_that_is_not_finite_is_said(tmp_path):
    write_run(tmp_path, "early", steps=10, config={"run.steps": 40})
    write_run(tmp_path, "nan", change=lambda step, _: {"loss": math.nan if step > 5 else 4.0})
    lines = shown(entries_of(tmp_path))
    assert float(lines["early"]["spark"]["points"].split()[-1].split(",")[0]) < 40
    assert lines["nan"]["loss"] == "not finite"
    assert lines["nan"]["verdict"].word == "diverged" and lines["nan"]["spark"]["mark"] is not None


def test_a_search_shows_what_it_matched(tmp_path):
    write_run(tmp_path, "a", config={"optimizer.learning_rate": 5e-5, "run.hypothesis": "x" * 80 + " half <b> as long"})
    write_run(tmp_path, "b")
    with served(tmp_path) as client:
        for word, text in (
            ("learning_rate=5e-5", "setting: optimizer.<mark>learning_rate=5e-5</mark>"),
            ("5e-05", "setting: optimizer.learning_rate=<mark>5e-05</mark>"),
            ("HALF", "hypothesis: \u2026xxxxxxxxxxxxxxxxxxxxxxxxxxxxx <mark>half</mark> &lt;b&gt; as long"),
            ("<b>", "<mark>&lt;b&gt;</mark>"),
        ):
            page = client.page("/runs", q=word)
            assert rows(page).keys() == {"a"} and text in page
        page = client.page("/runs", q="b healthy")
        assert "<mark>b</mark></a>" in page and page.count('class="found"') == 1, "the line of b shows both"
        assert rows(client.page("/runs", q=".*")) == {}


def test_no_excerpt_shows_half_a_secret(tmp_path):
    secret = SECRETS["hugging face"]
    write_run(tmp_path, "a", config={"run.hypothesis": f"{'x ' * 30}word {'y' * 20} {secret}"})
    with served(tmp_path) as client:
        page = client.page("/runs", q="word")
        assert "hypothesis: " in page and secret[:12] not in page
        assert rows(client.page("/runs", q=secret[:12])) == {}


def test_columns_are_chosen_and_a_setting_is_one(tmp_path):
    for name, rate in (("a", 3e-4), ("b", 1e-3)):
        write_run(tmp_path, name, config={"optimizer.learning_rate": rate, "data.note": "<i>"})
    with served(tmp_path) as client:
        page = client.page("/runs", col=["speed", ".optimizer.learning_rate"], sort="-.optimizer.learning_rate")
        heads = re.findall(r'data-sort="([^"]*)"', page)
        assert heads == ["name", ".optimizer.learning_rate", "speed"] and "what differs" not in page
        assert [*rows(page)] == ["b", "a"] and rows(page)["a"] == "a \u270e 3e-4 7.4k"
        assert 'value=".optimizer.learning_rate"> optimizer.learning_rate' in client.page("/")
        assert len(rows(client.page("/runs", col=["nothing", ".no.such"], sort=".<b>"))) == 2


def test_times_are_how_long_ago_or_dates(tmp_path):
    write_run(tmp_path, "a")
    [entry] = entries_of(tmp_path)
    for seconds, words in ((5, "just now"), (99, "1m ago"), (7300, "2h ago"), (200_000, "2d ago"), (-50, "just now")):
        machine, ago, date = table([entry], Question(), now=entry.changed + seconds)["lines"][0]["times"]["changed"]
        assert ago == words and re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d .+", date) and machine.endswith("+00:00")
    assert table([entry], Question(dates=True), now=entry.changed)["lines"][0]["times"]["changed"][1] == date[:16]


def test_csv_has_a_row_for_each_run_and_no_formula(tmp_path):
    formulas = ("=1+1", "a;=1+1", "+1", "-1", "@SUM(A1)", "\uff1d1", "\t=1")
    for number, text in enumerate(formulas):
        config = {"run.hypothesis": text, "data.path": text, "optimizer.learning_rate": 10.0**-number}
        write_run(tmp_path, f"r{number}", config=config)
    writer = RunWriter(tmp_path, "=cmd|calc!A0")
    writer.run_dir.write_inputs(merged(CONFIG, {}), {}, ENVIRONMENT)
    writer.start()
    writer.step(1, loss=math.nan)
    with served(tmp_path) as client:
        status, headers, body = client.ask("/runs.csv?sort=name")
        assert status == 200 and headers["Content-Type"].startswith("text/csv")
        assert len(client.page("/runs.csv", q="no such run").splitlines()) == 1
    found = {row["run"]: row for row in csv.DictReader(io.StringIO(body.decode()))}
    assert len(found) == 8 and found["'=cmd|calc!A0"]["loss"] == "" and found["'=cmd|calc!A0"]["step"] == "1"
    assert not any(cell and cell[0] in "=+-@\uff1d\t" for row in found.values() for cell in row.values())
    assert found["r0"]["hypothesis"] == "'=1+1" and found["r0"]["data.path"] == "'=1+1"
    assert float(found["r6"]["optimizer.learning_rate"]) == 1e-6 and found["r6"]["verdict"] == "healthy"
    assert export([], Question()) == '"run"\r\n'
    assert '"a;=1+1"' in body.decode(), "quoted, since a semicolon may part cells"


def noted(client, key="a", *, token=None, body=None, **headers):
    """Status and words of the answer to a note."""
    content = json.dumps({"tags": ["good"], "note": "n"} if body is None else body).encode()
    token = token or re.search(r'data-token="([^"]*)"', client.page("/"))[1]
    headers = {"Origin": client.address, "Content_Length": str(len(content)), "X_Token": token} | headers
    status, _, answer = client.ask(f"/run/notes?key={key}", method="POST", body=content, **headers)
    return status, answer.decode()


def test_notes_and_tags_are_kept_in_the_run_folder_and_are_text(tmp_path):
    folder = write_run(tmp_path, "a").path
    write_run(tmp_path, "b")
    tags = ["<img src=x onerror=alert(1)>", "good", " good ", "", "\u202eevil"]
    with served(tmp_path) as client:
        assert noted(client, body={"tags": tags, "note": "first\nsecond </script>"}) == (200, "{}")
        page = client.page("/")
        assert "&lt;img src=x onerror=alert(1)&gt;" in page and "<img" not in page and "\u202e" not in page
        kept = json.loads((folder / NOTES).read_text())
        assert kept == {"tags": [tags[0], "good", "\\u202eevil"], "note": "first\nsecond </script>"}
        assert client.data("/run/notes", key="a") == kept
        assert rows(client.page("/runs", q="good")).keys() == rows(client.page("/runs", q="second")).keys() == {"a"}
        assert "first <mark>second</mark>" in client.page("/runs", q="second")
        assert "<p>first second &lt;/script&gt;</p>" in client.page("/run", key="a")
        (folder / NOTES).write_text('{"tags": ["by hand"]}')
        client.library.look()
        assert "by hand" in client.page("/")
        assert [path.name for path in folder.glob(".notes*")] == []


def test_a_note_is_taken_from_a_page_of_this_server_alone(tmp_path):
    folder = write_run(tmp_path, "a").path
    with served(tmp_path) as client:
        other = f"http://localhost:{client.port}"
        for headers in (
            {"Origin": "http://evil.test"},
            {"Origin": "null"},
            {"Origin": other},
            {"Origin": ""},
            {"X_Token": "guess"},
            {"X_Token": ""},
        ):
            assert noted(client, **headers)[0] == 403
        assert noted(client, Host="evil.test", Origin="http://evil.test")[0] == 421
        assert noted(client, Content_Length=str(MOST_BYTES + 1))[0] == noted(client, Content_Length="-1")[0] == 413
        assert not (folder / NOTES).exists()
        assert noted(client, Host=f"localhost:{client.port}", Origin=other)[0] == 200
    with served(tmp_path, editable=False) as client:
        assert 'data-token=""' in client.page("/") and "note-it" not in client.page("/")
        assert noted(client, token="x")[0] == noted(client, X_Token="")[0] == 403


def test_notes_are_edited_beyond_this_machine_only_where_that_is_asked_for(tmp_path):
    write_run(tmp_path, "a")
    with served(tmp_path, host="0.0.0.0") as client:
        assert noted(client, token="x")[0] == 403 and "note-it" not in client.page("/")
    with served(tmp_path, host="0.0.0.0", editable=True) as client:
        assert noted(client)[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        *([], "text", {"tags": "a"}, {"tags": [1]}, {"note": None}, {"note": "x", "more": 1}),
        *({"tags": [f"t{number}" for number in range(MOST_TAGS + 1)]}, {"tags": ["x" * 41]}),
        {"note": "x" * (LONGEST_NOTE + 1)},
    ],
)
def test_what_is_no_note_is_refused_in_a_line(tmp_path, body):
    folder = write_run(tmp_path, "a").path
    with served(tmp_path) as client:
        status, answer = noted(client, body=body)
        assert status == 400 and json.loads(answer)["error"] and not (folder / NOTES).exists()
        assert noted(client, key="..%2fa")[0] == 404


def test_notes_that_are_damaged_or_elsewhere_are_not_replaced(tmp_path):
    root = tmp_path / "runs"
    damaged, linked = (write_run(root, name).path for name in ("damaged", "linked"))
    (damaged / NOTES).write_text('{"tags": [')
    secret = tmp_path / "secret.json"
    secret.write_text('{"note": "a secret text"}')
    (linked / NOTES).symlink_to(secret)
    with served(root) as client:
        assert len(rows(client.page("/"))) == 2 and "a secret text" not in client.page("/")
        for key, words in (("damaged", "restore or remove it"), ("linked", "leads out of")):
            status, answer = noted(client, key=key)
            assert status == 400 and words in answer
            assert client.ask(f"/run/notes?key={key}")[0] == 400
    assert (damaged / NOTES).read_text() == '{"tags": [' and "secret" in secret.read_text()


def test_a_run_that_cannot_be_read_is_named_and_hides_no_other(tmp_path):
    write_run(tmp_path, "good")
    bad = write_run(tmp_path, "bad", change=lambda step, _: {"loss": 4.0 if step < 20 else 900.0}).path
    (bad / "environment.json").write_text('{"resume_command": "python \'train.py"}')  # which is no command
    with served(tmp_path) as client:
        page = " ".join(client.page("/").split())
        assert "bad cannot be read" in page and "good" in rows(page)
    with served(tmp_path / "bad") as client:
        assert "There is no run" not in client.page("/")


def test_answers_and_trackers_files_of_a_run_are_not_searched_for_runs(tmp_path):
    """A step of GRPO is a file; a million names would be listed every few seconds."""
    for name in ("rollouts", "tensorboard"):
        write_run(tmp_path, name)  # a run may have that name
        write_run(tmp_path / "rollouts" / name, "within")
    write_run(tmp_path / "rollouts", "trial")
    with served(tmp_path) as client:
        assert rows(client.page("/")).keys() == {"rollouts", "tensorboard", "rollouts/trial"}


def test_each_run_that_went_wrong_is_named_by_the_text_of_its_line(tmp_path):
    """Runs that were recorded, one of each kind."""
    said = {
        "learning_rate_x_1000": "diverged 2 warnings its loss rose from 5.362 (step 1) to 46.6",
        "planted_nan": "finished with warnings 1 warning SKIP: the step is not finite (loss 2.974, gradient norm inf)",
        "sigkill": "killed no process has the run folder, and no end was recorded",
        "every_step_skipped": "not learning 12 warnings none of its 12 steps was applied",
        "tiny_learning_rate": "not learning its loss has not fallen by 2% in 100 applied steps from random weights",
        "aborted": "failed 2 warnings 2 steps in a row were skipped",
        "fp16_overflows": "healthy",
        "healthy": "healthy",
    }
    for kind in said:
        folder_of(tmp_path, kind)
    with served(tmp_path) as client:
        page = client.page("/")
        found, grouped = rows(page), rows(client.page("/runs", group="seed"))
    assert all(found[kind].startswith(f"{kind} \u270e {text}") for kind, text in said.items())
    assert "2.7450 2.9310" in found["healthy"] and "12 (100%)" in found["every_step_skipped"]
    assert page.count(">diverged</text>") == 1 and page.count(">not learning</text>") == 2
    [(name, line)] = grouped.items()
    assert name.endswith("(8 runs)") and "seeds None; learning_rate_x_1000: its loss rose" in line


@pytest.mark.parametrize("count", [0, 1])
def test_no_run_and_one_run(tmp_path, count):
    for number in range(count):
        write_run(tmp_path, f"r{number}")
    with served(tmp_path) as client:
        page = client.page("/")
        assert f"{count} run{'' if count == 1 else 's'}" in page
        assert ("There is no run in this folder yet" in page) == (count == 0)
        for query in ({"group": "seed"}, {"q": "nothing"}, {"sort": "loss"}):
            client.page("/runs", **query)
