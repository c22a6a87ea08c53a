"""Train a Hugging Face causal language model with DeepSpeed.

    deepspeed train.py --config config/recipes/demo.yaml [key.sub=value ...]

`accelerate launch`, `torchrun` and, for one process, plain `python` work too. `--help` prints one page.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from config.cli import CONFIG_ERROR, LOST, print_any_text
from config.command_line import read_command_line
from config.errors import UserError, report_error
from config.extras import require_extras
from config.hub import settle_hub
from config.machine.processes import launchers
from config.resolved import Resolved
from training.start.process import (
    end_with,
    import_deepspeed,
    leave,
    open_more_files,
    outlive_full_disk,
    use_writable_caches,
)


def main(arguments: Sequence[str]) -> int:
    """Run one training job; returns the process's exit code."""
    print_any_text()
    # set before torch is imported: it would print a C++ stack trace for every connection to a rank that has exited
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    end_with(launchers())
    open_more_files()
    try:
        moved_caches = use_writable_caches()
    except UserError as error:
        report_error(error, 0)
        return CONFIG_ERROR
    resolved = read_command_line(arguments)  # --help, --show-config and every mistake in the config end here
    if moved_caches and resolved.rank == 0:
        print(f"mantissa: {moved_caches}", file=sys.stderr, flush=True)
    try:
        require_extras(resolved.config)
        settle_hub(resolved.config)
        return run(resolved)
    except UserError as error:
        report_error(error, resolved.rank)
        return CONFIG_ERROR


def run(resolved: Resolved) -> int:
    """Prepare the data, build the parts, restore, train, report."""
    # Imported here so that --help and a mistyped key answer at once.
    import_deepspeed()
    from training.build import build
    from training.finish import finish
    from training.loop import train
    from training.session import session
    from training.watchdog.watch import LostRank

    try:
        with session(resolved, trains=True) as opened:
            parts, progress = build(opened)
            ending = train(parts, progress)
            finish(parts, ending)
    except LostRank:
        return LOST
    return ending.exit_code


if __name__ == "__main__":
    outlive_full_disk()
    leave(main(sys.argv[1:]))
