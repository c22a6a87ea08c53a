"""A web server of a folder's files: one that sends them whole, or in the parts that are asked for."""

from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

from tests.support.servers import threads


class Web(threads.Server):
    """The files of a folder, whole or in parts."""

    def __init__(self, folder: Path, *, parts: bool) -> None:
        super().__init__(partial(_Handler, directory=str(folder)))
        self.parts, self.cut, self.ranges = parts, False, 0


class _Handler(threads.Handler, SimpleHTTPRequestHandler):
    server: Web

    def do_GET(self) -> None:
        path, wanted = Path(self.translate_path(self.path)), self.headers.get("Range")
        if path.is_file() and self.server.cut:
            self.send_response(200)
            self.send_header("Content-Length", str(path.stat().st_size))
            self.end_headers()
            self.wfile.write(path.read_bytes()[:-5])
        elif path.is_file() and self.server.parts and wanted is not None:
            first, last = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
            content = path.read_bytes()
            part = content[first : last + 1]
            self.server.ranges += 1
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part)
        else:
            super().do_GET()
