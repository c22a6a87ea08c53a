"""Fill a template: what comes from a run is text, and a page loads nothing."""

import json
from base64 import b64encode
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from config.printable import printable, shown
from config.redact import redact

_FOLDER = Path(__file__).parent


def render(template: str, **values: Any) -> str:
    """The whole page, UTF-8 text. template: a path below `tracking/`; values: what it needs, else UndefinedError."""
    return _environment().get_template(template).render(**values)


def picture(png: Path) -> str:
    """A picture as the value of `src`: the page stays one file. Raises OSError when it cannot be read."""
    return f"data:image/png;base64,{b64encode(png.read_bytes()).decode()}"


def script_json(value: Any) -> str:
    """Plain values as JSON that ends no <script>, opens no comment in it, and holds nothing that a page would obey."""
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


_shown_text = lru_cache(1 << 15)(shown)  # a table of runs has the same few texts again and again


def _shown(value: Any) -> Any:
    """Names and texts without control and bidirectional characters; autoescape does the rest."""
    return value if isinstance(value, Markup) else _shown_text(value) if isinstance(value, str) else shown(value)


@cache
def _asset(name: str) -> Markup:
    """One of the repository's own scripts or styles below `tracking/`, as it is."""
    return Markup((_FOLDER.parent / name).read_text(encoding="utf-8"))


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(name)): _printable(item) for name, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list | tuple) else value
