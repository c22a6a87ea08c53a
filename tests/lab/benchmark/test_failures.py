"""Benchmarks that cannot do all they should: a mistake is one line; of several jobs, one that fails is a row."""

import json
import multiprocessing

import pytest

from config.cli import REPOSITORY
from lab.benchmark import command, data, largest, loss
from tests.lab.benchmark.benchmark_cases import RECIPE
from tests.support.jobs import forked

MISTAKES = {
    command: [
        (["--contestants", "mantissa,bear"], "there is no bear"),
        (["--contestants", "torchtitan"], "none of them can run here"),
        (["--at-least", "mantissa=1"], "takes no part"),
        (["--at-least", "mantissa/bare"], "is not of the form"),
        (["--contestants", "mantissa", "--at-least", "mantissa/bare=1"], "bare takes no part"),
        (["precision.path=manifest", "precision.manifest=config/manifests/bf16.json"], "path = manifest would not"),
        (["model.activation_checkpointing=selective"], "selective would not be the same for all contestants; set"),
    ],
    largest: [
        (["--layers", "4,2"], "ascending"),
        (["--layers", "2", "model.confg.num_hidden_layers=3"], "model.confg"),
    ],
    data: [
        (["--megabytes", "100"], "--megabytes 100: data.path="),
        (["--json", "/nowhere/rows.json"], "--json /nowhere/rows.json: cannot be written"),
    ],
}
GIVEN = {
    command: ["--config", RECIPE, "--out"],
    largest: ["--config", RECIPE, "--layers", "2", "--out"],
    data: ["--path", str(REPOSITORY / "data"), "--json"],
}
"""Options of each; the last one names the output."""


@pytest.mark.parametrize(
    ("tool", "arguments", "said"), [(tool, *mistake) for tool, mistakes in MISTAKES.items() for mistake in mistakes]
)
def test_a_mistake_is_one_line_and_exit_code_2(tool, arguments, said, tmp_path, refusal) -> None:
    assert said in refusal(tool.main, [*GIVEN[tool], str(tmp_path / "out"), *arguments])


def test_a_loss_that_cannot_be_computed_is_a_row(capsys, monkeypatch) -> None:
    """One that nobody knows stands for one that has no memory."""
    context = forked.context()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    options = ["--vocabulary", "64", "--hidden", "8", "--tokens", "16", "--repeats", "0", "--json"]
    assert loss.main([*options, "--ways", "of nobody", "chunked"]) == 3
    failed, chunked = map(json.loads, capsys.readouterr().out.splitlines())
    assert failed["way"] == "of nobody" and "of nobody" in failed["failed"]
    assert "failed" not in chunked and 3 < chunked["loss"] < 6
