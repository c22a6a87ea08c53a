"""Show a running or finished run in the terminal: `python -m tracking.watch RUN`.

Reads only the run folder, so it works for a run on any machine with a shared disk and does not affect the run. Keys: q
quits, x toggles a logarithmic step axis, h cycles through the heat maps of the layers. With --once, or if the output is
not a terminal, one frame is printed.
"""

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from config.cli import Arguments, entry_point
from config.errors import UserError
from tracking import terminal
from tracking.heatmap.grid import drawn_panels
from tracking.heatmap.panels import PANELS
from tracking.heatmap.still import still_of_run
from tracking.live import LiveRun
from tracking.run_dir import RunDir
from tracking.status import run_status
from tracking.watch.screen import View, frame

_REFRESH_S = 0.5
_SLICE_S = 0.2  # maximum reading time between frames
_DUMB_REFRESH_S = 10.0
_ONCE_HEIGHT = 36


class Watch:
    """Reads one run folder as it grows and draws it."""

    def __init__(self, run_dir: RunDir, *, log_steps: bool = False, ascii_only: bool = False) -> None:
        self.run = LiveRun(run_dir.path, run_dir.name)
        self.log_steps, self._ascii = log_steps, ascii_only
        self.panel = ""
        """Heat map to show; empty shows the curves."""
        self._read = 1.0
        self._still = (0, "")  # (number of telemetry events, warning based on them that the run hardly moves)

    def read(self, seconds: float) -> bool:
        """Read new events for at most `seconds`; returns whether there is more to read."""
        self._read = self.run.read(seconds)
        return self._read < 1.0

    def frame(self, width: int, height: int, *, keys: bool) -> RenderableType:
        """The current screen for a terminal of this size. keys: whether key presses are read."""
        run = self.run.known_facts()
        if run.counts["telemetry"] != self._still[0]:
            self._still = run.counts["telemetry"], still_of_run(run, self.run.heat())
        view = View(
            width=width,
            height=height,
            now=time.time(),
            log_steps=self.log_steps,
            ascii=self._ascii,
            read=self._read,
            damaged=self.run.damaged,
            keys=keys,
            panel=self.panel,
            heat=self.run.heat() if self.panel else None,
            alert=self._still[1],
        )
        return frame(run, view)

    def next_panel(self) -> None:
        """Switch to the next heat map that is worth drawing; after the last, back to the curves."""
        keys = ["", *drawn_panels(self.run.heat())]
        at = keys.index(self.panel) if self.panel in keys else 0
        self.panel = keys[(at + 1) % len(keys)]


def once(watch: Watch, console: Console) -> None:
    """Read everything and print one frame."""
    while watch.read(60.0):
        pass
    console.print(watch.frame(console.width, _ONCE_HEIGHT, keys=False))


def live(watch: Watch, console: Console) -> None:
    """Redraw the whole terminal until q or Ctrl-C."""
    with _keys() as key, Live(console=console, screen=True, auto_refresh=False) as screen:
        while True:
            behind = watch.read(_SLICE_S)
            width, height = console.size
            screen.update(watch.frame(width, height, keys=True), refresh=True)
            pressed = key(0.0 if behind else _REFRESH_S)
            if pressed in ("q", "Q", "\x03"):
                return
            if pressed == "x":
                watch.log_steps = not watch.log_steps
            if pressed == "h":
                watch.next_panel()


@contextmanager
def _keys() -> Iterator[Any]:
    """Yield a function that waits up to some seconds for a key and returns it, or None; without a tty it sleeps."""
    if not sys.stdin.isatty():
        yield time.sleep
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def key(seconds: float) -> str | None:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 1).decode(errors="replace") if ready else None

    try:
        tty.setcbreak(descriptor)
        yield key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@entry_point()
def main(arguments: list[str] | None = None) -> int:
    """Watch one run. Exit code 2 if the folder does not exist."""
    parser = Arguments("python -m tracking.watch", __doc__)
    parser.add_argument("run", type=Path, help="run folder, such as runs/demo; may still be empty")
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    parser.add_argument("--log-steps", action="store_true", help="steps on a logarithmic axis")
    parser.add_argument("--heat", choices=PANELS, default="", help="show this heat map of the layers, not the curves")
    parser.add_argument("--ascii", action="store_true", help="only ASCII characters")
    given = parser.parse_args(arguments)
    console = terminal.console()
    ascii_only = given.ascii or console.is_dumb_terminal or not console.encoding.lower().startswith("utf")
    if not given.run.is_dir():
        raise UserError(f"{given.run}: there is no such run folder; give one such as runs/demo")
    watch = Watch(RunDir(given.run), log_steps=given.log_steps, ascii_only=ascii_only)
    watch.panel = given.heat
    with suppress(KeyboardInterrupt):
        if given.once or not console.is_terminal:
            once(watch, console)
        elif console.is_dumb_terminal:  # it cannot move its cursor
            once(watch, console)
            while not run_status(given.run).over:
                time.sleep(_DUMB_REFRESH_S)
                once(watch, console)
        else:
            live(watch, console)
    return 0
