"""Each tracker's own reader finds what events.jsonl holds, over sessions, crashes and broken clients."""

import csv
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.compare_runs import step_fields, whole_event
from tests.support.runs.heat_runs import modules, telemetry
from tests.support.runs.report_runs import session
from tracking.jsonl import encode
from tracking.run_dir import RunDir
from tracking.trackers.delivery import Delivery
from tracking.trackers.sink import TrackerSink

SECRET = "hf_" + "a" * 30
CONFIG: dict[str, Any] = {
    "run": {"name": "demo", "hypothesis": "it holds", "steps": 8},
    "optimizer": {"learning_rate": 3e-4},
    "tracking": {"project": "papers", "group": "seeds", "tags": ["small", "fp16"], "log_every_steps": 1},
    "token": SECRET,
}


def loss(step: int) -> float:
    return math.nan if step == 3 else 5.0 - step / 10


def track(run_dir: RunDir, tracker: str, first: int, last: int, *, status: str | None = "done", every: int = 1) -> None:
    """Steps first to last through a real record; status: None leaves the session without an end."""
    sink = TrackerSink(tracker, run_dir, CONFIG | {"tracking": CONFIG["tracking"] | {"log_every_steps": every}})
    with session(run_dir.path, sink, step=first - 1) as run:
        for step in range(first, last + 1):
            run.steps(1, loss=loss(step), applied=step != 3, skipped_total=int(step >= 3))
        run.evaluate(4.0)
        if status:
            run.end(status, {"done": 0, "preempted": 75, "crashed": 69}[status])
    assert "is switched off" not in run_dir.events.read_text()


@pytest.fixture(autouse=True)
def _local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_tensorboard_reads_back_every_step_of_two_sessions(run_dir: RunDir) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    track(run_dir, "tensorboard", 1, 4, status="preempted")
    track(run_dir, "tensorboard", 5, 8)
    found = EventAccumulator(str(run_dir.path / "tensorboard"))
    found.Reload()

    def values(name: str) -> dict[int, float]:
        return {item.step: float(make_ndarray(item.tensor_proto)) for item in found.Tensors(name)}

    losses = values("1 training/loss")
    assert list(losses) == list(range(1, 9)) and math.isnan(losses[3])
    assert {step: value for step, value in losses.items() if step != 3} == pytest.approx(
        {step: loss(step) for step in range(1, 9) if step != 3}
    )
    assert values("1 training/validation loss") == {4: 4.0, 8: 4.0}
    assert values("1 training/learning rate")[2] == pytest.approx(step_fields(2)["lr"])


def test_tensorboard_opens_on_what_matters_with_text_settings_histograms_and_the_verdict(run_dir: RunDir) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2
    from tensorboard.util.tensor_util import make_ndarray

    skip = {"verdict": "SKIP", "reason": "loss nan", "modules": [], "replay": "python -m tools.replay r --step 1"}
    end = {"verdict": "diverged", "verdict_text": "diverged since step 1: it rose", "next_command": "python train.py"}
    with session(run_dir.path, TrackerSink("tensorboard", run_dir, CONFIG)) as run:
        run.steps(1)
        run.event("telemetry", **telemetry(1, 2))
        run.event("incident", **skip)
        run.event("run_end", status="done", exit_code=0, **end)
    found = EventAccumulator(str(run_dir.path / "tensorboard"))
    found.Reload()
    tags = found.Tags()["tensors"]
    kinds = {tag: found.SummaryMetadata(tag).plugin_data.plugin_name for tag in tags}
    scalars = sorted(tag for tag, kind in kinds.items() if kind == "scalars")
    matters = ["gradient norm", "learning rate", "loss", "loss scale"]
    assert scalars[:4] == [f"1 training/{name}" for name in matters]

    def text(tag: str) -> str:
        return make_ndarray(found.Tensors(tag)[-1].tensor_proto).item().decode()

    assert [make_ndarray(item.tensor_proto).item() for item in found.Tensors("1 verdict")][:-1] == [b"running"]
    assert text("1 verdict") == "diverged since step 1: it rose\n\nnext:\n\n    python train.py"
    assert text("2 incidents") == "step 1: SKIP: loss nan\n\n    python -m tools.replay r --step 1"
    assert text("3 hypothesis") == "it holds" and "    learning_rate: 0.0003" in text("4 config")
    assert SECRET not in text("4 config")
    (layers,) = found.Tensors("telemetry/modules/log10_activation")
    assert kinds["telemetry/modules/log10_activation"] == "histograms"
    assert make_ndarray(layers.tensor_proto)[:, 2].sum() == len(modules(2))

    def settings(tag: str) -> plugin_data_pb2.HParamsPluginData:
        return plugin_data_pb2.HParamsPluginData.FromString(found.SummaryMetadata(tag).plugin_data.content)

    start = settings("_hparams_/session_start_info").session_start_info.hparams
    assert start["optimizer.learning_rate"].number_value == 3e-4 and start["run.steps"].number_value == 8
    assert [item.name.tag for item in settings("_hparams_/experiment").experiment.metric_infos][0] == "1 training/loss"
    assert settings("_hparams_/session_end_info").session_end_info.status == 1  # success


