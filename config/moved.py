"""Earlier names of tools, those of `python -m training.NAME` from before version 0.2.0."""

import sys

MOVED = {
    **dict.fromkeys(("analyze", "export_hf", "generate", "parity", "replay"), "tools"),
    **dict.fromkeys(("benchmark", "envelope", "gpu_check", "matrix"), "lab"),
}
"""Old module inside `training` to the package it is in now."""
RENAMED = {"training.parity.defects": "lab.detection.gate", "tracking.wandb.deliver": "tracking.wandb.sync"}


def new_name(module: str) -> str | None:
    """The present name of a module that has another one now; None for every other one."""
    package, _, rest = module.partition(".")
    folder = MOVED.get(rest.partition(".")[0]) if package == "training" else None
    return RENAMED.get(module, folder and f"{folder}.{rest}")


def refuse_old_name() -> None:
    """End the process, with exit code 2, where its command line starts a tool by its old name.

    For packages that Python imports on its way to the module that `python -m` asked for.
    """
    command = sys.orig_argv if sys.argv[:1] == ["-m"] else []
    old = command[command.index("-m") + 1] if "-m" in command[:-1] else ""
    if new := new_name(old):
        print(f"error: python -m {old} has moved: use python -m {new}", file=sys.stderr)
        sys.exit(2)
