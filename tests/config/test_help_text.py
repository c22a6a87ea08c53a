"""`--help` covers every key of the schema, with the words that stand in it."""

import re

import pytest

from config.cli import BROKEN, CONFIG_ERROR, DIVERGED, DONE, LOST, PREEMPTED, UNSAVED
from config.errors import UserError
from config.help_text import keys, render
from config.load import all_keys, field_types
from config.schema import Config


def test_every_key_is_there_with_a_unit_and_a_meaning() -> None:
    found = {item.key: item for item in keys()}
    leaves = {key for key in all_keys() if not any(other.startswith(f"{key}.") for other in all_keys())}
    assert leaves <= found.keys()
    entries = {"faults": "kind step rank module factor place bit persists"}
    entries["data.sources"] = "path source name format weight epochs"
    entries["data.validation"] = "path source name format"
    entries["optimizer.groups"] = "match learning_rate weight_decay"
    assert found.keys() - leaves == {f"{name}[].{key}" for name, all_of in entries.items() for key in all_of.split()}
    for item in found.values():
        assert item.unit, item.key
        assert item.meaning.endswith((".", "it.")), item.key


def test_a_key_as_the_user_reads_it() -> None:
    found = {item.key: item for item in keys()}
    assert (found["batch.micro_size"].default, found["batch.micro_size"].unit) == ("1", "sequences")
    kinds = {
        "batch.micro_size": "integer, at least 1",
        "data.validation_fraction": "number, at least 0 and below 1",
        "optimizer.betas": "list of 2 numbers, at least 0 and below 1",
        "faults": "list of Faults",
        "guard.reactions": "list of skip | cut_lr | correct | promote | rollback | abort",
        "precision.compute": "auto | fp32 | bf16 | fp16",
        "model.name_or_path": "text or null",
    }
    assert {key: found[key].kind for key in kinds} == kinds
    assert found["optimizer.betas"].default == "[0.9, 0.95]"
    assert found["faults[].step"].default == "(must be given)"


def test_the_help_is_one_page_of_options_exit_codes_sections_and_true_defaults() -> None:
    lines = render().splitlines()
    assert len(lines) <= 42 and max(map(len, lines)) < 80
    text, defaults = "\n".join(lines), {item.key: item.default for item in keys()}
    for option in ("--config", "--deepspeed_config", "--show-config", "--local_rank", "--version", "--help"):
        assert option in text
    codes = text.partition("\nexit codes: ")[2]
    named = {int(code) for code in re.findall(r"(?:^|; |;\n  )(\d+) ", codes)}
    assert named == {DONE, CONFIG_ERROR, DIVERGED, LOST, BROKEN, UNSAVED, PREEMPTED}
    shown = dict(re.findall(r"^  ([a-z_.]+)=(\S+)  ", text, re.MULTILINE))
    assert len(shown) >= 12 and shown == {key: defaults[key] for key in shown}
    sections = text.partition("\nsections (--help SECTION):\n")[2].partition("\n\n")[0]
    assert [name for name in field_types(Config) if not re.search(rf"\b{name}\b", sections)] == []


def test_all_of_the_help_has_every_key_and_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = render("all")
        words = " ".join(text.split())
        for item in keys():
            assert f" {item.key}: {item.kind} = {item.default} [{item.unit}] {item.meaning}" in words
        assert max(map(len, text.splitlines())) <= min(columns, 110)


@pytest.mark.parametrize(
    ("about", "first", "last"),
    [
        ("run", "run.name", "run.deterministic"),
        ("precision.loss_scale", "precision.loss_scale.policy", "precision.loss_scale.escalate_within"),
        ("faults", "faults", "faults[].persists"),
        ("optimizer.betas", "optimizer.betas", "optimizer.betas"),
    ],
)
def test_the_help_on_a_section_has_its_keys(about: str, first: str, last: str) -> None:
    found = re.findall(r"^  ([a-z_.\[\]]+): ", render(about), re.MULTILINE)
    assert (found[0], found[-1]) == (first, last)
    assert all(key.startswith(about) for key in found)


@pytest.mark.parametrize(("about", "meant"), [("optimizr", "optimizer"), ("lr", "optimizer.learning_rate")])
def test_a_section_that_is_not_there_is_one_line_with_what_was_meant(about: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"^command line: --help {about}: no such section or key; did you mean {meant}"):
        render(about)
