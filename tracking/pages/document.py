"""Write a tool's page as Markdown and as HTML, the latter as one file with its pictures inlined.

Text between the heading and the first section is the verdict, and is framed as such.
"""

import re
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markupsafe import Markup

from config.files import write_atomically
from tracking.pages.render import render

Tone = Literal["good", "bad", "warn"]

PARSER = MarkdownIt("commonmark", {"html": False}).enable("table")
_NO_PICTURE = re.compile(r"^([a-z]+:|//|/)", re.IGNORECASE)


def write_document(path: Path, markdown: str, *, tone: Tone = "warn") -> Path:
    """Write `path` (PAGE.md) and PAGE.html beside it; returns the former. Raises OSError if either cannot be written.

    markdown: starts with a heading; text from a run has to be escaped by `tracking.pages.markdown`. Pictures are files
    beside the page. tone: of the verdict.
    """
    write_atomically(path, markdown.encode())
    write_atomically(path.with_suffix(".html"), document(markdown, path.parent, tone=tone).encode())
    return path


def document(markdown: str, folder: Path, *, tone: Tone = "warn") -> str:
    """The page as HTML. markdown: starts with a heading; its HTML tags are shown as text. folder: of the pictures."""
    renderer = Renderer(folder)
    tokens = PARSER.parse(markdown)
    title, rest = "".join(child.content for child in tokens[1].children or ()), tokens[3:]  # after the heading
    at = next((index for index, token in enumerate(rest) if token.type == "heading_open"), len(rest))
    pictured = [any(child.type == "image" for child in token.children or ()) for token in rest[:at]]
    verdict = pictured.index(True) if any(pictured) else at
    while verdict < at and verdict and rest[verdict].type != "paragraph_open":
        verdict -= 1  # a picture and its paragraph belong to the body
    lead, body = (renderer.render(part, PARSER.options, {}) for part in (rest[:verdict], rest[verdict:]))
    return render("pages/document.html", title=title, lead=Markup(lead), body=Markup(body), tone=tone)


class Renderer(RendererHTML):
    """Inlines pictures and makes wide tables scroll."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def image(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        """An inlined picture; only its text if it is not a file beside the page."""
        token = tokens[index]
        name, said = unquote(str(token.attrGet("src") or "")), token.content
        file = self._folder / name
        if _NO_PICTURE.match(name) or ".." in Path(name).parts or not file.is_file():
            return str(Markup("<em>{}</em>").format(said))
        shown = Markup('<span class="picture"><img class="plot" alt="{}" src="data:image/png;base64,{}"></span>')
        return str(shown.format(said, b64encode(file.read_bytes()).decode()))

    def render(self, tokens: Sequence[Token], options: Any, env: Any) -> str:
        """HTML in which each table is wrapped in a scrolling box."""
        html: str = super().render(tokens, options, env)  # tags within text are escaped
        return html.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>")
