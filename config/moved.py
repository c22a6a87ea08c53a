"""Old names of tools, such as `python -m training.NAME` before version 0.2.0."""

import sys

MOVED = {
    **dict.fromkeys(("analyze", "export_hf", "generate", "parity", "replay"), "tools"),
    **dict.fromkeys(("benchmark", "envelope", "gpu_check", "matrix"), "lab"),
}
"""Old module inside `training` to the package that now holds it."""
RENAMED = {"training.parity.defects": "lab.detection.gate", "tracking.wandb.deliver": "tracking.wandb.sync"}


def new_name(module: str) -> str | None:
    """The current name of a module that was renamed; None for any other."""
    package, _, rest = module.partition(".")
    folder = MOVED.get(rest.partition(".")[0]) if package == "training" else None
    return RENAMED.get(module, folder and f"{folder}.{rest}")


def refuse_old_name() -> None:
    """Exit with code 2 if `python -m` names a tool by its old name. Called by packages that Python imports first."""
    command = sys.orig_argv if sys.argv[:1] == ["-m"] else []
    old = command[command.index("-m") + 1] if "-m" in command[:-1] else ""
    if new := new_name(old):
        print(f"error: python -m {old} has moved: use python -m {new}", file=sys.stderr)
        sys.exit(2)
