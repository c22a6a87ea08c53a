"""A tool's Markdown page in a browser: verdict framed, pictures inside, nothing loaded, no markup of a run obeyed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracking.pages import markdown
from tracking.pages.document import document, write_document
from tracking.pages.render import render

PNG = b"\x89PNG\r\n\x1a\nnot really"


def test_the_verdict_stands_first_in_a_frame_and_the_rest_below_it(tmp_path: Path) -> None:
    (tmp_path / "a b.png").write_bytes(PNG)
    below = f"![curves](<a b.png>)\n\n## More\n\n{markdown.Table(('a',), [('1',)])}"
    text = f"# It `is` x\n\n**failed**: one\n\n- two\n\n{below}"
    written = write_document(tmp_path / "page.md", text, tone="bad")
    assert written.read_text() == text
    page = (tmp_path / "page.html").read_text()
    frame = page.partition('<div class="note bad">')[2].partition("</div>")[0]
    assert "<strong>failed</strong>: one" in frame and "<li>two</li>" in frame and "img" not in frame
    assert "<title>It is x</title>" in page
    assert '<img class="plot" alt="curves" src="data:image/png;base64,' in page
    assert page.index("</div>") < page.index("<img") < page.index("<h2>More</h2>")
    assert '<div class="scroll"><table>' in page and "http" not in page.replace("http-equiv", "")


@pytest.mark.parametrize(
    "name", ["https://example.org/x.png", "//example.org/x.png", "/etc/passwd", "../secret.png", "missing.png"]
)
def test_only_pictures_beside_the_page_are_in_it(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(PNG)
    page = document(f"# x\n\n![said]({name})\n", folder)
    assert "<img" not in page and "<em>said</em>" in page


@pytest.mark.parametrize("said", ["<script>alert(1)</script>", "[x](javascript:alert(1))", "</div><img src=x>", "a|b"])
def test_what_a_run_says_is_text(tmp_path: Path, said: str) -> None:
    page = document(f"# {said}\n\n{said}\n\n{markdown.Table((said,), [(markdown.text(said),)])}", tmp_path)
    body = page.partition("<body>")[2]
    assert "<script>alert" not in body and "<img" not in body and "href=" not in body


def test_a_template_shows_no_control_character_and_escapes(tmp_path: Path) -> None:
    page = render("pages/document.html", title="a\u202e<b>\x1b[31m", lead="", body="<i>", tone="warn")
    assert "\u202e" not in page and "\x1b" not in page and "<i>" not in page and "&lt;i&gt;" in page
