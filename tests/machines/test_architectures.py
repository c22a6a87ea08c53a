"""Architectures of transformers, small, through everything a run does: docs/models.md has the table of the outcomes."""

from pathlib import Path

import pytest

from tests.support.models.architectures import CASES, TABLE, Case, run_case, stage_of


@pytest.mark.machines
@pytest.mark.parametrize(("index", "case"), enumerate(CASES), ids=[case.architecture for case in CASES])
def test_it_trains_resumes_exports_and_loads_or_is_refused(folder: Path, index: int, case: Case) -> None:
    (folder / case.architecture).mkdir()
    outcome = run_case(case, folder / case.architecture, stage=stage_of(index))
    assert outcome.problems == ()
    if case.refusal:
        assert case.refusal in outcome.refusal
    else:
        assert outcome.refusal == ""
    assert f"| {case.architecture} | {outcome.stage} | {outcome.attention} |" in TABLE.read_text()


def test_the_table_has_every_architecture() -> None:
    text = TABLE.read_text()
    assert [case.architecture for case in CASES if f"| {case.architecture} |" not in text] == []
