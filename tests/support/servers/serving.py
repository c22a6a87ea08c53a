"""The page server on a free port, in a thread of the test."""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from tests.support.servers.threads import answering
from tracking.serve.library import Library
from tracking.serve.server import PageServer


class Client:
    """Asks a server, without following anything."""

    def __init__(self, port: int, library: Library) -> None:
        self.port, self.library = port, library
        self.address = f"http://127.0.0.1:{port}"

    def ask(
        self, path: str, *, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer; the path is sent as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders(body)
        answer = connection.getresponse()
        found = answer.status, dict(answer.getheaders()), answer.read()
        connection.close()
        return found

    def page(self, path: str, **query: Any) -> str:
        """The text of a page that is there."""
        status, _, body = self.ask(f"{path}?{urlencode(query, doseq=True, quote_via=quote, errors='surrogateescape')}")
        assert status == 200, body
        return body.decode()

    def data(self, path: str, **query: Any) -> Any:
        """The values of a JSON answer."""
        return json.loads(self.page(path, **query))


@contextmanager
def served(root: Path, host: str = "127.0.0.1", **options: Any) -> Iterator[Client]:
    """A server of the runs below `root`, which were read once; `client.library.look()` reads them again."""
    library = Library(root)
    library.look()
    with answering(PageServer(host, 0, library, **options)) as server:
        yield Client(server.server_port, library)
