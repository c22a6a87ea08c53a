"""`python -m tools.audit` on configs: what it reads, what it says, how it ends."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.cli import REPOSITORY
from tools.audit.command import main

AUTO = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)
SIXTEEN = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16}}
ZERO2 = AUTO | SIXTEEN | {"zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8}}
AXOLOTL = {"base_model": "m", "datasets": [], "micro_batch_size": 1, "gradient_accumulation_steps": 4, "bf16": "auto"}
ACCELERATE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "mixed_precision": "bf16",
    "num_processes": 8,
    "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu", "gradient_accumulation_steps": 2},
}
NOW = ("--with", "deepspeed=0.19.8", "--with", "transformers=5.23.0", "--with", "accelerate=1.15.0")


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Write a file of that content, and return its path as an argument."""

    def written(name: str, content: Any) -> str:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return written


def audit(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    code = main(arguments)
    return code, *capsys.readouterr()


@pytest.mark.parametrize("path", sorted((REPOSITORY / "ds_configs").glob("*.json")), ids=lambda path: path.stem)
def test_the_verdict_on_the_shipped_configs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """BF16 and FP16 at ZeRO-0 are wrong, through DeepSpeed alone; the rest is sound with clipping on."""
    code, out, _ = audit(capsys, "--deepspeed-config", str(path), *NOW)
    assert code == (3 if path.stem in ("zero0_bf16", "zero0_fp16") else 0), out
    assert max(len(line) for line in out.splitlines() if "/" not in line) <= 80


def test_a_sound_run_of_the_trainer_is_not_blamed(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"output_dir": "o", "bf16": True, "gradient_accumulation_steps": 8, "deepspeed": ZERO2}
    code, out, _ = audit(capsys, "--trainer-config", write("args.json", arguments), *NOW)
    assert code == 0
    assert "ZeRO-2, BF16, optimizer adamw, accumulation 8, trainer hf" in out
    assert "masters off by 5.4e-03, 6.5e-02 allowed" in " ".join(out.split())
    assert "verdict: nothing known to be wrong\n" in out
    assert "May be wrong" not in out and "WRONG" not in out


@pytest.mark.parametrize(
    ("trainers", "own", "found"),
    [
        ({}, {"type": "Muon", "params": {"lr": "auto"}}, "muon"),
        ({}, {"type": "Lamb"}, "lamb"),
        ({"optim": "adafactor"}, {"type": "AdamW"}, "adamw"),
        ({"optim": "adafactor"}, None, "adafactor"),
    ],
)
def test_an_optimizer_of_the_json_takes_the_place_of_the_trainers(trainers, own, found, write, capsys) -> None:
    document = ZERO2 | ({"optimizer": own} if own else {})
    arguments = {"output_dir": "o", "bf16": True, "gradient_accumulation_steps": 4, "deepspeed": document}
    code, out, _ = audit(capsys, "--trainer-config", write("args.json", arguments | trainers), *NOW)
    assert f"optimizer {found}," in out and code == (0 if found == "adamw" else 3)


def test_the_same_run_with_a_release_that_loses_gradients(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    json_file = Path(write("report.json", ""))
    arguments = {"output_dir": "o", "bf16": True, "gradient_accumulation_steps": 8, "deepspeed": ZERO2}
    old = ("--with", "deepspeed==0.18.2")
    page = json_file.with_suffix(".html")
    files = ("--trainer-config", write("args.json", arguments), "--json", str(json_file), "--page", str(page))
    code, out, _ = audit(capsys, *files, *NOW, *old)
    assert code == 3
    assert "[zero2-keeps-last-micro-batch]" in page.read_text() and 'class="note bad"' in page.read_text()
    assert "verdict: wrong; findings: 1" in out
    report = json.loads(json_file.read_text())
    assert report["verdict"] == "wrong; findings: 1"
    assert report["findings"][0]["id"] == "zero2-keeps-last-micro-batch"
    assert report["facts"]["accumulation"] == 8 and report["facts"]["dtype"] == "bf16"
    assert "gradients are summed in: BF16 (data_types.grad_accum_dtype is not set)" in report["numerics"]


def test_the_page_shows_what_is_printed(write, capsys, tmp_path, monkeypatch) -> None:
    page = (REPOSITORY / "docs/audit.md").read_text(encoding="utf-8")
    shown = page.partition(
        "```\n$ python -m tools.audit --trainer-config training_args.json --with deepspeed=0.18.2\n"
    )[2]
    bf16 = {"enabled": "auto", "check_grad_overflow": True}
    document = AUTO | {"bf16": bf16, "zero_optimization": {"stage": 2}}
    write(
        "training_args.json", {"output_dir": "o", "bf16": True, "gradient_accumulation_steps": 4, "deepspeed": document}
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    given = ("--trainer-config", "training_args.json", *NOW, "--with", "torch=2.13.0+cpu", "--with", "deepspeed=0.18.2")
    code, out, _ = audit(capsys, *given)
    assert code == 3
    assert shown.partition("```")[0] == out


def test_what_is_open_may_be_wrong(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = write("ds.json", ZERO2)
    code, out, _ = audit(capsys, "--deepspeed-config", path, *NOW, "--with", "deepspeed=0.18.2")
    assert code == 0
    assert "[zero2-keeps-last-micro-batch]: if accumulation is > 1" in " ".join(out.split())
    assert "verdict: nothing known to be wrong; 2 may be, see what is open" in out


def test_axolotl_with_the_json_that_it_names(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    write("zero2.json", ZERO2)
    config = AXOLOTL | {"deepspeed": "zero2.json", "max_grad_norm": 0.3, "optimizer": "adafactor"}
    code, out, _ = audit(capsys, "--trainer-config", write("axolotl.yml", config), *NOW)
    assert code == 3
    assert "zero2.json" in out and "[layerwise-optimizer-on-flat-shard]" in out
    assert "clipping: 0.3" in out


def test_accelerates_own_settings(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = write("accelerate.yaml", ACCELERATE)
    code, out, _ = audit(capsys, "--trainer-config", path, *NOW)
    assert code == 0 and "BF16, ZeRO-2, optimizer on the CPU" in " ".join(out.split())
    code, out, _ = audit(capsys, "--trainer-config", path, *NOW, "--with", "deepspeed=0.18.9")
    assert code == 3 and "[zero2-offload-drops-micro-batches]" in out


def test_a_scripts_arguments_beside_accelerates_file(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Accelerate's precision stands where the script names none."""
    script = {"output_dir": "o", "optim": "adafactor", "gradient_accumulation_steps": 2}
    files = ("--trainer-config", write("args.yaml", script), "--trainer-config", write("acc.yaml", ACCELERATE))
    code, out, _ = audit(capsys, *files, *NOW)
    assert code == 3
    assert "BF16, optimizer adafactor, accumulation 2" in " ".join(out.split())


def test_accumulation_follows_from_the_batch_sizes(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    document = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    path = write("ds.json", document | {"bf16": {"enabled": True}})
    for ranks, told in (
        ((), "accumulation open"),
        (("--ranks", "4"), "accumulation 4"),
        (("--ranks", "16"), "accumulation 1"),
    ):
        _, out, _ = audit(capsys, "--deepspeed-config", path, *ranks, *NOW)
        assert told in " ".join(out.split())


def test_a_trainers_clipping_that_never_reaches_deepspeed(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    document = {key: value for key, value in ZERO2.items() if key != "gradient_clipping"}
    arguments = {"output_dir": "o", "bf16": True, "max_grad_norm": 0.3, "deepspeed": document}
    code, out, _ = audit(capsys, "--trainer-config", write("args.json", arguments), *NOW)
    assert code == 3 and "[clipping-ignored]" in out
    code, out, _ = audit(capsys, "--trainer-config", write("args.json", arguments | {"max_grad_norm": 1.0}), *NOW)
    assert code == 0


def test_what_was_never_measured_is_named(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    zero = {"stage": 3, "zero_quantized_gradients": True, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}
    document = {"zero_optimization": zero, "bf16": {"enabled": True}, "monitor_config": {"tag": "x"}, "amp": {}}
    document |= {"activation_checkpointing": {"cpu_checkpointing": True}, "dataloader_drop_last": True}
    path = write("ds.json", document)
    _, out, _ = audit(capsys, "--deepspeed-config", path, "--optimizer", "galore_adamw", *NOW)
    told = out.partition("Never measured")[2].partition("Numerics")[0]
    for text in ("zero_quantized_gradients = true", "device = nvme", "monitor_config: DeepSpeed", "galore_adamw"):
        assert text in told
    assert "checkpointing" not in told and "drop_last" not in told


def test_a_model_tells_its_type_and_dropout(write: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write("config.json", {"model_type": "t5", "dropout_rate": 0.1})
    document = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}, "tensor_parallel": {"autotp_size": 2}}
    code, out, _ = audit(capsys, "--deepspeed-config", write("ds.json", document), "--model", str(tmp_path), *NOW)
    assert code == 3
    assert "[autotp-dropout-parts-replicas]" in out and "[fp16-range]" in out


BAD: dict[str, tuple[Any, str]] = {
    "no JSON": ("{'stage': 2}", "not valid JSON: line 1, column 2"),
    "comments": ('{"zero_optimization": {"stage": 2}} // ZeRO', "not valid JSON: line 1, column 37"),
    "a list": ([1], "holds [1] where a JSON object is expected"),
    "another tool's": ({"name": "app", "version": "1.0"}, "is no DeepSpeed JSON: it has none of its keys"),
    "a misspelt section": (
        {"bf16": {"enabled": True}, "zero_optimisation": {"stage": 2}},
        "DeepSpeed has no such key and ignores it; did you mean zero_optimization?",
    ),
    "a misspelt key": ({"zero_optimization": {"overlap_com": True}}, "stops at it; did you mean overlap_comm?"),
    "a stage of 4": ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4 is not one of 0, 1, 2, 3"),
    "an open stage": ({"zero_optimization": {"stage": "auto"}}, "stage = 'auto' is not one of 0, 1, 2, 3"),
    "a section that is none": ({"zero_optimization": 2}, "zero_optimization = 2 is not an object; write {...}"),
    "text for a number": (ZERO2 | {"gradient_accumulation_steps": "8"}, "is not a whole number of 0 or more"),
    "a key twice": ('{"bf16": {}, "bf16": {}}', "bf16 is given twice in one object"),
    "both dtypes": ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "are both true; set one of them to false"),
}


FOREIGN: dict[str, tuple[Any, str]] = {
    "another tool's": ("services: {web: {image: x}}", "is no Accelerate YAML, axolotl YAML, TrainingArguments"),
    "no YAML": ("a: [1", "cannot be read as YAML"),
    "a list": ("- a\n- b", "its keys are none"),
    "no DeepSpeed": (ACCELERATE | {"distributed_type": "FSDP"}, "distributed_type = 'FSDP' does not start DeepSpeed"),
    "no JSON named": (AXOLOTL, "names no DeepSpeed JSON; add --deepspeed-config ds.json"),
    "a JSON that is not there": (AXOLOTL | {"deepspeed": "gone.json"}, "gone.json"),
}


FILES = {"--deepspeed-config": BAD, "--trainer-config": FOREIGN}


@pytest.mark.parametrize(("option", "name"), [(option, name) for option, cases in FILES.items() for name in cases])
def test_a_bad_file_is_one_line(option: str, name: str, write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    content, told = FILES[option][name]
    code, out, error = audit(capsys, option, path := write("given.yaml", content))
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith(f"error: {path if option == '--deepspeed-config' else ''}") and told in error


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "give one of --deepspeed-config FILE, a probe's folder, or --write-probe DIR"),
        (["folder", "--deepspeed-config", "ds.json"], "give one of"),
        (["--deepspeed-config", "gone.json"], "gone.json: cannot be read as a DeepSpeed JSON"),
        (["--deepspeed-config", "DS", "--with", "deepspeed"], "--with deepspeed: is not one of"),
        (["--deepspeed-config", "DS", "--with", "numpy=1.0"], "--with numpy=1.0: is not one of"),
        (["--deepspeed-config", "DS", "--with", "deepspeed=new"], "--with deepspeed=new: is not one of"),
        (["--deepspeed-config", "DS", "--trainer", "own"], 'train_batch_size = "auto" is filled in by'),
        (["--deepspeed-config", "DS", "--model", "no/model"], "--model no/model: is no folder with a config.json"),
        (["--deepspeed-config", "DS", "--json", "/dev/null/x"], "/dev/null/x: cannot be written: "),
        (["--deepspeed-config", "DS", "--ranks", "0"], "0 is not a whole number of 1 or more"),
    ],
)
def test_a_bad_command_line_is_one_line(arguments, told, write, capsys) -> None:
    path = write("ds.json", ZERO2)
    code, out, error = audit(capsys, *(path if argument == "DS" else argument for argument in arguments))
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert told in error


def test_the_probe_is_written_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "new" / "mantissa_probe.py"
    for _ in range(2):
        code, out, _ = audit(capsys, "--write-probe", str(target.parent))
        assert code == 0 and "from mantissa_probe import Probe" in out
    assert target.read_bytes() == (REPOSITORY / "tools/audit/mantissa_probe.py").read_bytes()
    target.write_text("mine")
    code, out, error = audit(capsys, "--write-probe", str(target.parent))
    assert (code, out) == (2, "") and "is there already and differs; remove it" in error
    assert target.read_text() == "mine"
