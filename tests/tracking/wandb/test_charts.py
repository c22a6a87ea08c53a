"""Charts that wandb draws of the events: rows on an axis that never goes back, tables, alerts, histograms."""

import math
from typing import Any

import pytest

from config import yaml_text
from tests.support.runs.heat_runs import modules, telemetry
from tests.support.runs.synthetic_events import SCALE, step_fields
from tracking.run_dir import RunDir
from tracking.wandb.charts import Rows, chart_values, histograms
from tracking.wandb.upload import ALERT_EVERY_S, MAX_ROWS, STALE_S, SUMMARY, Alerts, Tables
from tracking.wandb.view import DEFINITION, build

_SCALE: dict[str, Any] = {"from": 4.0, "to": 2.0, "reason": "overflow", **SCALE}
_INCIDENT: dict[str, Any] = {"verdict": "SKIP", "reason": "nan", "modules": ["lm_head"], "replay": "again"}
_NONFINITE: dict[str, Any] = {"rank": 0, "module": "lm_head", "tensor": "gradient", "kind": "nan", "count": 3}
_TELEMETRY: dict[str, Any] = {"activation_max": {"lm_head": 7.0}, "drift": {"maximum": 0.0, "rms": 0.0}}
_TELEMETRY |= {"gradients": {"lm_head": {"norm": 0.5, "flushed": 0.25}}, "update_ratio": 0.001}
_TELEMETRY |= {"probe": {"lm_head.weight": {"cosine": 0.99}}}
_TELEMETRY |= {"gradient_exponents": {"lowest": -30, "counts": [1, 4, 2]}}
_CHECKPOINT: dict[str, Any] = {"path": "step-3", "seconds": 1.0, "stall_seconds": 0.1, "bytes": 10, "verified": True}


def _event(event: str, step: int = 3, **fields: Any) -> dict[str, Any]:
    return {"event": event, "step": step, "tokens": 10 * step, "time": 1.0, **fields}


def _step(step: int, **changes: Any) -> dict[str, Any]:
    return _event("step", step, **step_fields(step, **changes))


def test_the_axis_goes_on_where_a_rollback_takes_steps_back() -> None:
    rows = Rows()
    history = [_step(1), _step(2, applied=False, skipped_total=1), _step(3, skipped_total=1), _step(2), _step(3)]
    drawn = [rows.row(event) for event in history]
    assert [row["attempt"] for row in drawn] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in drawn] == [1, 2, 3, 2, 3]
    assert [row["applied"] for row in drawn] == [1, 1, 2, 2, 3]
    late = rows.row(_event("checkpoint", 1, **_CHECKPOINT))
    assert (late["attempt"], late["step"]) == (5, 1), "a save that ends late is drawn where it ended"


def test_the_lowest_validation_loss_is_that_of_all_sessions() -> None:
    rows = Rows()
    rows.row(_event("eval", loss=2.0, perplexity=1.0))
    events = [_event("eval", loss=loss, perplexity=1.0) for loss in (3.0, math.nan, 1.5)]
    assert [rows.row(event)["eval/lowest_loss"] for event in events] == [2.0, 2.0, 1.5]


def test_charts_keep_what_is_not_finite_and_leave_out_what_was_not_recorded() -> None:
    values = chart_values(_step(3, loss=math.inf, clip_coefficient=None))
    assert values["train/loss"] == math.inf and "train/clip_coefficient" not in values and values["step"] == 3
    by_source = {"labels_by_source": {"code": 7, "chat": 0}, "loss_by_source": {"code": 1.5}}
    drawn = {name: value for name, value in chart_values(_step(3) | by_source).items() if "_source/" in name}
    assert drawn == {
        "train/labels_by_source/code": 7,
        "train/labels_by_source/chat": 0,
        "train/loss_by_source/code": 1.5,
    }
    held_out = chart_values(_event("eval", loss=1.0, perplexity=2.0, by_source={"code": 1.5}))
    assert held_out["eval/loss_by_source/code"] == 1.5
    values = chart_values(_event("scale", **_SCALE))
    assert values["scale/from"] == 4.0 and values["scale/reason"] == "overflow" and "scale/momentum_norm" not in values


