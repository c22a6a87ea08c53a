"""Fixtures that the tests of several tasks share."""

from pathlib import Path

import pytest

from tests.support.jobs.task_jobs import write_all
from tests.support.rows import seq2seq
from tests.support.rows.chats import write_folder
from tests.support.rows.labelled import FAMILIES, write_encoder, write_rows
from tests.training.tasks import classify_cases, mlm_cases
from training.tasks.task import prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, 60 chats and 40 pairs."""
    return write_folder(tmp_path_factory.mktemp("chats"))


@pytest.fixture(scope="session")
def every_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models and rows of all jobs of `task_jobs`."""
    return write_all(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="session")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Encoders, 60 rows of each kind, and 40 documents, which the processes of a group could not prepare."""
    folder = tmp_path_factory.mktemp("encoders")
    for family in FAMILIES:
        write_encoder(folder / family, family)
    write_encoder(folder / "bare", auto="AutoModel", seed=1)
    for kind in classify_cases.AUTO:
        write_rows(folder / f"{kind}.jsonl", kind, 60, pair=kind != "token")
    mlm_cases.write_text(folder / "text", 40)
    resolved = classify_cases.resolve(folder, overrides=mlm_cases.mlm(folder, "data.workers=1"))
    prepare(resolved.config, progress=False)
    return folder


@pytest.fixture(scope="session")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder-decoder of each family, and 60 rows."""
    made = tmp_path_factory.mktemp("seq2seq")
    for family in seq2seq.FAMILIES:
        seq2seq.write_model(made / family, family)
    seq2seq.write_rows(made / "rows.jsonl", 60)
    return made
