"""Fill a template: everything from a run is rendered as text, and a page loads no other file."""

import json
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from config.printable import printable, shown
from config.redact import redact

_FOLDER = Path(__file__).parent


def render(template: str, **values: Any) -> str:
    """The rendered page. template: path below `tracking/`. Raises UndefinedError if `values` lack one it uses."""
    return _environment().get_template(template).render(**values)


def script_json(value: Any) -> str:
    """Plain values as JSON that is safe inside <script>: it cannot close it or open a comment."""
    content = json.dumps(_printable(redact(value)), allow_nan=False, separators=(",", ":"))
    return content.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(_FOLDER.parent, encoding="utf-8"),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    found.filters["json"] = lambda value: Markup(script_json(value))
    found.globals["asset"] = _asset
    return found


_shown_text = lru_cache(1 << 15)(shown)  # a table of runs repeats a few texts many times


def _shown(value: Any) -> Any:
    """Text without control and bidirectional characters; autoescape does the rest."""
    return value if isinstance(value, Markup) else _shown_text(value) if isinstance(value, str) else shown(value)


@cache
def _asset(name: str) -> Markup:
    """One of the repository's scripts or stylesheets below `tracking/`, verbatim."""
    return Markup((_FOLDER.parent / name).read_text(encoding="utf-8"))


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(name)): _printable(item) for name, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list | tuple) else value
