"""The largest model of a machine: real jobs, one of which takes more memory than it may."""

import json
import subprocess
import sys

import pytest

from lab.benchmark import largest as benchmark_largest
from tests.lab.benchmark.benchmark_cases import RECIPE
from tests.support.jobs.launches import SMALL


@pytest.mark.slow
def test_a_job_that_takes_too_much_is_ended_and_the_one_before_is_the_largest(tmp_path, capsys) -> None:
    """One block of width 512 beside 600, whose weights alone are 4 GB. Other children of this process stay."""
    bystander = subprocess.Popen([sys.executable, "-c", "held = bytearray(2**30); input()"], stdin=subprocess.PIPE)
    widths = "model.config={hidden_size: 512, intermediate_size: 512, num_attention_heads: 2, vocab_size: 300}"
    overrides = [*SMALL, widths, f"data.cache_dir={tmp_path}/cache", "batch.global_size=2"]
    options = ["--layers", "1,600", "--steps", "2", "--host-gib", "1.3", "--processes", "1", "--out", str(tmp_path)]
    code = benchmark_largest.main(["--config", RECIPE, *options, *overrides])
    found = json.loads((tmp_path / "largest.json").read_text())
    first, second = found["depths"]["1"], found["depths"]["600"]
    alive = bystander.poll() is None
    bystander.kill()
    bystander.wait()
    assert alive and code == 0 and found["largest"] == 1
    assert first["failed"] is None and first["parameters"] == 2 * 512 * 300 + 4 * 512**2 + 3 * 512**2 + 3 * 512
    assert first["tokens_per_second"] == pytest.approx(64 / first["step_seconds"])
    assert 0.2e9 < first["host_bytes"] < 1.3 * 2**30 < second["host_bytes"]
    assert second["failed"] == "took more than 1.3 GiB of this machine's memory"
    assert "| 1 | 2,143,744 |" in capsys.readouterr().out and "| 600 | - |" in (tmp_path / "largest.md").read_text()
