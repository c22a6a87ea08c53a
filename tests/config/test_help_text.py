"""`--help` covers every key of the schema, with the words that stand in it."""

from __future__ import annotations

import re

from config.cli import BROKEN, CONFIG_ERROR, DIVERGED, DONE, LOST, PREEMPTED, UNSAVED
from config.help_text import KeyHelp, keys, render
from config.load import all_keys


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
    assert found["batch.micro_size"] == KeyHelp(
        key="batch.micro_size",
        kind="integer, at least 1",
        default="1",
        unit="sequences",
        meaning="Sequences in one forward pass on one rank. Accumulation is global_size / (micro_size x ranks).",
    )
    kinds = {
        "data.validation_fraction": "number, at least 0 and below 1",
        "optimizer.betas": "list of 2 numbers, at least 0 and below 1",
        "faults": "list of Faults",
        "guard.reactions": "list of skip | cut_lr | promote | rollback | abort",
        "precision.compute": "auto | fp32 | bf16 | fp16",
        "model.name_or_path": "text or null",
    }
    assert {key: found[key].kind for key in kinds} == kinds
    assert found["optimizer.betas"].default == "[0.9, 0.95]"
    assert found["faults[].step"].default == "(must be given)"


def test_the_text_names_every_key_option_and_exit_code() -> None:
    text = render()
    for item in keys():
        assert f"  {item.key}: {item.kind} = {item.default} [{item.unit}]\n" in text
    for option in ("--config", "--deepspeed_config", "--show-config", "--local_rank", "--version", "--help"):
        assert option in text
    codes = text.partition("\nexit codes: ")[2].partition("\n\n")[0]
    named = {int(code) for code in re.findall(r"(?:^|; |;\n  )(\d+) ", codes)}
    assert named == {DONE, CONFIG_ERROR, DIVERGED, LOST, BROKEN, UNSAVED, PREEMPTED}
    assert max(len(line) for line in text.splitlines() if " | " not in line) <= 140  # choices stay in one line
