"""Whole runs on the same documents from every source of them: the same loss at every step."""

import json
from pathlib import Path

import pytest

from data.text.encode import byte_ids
from tests.support.jobs.launches import command, events, finish
from tests.support.rows import indexed_dataset
from tests.support.servers.threads import answering
from tests.support.servers.web_files import Web


@pytest.mark.slow
def test_a_run_does_not_depend_on_how_its_documents_are_given(tmp_path: Path) -> None:
    files = sorted(Path("data").glob("*.py"))
    table = byte_ids()
    ids = [[int(table[byte]) for byte in path.read_bytes()] for path in files]
    indexed_dataset.write(tmp_path / "corpus", [[each] for each in ids])
    (tmp_path / "one.txt").write_bytes(b"\x1e".join(path.read_bytes() for path in files))
    rows = "".join(json.dumps({"input_ids": each}) + "\n" for each in ids)
    (tmp_path / "ids.jsonl").write_text(rows, encoding="utf-8")
    separator = r'data.document_separator="\x1e"'
    losses = {}
    with answering(Web(tmp_path, parts=False)) as server:
        for name, data in {
            "files": ["data.source=text", "data.path=data/*.py"],
            "split": ["data.source=text", f"data.path={tmp_path}/one.txt", separator],
            "web": ["data.source=text", f"data.path={server.url}/one.txt", separator],
            "megatron": ["data.source=megatron", f"data.path={tmp_path}/corpus"],
            "ids": ["data.source=jsonl", f"data.path={server.url}/ids.jsonl", "data.input_ids_field=input_ids"],
        }.items():
            short = ["data.validation_fraction=0", "evaluate.every_steps=0", "checkpoint.every_steps=0", "run.steps=4"]
            finish(command("python", tmp_path, name, *data, *short))
            losses[name] = [event["loss"] for event in events(tmp_path, name, "step")]
    assert len(losses["files"]) == 4
    assert all(each == losses["files"] for each in losses.values()), losses