def test_telemetry_becomes_as_many_panels_for_a_large_model_as_for_a_small_one() -> None:
    event = _event("telemetry", 5, **_TELEMETRY)
    values = chart_values(event)
    assert values["telemetry/largest_activation"] == 7.0 and values["telemetry/update_ratio"] == 0.001
    assert values["telemetry/smallest_probe_cosine"] == 0.99
    panels = [
        {*chart_values(event), *histograms(event)}
        for layers in (1, 32)
        for event in [_event("telemetry", 5, **telemetry(5, layers))]
    ]
    assert panels[0] == panels[1] and len(panels[0]) < 20
    spread = histograms(_event("telemetry", 5, **telemetry(5, 32)))["telemetry/modules/log10_activation"]
    assert sum(spread[0]) == len(modules(32))
    counts, edges = histograms(event)["telemetry/log2_gradient"]
    assert list(counts) == [1, 4, 2] and list(edges) == [-30, -29, -28, -27]
    assert histograms({"event": "step"}) == {}


def test_tables_hold_all_sessions_and_are_logged_when_they_changed() -> None:
    tables = Tables()
    tables.add(_event("nonfinite", **_NONFINITE, largest_finite=math.inf), 3, delivered=True)
    assert not tables.due(1000.0), "wandb has these"
    tables.add(_event("nonfinite", 4, **_NONFINITE), 7, delivered=False)
    tables.add(_step(4), 8, delivered=False)
    assert tables.due(1000.0)
    (table,) = tables.take(1000.0).values()
    assert [row[:2] for row in table.data] == [[3, 3], [7, 4]]
    assert table.data[0][table.columns.index("largest_finite")] == "inf"
    assert not tables.due(2000.0)
    tables.add(_event("incident", **_INCIDENT), 9, delivered=False)
    assert not tables.due(1001.0) and tables.due(2000.0)
    for attempt in range(MAX_ROWS + 5):
        tables.add(_event("incident", **_INCIDENT), attempt, delivered=False)
    data = tables.take(2000.0)["tables/incident"].data
    assert len(data) == MAX_ROWS and data[-1][0] == MAX_ROWS + 4 and data[0][0] == 5


def test_alerts_name_the_cause_and_do_not_flood() -> None:
    alerts = Alerts()
    event = _event("incident", **_INCIDENT)
    first = alerts.alert(event, "demo", now=10.0)
    assert first is not None and first["level"] == "WARN"
    assert all(word in first["text"] for word in ("SKIP", "step 3", "demo", "nan", "lm_head", "again"))
    assert [alerts.alert(event, "demo", now=10.0 + n) for n in (1, 2)] == [None, None]
    rollback = alerts.alert(event | {"verdict": "ROLLBACK"}, "demo", now=13.0)
    assert rollback is not None and rollback["level"] == "ERROR", "another verdict is sent at once"
    later = alerts.alert(event, "demo", now=10.0 + ALERT_EVERY_S)
    assert later is not None and "2 more" in later["text"]
    assert alerts.alert(event, "demo", now=STALE_S + 2.0 + ALERT_EVERY_S) is None, "long over"
    assert alerts.alert(_step(3), "demo", now=10.0) is None
    named = alerts.alert(event | {"verdict": "ABORT"}, "x" * 200, now=20.0)
    assert named is not None and len(named["title"]) < 64, "wandb takes no longer title"


@pytest.mark.filterwarnings("ignore:Pydantic")  # wandb-workspaces has old decorators
def test_every_metric_of_the_saved_view_is_one_that_is_logged(run_dir: RunDir) -> None:
    rows = Rows()
    events = [
        _step(3, clip_coefficient=0.5),
        _event("scale", **_SCALE),
        _event("eval", loss=2.0, perplexity=math.exp(2.0)),
        _event("incident", **_INCIDENT),
        _event("nonfinite", **_NONFINITE),
        _event("checkpoint", **_CHECKPOINT),
        _event("telemetry", **_TELEMETRY),
    ]
    logged = set().union(*(rows.row(event) for event in events))
    definition = yaml_text.parse(DEFINITION.read_text())
    panels = [panel for section in definition["sections"] for panel in section["panels"]]
    drawn = {name for panel in panels if "y" in panel for name in [panel["x"], *panel["y"]]}
    assert drawn | set(definition["columns"]) <= logged | set(SUMMARY)
    tables = Tables()
    for event in events:
        tables.add(event, 1, delivered=False)
    assert {panel["table"] for panel in panels if panel.get("panel") == "table"} == set(tables.take(1.0))
    spec = build("team", "p", definition)._to_model().model_dump_json(by_alias=True)
    assert all(f'"{name}"' in spec for name in drawn - {"tokens"})
