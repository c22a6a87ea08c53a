"""Credentials and keys are refused before anything of the config is shown or written."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.command_line import read_command_line

KEY = "7f" * 32


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
def test_it_ends_in_one_line_without_the_secret(tmp_path: Path, capsys, settings, said, shown) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("model: {architecture: llama}\nbatch: {global_size: 2, micro_size: 1}\n")
    with pytest.raises(SystemExit) as ended:
        read_command_line(["--config", str(config), *settings, *shown], {})
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert said in printed.err and printed.err.count("\n") == 1 and printed.out == ""
    assert "hush" not in printed.err and KEY not in printed.err
