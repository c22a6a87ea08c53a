"""Progress lines of a preparation."""

import itertools

from data.text.preparation_progress import Display, ProgressFile, read_progress


def test_a_line_comes_when_it_says_something_new_and_seldom_else(tmp_path, monkeypatch, capsys) -> None:
    seconds = itertools.count(start=1000, step=0.4)
    monkeypatch.setattr("data.text.preparation_progress.time.monotonic", lambda: float(next(seconds)))
    (tmp_path / "corpus.partial-1").mkdir()
    with ProgressFile(tmp_path / "corpus.partial-1", Display("chats", active=True)) as report:
        for _ in range(110):
            report("making the tokenizer for")
        for done in range(110):
            report("tokenizing", done * 10**6, 10**9)
        assert read_progress(tmp_path / "corpus") == "data: tokenizing chats, 109.0 of 1000.0 MB"
    assert read_progress(tmp_path / "corpus") == ""
    lines = capsys.readouterr().err.splitlines()
    waiting = [line for line in lines if line == "data: making the tokenizer for chats"]
    moving = [line for line in lines if line.startswith("data: tokenizing chats")]
    assert 1 < len(waiting) < 6 and 10 < len(moving) < 40 and len(lines) == len(waiting) + len(moving)
    assert len(set(moving)) == len(moving)


def test_nothing_is_printed_by_those_that_are_not_to_show_it(capsys) -> None:
    display = Display("chats", active=False)
    display.show("data: tokenizing chats")
    display.finish()
    assert capsys.readouterr() == ("", "")
