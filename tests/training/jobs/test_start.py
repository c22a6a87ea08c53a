"""A job's start and end among others: port, run folder, launcher; no secret in any file; pages show names as text."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from config import yaml_text
from config.cli import CONFIG_ERROR, PREEMPTED, REPOSITORY
from config.machine.processes import runs, start_ticks
from config.printable import line
from tests.support.jobs.launches import command, events, finish, start, wait_until
from tests.support.runs.hostile import HOSTILE, OBEYED, SECRETS
from tests.support.servers import wandb_files
from tests.tools.parity.test_report import check, found
from tools.export_hf.card import model_card
from tools.parity.report import write_report
from tracking.report.command import main as report


def ranks_of(runner: int) -> dict[int, int]:
    """Pid and start of what the `deepspeed` runner started, its launcher and the ranks."""
    lines = subprocess.check_output(["ps", "-A", "-o", "pid=,ppid="], text=True).splitlines()
    parents = {int(pid): int(parent) for pid, parent in map(str.split, lines)}
    launcher = next(pid for pid, parent in parents.items() if parent == runner)
    return {pid: start_ticks(pid) for pid, parent in parents.items() if parent == launcher or pid == launcher}


def test_a_job_finds_a_free_port_keeps_its_folder_and_ends_with_its_launcher(folder):
    """Started where its port is taken; a second job in the same folder is refused; then the runner is killed."""
    line = command("deepspeed", folder, "lone", "run.steps=100000", "checkpoint.every_steps=0", "generate.tokens=0")
    with socket.create_server(("", 0)) as taken:
        line[line.index("--master_port") + 1] = str(taken.getsockname()[1])
        job = start(line)
        wait_until(
            lambda: (folder / "runs/lone/events.jsonl").exists() and events(folder, "lone", "step"),
            seconds=120,
            why=lambda: job.poll() is not None and job.stdout.read(),
        )
    second = finish(command("python", folder, "lone"), exit_code=CONFIG_ERROR)
    assert re.search(r"error: .*/runs/lone: a job \(pid \d+ on .*\) is still writing this run; stop it", second)
    assert "Traceback" not in second
    processes = ranks_of(job.pid)
    assert len(processes) == 3
    os.kill(job.pid, signal.SIGKILL)
    began = time.monotonic()
    output, _ = job.communicate(timeout=90)  # until the last rank has closed it
    assert time.monotonic() - began < 60
    wait_until(lambda: not any(runs(*process) for process in processes.items()))
    assert f"port {taken_port(line)} is in use; this job's ranks meet at " in output
    assert f"deepspeed (pid {job.pid}), which started this job, has ended: the run stops" in output
    (end,) = events(folder, "lone", "run_end")
    assert end["exit_code"] == PREEMPTED
    assert (folder / "runs/lone/.run_lock").read_text() == ""


def taken_port(line: list[str]) -> str:
    return line[line.index("--master_port") + 1]


def losses(folder: Path, name: str) -> list[tuple[float, float]]:
    return [(event["loss"], event["grad_norm"]) for event in events(folder, name, "step")]


def test_train_can_be_called_again_in_the_same_process(folder):
    line = command("python", folder, "unused", "generate.tokens=0")
    finish([*line, "run.name=alone2", "deepspeed.config=ds_configs/zero2_fp32.json"])
    python, _, *given = line
    finish([python, str(REPOSITORY / "tests/support/jobs/repeated_train.py"), "first2:2,then3:3,again2:2", *given])
    assert len(losses(folder, "alone2")) == 6
    assert losses(folder, "first2") == losses(folder, "again2") == losses(folder, "alone2")
    for step, expected in zip(losses(folder, "then3"), losses(folder, "alone2"), strict=True):
        assert step == pytest.approx(expected, rel=1e-5)


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


SAID = pytest.mark.parametrize("said", HOSTILE.values(), ids=HOSTILE)


def _text_of(source: str, *, images: int = 0) -> str:
    """The words of a page; fails where there is other markup than the page's own."""
    assert not OBEYED.search(source.replace("\n", ""))
    tokens = MarkdownIt("commonmark").enable("table").parse(source)
    inside = [item for token in tokens for item in token.children or []]
    assert not [token for token in tokens if token.type == "html_block"]
    assert not [item for item in inside if item.type in ("html_inline", "link_open")]
    assert sum(item.type == "image" for item in inside) == images
    return " ".join("".join(item.content or " " for item in inside).split())


def _words(said: str) -> str:
    return " ".join(line(said).split())


@pytest.mark.one_in(2)
@SAID
def test_the_page_of_parity_is_text(said: str, tmp_path: Path) -> None:
    content = found()
    content["checks"].append(check("skipped_share", 0.5, 0.05, passed=False, modules=[said], where=said, note=said))
    content["failed"] = ["skipped_share"]
    content["conditions"] |= {"hypothesis": said, "command": f"python x {said}", "model": said, "data": said}
    content["first_parting"] = {"module": said, "own_error": 0.5, "step": 1}
    step = content["walks"][0]["steps"][0]
    step["own_error"] = {said: 0.5}
    step["order"] = [said]
    words = _text_of(write_report(tmp_path, content).read_text(), images=2)
    assert words.count(_words(said)) >= 5


@SAID
def test_a_model_card_is_text(said: str) -> None:
    parity = {"lines": [], "differences": [said], "checks": []}
    facts: dict[str, Any] = {
        "run": said,
        "model": {
            "class": said,
            "auto_class": "AutoModelForCausalLM",
            "type": "llama",
            "parameters": 3,
            "base": said,
            "frozen": [],
        },
        "training": {"step": 3, "hypothesis": said},
        "data": {"source": said},
        "precision": {"path": said, "manifest": {"rules": [said]}},
        "parity": parity,
        "versions": {},
        "hardware": {"device": said},
        "export": {"dtype": "bf16", "compared": "all", "files": {said: "ab"}},
    }
    card = model_card(facts)
    front, _, rest = card.removeprefix("---\n").partition("\n---\n")
    assert front.count("\n") == 3
    assert _text_of(rest).count(_words(said)) >= 7
