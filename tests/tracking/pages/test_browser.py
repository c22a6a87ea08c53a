"""Pages that are files, in a real browser: nothing in a run's texts is obeyed, and a phone can read a tool's page."""

import math
from pathlib import Path

from config.cli import REPOSITORY
from tests.support.runs.compare_runs import write_run
from tests.support.runs.hostile import HOSTILE
from tests.tracking.test_numbers import TEXTS
from tracking.compare.command import main
from tracking.pages import markdown
from tracking.pages.document import write_document

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
        for value, text in cases:
            said = {math.inf: "Infinity", -math.inf: "-Infinity", None: "null"}.get(value) or repr(value)
            assert page.value(f"{function}({said.replace('nan', 'NaN')})") == text, (function, value)


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