@pytest.mark.slow
def test_mlflow_reads_back_one_run_with_its_config_and_status(run_dir: RunDir, monkeypatch: Any) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="mlflow's local store needs sqlalchemy")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir.path / 'mlflow.db'}")
    track(run_dir, "mlflow", 1, 4, status="crashed")
    (run,) = client.search_runs([client.get_experiment_by_name("papers").experiment_id])
    assert (run.info.status, run.data.tags["verdict"]) == ("FAILED", "crashed"), "as readers of the folder judge it"
    track(run_dir, "mlflow", 5, 8)
    (run,) = client.search_runs([client.get_experiment_by_name("papers").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "demo")
    assert run.data.params["run.steps"] == "8" and run.data.params["optimizer.learning_rate"] == "0.0003"
    assert SECRET not in str(run.data.params)
    assert run.data.tags["group"] == "seeds" and run.data.tags["tag.fp16"] == "true"
    history = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "train/loss")}
    assert sorted(history) == list(range(1, 9)) and math.isnan(history[3]) and history[8] == pytest.approx(loss(8))
    server = f"sqlite:///{run_dir.path / 'server.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    track(run_dir, "mlflow", 9, 9)
    (run,) = (other := MlflowClient(server)).search_runs([other.get_experiment_by_name("papers").experiment_id])
    whole = [metric.step for metric in other.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(whole) == list(range(1, 10)), "another server gets the earlier sessions, too"


def test_trackio_reads_back_each_run_folder_as_a_run_of_its_own(tmp_path: Path, monkeypatch: Any) -> None:
    """Two folders of one name, as a run that is started anew leaves them; the first is resumed after it."""
    pytest.importorskip("trackio", reason="trackio is not installed")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for folder, first, last in (("first", 1, 4), ("second", 1, 3), ("first", 5, 8)):
        track(RunDir.create(tmp_path / folder, "demo", fresh=False), "trackio", first, last)
    read = (
        "import json; from trackio import Api; from trackio.sqlite_storage import SQLiteStorage as store\n"
        "runs = [(run.config, store.get_logs('papers', run.name, run_id=run.id)) for run in Api().runs('papers')]\n"
        "print(json.dumps(runs))"
    )
    said = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True).stdout
    runs = sorted(json.loads(said.splitlines()[-1]), key=lambda run: -len(run[1]))
    histories = [{row["step"]: row["train/loss"] for row in rows if "train/loss" in row} for _, rows in runs]
    assert [list(history) for history in histories] == [list(range(1, 9)), list(range(1, 4))]
    assert math.isnan(histories[0][3]) and histories[0][8] == pytest.approx(loss(8))
    assert [row["train/step"] for row in runs[0][1] if "train/loss" in row] == list(range(1, 9))
    config = runs[0][0]
    assert (config["run.steps"], config["optimizer.learning_rate"], config["_Group"]) == (8, 3e-4, "seeds")
    assert SECRET not in str(runs)


def test_csv_has_a_row_for_each_step_and_evaluation_also_after_a_torn_line(run_dir: RunDir) -> None:
    track(run_dir, "csv", 1, 4, status=None, every=2)
    path = run_dir.path / "metrics.csv"
    with path.open("ab") as file:
        file.write(b"9,9,1.7e9,36864,6.")  # of 6.9078
    track(run_dir, "csv", 5, 8, every=2)
    rows = list(csv.DictReader(path.open()))
    assert [int(row["step"]) for row in rows if row["train/loss"]] == [2, 3, 4, 6, 8], (
        "skipped steps are never left out"
    )
    assert rows[1]["train/loss"] == "nan" and float(rows[0]["train/loss"]) == pytest.approx(loss(2))
    assert [row["eval/loss"] for row in rows if row["eval/loss"]] == ["4.0", "4.0"]


def test_a_session_after_a_power_failure_is_delivered_whole(run_dir: RunDir) -> None:
    """The events lost their newest lines, which had been delivered and counted."""
    track(run_dir, "csv", 1, 8, status=None)
    start_and_four_steps = run_dir.events.read_bytes().splitlines(keepends=True)[:5]
    run_dir.events.write_bytes(b"".join(start_and_four_steps))
    track(run_dir, "csv", 5, 8)
    rows = list(csv.DictReader((run_dir.path / "metrics.csv").open()))
    assert [int(row["attempt"]) for row in rows if row["train/loss"]] == [*range(1, 9), *range(5, 9)]


def test_a_client_that_fails_is_switched_off_and_training_continues(run_dir: RunDir, capsys: Any) -> None:
    (run_dir.path / "metrics.csv").mkdir()
    sink = TrackerSink("csv", run_dir, CONFIG)
    assert sink._process is not None
    sink._process.wait(30)
    with session(run_dir.path, sink) as run:
        run.steps(1)
    said = capsys.readouterr().err
    assert "csv failed: IsADirectoryError" in said and "the next session delivers the rest" in said


def test_telemetry_of_earlier_sessions_is_only_counted() -> None:
    """It is most of the file of a long run, which every restart reads."""

    class Passed(Delivery):
        def __init__(self, delivered: int) -> None:
            super().__init__(1, delivered)
            self.kinds: list[tuple[str, bool]] = []

        def log(self, event: dict[str, Any], row: dict[str, Any], *, earlier: bool) -> None:
            self.kinds.append((event["event"], earlier))

        def flush(self) -> None: ...

        def close(self, exit_code: int, verdict: dict[str, Any]) -> None: ...

    lines = [encode(whole_event("step", 1))]
    lines += [encode(whole_event("telemetry", 1, **telemetry(1, 1)))]
    lines += [encode(whole_event("eval", 1, loss=4.0, perplexity=54.6))]
    found = Passed(delivered=3)
    for number, line in enumerate(2 * lines, 1):
        found.add(number, line)
    assert found.kinds == [("eval", True), ("step", False), ("telemetry", False), ("eval", False)]
    assert found.rows.attempts == 2
