"""The Markdown pages and figures of the tools show names, reasons and commands as text."""

from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from config.printable import line
from lab.envelope.plot import draw_envelope, envelope_page
from tests.lab.envelope.test_report import RATES, ROWS
from tests.support.runs.hostile import HOSTILE, OBEYED, SECRETS
from tests.tools.parity.test_report import check, found
from tools.analyze.plot import plain
from tools.export_hf.card import model_card
from tools.parity.report import write_report
from tracking.pages.markdown import Table, text
from tracking.profile.page import merge_blocks

SAID = pytest.mark.parametrize("said", HOSTILE.values(), ids=HOSTILE)


def _text_of(source: str, *, images: int = 0) -> str:
    """The words of a page; fails where there is other markup than the page's own."""
    assert not OBEYED.search(source.replace("\n", ""))
    tokens = MarkdownIt("commonmark").enable("table").parse(source)
    inside = [item for token in tokens for item in token.children or []]
    assert not [token for token in tokens if token.type == "html_block"]
    assert not [item for item in inside if item.type in ("html_inline", "link_open")]
    assert sum(item.type == "image" for item in inside) == images
    return " ".join("".join(item.content or " " for item in inside).split())


def _words(said: str) -> str:
    return " ".join(line(said).split())


@pytest.mark.one_in(2)
@SAID
def test_the_page_of_parity_is_text(said: str, tmp_path: Path) -> None:
    content = found()
    content["checks"].append(check("skipped_share", 0.5, 0.05, passed=False, modules=[said], where=said, note=said))
    content["failed"] = ["skipped_share"]
    content["conditions"] |= {"hypothesis": said, "command": f"python x {said}", "model": said, "data": said}
    content["first_parting"] = {"module": said, "own_error": 0.5, "step": 1}
    step = content["walks"][0]["steps"][0]
    step["own_error"] = {said: 0.5}
    step["order"] = [said]
    words = _text_of(write_report(tmp_path, content).read_text(), images=2)
    assert words.count(_words(said)) >= 5


@SAID
def test_the_page_of_an_envelope_is_text(said: str, tmp_path: Path) -> None:
    rows = [{**row, "tried": [{**item, "why": item["why"] and said} for item in row["tried"]]} for row in ROWS]
    page = envelope_page(rows, RATES, {"model": said, "command": said}, "meaning", picture="envelope.png")
    assert _text_of(page, images=1).count(_words(said)) >= 3
    draw_envelope(ROWS[:1], RATES, tmp_path / "envelope.png", title=said)


@SAID
def test_a_model_card_is_text(said: str) -> None:
    parity = {"lines": [], "differences": [said], "checks": []}
    facts: dict[str, Any] = {
        "run": said,
        "model": {
            "class": said,
            "auto_class": "AutoModelForCausalLM",
            "type": "llama",
            "parameters": 3,
            "base": said,
            "frozen": [],
        },
        "training": {"step": 3, "hypothesis": said},
        "data": {"source": said},
        "precision": {"path": said, "manifest": {"rules": [said]}},
        "parity": parity,
        "versions": {},
        "hardware": {"device": said},
        "export": {"dtype": "bf16", "compared": "all", "files": {said: "ab"}},
    }
    card = model_card(facts)
    front, _, rest = card.removeprefix("---\n").partition("\n---\n")
    assert front.count("\n") == 3
    assert _text_of(rest).count(_words(said)) >= 7


@SAID
def test_the_names_of_modules_and_trials_are_text(said: str) -> None:
    (merged,) = merge_blocks([{"module": said, "seconds": 1.0}])
    table = Table(("what", "module"), [(text(said), text(said))]).padded()
    assert _text_of(f"{merged['modules']}\n\n{table}\n").count(_words(said)) == 3


def test_a_figure_takes_no_word_for_mathematics() -> None:
    assert plain("$a$\n\x1b[1m") == r"\$a\$ \x1b[1m"


def test_a_page_shows_no_secret(tmp_path: Path) -> None:
    content = found()
    content["conditions"] |= {"hypothesis": SECRETS["github"], "command": f"x run.hypothesis={SECRETS['openai']}"}
    page = write_report(tmp_path, content).read_text()
    assert SECRETS["github"] not in page and SECRETS["openai"] not in page
