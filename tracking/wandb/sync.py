"""Sync a run to wandb (safe to repeat), and record its checkpoints and exports as models.

    python -m tracking.wandb.sync runs/demo --online [--export exported/demo]
        [--checkpoint runs/demo/checkpoints/step-400] [--parity parity.json]

Everything goes to the wandb run named in the run folder. Without --online an offline run is written, for `wandb sync`.
The last line says how much was new and where it went. Exit code 0: done; 1: wandb failed, or --online was recorded
offline; 2: wrong arguments.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config.cli import Arguments, entry_point
from config.errors import UserError
from config.printable import shown
from tracking.run_dir import RunDir
from tracking.summary import read_inputs
from tracking.wandb.models import export_facts, named_checkpoint_facts, parity_facts
from tracking.wandb.sink import WandbSink

FAILED = 1
FINISH_TIMEOUT_S = 600.0


def deliver(run_dir: RunDir, config: dict[str, Any], *, online: bool, models: Sequence[dict[str, Any]]) -> str:
    """Deliver and wait; returns a summary. config: as for `WandbSink`.

    Raises UserError if it is not a run folder, RuntimeError if wandb fails.
    """
    run = config["run"]
    if not run or not run_dir.events.is_file():
        raise UserError(f"{run_dir.path}: holds no config.yaml and events.jsonl; give a run folder")
    for key in ("tracking.project", "tracking.log_every_steps", "run.name", "run.hypothesis"):
        section, name = key.split(".")
        if name not in (run.get(section) or {}):
            raise UserError(f"{run_dir.config}: has no {key}; restore it, from config.N.yaml where there is one")
    mode = "online" if online else "offline"
    sink = WandbSink(run_dir, config, mode=mode, models=models, finish_timeout_s=FINISH_TIMEOUT_S)
    sink.close()
    return sink.done


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = Arguments("python -m tracking.wandb.sync", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, of a run that has ended")
    parser.add_argument("--online", action="store_true", help="send it now instead of writing an offline run")
    several: dict[str, Any] = {"type": Path, "action": "append", "default": []}
    parser.add_argument("--checkpoint", **several, metavar="FOLDER", help="a checkpoints/step-N; may be repeated")
    parser.add_argument("--parity", type=Path, metavar="FILE", help="parity.json with the verdict on the checkpoints")
    parser.add_argument("--export", **several, metavar="OUT", help="OUT of tools.export_hf; may be repeated")
    options = parser.parse_args(arguments)
    try:
        parity = parity_facts(options.parity) if options.parity else None
        if parity and not options.checkpoint:
            raise UserError("--parity: needs a --checkpoint; an export has its own verdict")
        run_dir = RunDir(options.run)
        inputs = read_inputs(run_dir)
        config = {"run": inputs.pop("config"), **inputs}
        models = [named_checkpoint_facts(path, config, parity) for path in options.checkpoint]
        models += [export_facts(path) for path in options.export]
        done = deliver(run_dir, config, online=options.online, models=models)
    except RuntimeError as error:
        print(f"error: {shown(error)}", file=sys.stderr)
        return FAILED
    further = f", with {len(models)} model{'s' if models[1:] else ''}" if models else ""
    print(shown(f"{options.run}: {done}{further}"))
    return FAILED if options.online and done.startswith("wrote") else 0


if __name__ == "__main__":
    sys.exit(main())
