"""The defects that Mantissa repairs or refuses are still in the pinned DeepSpeed, and every one is listed.

A failure after an upgrade is good news: the repair can go.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from config.deepspeed.combinations import SETTINGS
from config.deepspeed.combinations import UPSTREAM as COMBINATIONS
from config.deepspeed.keys import REFUSED
from config.not_offered import why_not

UPSTREAM = REPOSITORY / "docs/upstream"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp16_zero0_loss_not_scaled", "autocast_zero0_skip_reported_as_applied"])
def test_the_defect_is_still_there(name: str, tmp_path: Path) -> None:
    """Exit code 1 alone would also be a crash: the script has to have come to its verdict."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    job = subprocess.run(
        [*launcher, str(UPSTREAM / f"{name}.py")],
        cwd=tmp_path,
        env={**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "verdict: the defect is there" in job.stdout, job.stdout + job.stderr
    assert job.returncode == 1


def test_every_script_is_listed_and_every_listed_script_exists() -> None:
    listed = re.findall(r"^\|[^|]+\| `(\w+\.py)`, [12] \|", (UPSTREAM / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in UPSTREAM.glob("*.py"))


OF_KEYS = {key: REFUSED[key] for key in ("optimizer", "torch_autocast", "sequence_parallel_size")}
OF_ROWS = {(row.computes[0], row.stages): row.problem for row in COMBINATIONS if row.refused and row.path == "cast"}
ROUND_ROBIN = next(row.refused for row in SETTINGS if row.key.endswith("round_robin_gradients"))
SCALING = why_not("precision.fp8.scaling", "delayed")
REFUSALS: list[tuple[str, str | None, str]] = [
    ("zero0_adam_stepped_at_init", OF_ROWS["bf16", (0,)], ""),
    ("fp16_zero0_loss_not_scaled", OF_ROWS["fp16", (0,)], ""),
    ("bf16_zero0_accumulates_in_bf16", OF_ROWS["bf16", (0,)], "0.5, not 1.0"),
    ("round_robin_reads_wrong_masters", ROUND_ROBIN, "0.487"),
    ("autocast_fp16_clips_scaled_norm", OF_KEYS["torch_autocast"], "1.221e+05, not 1.863"),
    ("autocast_fp16_scale_never_backs_off", OF_KEYS["torch_autocast"], "0 of 12 steps applied, 7"),
    ("autocast_fp16_scale_changes_mid_step", OF_KEYS["torch_autocast"], "0.7040, not 1.4080"),
    ("autocast_fp16_scaler_not_saved", OF_KEYS["torch_autocast"], "65536, not 4096"),
    ("autocast_zero0_skip_reported_as_applied", OF_KEYS["torch_autocast"], "12, not 7"),
    ("muon_clipping_shrinks_update", OF_KEYS["optimizer"], "1.000, not 5.161"),
    ("muon_zero2_drops_gradients", OF_KEYS["optimizer"], "6 of 6 biases"),
    ("layerwise_optimizer_on_flat_shard", OF_KEYS["optimizer"], "14% to 68%"),
    ("layerwise_optimizer_on_flat_shard", why_not("optimizer.name", "adafactor"), "14% to 18%"),
    ("adamw_8bit_rows_run_away", why_not("optimizer.name", "adamw_8bit"), "11.3 times"),
    ("adamw_8bit_rows_run_away", why_not("optimizer.name", "AdamWFp8"), "69.3 times"),
    ("ulysses_zero3_divides_by_sp", OF_KEYS["sequence_parallel_size"], "1.31, not 2.62"),
    ("ulysses_drops_mask", OF_KEYS["sequence_parallel_size"], "48% to 120%"),
    ("autotp_dropout_replicas_part", REFUSED["tensor_parallel"], "3.5e-2"),
    ("pipeline_tied_gradients", REFUSED["pipeline"], "33.8%"),
    ("pipeline_tied_gradients", REFUSED["pipeline"], "7.3%"),
    ("moe_zero0_clips_by_mean_norm", REFUSED["expert_parallel"], "0.062760, not 0.062279"),
    ("bf16_masters_stand_still", REFUSED["bf16.bf16_master_weights_and_grads"], "0.0000, not 0.0195"),
    ("bf16_masters_stand_still", why_not("precision.masters", "bf16"), "0.0195"),
    ("fp8_cast_hides_inf", SCALING, "448"),
    ("fp8_cast_hides_inf", SCALING, "32 in BF16"),
]
"""Script, the text of a refusal that is due to it, and what it says of what was measured. "": that was measured by
whole runs, not by the script."""
RAISE = {"ulysses_bf16_zero1_stops", "autoep_transformers_5"}
"""Scripts of refused keys that measure nothing: DeepSpeed stops."""
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")


@pytest.mark.parametrize(("name", "text", "measured"), REFUSALS, ids=lambda item: str(item)[:40])
def test_a_refusal_has_the_number_that_its_script_printed(name: str, text: str | None, measured: str) -> None:
    assert text and "measured: " in text and measured in text
    _, _, printed = (UPSTREAM / f"{name}.py").read_text(encoding="utf-8").split('"""')[1].partition("Printed")
    there = [float(number) for number in NUMBER.findall(printed)]
    for number in NUMBER.findall(measured.replace("BF16", "")):
        decimals = len(number.partition("e")[0].partition(".")[2])
        given = float(number)
        scales = (1, 100) if f"{number}%" in measured else (1,)
        near = [value * scale for value in there for scale in scales]
        if "e" in number:
            assert given in near, number
        else:
            assert any(round(value, decimals) == given for value in near), number


def test_every_refused_defect_has_its_refusal_checked() -> None:
    rows = re.findall(r"^\|.*?`(\w+)\.py`, [12] \|.*\| ([^|]+) \|$", (UPSTREAM / "README.md").read_text(), re.MULTILINE)
    named = {name for name, what in rows if re.search(r"^refused|is refused", what)}
    assert named and named <= {name for name, _, _ in REFUSALS} | RAISE


def test_every_script_holds_its_output() -> None:
    for path in UPSTREAM.glob("*.py"):
        assert "verdict: the defect is there" in path.read_text().split('"""')[1], path.name
