"""The HTTP server for the pages: it answers GET and HEAD for a fixed set of addresses, and stores notes on runs.

Runs are identified by a key in the query, which is looked up among the known runs; no part of a request becomes a path.
Content-Security-Policy admits only scripts from files of this package, so text injected as markup could not run any.
On a loopback address the Host header has to name this server, which prevents DNS rebinding: a foreign page could
otherwise resolve its own name to this machine and read the runs. Notes are accepted only from this server's pages: the
request's Origin has to be this server, and it has to carry the token in the page.
"""

import gzip
import hashlib
import hmac
import ipaddress
import json
import re
import socket
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from config.errors import UserError
from config.printable import shown, tell
from tracking.serve.library import Library
from tracking.serve.notes import MOST_BYTES
from tracking.serve.pages import NotFound, Pages, Reply

_SECONDS = 30.0  # timeout for reading a request and for writing each part of the answer
_FIELDS = 200  # maximum number of query fields, enough for a selection of runs
_COMPRESSED_FROM = 4096
_POLICIES = {
    # 'unsafe-inline' because charts set styles on their elements.
    "page": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    # A page in one file: its inline script runs without an origin, so that it cannot reach the rest of this server.
    "single": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; sandbox allow-scripts",
}


class PageServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, library: Library, *, editable: bool | None = None) -> None:
        """Open the port. editable: whether notes may be written; None: only on a loopback address.

        Raises OSError, OverflowError or UnicodeError if the port is not available.
        """
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        self.names: frozenset[str] | None = None
        """Accepted host names in the Host header; None accepts any."""
        super().__init__((str(found[0][4][0]), port), _Handler)
        if ipaddress.ip_address(str(self.server_address[0])).is_loopback:
            self.names = frozenset({host.lower(), "localhost", "127.0.0.1", "[::1]"})
        self.pages = Pages(library, editable=self.names is not None if editable is None else editable)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect in the middle of an answer; print one line for any other error."""
        error = sys.exception()
        if not isinstance(error, OSError):
            tell(f"a request failed: {type(error).__name__}: {error}")


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = _SECONDS
    server_version, sys_version = "mantissa", ""

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Store the notes of a run."""
        length, host = self.headers.get("Content-Length", ""), self.headers.get("Host")
        own = self.headers.get("Origin") in (f"http://{host}", f"https://{host}")
        token, brought = self.server.pages.token, self.headers.get("X-Token", "")
        if not token:
            self.send_error(HTTPStatus.FORBIDDEN, explain="This server does not write; --edit lets it take notes.")
        elif not own or not hmac.compare_digest(token.encode(), brought.encode()):
            self.send_error(HTTPStatus.FORBIDDEN, explain="Notes are taken from a page of this server; reload it.")
        elif not length.isdecimal() or int(length) > MOST_BYTES:
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, explain=f"Notes have at most {MOST_BYTES:,} bytes.")
        else:
            self._answer(self.rfile.read(int(length)))

    def _answer(self, content: bytes | None = None) -> None:
        host = re.sub(r":\d*$", "", self.headers.get("Host", "")).lower()
        if self.server.names is not None and host not in self.server.names:
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, explain="This server has another name.")
            return
        pages = self.server.pages
        try:
            asked = urlsplit(self.path)
            query = parse_qs(asked.query, keep_blank_values=True, max_num_fields=_FIELDS, errors="surrogateescape")
            reply = pages.reply(asked.path, query) if content is None else pages.write(asked.path, query, content)
        except NotFound as problem:
            self.send_error(HTTPStatus.NOT_FOUND, explain=shown(problem))
            return
        except (ValueError, UserError, OSError) as problem:
            reply = Reply(json.dumps({"error": shown(problem)}).encode(), "application/json", status=400)
        except Exception as problem:  # a failing page must not look like a dead server
            tell(f"{self.path}: {type(problem).__name__}: {problem}")
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        self._send(reply)

    def _send(self, reply: Reply) -> None:
        body = reply.body
        tag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
        same = self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if same else reply.status)
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Content-Security-Policy", _POLICIES[reply.policy])
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        if not same:
            self.send_header("Content-Type", reply.kind)
            if len(body) >= _COMPRESSED_FROM and "gzip" in self.headers.get("Accept-Encoding", ""):
                body = gzip.compress(body, 1)
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not same and self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing."""
