"""The overview's description of runs: their differences, findings and notes, and the same as CSV."""

import csv
import io
import json
import math
import re
from pathlib import Path

import pytest

from tests.support.runs.compare_runs import CONFIG, ENVIRONMENT, RunWriter, merged, write_run
from tests.support.runs.hostile import SECRETS
from tests.support.servers.serving import served
from tests.tracking.serve.test_serve import rows
from tests.tracking.test_verdict import folder_of
from tracking.serve.notes import LONGEST_NOTE, MOST_BYTES, MOST_TAGS, NOTES
from tracking.serve.overview import Asked as Question
from tracking.serve.overview import differing, export, short_names, table


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
