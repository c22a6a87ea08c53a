"""Show all runs of a folder on a live local page: `python -m tracking.serve [RUNS]`.

An overview with the verdict, loss, skips, loss scale, incidents and config differences of every run; a page for
each run with curves, heat maps of its layers, incidents and report; and comparisons of any selection. It reads the run
folders and writes nothing but your notes and tags (notes.json), needs no network, and answers only this machine unless
--host says otherwise.
"""

import argparse
from pathlib import Path

from config.cli import Arguments, entry_point
from config.errors import UserError
from config.printable import shown
from tracking.serve.library import Library
from tracking.serve.server import PageServer

PORT = 8600


@entry_point()
def main(arguments: list[str] | None = None) -> int:
    """Serve until Ctrl-C. Exit code 2 if the folder does not exist or the port is not available."""
    parser = Arguments("python -m tracking.serve", __doc__)
    parser.add_argument("runs", nargs="?", type=Path, default=Path("runs"), help="folder of run folders (runs)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine alone)")
    parser.add_argument("--port", type=int, default=PORT, help=f"port to listen on ({PORT}; 0 takes a free one)")
    parser.add_argument(
        "--edit",
        action=argparse.BooleanOptionalAction,
        help="allow editing notes and tags on the page, in notes.json of the run folders (default: on 127.0.0.1 alone)",
    )
    options = parser.parse_args(arguments)
    library = Library(options.runs)
    try:
        server = PageServer(options.host, options.port, library, editable=options.edit)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--port {options.port}: cannot listen on {options.host} ({reason}); choose another") from error
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(shown(f"{library.root}: http://{host}:{server.server_port}/  (Ctrl-C ends it)"), flush=True)
    if server.names is None:
        may = "read these runs and edit their notes" if server.pages.token else "read these runs"
        print(f"anyone who reaches this machine's port can {may}: there is no password", flush=True)
    library.start()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        server.server_close()
    return 0
