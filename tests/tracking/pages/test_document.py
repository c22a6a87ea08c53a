"""Pages that are files, and a tool's Markdown: whatever a run says is text, nothing is loaded, no markup obeyed."""

import math
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from config.cli import REPOSITORY
from config.printable import line, printable, shown
from tests.support.runs.compare_runs import write_run
from tests.support.runs.hostile import HOSTILE, OBEYED, SECRETS
from tests.tracking.test_numbers import TEXTS
from tracking.compare.command import main
from tracking.pages import markdown
from tracking.pages.document import document, write_document
from tracking.pages.markdown import Table, code, fenced, text
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


PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
SAID = pytest.mark.parametrize(
    "said", [*HOSTILE.values(), "- item", "1. one", "===", "***", "> quoted", "\\", "`", "|"]
)


def _inline(source: str) -> list[tuple[str, str]]:
    """(type, content) of everything inside the blocks of a page."""
    return [(item.type, item.content) for token in PARSER.parse(source) for item in token.children or []]


@SAID
def test_text_is_read_back_as_the_same_words(said: str) -> None:
    source = text(said)
    assert [token.type for token in PARSER.parse(source)] == ["paragraph_open", "inline", "paragraph_close"]
    assert {kind for kind, _ in _inline(source)} <= {"text", "text_special"}
    assert " ".join("".join(content for _, content in _inline(source)).split()) == " ".join(line(said).split())
    assert not OBEYED.search(source) and "\n" not in source


@SAID
def test_a_cell_neither_ends_its_row_nor_its_table(said: str) -> None:
    source = str(Table(("what", "as text", "as code"), [(1, text(said), code(said)), (2, "after", "it")]))
    types = [token.type for token in PARSER.parse(source)]
    assert (types.count("tr_open"), types.count("td_open"), types.count("table_open")) == (3, 6, 1)
    assert types[-1] == "table_close"
    cells = [token for token in PARSER.parse(source) if token.type == "inline"]
    words = "".join(item.content for item in cells[4].children or [])
    assert " ".join(words.split()) == " ".join(line(said).split())
    assert [item.type for item in cells[5].children or [] if item.content.strip()] == ["code_inline"]


@SAID
def test_a_block_of_code_holds_every_fence(said: str) -> None:
    tokens = PARSER.parse(f"before\n\n{fenced(said)}\nafter")
    assert [token.type for token in tokens if token.type == "fence"] == ["fence"]
    assert tokens[-2].content == "after"
    assert next(token for token in tokens if token.type == "fence").content.rstrip("\n") == printable(said.rstrip())


@pytest.mark.parametrize("secret", [SECRETS["hugging face"], SECRETS["openai"], "https://me:hunter2@host"])
def test_markdown_shows_no_secret(secret: str) -> None:
    for made in (text, code, fenced):
        assert secret not in made(f"see {secret} there") and "***" in made(f"see {secret} there").replace("\\", "")


@pytest.mark.parametrize(
    "plain", ["0.5%", "3.1 -> 2.4 (best 2.3 at step 6)", "-5.3", "model.layers.0.self_attn", "<= x"]
)
def test_ordinary_text_is_hardly_touched(plain: str) -> None:
    assert re.sub(r"\\([<>])", r"\1", text(plain)) == plain


@SAID
def test_a_terminal_gets_one_printable_line(said: str) -> None:
    assert not OBEYED.search(shown(said)) and "\n" not in shown(said)


def test_escapes_are_visible_and_letters_of_any_language_stay() -> None:
    assert line("a\x1b[31mb\u202ec\n\td\x00") == "a\\x1b[31mb\\u202ec d\\x00"
    for kept in ("größe", "נסוי", "تجربة", "実験", "👩\u200d💻", "na\u00efve"):
        assert line(kept) == kept


OVERFLOWING = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
MARKUP = "document.querySelectorAll('body img, iframe, main a, main script, [onmouseover], [onerror]').length"
POINT_AT_STEP_20 = """(() => {
  const chart = drawn[0], place = chart.over.getBoundingClientRect();
  const at = { clientX: place.left + chart.valToPos(20, "x"), clientY: place.top + 20 };
  CHARTS[0].element.dispatchEvent(new MouseEvent("mouseenter"));
  chart.over.dispatchEvent(new MouseEvent("mousemove", at));
})()"""


