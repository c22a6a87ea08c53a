"""All addresses of the server and their answers: a rendered template, or JSON for its script."""

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from config.errors import UserError
from config.printable import shown
from tracking.live import LiveRun, sketch
from tracking.pages.render import render, script_json
from tracking.report.context import MeasureContext
from tracking.run_facts import RunFacts
from tracking.serve import overview, run_page
from tracking.serve.library import Entry, Library, require_inside
from tracking.serve.notes import parse, read_notes

MOST_COMPARED = 24
Query = dict[str, list[str]]
_HTML = "text/html; charset=utf-8"
_quoted = partial(quote, safe="", errors="surrogateescape")  # a run's folder may have a name that is not UTF-8
_TRACKING = Path(__file__).parent.parent
_KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
_STATIC = {str(file.relative_to(_TRACKING)): file for file in _TRACKING.rglob("*.*") if file.suffix in _KINDS}
"""Scripts and stylesheets by their path below `tracking/`."""


class NotFound(Exception):
    """Raised for an unknown address or run."""


@dataclass(frozen=True)
class Reply:
    """An answer. policy: content security policy, by its name in server.py."""

    body: bytes
    kind: str
    policy: str = "page"
    status: int = 200


class Pages:
    def __init__(self, library: Library, *, editable: bool) -> None:
        self._library = library
        self.token = secrets.token_urlsafe(16) if editable else ""
        """Secret that our page sends along with notes and other sites cannot read; empty if notes are read-only."""
        self._addresses: dict[str, Callable[[Query], Reply]] = {
            "/": self._overview,
            "/favicon.ico": lambda query: _static("serve/icon.svg"),
            "/runs": lambda query: self._render("serve/runs.html", **self._table(query)),
            "/runs.csv": self._export,
            "/run": self._run,
            "/run/state": self._state,
            "/run/curves": self._curves,
            "/run/heat": self._heat,
            "/run/incidents": self._incidents,
            "/run/sections": self._sections,
            "/run/notes": self._notes,
            "/run/report": self._report,
            "/compare": self._compare,
        }

    def reply(self, path: str, query: Query) -> Reply:
        """The answer to a request. Raises NotFound, or ValueError, OSError or UserError if it cannot be answered."""
        if path.startswith("/static/"):
            return _static(path.removeprefix("/static/"))
        if path not in self._addresses:
            raise NotFound("There is nothing at this address.")
        return self._addresses[path](query)

    def write(self, path: str, query: Query, content: bytes) -> Reply:
        """Replace the notes of a run. Raises the same errors as `reply`."""
        if path != "/run/notes":
            raise NotFound("Nothing is written here.")
        self._entry(query)
        self._library.note(one(query, "key"), parse(content))
        return _json({})

    def _render(self, template: str, **values: Any) -> Reply:
        text = render(template, quoted=_quoted, marked=overview.marked, **values)
        return Reply(text.encode(errors="replace"), _HTML)

    def _entry(self, query: Query) -> Entry:
        entry = self._library.entry(one(query, "key"))
        if entry is None:
            raise NotFound("There is no such run.")
        return entry

    def _overview(self, query: Query) -> Reply:
        values = {"root": self._library.root, "token": self.token, "usual": overview.USUAL, **self._table(query)}
        return self._render("serve/overview.html", **values)

    def _export(self, query: Query) -> Reply:
        text = overview.export(self._library.entries(), _asked(query))
        return Reply(text.encode(errors="replace"), "text/csv; charset=utf-8")

    def _table(self, query: Query) -> dict[str, Any]:
        table = overview.table(self._library.entries(), _asked(query), now=time.time())
        unread = dict(self._library.unread)
        damaged = {key: why for key, why in unread.items() if why}
        return {
            "table": table,
            "editable": bool(self.token),
            "unread": len(unread) - len(damaged),
            "damaged": damaged,
            "left_out": self._library.left_out,
            "most_compared": MOST_COMPARED,
        }

    def _notes(self, query: Query) -> Reply:
        entry = self._entry(query)
        require_inside(entry.folder, self._library.root)
        found = read_notes(entry.folder)
        return _json({"tags": found.tags, "note": found.note})

    def _run(self, query: Query) -> Reply:
        entry = self._entry(query)
        changes = run_page.changes(entry, self._library.entries())
        state = run_page.state(entry, now=time.time())
        return self._render("serve/run.html", entry=entry, state=state, changes=changes, sections=None)

    def _state(self, query: Query) -> Reply:
        entry = self._entry(query)
        return self._render("report/state.html", entry=entry, state=run_page.state(entry, now=time.time()))

    def _read(self, query: Query) -> LiveRun:
        """The whole run, read up to its newest event."""
        live = self._library.live(self._entry(query))
        live.read()
        return live

    def _curves(self, query: Query) -> Reply:
        live = self._library.live(self._entry(query))
        if ready := live.ready():
            live.read()
        facts = live.events() if ready else sketch(live.folder, live.label)
        with suppress(UserError):  # utilisation also needs the config and environment
            facts = self._facts(query) if ready else facts
        return _json({"drawn": run_page.curves(facts), "steps": len(facts.columns), "sketch": not ready})

    def _heat(self, query: Query) -> Reply:
        found = self._read(query).heat()
        return _json(run_page.heat(found, one(query, "panel"), one(query, "fold"), query.get("open", [])))

    def _report(self, query: Query) -> Reply:
        entry, context = self._entry(query), self._measured(query)
        changed = run_page.changes(entry, self._library.entries())
        page = run_page.whole(entry, changed, context, root=self._library.root)
        return Reply(page.encode(errors="replace"), _HTML, policy="single")

    def _incidents(self, query: Query) -> Reply:
        return self._render("report/incidents.html", incidents=run_page.incidents(self._read(query).events()))

    def _sections(self, query: Query) -> Reply:
        try:
            found = run_page.sections(self._measured(query), root=self._library.root)
        except (UserError, ValueError) as problem:
            return Reply(Markup('<p class="note warn">{}</p>').format(shown(problem)).encode(), _HTML)
        return self._render("report/sections.html", **found)

    def _measured(self, query: Query) -> MeasureContext:
        """The run as the input of its measures."""
        facts = self._facts(query)
        if not facts.start:
            raise ValueError("nothing was recorded in this run folder")
        return MeasureContext(facts)

    def _compare(self, query: Query) -> Reply:
        from tracking.compare.divergence import Tolerance
        from tracking.compare.html import page
        from tracking.compare.result import compare

        keys = list(dict.fromkeys(query.get("run", [])))
        if not 1 <= len(keys) <= MOST_COMPARED:
            raise ValueError(f"choose from 1 to {MOST_COMPARED} runs to compare; there are {len(keys)}")
        found = compare([self._facts({"key": [key]}) for key in keys], tolerance=Tolerance(), price=None)
        return Reply(page(found).encode(errors="replace"), _HTML, policy="single")

    def _facts(self, query: Query) -> RunFacts:
        require_inside(self._entry(query).folder, self._library.root)
        return self._read(query).facts()


def _asked(query: Query) -> overview.Asked:
    columns, time = query.get("col", []), one(query, "time")
    return overview.Asked.of(one(query, "q"), one(query, "sort"), one(query, "group"), columns, time)


def one(query: Query, name: str) -> str:
    """The value of a query field; empty if missing."""
    return query.get(name, [""])[0]


def _json(value: Any) -> Reply:
    return Reply(script_json(value).encode(), "application/json")


@cache
def _static(name: str) -> Reply:
    if name not in _STATIC:
        raise NotFound("There is no such file.")
    return Reply(_STATIC[name].read_bytes(), _KINDS[_STATIC[name].suffix])
