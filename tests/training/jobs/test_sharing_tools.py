"""docs/parallel.md says which tool takes which kind of sharing: those it says refuse do, in one line and at once."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.launcher import as_launched
from config.load import to_yaml
from lab.benchmark.command import main as benchmark
from lab.benchmark.overhead import main as overhead
from launch.canary.command import main as canary
from tests.support.jobs.forked_launcher import forked_launcher
from tests.support.jobs.launches import SMALL, command, finish
from tests.support.jobs.sharing_jobs import MIXTURE
from tests.support.runs.compare_runs import start_fields, step_fields
from tools.analyze.command import main as analyze
from tools.parity.gate import gate
from tools.parity.jobs import plan
from tools.replay.command import main as replay

DEMO = ["--config", str(REPOSITORY / "config/recipes/demo.yaml")]
KEYS = ("tensor", "sequence", "expert")
REFUSING: dict[str, Callable[[list[str], Path], int]] = {
    "`tools.replay --bisect`": lambda given, there: replay([str(recorded(there, given)), "--bisect"]),
    "`launch.canary`": lambda given, _: canary([*DEMO, *given, "--processes", "2"]),
    "`lab.benchmark`": lambda given, there: benchmark([*DEMO, *given, "--processes", "2", "--out", str(there)]),
    "`lab.benchmark.overhead`": lambda given, _: overhead([*DEMO, *given]),
    "`tools.analyze`": lambda given, there: analyze(
        [*DEMO, *given, "--processes", "2", f"--out={there.parent}/a.json"]
    ),
}
"""Tools of the table that refuse some kind, each started as its command line is."""


def cells() -> list[tuple[str, str, str]]:
    """(tool, key, cell) of each cell of the table."""
    page = (REPOSITORY / "docs/parallel.md").read_text(encoding="utf-8")
    table = page.split("## Which tools take it\n")[1].split("\n## ")[0]
    found = []
    for row in re.findall(r"^\| (.+) \|$", table, re.M)[1:]:
        tools, *said = row.split(" | ")
        assert len(said) == len(KEYS), row
        found += [(tool, key, cell) for tool in tools.split(", ") for key, cell in zip(KEYS, said, strict=True)]
    return found


def recorded(folder: Path, overrides: list[str]) -> Path:
    """The folder of a run of two steps on two processes, as far as a replay looks before it starts one."""
    resolved = read_command_line([*DEMO, *overrides], as_launched(2))
    run = folder / "run"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(resolved.config), encoding="utf-8")
    at = {"time": 1.0, "tokens": 0}
    events = [{**at, "event": "run_start", "step": 0, **start_fields()}]
    events += [{**at, "event": "step", "step": step, "position": step - 1, **step_fields(step)} for step in (1, 2)]
    (run / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events), encoding="utf-8")
    return run


@pytest.mark.parametrize(("tool", "key", "cell"), [cell for cell in cells() if not cell[2].startswith("works")])
def test_what_the_table_says_is_refused_is_in_one_line_before_anything_starts(
    tool, key, cell, tmp_path, capsys, monkeypatch
):
    assert cell.startswith("refused: "), cell
    for name, value in as_launched(2).items():
        if tool == "`lab.benchmark.overhead`":  # which a launcher starts
            monkeypatch.setenv(name, value)
    here = [f"run.dir={tmp_path}/runs", f"data.cache_dir={tmp_path}/cache", *SMALL, f"parallel.{key}=2"]
    assert REFUSING[tool](here, tmp_path / "out") == 2
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    assert line.startswith("error: ") and line.endswith("; set it to 1") and f"parallel.{key} = 2: " in line
    assert cell.removeprefix("refused: ") in line, "the reason is the table's"
    assert not printed.out and not (tmp_path / "runs").exists() and not (tmp_path / "cache").exists()


def test_a_run_of_several_machines_is_not_replayed_on_one(tmp_path, monkeypatch, capsys):
    run = recorded(tmp_path, [f"run.dir={tmp_path}/runs", *SMALL])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert replay([str(run), "--step", "2"]) == 2
    said = capsys.readouterr().err
    assert (
        "made by 2 processes, and 1 GPUs are visible here; start the replay as the run was, such as deepspeed" in said
    )
    assert said.endswith(f"--module tools.replay {run} --step 2\n")


def test_the_table_has_every_tool_that_could_refuse():
    told = {tool.strip("`").split()[0] for tool, _, _ in cells()}
    sources = [*REPOSITORY.glob("training/**/*.py"), *REPOSITORY.glob("launch/**/*.py")]
    asking = {
        path for path in sources if re.search(r"\brefuse_sharing\(|\bsession\(", path.read_text(encoding="utf-8"))
    }
    modules = {".".join(path.relative_to(REPOSITORY).with_suffix("").parts) for path in asking}
    for module in modules - {"training.session", "training.loop", "tracking.tracing.otlp"}:
        assert any(module == tool or module.startswith(f"{tool}.") for tool in told), module


OF = {"expert": [f"model={{architecture: mixtral, config: {json.dumps(MIXTURE)}}}"]}


@pytest.mark.slow
@pytest.mark.parametrize("key", ["sequence", "expert"])
def test_recorded_steps_of_ranks_that_share_are_tried_under_another_precision(key, tmp_path):
    given = [*OF.get(key, []), "precision.compute=bf16", "deepspeed.config=ds_configs/zero2_bf16.json", "run.steps=4"]
    finish(command("python", tmp_path, "it", *given, f"parallel.{key}=2", "generate.tokens=0"), ranks=2)
    run = ["python", "-m", "tools.replay", str(tmp_path / "runs/it")]
    said = finish([*run, "--step", "3", "--steps", "1", "--what-if", "precision.compute=fp32"], ranks=2)
    assert "the run would have survived" in said
    if key == "sequence":
        assert "the run matches its FP32 twin" in finish([*run, "--bisect"], ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize(("compute", "stage"), [("bf16", 2), ("fp16", 3)])
@pytest.mark.parametrize("key", ["sequence", "expert"])
def test_the_gate_takes_ranks_that_share(key, compute, stage, tmp_path):
    """Tokens take all experts: a 16-bit router may else choose others than FP32's, shared or not."""
    own = [*OF["expert"], "model.config.num_experts_per_tok=4"] if key == "expert" else []
    given = [*SMALL, *own, f"data.cache_dir={tmp_path}/cache", f"parallel.{key}=2", "batch.micro_size=4"]
    given += [f"deepspeed.config=ds_configs/zero{stage}_{compute}.json", f"precision.compute={compute}"]
    with forked_launcher(2) as launcher:
        chosen = plan(
            DEMO[1], [*given, "parity.points=2"], folder=tmp_path / "gate", steps=12, processes=2, launcher=launcher
        )
        found = gate(chosen)
    assert found["verdict"] == "parity", found["failed"]
    assert all(walk["recorded_loss"] == walk["steps"][0]["loss"] for walk in found["walks"])
