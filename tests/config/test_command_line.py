"""The command line as a user meets it, in a process of its own where that counts; `--help`; credentials are refused."""

import dataclasses
import json
import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from config.batch import BatchPlan
from config.cli import BROKEN, CONFIG_ERROR, DIVERGED, DONE, LOST, PREEMPTED, REPOSITORY, UNSAVED
from config.command_line import read_command_line
from config.deepspeed.choice import find_deepspeed_json
from config.errors import UserError
from config.help_text import keys, render
from config.launcher import deepspeed_program
from config.load import all_keys, field_types, load_config
from config.resolved import Resolved
from config.schema import Config
from tests.support.runs.hostile import OBEYED

# What train.py does first; run without the rest of it so that nothing but config/ is loaded.
PROGRAM = "import sys; from config.command_line import read_command_line as r; r(sys.argv[1:])"


@pytest.fixture
def run_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "demo.yaml"
    path.write_text("model: {architecture: llama}\nbatch: {global_size: 8, micro_size: 2}\n")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return path


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_SIZE": world_size}.items():
        monkeypatch.setenv(name, str(value))


def in_a_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, env=clean | environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_run_is_completely_decided(run_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, 1, 2)
    overrides = ["run.steps=20", "optimizer.betas=[0.9,0.95]"]
    options = ["--config", str(run_config), "--deepspeed_config", "ds_configs/zero3_fp16_offload.json"]
    resolved = read_command_line(["--local_rank=1", overrides[0], *options, overrides[1]])
    assert isinstance(resolved, Resolved)
    assert resolved.config.precision.compute == resolved.compute == "fp16"
    assert resolved.config.deepspeed.config == "ds_configs/zero3_fp16_offload.json"
    assert (resolved.zero_stage, resolved.offload) == (3, "optimizer+param")
    assert resolved.batch == BatchPlan(global_size=8, micro_size=2, accumulation=2, world_size=2)
    assert (resolved.rank, resolved.world_size, resolved.local_rank) == (1, 2, 1)
    assert resolved.deepspeed["gradient_accumulation_steps"] == 2
    assert resolved.overrides == tuple(overrides)
    assert resolved.command == (
        f"{shlex.join(deepspeed_program())} --num_gpus 2 train.py --config {run_config} "
        "--deepspeed_config ds_configs/zero3_fp16_offload.json run.steps=20 'optimizer.betas=[0.9,0.95]'"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved.compute = "fp32"  # type: ignore[misc]


def test_a_command_to_resume_repeats_no_key(run_config: Path) -> None:
    given = ["run.resume=never", "run.steps=3", "model.config={hidden_size: 8}", "run.steps=4"]
    given += ["model.config={num_hidden_layers: 1}"]
    resolved = read_command_line(["--config", str(run_config), *given])
    models = "'model.config={hidden_size: 8}' run.steps=4 'model.config={num_hidden_layers: 1}'"  # merged
    assert resolved.command == f"python train.py --config {run_config} run.resume=never {models}"
    assert resolved.resume_command == f"python train.py --config {run_config} {models} run.resume=auto"


FAULT = "faults=[{{kind: inf_gradient, step: 1, rank: 1}}]"
WITH_CONFIG = [
    ("--cnofig", "command line: no such option --cnofig; did you mean --config?"),
    ("--epochs=3", "command line: no such option --epochs; write run.epochs=VALUE"),
    ("--local_rank=x", "command line: argument --local_rank/--local-rank: invalid int"),
    ("run.stpes=3", "command line: run.stpes: no such key; did you mean run.steps?"),
    ("lr=1e-3", "command line: lr: no such key; did you mean optimizer.learning_rate?"),
    ("bf16=true", "command line: bf16: no such key; did you mean precision.compute=bf16?"),
    ("seed=1", "command line: seed: no such key; did you mean run.seed?"),
    ("optimizer.seed=1", "command line: optimizer.seed: no such key; did you mean run.seed?"),
    ("learnig_rate=1", "command line: learnig_rate: no such key; did you mean optimizer.learning_rate?"),
    ("training.seq_len=8", "command line: training.seq_len: no such key; did you mean data.sequence_length?"),
    ("trackin.wandb=online", "command line: trackin.wandb: no such key; did you mean tracking.wandb?"),
    ("model.name=x", "command line: model.name: no such key; did you mean model.name_or_path?"),
    ("hidden_size=64", "command line: hidden_size: no such key; did you mean model.config.hidden_size?"),
    ("model.xyz=1", "command line: model.xyz: no such key; model has: name_or_path, architecture, config,"),
    ("batch.size=1", "command line: batch.size: no such key; batch has: global_size, micro_size"),
    ("xyz=1", "command line: xyz: no such key; the top level has: task, run, model,"),
    ("--learning_rate=1e-3", "command line: no such option --learning_rate; write optimizer.learning_rate=VALUE"),
    ("--bf16", "command line: no such option --bf16; write precision.compute=bf16"),
    ("optimizer.learning_rate=1e-3s", "command line: optimizer.learning_rate = '1e-3s' is not a number; write digits"),
    ("run.steps=20,000", "command line: run.steps = '20,000' is not an integer; write digits alone, without a unit"),
    ("run.steps=many", "command line: run.steps = 'many' is not an integer; give a number"),
    *(
        (f"data.tokenizer={spec}", f"command line: data.tokenizer = '{spec}' names no vocabulary size of 257 or more")
        for spec in ("bpe:256", "bpe:many", "bpe:-5")
    ),
    ("data.tokenizer=./nowhere", "command line: data.tokenizer = './nowhere' does not exist; give a folder, a hub id"),
    ("batch.micro_size=3", "{config} with batch.micro_size=3: batch.global_size = 8 cannot be"),
    ("deepspeed.config=zero9.json", "{config}: deepspeed.config = 'zero9.json' does not exist"),
    ("--deepspeed_config=ds_configs/zero2_bf61.json", "{config}: deepspeed.config = 'ds_con"),
    ("deepspeed.config=ds_configs/zero0_fp16.json", "{repository}/ds_configs/zero0_fp16.json: F"),
    (FAULT, f"{{config}} with {FAULT}: faults[0].rank = 1 is not"),
]
MISTAKES = [
    ([], "command line: --config FILE is missing; for example: deepspeed --num_gpus 2 train.py --config"),
    (["--config"], "command line: argument --config: expected one argument"),
    (["--config", "nowhere.yaml"], "nowhere.yaml: no such run config"),
    *((["--config", "{config}", option], expected) for option, expected in WITH_CONFIG),
    (
        ["--config", "{config}", "precision.compute=fp16", "deepspeed.config=ds_configs/zero2_bf16.json"],
        "{repository}/ds_configs/zero2_bf16.json: enables bf16, but precision.compute = fp16 in the run config; remove",
    ),
]


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(run_config, arguments, expected, refusal, monkeypatch):
    monkeypatch.chdir(run_config.parent)
    names = {"config": run_config, "repository": REPOSITORY}
    said = refusal(read_command_line, [item.format(**names) for item in arguments], quiet=True)
    assert said.startswith("error: " + expected.format(**names))


def test_only_rank_0_speaks(run_config: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    as_rank(monkeypatch, 1, 2)
    for arguments, code in ((["run.stpes=3"], 2), (["--show-config"], 0), (["--help"], 0), (["--version"], 0)):
        with pytest.raises(SystemExit) as caught:
            read_command_line(["--config", str(run_config), *arguments])
        assert caught.value.code == code
    assert capsys.readouterr() == ("", "")


def test_a_rank_that_cannot_know_its_rank_speaks(run_config, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for said in ("RANK and LOCAL_RANK not set while WORLD_SIZE = 2", "RANK = 'one' is not a whole number"):
        with pytest.raises(SystemExit, match="2"):
            read_command_line(["--config", str(run_config)])
        assert capsys.readouterr().err.startswith(f"error: environment: {said}")
        monkeypatch.setenv("RANK", "one")


def test_options_of_other_launchers_are_taken(run_config: Path) -> None:
    resolved = read_command_line(["--local-rank", "0", "--deepspeed", "--config", str(run_config), "run.seed=1"])
    assert (resolved.config.run.seed, resolved.local_rank) == (1, 0)


@pytest.mark.parametrize(("option", "seconds"), [("--help", 0.5), ("--show-config", 1.0)])
def test_it_answers_at_once(run_config: Path, option: str, seconds: float) -> None:
    """Measured in processor time, the least of a few, so that a busy machine does not decide."""
    taken = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert in_a_process("--config", str(run_config), option).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(taken) < seconds


def test_the_deepspeed_json_is_looked_up_in_three_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, work = tmp_path / "recipes" / "a.yaml", tmp_path / "work"
    name = "ds_configs/zero2_bf16.json"
    for folder in (recipe.parent, work):
        (folder / "ds_configs").mkdir(parents=True)
    monkeypatch.chdir(work)
    assert find_deepspeed_json(name, recipe).resolve() == REPOSITORY / name
    (work / name).touch()
    assert find_deepspeed_json(name, recipe).resolve() == work / name
    (recipe.parent / name).touch()
    assert find_deepspeed_json(name, recipe).resolve() == recipe.parent / name
    # A path typed on the command line means the working folder first.
    assert find_deepspeed_json(name, recipe, first=True).resolve() == work / name
    assert find_deepspeed_json(str(work / name), recipe) == work / name
    with pytest.raises(UserError, match="did you mean ds_configs/zero2_fp16.json"):
        find_deepspeed_json("ds_configs/zero2_fp61.json", recipe)


def test_a_json_outside_the_repository_is_remembered_absolutely(run_config: Path) -> None:
    (run_config.parent / "mine.json").write_text('{"zero_optimization": {"stage": 1}}')
    resolved = read_command_line(["--config", str(run_config), "deepspeed.config=mine.json"])
    assert resolved.config.deepspeed.config == str(run_config.parent / "mine.json")
    assert resolved.compute == "fp32"
    assert load_config(run_config, [], None).precision.compute == "auto"


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_a_word_that_the_locale_cannot_write_is_refused_in_a_line() -> None:
    """Its file could be opened; the record of the run could not be written."""
    done = in_a_process("--config", "config/recipes/demo.yaml", "run.dir=größe", **ASCII)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: command line: run.dir=gr\\udcc3\\udcb6") and "ascii" in line
    assert "set LC_ALL=C.UTF-8 or PYTHONUTF8=1" in line


def test_what_the_terminal_cannot_show_is_printed_as_a_question_mark(tmp_path: Path) -> None:
    text = (REPOSITORY / "config/recipes/demo.yaml").read_text(encoding="utf-8")
    (tmp_path / "run.yaml").write_text(text.replace("name: demo", "name: größer"), encoding="utf-8")
    command = [sys.executable, str(REPOSITORY / "train.py"), "--config", str(tmp_path / "run.yaml"), "--show-config"]
    for encoding, shown in (("ascii", b"  name: gr??er  #"), ("utf-8", "  name: größer  #".encode())):
        variables = os.environ | {"PYTHONIOENCODING": encoding}
        done = subprocess.run(command, env=variables, capture_output=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        assert shown in done.stdout


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
def test_it_ends_in_one_line_without_the_secret(run_config: Path, refusal, settings, said, shown) -> None:
    line = refusal(read_command_line, ["--config", str(run_config), *settings, *shown], quiet=True)
    assert said in line and "hush" not in line and KEY not in line


UNFIT = [
    *("a\x1b[31m", "a\u202eb", "line\nbreak", "x" * 201, " space ", "a\x00", "a\ud800", "a/b", ".."),
    "ghp_" + "x1Y2z3" * 6,
]


@pytest.mark.parametrize("name", UNFIT)
def test_a_name_that_cannot_be_that_of_a_folder_is_refused_in_one_printable_line(run_config, refusal, name) -> None:
    said = refusal(read_command_line, ["--config", str(run_config), f"run.name={json.dumps(name)}"])
    assert said.startswith("error: command line: run.name ")
    assert not OBEYED.search(said.rstrip("\n")) and "ghp_" not in said


@pytest.mark.parametrize("name", ["a <b> | `c` $d$ [e]", "größe-実験", "-x", "a\u200db"])
def test_a_name_with_markup_is_a_name(run_config: Path, name: str) -> None:
    resolved = read_command_line(["--config", str(run_config), f"run.name={json.dumps(name)}"], {})
    assert resolved.config.run.name == name


def test_an_error_shows_no_secret_of_the_command_line(run_config: Path, refusal) -> None:
    for settings, problem in (
        (["run.resume=https://me:hunter2hunter2@host/x"], "run.resume = 'https://***@host/x' does not exist"),
        (["data.source=text", "data.path=https://me:hunter2hunter2@host/x"], "data.path holds what looks like a cred"),
    ):
        said = refusal(read_command_line, ["--config", str(run_config), *settings])
        assert problem in said and "hunter2" not in said


def test_the_shown_config_has_no_secret(run_config: Path, capsys) -> None:
    settings = ["run.hypothesis=see https://me:hunter2hunter2@host/x", "model.config={hub_token: hunter2hunter2}"]
    with pytest.raises(SystemExit):
        read_command_line(["--config", str(run_config), "--show-config", *settings], {})
    shown = capsys.readouterr().out
    assert "see https://***@host/x" in shown and "hub_token: ***" in shown and "hunter2" not in shown


def test_every_key_is_there_with_a_unit_and_a_meaning() -> None:
    found = {item.key: item for item in keys()}
    leaves = {key for key in all_keys() if not any(other.startswith(f"{key}.") for other in all_keys())}
    assert leaves <= found.keys()
    entries = {"faults": "kind step rank module factor place bit persists"}
    entries["data.sources"] = "path source name format split configuration weight epochs"
    entries["data.validation"] = "path source name format split configuration"
    entries["optimizer.groups"] = "match learning_rate weight_decay"
    assert found.keys() - leaves == {f"{name}[].{key}" for name, all_of in entries.items() for key in all_of.split()}
    for item in found.values():
        assert item.unit, item.key
        assert item.meaning.endswith((".", "it.")), item.key


def test_a_key_as_the_user_reads_it() -> None:
    found = {item.key: item for item in keys()}
    assert (found["batch.micro_size"].default, found["batch.micro_size"].unit) == ("1", "sequences")
    kinds = {
        "batch.micro_size": "integer, at least 1",
        "data.validation_fraction": "number, at least 0 and below 1",
        "optimizer.betas": "list of 2 numbers, at least 0 and below 1",
        "faults": "list of Faults",
        "guard.reactions": "list of skip | cut_lr | correct | promote | rollback | abort",
        "precision.compute": "auto | fp32 | bf16 | fp16",
        "model.name_or_path": "text or null",
    }
    assert {key: found[key].kind for key in kinds} == kinds
    assert found["optimizer.betas"].default == "[0.9, 0.95]"
    assert found["faults[].step"].default == "(must be given)"


def test_the_help_is_one_page_of_options_exit_codes_sections_and_true_defaults() -> None:
    lines = render().splitlines()
    assert len(lines) <= 42 and max(map(len, lines)) < 80
    text, defaults = "\n".join(lines), {item.key: item.default for item in keys()}
    for option in ("--config", "--deepspeed_config", "--show-config", "--local_rank", "--version", "--help"):
        assert option in text
    codes = text.partition("\nexit codes: ")[2]
    named = {int(code) for code in re.findall(r"(?:^|; |;\n  )(\d+) ", codes)}
    assert named == {DONE, CONFIG_ERROR, DIVERGED, LOST, BROKEN, UNSAVED, PREEMPTED}
    shown = dict(re.findall(r"^  ([a-z_.]+)=(\S+)  ", text, re.MULTILINE))
    assert len(shown) >= 12 and shown == {key: defaults[key] for key in shown}
    sections = text.partition("\nsections (--help SECTION):\n")[2].partition("\n\n")[0]
    assert [name for name in field_types(Config) if not re.search(rf"\b{name}\b", sections)] == []


def test_all_of_the_help_has_every_key_and_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = render("all")
        words = " ".join(text.split())
        for item in keys():
            assert f" {item.key}: {item.kind} = {item.default} [{item.unit}] {item.meaning}" in words
        assert max(map(len, text.splitlines())) <= min(columns, 110)


@pytest.mark.parametrize(
    ("about", "first", "last"),
    [
        ("run", "run.name", "run.deterministic"),
        ("precision.loss_scale", "precision.loss_scale.policy", "precision.loss_scale.escalate_within"),
        ("faults", "faults", "faults[].persists"),
        ("optimizer.betas", "optimizer.betas", "optimizer.betas"),
    ],
)
def test_the_help_on_a_section_has_its_keys(about: str, first: str, last: str) -> None:
    found = re.findall(r"^  ([a-z_.\[\]]+): ", render(about), re.MULTILINE)
    assert (found[0], found[-1]) == (first, last)
    assert all(key.startswith(about) for key in found)


@pytest.mark.parametrize(("about", "meant"), [("optimizr", "optimizer"), ("lr", "optimizer.learning_rate")])
def test_a_section_that_is_not_there_is_one_line_with_what_was_meant(about: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"^command line: --help {about}: no such section or key; did you mean {meant}"):
        render(about)
