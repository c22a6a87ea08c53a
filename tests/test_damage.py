"""Damage to every file of a run: each reader passes it over or refuses it in one line, and none ends with a traceback.

A row is a file and what happens to it, on a copy of one finished run. What needs real jobs is in tests/machines/.
"""

import os
import shutil
from pathlib import Path

import pytest

from config.command_line import read_command_line
from config.errors import UserError
from data.text.prepare import prepare
from tests.support.runs import damages as d
from tests.training.checkpoint import checkpoint_cases
from tools.export_hf.command import main as export
from tools.replay.command import main as replay
from tracking.compare.command import main as compare
from tracking.report.command import main as report
from tracking.watch.command import main as watch
from training.checkpoint import tool

SHARD = "deepspeed/zero_pp_rank_0_mp_rank_00_optim_states.pt"
MODEL = "deepspeed/mp_rank_00_model_states.pt"


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the finished run to break; its data cache is beside it, as its config says, and is shared."""
    return shutil.copytree(finished / "runs/it", tmp_path / "it")


def said(capsys, main, *arguments):
    """Exit code and the error of one command: a single line, and no exception."""
    code = main([str(argument) for argument in arguments])
    output = capsys.readouterr()
    errors = [line for line in output.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == (code == 2), output.err
    assert "Traceback" not in output.err
    return code, errors[0] if errors else "", output.out


def checkpoint_tool(*arguments):
    """Exit code and lines of `python -m training.checkpoint`."""
    lines = []
    return tool.main([str(argument) for argument in arguments], lines.append), lines


CHECKPOINTS = {
    **d.common(
        {
            "manifest.json": ", ".join(d.COMMON),
            "state.json": "gone, a flipped bit, half",
            MODEL: "gone, a flipped bit, half, zeros, a folder",
            SHARD: "a flipped bit, a link to itself",
            "deepspeed": "gone",
            ".": "a folder, a link to itself",
        }
    ),
    "a manifest that is a number": ("manifest.json", d.holding(b"1" * 5000)),
    "a manifest without a seal": ("manifest.json", d.edited(lambda m: {k: m[k] for k in m if k != "sha256"})),
    "a manifest of a later format": ("manifest.json", d.sealed_again(lambda m: {"format": 4})),
    "a manifest without files": ("manifest.json", d.sealed_again(lambda m: {"files": {}})),
    "a manifest whose files are a list": ("manifest.json", d.sealed_again(lambda m: {"files": []})),
    "a manifest of files elsewhere": (
        "manifest.json",
        d.sealed_again(lambda m: {"files": {**m["files"], "../LATEST": m["files"]["state.json"]}}),
    ),
    "a manifest of another step": ("manifest.json", d.sealed_again(lambda m: {"step": 5})),
    "a manifest of another run": (
        "manifest.json",
        d.sealed_again(lambda m: {"run": {"id": "0123456789abcdef", "name": "other"}}),
    ),
    "a nested state": ("state.json", d.in_its_manifest(d.holding(d.NESTED))),
    "a binary state": ("state.json", d.in_its_manifest(d.holding(d.BINARY))),
    "a state that is a list": ("state.json", d.in_its_manifest(d.holding(b"[]"))),
    "a state without identity": (
        "state.json",
        d.in_its_manifest(d.edited(lambda s: {k: s[k] for k in s if k != "identity"})),
    ),
    "another rank's generators": ("rng-rank-0.pt", lambda path: shutil.copy(path.with_name("rng-rank-1.pt"), path)),
    "a checkpoint that is a file": (".", lambda path: (d.removed(path), path.write_bytes(d.BINARY))),
}


UNSEEN_BY_INSPECT = {
    *(f"{MODEL}: a flipped bit", f"{MODEL}: zeros", f"{SHARD}: a flipped bit", "another rank's generators"),
    "a manifest of another run",
}
"""It hashes the state alone, and a path that is given may be of any run."""


@pytest.mark.parametrize("what", CHECKPOINTS)
def test_a_damaged_checkpoint_is_passed_over_and_refused(solo, run, capsys, what):
    name, act = CHECKPOINTS[what]
    step = run / "checkpoints" / "step-6"
    act(Path(os.path.normpath(step / name)))
    code, lines = checkpoint_tool("list", run)
    assert code == 0 and len([line for line in lines if line.startswith("step-6 ")]) <= 1
    assert checkpoint_tool("inspect", step)[0] == (0 if what in UNSEEN_BY_INSPECT else 3)
    code, lines = checkpoint_tool("verify", run)
    assert code == 3 and sum("step-6: " in line for line in lines) == 1
    code, error, _ = said(capsys, export, step, run.parent / "out", "--dtype", "bf16")
    assert code == 2 and "step-6" in error and not (run.parent / "out").exists()
    found, lines = solo.run(checkpoint_cases.find, folder=str(run / "checkpoints"), resume="auto")[0]
    assert found == "step-4"
    assert sum("step-6" in line for line in lines) >= 1 and all("\n" not in line for line in lines)
    code, lines = checkpoint_tool("prune", run, "--keep", "1")
    assert code == 0 and lines[-1] == "1 stay, the newest is step-4"


def without(field):
    """A step event that lacks a field."""
    return d.lines(lambda all_lines: [line.replace(f'"{field}"'.encode(), b'"gone"') for line in all_lines])


def value(old, new):
    """Another value in every line that has the old one."""
    return d.lines(lambda all_lines: [line.replace(old, new) for line in all_lines])


READ, REFUSED = 0, 2
EVENTS = {
    "half a last line": (d.after(b'{"event":"step","st'), READ),
    "a binary last line": (d.after(d.BINARY.replace(b"\n", b"")), READ),
    "zeros at the end": (d.after(bytes(5000)), READ),
    "every line twice": (d.lines(lambda all_lines: [line for line in all_lines for _ in range(2)]), READ),
    "the whole file twice": (d.lines(lambda all_lines: all_lines * 2), READ),
    "steps in another order": (d.lines(lambda all_lines: [all_lines[0], *sorted(all_lines[1:])]), READ),
    "the lines backwards": (d.lines(lambda all_lines: all_lines[::-1]), READ),
    "an unknown event": (d.line(3, b'{"event":"of another version","step":1,"time":1.0,"tokens":0}'), READ),
    "a run that has just started": (d.lines(lambda all_lines: all_lines[:1]), READ),
    "Windows line ends": (d.lines(lambda all_lines: [line[:-1] + b"\r\n" for line in all_lines]), READ),
    "an empty file": (d.holding(b""), REFUSED),
    "zeros": (d.zeroed, REFUSED),
    "a torn line": (d.line(2, b'{"event":"step","st'), REFUSED),
    "a line of zeros": (d.line(2, bytes(5000)), REFUSED),
    "a binary line": (d.line(2, d.BINARY.replace(b"\n", b"")), REFUSED),
    "a line that is no UTF-8": (d.line(1, b'{"event":"\xff\xfe"}'), REFUSED),
    "a nested line": (d.line(2, d.NESTED), REFUSED),
    "a line nested and closed": (d.line(2, d.NESTED_AND_CLOSED[:-1]), REFUSED),
    "a huge line": (d.line(2, b"x" * (20 << 20)), REFUSED),
    "a list": (d.line(2, b"[]"), REFUSED),
    "a number": (d.line(2, b"7"), REFUSED),
    "an empty line": (d.line(2, b""), REFUSED),
    "an object without an event": (d.line(2, b"{}"), REFUSED),
    "an event that is a number": (value(b'"event":"eval"', b'"event":5'), REFUSED),
    "no steps in an event": (d.line(-1, b'{"event":"run_end","status":"done","exit_code":0}'), REFUSED),
    "a step that is text": (value(b'"step":3,', b'"step":"three",'), REFUSED),
    "a step that is negative": (value(b'"step":3,', b'"step":-3,'), REFUSED),
    "a step that is huge": (value(b'"step":3,', b'"step":99999999999999999999999,'), REFUSED),
    "a step that is infinite": (value(b'"event":"eval","step":6', b'"event":"eval","step":"inf"'), REFUSED),
    "a time that is text": (value(b'"time":', b'"time":"x","old":'), REFUSED),
    "a time that is null": (value(b'"time":', b'"time":null,"old":'), REFUSED),
    "a loss that is text": (value(b'"loss":', b'"loss":"low","old":'), REFUSED),
    "a loss that is a list": (value(b'"loss":', b'"loss":[1],"old":'), REFUSED),
    "a perplexity that is text": (value(b'"perplexity":', b'"perplexity":"low","old":'), REFUSED),
    "a size that is text": (value(b'"bytes":', b'"bytes":"many","old":'), REFUSED),
    "a path that is a number": (value(b'"path":', b'"path":5,"old":'), REFUSED),
    "a compute dtype that is a list": (value(b'"compute":', b'"compute":[],"old":'), REFUSED),
    "no parameters": (without("parameters"), REFUSED),
    "no status": (without("status"), REFUSED),
    "no file": (d.removed, REFUSED),
    "a folder": (d.folder, REFUSED),
    "a link to itself": (d.looped, REFUSED),
}


@pytest.mark.parametrize("what", EVENTS)
def test_damaged_events_are_refused_by_line_or_read_as_far_as_they_are_whole(finished, run, capsys, monkeypatch, what):
    monkeypatch.delenv("RANK", raising=False)
    act, expected = EVENTS[what]
    act(run / "events.jsonl")
    code, error, _ = said(capsys, report, run)
    assert code == expected and (code == READ or "events.jsonl" in error)
    code, error, _ = said(capsys, compare, finished / "runs/it", run)
    assert code == expected and (code == READ or "events.jsonl" in error)
    code, error, _ = said(capsys, report, "--runs", run)
    assert code == 0 or (code == 2 and "events.jsonl" in error), "one that cannot be read is left out, and named"
    code, error, _ = said(capsys, watch, run, "--once", "--ascii")
    assert code == 0 or (code == 2 and "events.jsonl" in error)
    code, error, _ = said(capsys, replay, run, "--step", "99")
    assert code == 2 and ("events.jsonl" in error or "no such step" in error)


INPUTS = {
    **d.common(
        {
            "config.yaml": "gone, empty, half, binary, zeros, a list, a folder",
            "ds_config.json": "gone, half, nested",
            "environment.json": "gone, half, binary, nested, a list",
            "sample.txt": "binary, a folder",
            "report.md": "binary",
        }
    ),
    "a nested config": ("config.yaml", d.holding(b"[" * 3_000)),
    "a config whose sections are numbers": ("config.yaml", d.holding(b"run: 5\ndata: 6\ntracking: 7\n")),
    "a DeepSpeed JSON whose sections are numbers": ("ds_config.json", d.holding(b'{"zero_optimization": 5}')),
    "an environment of other types": (
        "environment.json",
        d.holding(
            b'{"data": 5, "versions": [], "git": "x", "accelerator": [], "cpu": 7, "ledger": 3, "command_line": 1}'
        ),
    ),
    "a ledger without sizes": ("environment.json", d.edited(lambda e: {**e, "ledger": [{}]})),
    "a plot that is text": ("plots/run.png", d.holding(b"no picture")),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("what", INPUTS)
def test_damaged_files_beside_the_events_are_refused_by_name_or_left_out(finished, run, capsys, monkeypatch, what):
    monkeypatch.delenv("RANK", raising=False)
    name, act = INPUTS[what]
    act(run / name)
    for main, arguments in (
        (report, [run]),
        (compare, [finished / "runs/it", run]),
        (watch, [run, "--once", "--ascii"]),
        (export, [run / "checkpoints/step-6", run.parent / "out", "--dtype", "fp32"]),
    ):
        code, error, _ = said(capsys, main, *arguments)
        assert code == 0 or (code == 2 and (str(run / name) in error or name in error)), (main.__module__, error)


FIRST = "train-00000.safetensors"
CACHE = {
    **d.common(
        {
            "index.json": "gone, empty, half, a flipped bit, binary, nested, nested and closed, a list, a folder",
            FIRST: "gone, half, zeros, a flipped bit, a folder",
            "tokenizer": "gone",
            "tokenizer/tokenizer.json": "half, a flipped bit, a folder",
        }
    ),
    "a shard with a nested header": (
        FIRST,
        lambda path: path.write_bytes((500_000).to_bytes(8, "little") + d.NESTED.ljust(path.stat().st_size - 8, b"[")),
    ),
}


@pytest.mark.parametrize("what", CACHE)
def test_damaged_prepared_data_are_refused_by_name_or_prepared_again(finished, tmp_path, what):
    name, act = CACHE[what]
    cache = shutil.copytree(finished / "cache", tmp_path / "cache")
    folder = next(path for path in cache.iterdir() if path.is_dir())
    act(folder / name)
    settings = ["--config", str(finished / "runs/it/config.yaml"), f"data.cache_dir={cache}", "data.verify=true"]
    data = read_command_line(settings).config.data
    try:
        assert prepare(data, progress=False).train.tokens > 0
        assert what in ("index.json: gone", "index.json: a folder")
    except UserError as error:
        assert str(folder) in str(error) and "\n" not in str(error)
        assert "Delete the folder" in str(error) or "cannot be" in str(error)
