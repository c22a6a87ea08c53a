"""Real training runs, one with a divergence planted in the middle: compare names the step and the cause."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from tracking.compare.divergence import Tolerance
from tracking.compare.result import compare
from tracking.compare.sources import read_runs

STEPS, PLANTED_AT = 8, 5

# train.py, with another seed of the sampler from step PLANTED_AT on.
PLANT = f"""
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
if __name__ == "__main__":
    import data.batches.loader, train
    honest = data.batches.loader.sample_ids
    def planted(position, *, seed, **sizes):
        return honest(position, seed=seed + (position + 1 >= {PLANTED_AT}), **sizes)
    if sys.argv.pop(1) == "planted":
        data.batches.loader.sample_ids = planted
    sys.exit(train.main(sys.argv[1:]))
"""

SETTINGS = (
    *("data.source=text", "data.tokenizer=bytes", "data.sequence_length=32", "data.workers=1"),
    "model.config={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2}",
    *("model.activation_checkpointing=none", "batch.global_size=4", "batch.micro_size=4", "schedule.warmup_steps=2"),
    *("deepspeed.config=ds_configs/zero2_fp32.json", "precision.compute=fp32", "tracking.wandb=disabled"),
    *("generate.tokens=0", "evaluate.every_steps=0", "parity.controls=0", f"run.steps={STEPS}"),
)


def _start(kind: str, folder: Path, text: Path) -> subprocess.Popen[str]:
    script = folder / f"{kind}.py"
    script.write_text(PLANT)
    settings = [f"run.dir={folder / 'runs'}", f"run.name={kind}"]
    settings += [f"data.path={text}", f"data.cache_dir={folder / kind}"]
    command = [sys.executable, str(script), kind, "--config", str(REPOSITORY / "config/recipes/demo.yaml")]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*command, *SETTINGS, *settings], stdout=pipe, stderr=subprocess.STDOUT, text=True, env=variables, cwd=folder
    )


@pytest.mark.slow
def test_another_seed_in_the_middle_of_a_real_run_is_found(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for path in sorted((REPOSITORY / "config").glob("*.py")):
        (text / f"{path.name}.txt").write_text(path.read_text())
    (tmp_path / "runs").mkdir()
    started = [_start(kind, tmp_path, text) for kind in ("plain", "planted")]
    for process in started:
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, output[-2000:]
    runs = read_runs([str(tmp_path / "runs" / kind) for kind in ("plain", "planted")])
    comparison = compare(runs, tolerance=Tolerance(), price=None)
    (pair,) = comparison.pairs
    assert (pair.divergence.step, pair.divergence.identical_to) == (PLANTED_AT, PLANTED_AT - 1), pair.headline
    assert pair.cause.startswith(f"the data order differs from step {PLANTED_AT}: no recorded setting")
    assert comparison.caveats == [
        f"different data order: planted sees other sequences than plain from step {PLANTED_AT}"
    ]
