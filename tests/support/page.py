"""A page as a browser takes it apart: its tags, texts, cells and scripts, and what it would load."""

from html.parser import HTMLParser

_EMPTY = frozenset({"br", "img", "meta", "input", "link"})


class Page(HTMLParser):
    """The parts of one page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, frozenset[str]]] = []
        """Each tag with the names of its attributes; a comment is one, too."""
        self.loads: list[str] = []
        """The addresses in it."""
        self.text, self.cells, self.scripts = "", list[str](), list[str]()
        self.open: list[str] = []
        """Tags that are not closed."""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, frozenset(name for name, _ in attrs)))
        self.loads += [value for name, value in attrs if name in ("src", "href") and value]
        if tag not in _EMPTY:
            self.open.append(tag)
        if tag in ("th", "td"):
            self.cells.append("")
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert tag in _EMPTY or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        if self.cells and self.open and self.open[-1] in ("th", "td", "span"):
            self.cells[-1] += data

    def handle_comment(self, data: str) -> None:
        self.tags.append(("comment", frozenset()))
