"""Progress lines of a preparation whose output is no terminal."""

import itertools

from data.text.preparation_progress import Display, Progress


def test_a_line_comes_when_it_says_something_new_and_seldom_else(monkeypatch, capsys) -> None:
    seconds = itertools.count(start=1000)
    monkeypatch.setattr("data.text.preparation_progress.time.monotonic", lambda: float(next(seconds)))
    with Display("chats", shown=True) as display:
        for _ in range(110):
            display.show(Progress("tokenizer", 0, None))
        for done in range(110):
            display.show(Progress("tokens", done * 10**6, 10**9))
    lines = capsys.readouterr().err.splitlines()
    waiting = [line for line in lines if line == "data: making the tokenizer for chats"]
    moving = [line for line in lines if line.startswith("data: tokenizing chats")]
    assert 1 < len(waiting) < 6 and 10 < len(moving) < 40 and len(lines) == len(waiting) + len(moving)
    assert len(set(moving)) == len(moving)


def test_nothing_is_printed_by_those_that_are_not_to_show_it(capsys) -> None:
    with Display("chats", shown=False) as display:
        display.show(Progress("tokens", 1, 2))
        display.finish()
    assert capsys.readouterr() == ("", "")
