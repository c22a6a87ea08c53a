"""A real browser, headless: a page as it is drawn, what it asked for, and what its scripts found. Skips without one."""

import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs.launches import wait_until

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium() -> str:
    """Path of a Chromium; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on PATH (apt-get install chromium)")
    return found


class Tab:
    """One page, driven by the DevTools protocol."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._number = socket, 0
        self.messages: list[dict[str, Any]] = []
        """Events of the protocol so far: dialogs, errors, requests."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                return message.get("result", message)
            self.messages.append(message)
            if message.get("method") == "Page.javascriptDialogOpening":
                self._socket.send(
                    json.dumps({"id": 0, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}})
                )

    def open(self, address: str, *, ready: str, seconds: float = 30.0) -> None:
        """Load a page and wait until the expression `ready` is true in it."""
        self._call("Page.navigate", url="about:blank")  # or `ready` could be true of the page before
        self.wait("location.href === 'about:blank'", seconds)
        self._call("Page.navigate", url=address)
        self.wait(f"document.readyState === 'complete' && location.href !== 'about:blank' && ({ready})", seconds)

    def wait(self, expression: str, seconds: float = 30.0) -> None:
        """Wait until `expression` is true in the page."""
        said = f"still not true after {seconds:g} s: {expression}; "
        wait_until(
            lambda: self.value(f"Boolean({expression})"), seconds=seconds, why=lambda: said + str(self.complaints())
        )

    def value(self, expression: str) -> Any:
        """The value of an expression in the page, as JSON has it; None for an error."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return answer.get("result", {}).get("value")

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Size of the window in pixels, and the system's theme."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=scheme)

    def picture(self, path: Path) -> Path:
        """A screenshot of the whole page."""
        import base64

        content = self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(content))
        return path

    def complaints(self) -> list[str]:
        """Dialogs, uncaught errors and blocked requests so far: a healthy page has none."""
        found = []
        for message in self.messages:
            method, values = message.get("method"), message.get("params", {})
            if method == "Page.javascriptDialogOpening":
                found.append(f"dialog: {values['message']}")
            elif method == "Runtime.exceptionThrown":
                found.append(f"error: {json.dumps(values['exceptionDetails'])[:500]}")
            elif method == "Log.entryAdded" and values["entry"]["level"] == "error":
                found.append(f"log: {values['entry']['text']} {values['entry'].get('url', '')}")
        return found

    def requested(self) -> list[str]:
        """Addresses that the page asked for."""
        sent = [message for message in self.messages if message.get("method") == "Network.requestWillBeSent"]
        return [message["params"]["request"]["url"] for message in sent]


@contextmanager
def tab(folder: Path) -> Iterator[Tab]:
    """A browser with its profile in `folder`, without any network but this machine."""
    websocket = pytest.importorskip("websocket", reason="no websocket-client to drive a browser with")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    offline = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--disable-background-networking"]
    command = [chromium(), *options, *offline, f"--user-data-dir={folder}", "--remote-debugging-port=0", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
        try:
            place = folder / "DevToolsActivePort"
            wait_until(lambda: place.is_file() and "\n" in place.read_text(), seconds=60)
            port = place.read_text().split("\n")[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
                page = next(found for found in json.load(answer) if found["type"] == "page")
            socket = websocket.create_connection(page["webSocketDebuggerUrl"], timeout=60, suppress_origin=True)
            try:
                yield Tab(socket)
            finally:
                socket.close()
        finally:
            browser.terminate()