def test_the_pages_script_writes_numbers_as_python_does(page, tmp_path: Path) -> None:
    script = (REPOSITORY / "tracking" / "pages" / "numbers.js").read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(f"<!DOCTYPE html><script>{script}</script>")
    page.open((tmp_path / "page.html").as_uri(), ready="typeof number === 'function'")
    for function, cases in TEXTS.items():
        for value, written in cases:
            said = {math.inf: "Infinity", -math.inf: "-Infinity", None: "null"}.get(value) or repr(value)
            assert page.value(f"{function}({said.replace('nan', 'NaN')})") == written, (function, value)


def test_nothing_in_the_texts_of_compared_runs_is_obeyed(page, tmp_path: Path) -> None:
    """Every hostile text as a name, and all of them as settings, reasons, modules and commands of the first run."""
    texts = list(HOSTILE.values())
    names = [said.replace("/", "|").replace("\n", " ").replace("\r", " ") for said in texts]
    settings = {f"optimizer.{said}": said for said in texts}
    events = []
    for said in texts:
        cause = {"event": "nonfinite", "rank": 0, "module": said, "tensor": "activation", "kind": "nan", "count": 1}
        events += [cause, {"event": "incident", "verdict": said, "reason": said, "modules": [said], "replay": said}]
    runs = []
    for number, (name, said) in enumerate(zip(names, texts, strict=True)):
        config = {"run.hypothesis": said, "optimizer.name": said, **(settings if number == 0 else {})}

        def change(step, _, number=number):
            return {"loss": 3.0 + number / 10} if step >= 20 else None

        after = {20: events if number == 0 else [{"event": "note", "text": said}]}
        runs.append(str(write_run(tmp_path, name, change=change, after=after, config=config).path))
    html = tmp_path / "page.html"
    assert main([*runs, "--html", str(html)]) == 0
    page.size(1200, 800)
    page.messages.clear()
    page.open(html.as_uri(), ready="document.body.dataset.drawn === 'yes'")
    rows = page.value("[...document.querySelectorAll('.only')].length")
    assert rows == len(texts), "a row of the table for each run"
    page.value(POINT_AT_STEP_20)
    page.wait("!document.querySelector('#tip').hidden")
    assert "<img src=x onerror=alert(1)>" in page.value("document.querySelector('#tip').textContent")
    page.value("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    page.value("document.querySelectorAll('.only').forEach((button) => button.click())")
    assert page.value(MARKUP) == 0
    assert page.complaints() == [] and page.requested() == [html.as_uri()]


def test_a_phone_can_read_the_page_of_a_tool(page, tmp_path: Path) -> None:
    """Wide tables and pictures scroll in boxes of their own; no name is broken within its letters."""
    import matplotlib.figure

    matplotlib.figure.Figure(figsize=(12, 4)).savefig(tmp_path / "wide.png")
    name = "model.layers.31.post_attention_layernorm"
    head = ("what", "measured", "bound", "holds", "worst at", "why it is so, which takes a sentence")
    row = (markdown.code(name), "100.00%", "at least 100.00%", "yes", markdown.code(name), "words " * 20)
    text = f"# A tool\n\n**accepted**\n\n![wide](wide.png)\n\n{markdown.Table(head, [row] * 3)}"
    write_document(tmp_path / "tool.md", text, tone="good")
    page.size(390, 844, dark=True)
    page.messages.clear()
    page.open((tmp_path / "tool.html").as_uri(), ready="true")
    assert page.value(OVERFLOWING) <= 0, "the page is wider than the phone"
    assert page.value("Math.max(...[...document.querySelectorAll('code')].map((e) => e.getClientRects().length))") == 1
    assert page.value("document.querySelector('tbody tr').offsetHeight") < 300, "a row is not as high as a screen"
    assert page.value("document.querySelector('img.plot').offsetWidth") > 700, "a picture of 1200 px can be read"
    boxes = "[...document.querySelectorAll('.scroll, .picture')].map((e) => e.scrollWidth > e.clientWidth)"
    assert page.value(boxes) == [True, True]
    assert page.complaints() == []
