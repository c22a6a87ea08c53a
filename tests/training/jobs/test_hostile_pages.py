"""The Markdown pages of parity and of an export show names, reasons and commands as text."""

from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from config.printable import line
from tests.support.runs.hostile import HOSTILE, OBEYED
from tests.tools.parity.test_report import check, found
from tools.export_hf.card import model_card
from tools.parity.report import write_report

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
