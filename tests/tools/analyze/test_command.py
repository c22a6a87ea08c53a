"""The analysis as a command, on a small model: minutes, so `make test-long` has it."""

import copy
import json
import math
import subprocess
import sys

import pytest

from config.cli import REPOSITORY
from precision.manifest import load_manifest
from tests.support.jobs.launches import SMALL
from tests.tools.analyze import analyze_cases
from tools.analyze import command as analyze

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The command's files for a small model, and its output."""
    folder = tmp_path_factory.mktemp("analysis") / "made"
    options = f"--out {folder}/manifest.json --steps 2 --sequences 1 --held-out 1 --parity-steps 3 --processes 2"
    command = [sys.executable, "-m", "tools.analyze", "--config", "config/recipes/demo.yaml", *options.split()]
    command += [*SMALL, f"data.cache_dir={folder}/cache", "batch.micro_size=2"]
    job = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert job.returncode == 0, job.stdout + job.stderr
    return folder, job.stdout


def test_the_command_writes_a_manifest_that_does_what_it_says(written, pair, tmp_path):
    folder, printed = written
    manifest = load_manifest(folder / "manifest.json")
    analysis = json.loads((folder / "manifest.analysis.json").read_text())
    tree = json.loads((folder / "manifest.json").read_text())
    assert tree == analysis["proposal"]["manifest"] and all(rule.reason for rule in manifest.rules)
    assert (folder / "manifest.png").read_bytes().startswith(b"\x89PNG")
    assert analysis["parity"]["verdict"] == "parity" and (folder / "manifest.parity" / "parity.md").is_file()
    assert analysis["objection"] is None and len(analysis["losses"]) == 2
    assert "largest value" in printed and "largest gradient" in printed
    assert "lm_head" in printed and "against uniform BF16: parity error" in printed and "FLOPs in 16 bits" in printed
    share = pair.run(analyze_cases.computes_as_promised, folder=str(tmp_path), tree=tree)[0]
    assert share.get("fp16", 0) + share.get("bf16", 0) > 0.85


def test_what_is_not_better_is_rejected(written, tmp_path, capsys):
    analysis = json.loads((written[0] / "manifest.analysis.json").read_text())
    uniform = copy.deepcopy(analysis) | {"uniform": "fp16"}
    assert analyze._publish(tmp_path / "m.json", uniform) == analyze.PROPOSED
    assert not (tmp_path / "m.json").exists() and (tmp_path / "m.analysis.json").is_file()
    scale = f"{analysis['uniform_fp16_scale']:.0f}"
    assert f"precision.compute=fp16 precision.loss_scale.initial={scale}\n" in capsys.readouterr().out
    worse = copy.deepcopy(analysis)
    worse["validation"]["proposal"]["error"] = math.inf
    assert analyze._publish(tmp_path / "m.json", worse) == analyze.REJECTED
    assert not (tmp_path / "m.json").exists() and (tmp_path / "m.rejected.json").is_file()
    assert "not finite" in json.loads((tmp_path / "m.analysis.json").read_text())["objection"]
    assert "rejected: " in capsys.readouterr().out
    for change, words in (
        (lambda tree: tree["parity"].update(failed=["gradient_error"]), "tools.parity: gradient_error"),
        (lambda tree: tree["proposal"].update(low_precision_share=0.0), "in 16 bits"),
    ):
        worse = copy.deepcopy(analysis)
        change(worse)
        assert words in str(analyze.rejection_reason(worse))
