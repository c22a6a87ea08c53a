"""Whatever a run says is text in Markdown: a parser reads back the same words, and no markup."""

import re

import pytest
from markdown_it import MarkdownIt

from config.printable import line, printable, shown
from tests.support.runs.hostile import HOSTILE, OBEYED, SECRETS
from tracking.pages.markdown import Table, code, fenced, text

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
