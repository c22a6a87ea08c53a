"""A real job of two processes keeps every path and word, and shows no secret in any file that it leaves."""

import json
import shlex
from pathlib import Path

from config import yaml_text
from tests.support.jobs.launches import command, events, finish
from tests.support.runs.hostile import SECRETS
from tests.support.servers import wandb_files
from tracking.report.command import main as report

KEY = "not-any-known-format-aB3dE5fG7hI9"
HYPOTHESIS = (
    f"falls with {SECRETS['hugging face']}, see https://me:hunter2hunter2@host/x and {KEY}; training on gpt2 bytes"
)


def test_a_run_is_whole_beside_variables_named_like_secrets_and_shows_no_real_one(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "a-folder-with-a-long-path" / "Ab1Cd2Ef3Gh4"
    folder.mkdir(parents=True)
    ordinary = {"PWD": str(folder), "OLDPWD": str(folder), "MY_TOKEN": "gpt2", "TOKENIZER_TOKEN": "bytes"}
    ordinary |= {"SECRET_SANTA": "/home/anna", "DB_PASSWORD": "training", "PASSWORD": "1234567890123"}
    ordinary |= {"RUNS_TOKEN": str(folder / "runs"), "NAME_SECRET": "demo-run", "HUGGING_FACE_HUB_TOKEN": str(folder)}
    for name, value in {**ordinary, "SOME_API_KEY": KEY, "AWS_SECRET_ACCESS_KEY": SECRETS["aws"]}.items():
        monkeypatch.setenv(name, value)
    overrides = ["tracking.wandb=offline", f"run.hypothesis={json.dumps(HYPOTHESIS)}", "evaluate.every_steps=3"]
    overrides += [f"generate.prompt={json.dumps(KEY)}", "telemetry.every_steps=3"]
    output = finish(command("python", folder, "demo-run", *overrides), ranks=2)
    assert "switched off" not in output
    run = folder / "runs" / "demo-run"

    assert [event["step"] for event in events(folder, "demo-run", "step")] == [1, 2, 3, 4, 5, 6]
    config = yaml_text.parse((run / "config.yaml").read_text())
    assert config["run"]["name"] == "demo-run" and config["run"]["dir"] == str(folder / "runs")
    assert config["data"]["tokenizer"] == "bytes" and config["data"]["cache_dir"] == str(folder / "cache")
    said = config["run"]["hypothesis"]
    assert said == "falls with ***, see https://***@host/x and ***; training on gpt2 bytes"
    environment = json.loads((run / "environment.json").read_text())
    assert environment["data"]["folder"].startswith(str(folder / "cache"))
    assert f"run.dir={folder}/runs" in shlex.split(environment["resume_command"])
    assert f"run.dir={folder}/runs" in environment["command_line"]

    rows, kept = wandb_files.rows(run / "wandb"), wandb_files.config(run / "wandb")
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["checkpoint/path"] for row in rows if "checkpoint/path" in row][0] == str(run / "checkpoints/step-2")
    assert kept["run"] == config["run"] and kept["data"] == config["data"]

    more = finish(command("python", folder, "demo-run", *overrides, "run.steps=8"))
    assert "switched off" not in more and events(folder, "demo-run", "run_start")[-1]["resumed_from"]
    assert [row["step"] for row in wandb_files.rows(run / "wandb") if "train/loss" in row] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert report([str(run), "--html", str(run / "report.html")]) == 0

    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".wandb", ".html", ".md", ".yaml", ".jsonl", ".json", ".log"}
    for secret in (KEY, SECRETS["hugging face"], SECRETS["aws"], "hunter2hunter2"):
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
        assert secret not in output + more
