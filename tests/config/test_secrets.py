"""Credentials and keys are refused before anything of the config is shown or written."""

import json
from pathlib import Path

import pytest

from config.command_line import read_command_line
from tests.support.runs.hostile import OBEYED

KEY = "7f" * 32


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("model: {architecture: llama}\nbatch: {global_size: 2, micro_size: 1}\n")
    return path


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([f"checkpoint.encryption_key={KEY}"], "checkpoint.encryption_key: give env:NAME or file:PATH, never the key"),
        ([f"checkpoint.encryption_key=env:{KEY}"], "never the key itself"),
        (["checkpoint.dir=s3://me:hush@bucket/x"], "checkpoint.dir: holds a user or password"),
        (["checkpoint.dir=s3://bucket", "checkpoint.storage_options={secret: hush}"], "storage_options.secret: looks"),
        (["checkpoint.dir=/mnt/runs"], "checkpoint.dir = /mnt/runs: is not a URL; set a folder with run.dir"),
        (["checkpoint.storage_options={anon: true}"], "have no effect without checkpoint.dir"),
        (["checkpoint.accept_plain=true"], "has no effect without checkpoint.encryption_key"),
    ],
)
@pytest.mark.parametrize("shown", [[], ["--show-config"]])
def test_it_ends_in_one_line_without_the_secret(config: Path, refusal, settings, said, shown) -> None:
    line = refusal(read_command_line, ["--config", str(config), *settings, *shown], quiet=True)
    assert said in line and "hush" not in line and KEY not in line


UNFIT = [
    *("a\x1b[31m", "a\u202eb", "line\nbreak", "x" * 201, " space ", "a\x00", "a\ud800", "a/b", ".."),
    "ghp_" + "x1Y2z3" * 6,
]


@pytest.mark.parametrize("name", UNFIT)
def test_a_name_that_cannot_be_that_of_a_folder_is_refused_in_one_printable_line(config: Path, capsys, name) -> None:
    with pytest.raises(SystemExit) as ended:
        read_command_line(["--config", str(config), f"run.name={json.dumps(name)}"], {})
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("error: command line: run.name ")
    assert said.count("\n") == 1 and not OBEYED.search(said.rstrip("\n")) and "ghp_" not in said


@pytest.mark.parametrize("name", ["a <b> | `c` $d$ [e]", "größe-実験", "-x", "a\u200db"])
def test_a_name_with_markup_is_a_name(config: Path, name: str) -> None:
    resolved = read_command_line(["--config", str(config), f"run.name={json.dumps(name)}"], {})
    assert resolved.config.run.name == name


def test_an_error_shows_no_secret_of_the_command_line(config: Path, capsys) -> None:
    for settings, problem in (
        (["run.resume=https://me:hunter2hunter2@host/x"], "run.resume = 'https://***@host/x' does not exist"),
        (["data.source=text", "data.path=https://me:hunter2hunter2@host/x"], "data.path holds what looks like a cred"),
    ):
        with pytest.raises(SystemExit):
            read_command_line(["--config", str(config), *settings], {})
        said = capsys.readouterr().err
        assert problem in said and "hunter2" not in said


def test_the_shown_config_has_no_secret(config: Path, capsys) -> None:
    settings = ["run.hypothesis=see https://me:hunter2hunter2@host/x", "model.config={hub_token: hunter2hunter2}"]
    with pytest.raises(SystemExit):
        read_command_line(["--config", str(config), "--show-config", *settings], {})
    shown = capsys.readouterr().out
    assert "see https://***@host/x" in shown and "hub_token: ***" in shown and "hunter2" not in shown
