"""Every address of the server and what it answers: Jinja2 templates with autoescape, or JSON for their scripts."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from config.printable import shown
from tracking.run_dir import RunDir
from tracking.run_facts import RunFacts
from tracking.serve import overview, run_page
from tracking.serve.library import Entry, Library, require_inside
from tracking.summary import read_inputs

MOST_COMPARED = 24
Query = dict[str, list[str]]
_HERE = Path(__file__).parent
_STATIC = {
    "icon.svg": "image/svg+xml",
    "serve.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "overview.js": "text/javascript; charset=utf-8",
    "run.js": "text/javascript; charset=utf-8",
}
_HTML, _JSON = "text/html; charset=utf-8", "application/json"


class NotFound(Exception):
    """There is no such address, or no such run."""


@dataclass(frozen=True)
class Reply:
    """An answer. policy: which scripts it may run. compressed: the body by gzip, where that is known already."""

    body: bytes
    kind: str
    policy: str = "page"
    status: int = 200
    compressed: bytes | None = None


class Pages:
    """Answers requests about the runs of a library."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._templates = Environment(
            loader=FileSystemLoader(_HERE / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
        )
        self._templates.filters |= {"shown": shown, "key": _quoted}
        self._addresses: dict[str, Callable[[Query], Reply]] = {
            "/": self._overview,
            "/favicon.ico": lambda query: _static("icon.svg"),
            "/runs": self._runs,
            "/run": self._run,
            "/run/state": self._state,
            "/run/curves": self._curves,
            "/run/heat": self._heat,
            "/run/report": self._report,
            "/compare": self._compare,
        }

    def reply(self, path: str, query: Query) -> Reply:
        """The answer to a request. Raises NotFound, or ValueError, OSError or UserError: it cannot be answered."""
        if path.startswith("/static/"):
            return _static(path.removeprefix("/static/"))
        try:
            answer = self._addresses[path]
        except KeyError:
            raise NotFound("There is nothing at this address.") from None
        return answer(query)

    def _render(self, template: str, **values: Any) -> Reply:
        return Reply(self._templates.get_template(template).render(**values).encode(errors="replace"), _HTML)

    def _entry(self, query: Query) -> Entry:
        entry = self._library.entry(one(query, "key"))
        if entry is None:
            raise NotFound("There is no such run.")
        return entry

    def _overview(self, query: Query) -> Reply:
        return self._render("overview.html", root=self._library.root, **self._table(query))

    def _runs(self, query: Query) -> Reply:
        return self._render("runs.html", **self._table(query))

    def _table(self, query: Query) -> dict[str, Any]:
        asked = overview.Asked.of(one(query, "q"), one(query, "sort"), one(query, "group"))
        table = overview.table(self._library.entries(), asked, now=time.time())
        return {"table": table, "unread": len(self._library.unread), "left_out": self._library.left_out}

    def _run(self, query: Query) -> Reply:
        entry = self._entry(query)
        return self._render("run.html", entry=entry, state=run_page.state(entry, now=time.time()))

    def _state(self, query: Query) -> Reply:
        entry = self._entry(query)
        return self._render("state.html", entry=entry, state=run_page.state(entry, now=time.time()))

    def _live(self, query: Query) -> Any:
        live = self._library.live(one(query, "key"))
        if live is None:
            raise NotFound("There is no such run.")
        return live

    def _curves(self, query: Query) -> Reply:
        return _json(run_page.curves(self._live(query).facts()))

    def _heat(self, query: Query) -> Reply:
        heat = self._live(query).heat()
        return _json(run_page.heat(heat, one(query, "panel"), one(query, "fold"), query.get("open", [])))

    def _report(self, query: Query) -> Reply:
        entry = self._entry(query)
        require_inside(entry.folder, self._library.root)
        page = run_page.report(entry)
        return Reply(page.encode(errors="replace"), _HTML, policy="single")

    def _compare(self, query: Query) -> Reply:
        from tracking.compare.divergence import Tolerance
        from tracking.compare.html import page
        from tracking.compare.result import compare

        keys = list(dict.fromkeys(query.get("run", [])))
        if not 1 <= len(keys) <= MOST_COMPARED:
            raise ValueError(f"choose from 1 to {MOST_COMPARED} runs to compare; there are {len(keys)}")
        found = compare([self._facts(key) for key in keys], tolerance=Tolerance(), price=None)
        return Reply(page(found).encode(errors="replace"), _HTML, policy="single")

    def _facts(self, key: str) -> RunFacts:
        entry, live = self._library.entry(key), self._library.live(key)
        if entry is None or live is None:
            raise NotFound("There is no such run.")
        require_inside(entry.folder, self._library.root)
        config, deepspeed, environment = read_inputs(RunDir(entry.folder))
        return replace(live.facts(), config=config, deepspeed=deepspeed, environment=environment)


def _quoted(key: str) -> str:
    """A run's key for a query, also of a folder whose name is no UTF-8."""
    return quote(key, safe="", errors="surrogateescape")


def one(query: Query, name: str) -> str:
    """The value of a field; empty when it was not given."""
    return query.get(name, [""])[0]


def _json(value: Any) -> Reply:
    return Reply(json.dumps(value, allow_nan=False, separators=(",", ":")).encode(), _JSON)


@cache
def _static(name: str) -> Reply:
    if name == "plotly.js":
        from plotly.offline import get_plotlyjs

        script = get_plotlyjs().encode()
        return Reply(script, "text/javascript; charset=utf-8", compressed=gzip.compress(script, 6))
    if name not in _STATIC:
        raise NotFound("There is no such file.")
    return Reply((_HERE / "static" / name).read_bytes(), _STATIC[name])
