"""Create the saved view that compares runs of a wandb project.

    python -m tracking.wandb.view ENTITY/PROJECT [--show]

The panels are in docs/wandb/saved_view.yaml. Each call creates a new view; delete old ones in wandb. --show prints
it and contacts no server. Needs wandb-workspaces. Exit code 0: created; 2: it cannot be created.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config import yaml_text
from config.cli import REPOSITORY, Arguments, entry_point
from config.errors import UserError, one_line
from config.extras import require

DEFINITION = REPOSITORY / "docs" / "wandb" / "saved_view.yaml"


def build(entity: str, project: str, definition: dict[str, Any]) -> Any:
    """The workspace of a definition, unsaved. Raises UserError without wandb-workspaces or for a wrong definition."""
    require("wandb_workspaces", "python -m tracking.wandb.view")
    import wandb_workspaces.workspaces as ws

    try:
        sections = [
            ws.Section(name=section["name"], panels=[_panel(panel) for panel in section["panels"]], is_open=True)
            for section in definition["sections"]
        ]
        columns = [f"summary:{name}" for name in definition["columns"]]
        return ws.Workspace(
            entity=entity,
            project=project,
            name=definition["name"],
            sections=sections,
            settings=ws.WorkspaceSettings(x_axis="attempt", max_runs=20),
            runset_settings=ws.RunsetSettings(pinned_columns=columns),
            auto_generate_panels=True,  # below our own: telemetry, histograms
        )
    except (KeyError, TypeError, ValueError) as error:
        why = one_line(error, 200)
        raise UserError(f"the definition of the view is wrong ({type(error).__name__}: {why}); correct it") from None


def _panel(panel: dict[str, Any]) -> Any:
    import wandb_workspaces.reports.v2 as reports

    kind = panel.get("panel", "line")
    if kind == "run_comparer":
        return reports.RunComparer(diff_only="split")
    if kind == "table":
        return reports.WeavePanelSummaryTable(table_name=panel["table"])
    if kind == "line":
        return reports.LinePlot(title=panel["title"], x=panel["x"], y=panel["y"], log_y=panel.get("log_y"))
    raise ValueError(f"panel: {kind} is not one of line, table, run_comparer")


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """Create the view and print its URL, or with --show its JSON."""
    parser = Arguments("python -m tracking.wandb.view", __doc__)
    parser.add_argument("project", metavar="ENTITY/PROJECT", help="a wandb project")
    parser.add_argument("--definition", type=Path, default=DEFINITION, metavar="FILE", help="the panels, in YAML")
    parser.add_argument("--show", action="store_true", help="print the view as JSON and send nothing")
    options = parser.parse_args(arguments)
    entity, _, project = options.project.partition("/")
    if not entity or not project or "/" in project:
        raise UserError(f"{options.project}: is not ENTITY/PROJECT; give a wandb user or team and a project")
    try:
        parsed = yaml_text.parse(options.definition.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--definition {options.definition}: cannot be read ({one_line(error, 200)})") from None
    view = build(entity, project, parsed)
    if options.show:
        print(json.dumps(view._to_model().model_dump(by_alias=True, exclude_none=True, mode="json"), indent=1))
        return 0
    try:
        view.save()
    except Exception as error:  # no login, no network, no such project: the client raises a different class for each
        advice = "check the name, `wandb login` and the network"
        raise UserError(f"{options.project}: not saved ({one_line(error, 200)}); {advice}") from None
    print(view.url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
