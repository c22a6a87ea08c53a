"""Every Accelerate setting is either applied or refused, never silently ignored."""

import shlex
from pathlib import Path

import pytest

from config.command_line import parse
from config.errors import UserError
from config.launcher import without_accelerate
from config.resolved import Resolved, resolve_run
from tests.support.refusals import refused

FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"


@pytest.fixture
def run_config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {architecture: llama}\nbatch: {global_size: 8, micro_size: 2}\n"
        "deepspeed: {config: ds_configs/zero2_bf16.json}\n"
    )
    return path


def resolve(run_config: Path, environment: dict[str, str], *arguments: str) -> Resolved:
    return resolve_run(parse(["--config", str(run_config), *arguments]), environment)


@pytest.mark.parametrize(
    ("told", "typed", "expected"),
    [
        ("", [], "zero2_bf16"),
        ("ds_configs/zero3_bf16.json", [], "zero3_bf16"),
        ("ds_configs/zero3_bf16.json", ["deepspeed.config=ds_configs/zero1_fp16.json"], "zero1_fp16"),
        ("ds_configs/zero3_bf16.json", ["deepspeed={config: ds_configs/zero1_fp16.json}"], "zero1_fp16"),
        ("ds_configs/zero3_bf16.json", ["--deepspeed_config", "ds_configs/zero1_fp16.json"], "zero1_fp16"),
    ],
)
def test_what_is_typed_wins_over_accelerate_and_that_over_the_run_config(run_config, told, typed, expected):
    resolved = resolve(run_config, {FILE: told, "ACCELERATE_USE_DEEPSPEED": "true"}, *typed)
    assert resolved.config.deepspeed.config == f"ds_configs/{expected}.json"
    assert f"zero{resolved.zero_stage}_{resolved.compute}" == expected
    # and so does the run that its command starts, by whichever launcher
    arguments = shlex.split(resolved.command.partition("train.py ")[2])
    assert resolve_run(parse(arguments), {}).deepspeed == resolved.deepspeed


def test_the_working_folder_comes_first_as_it_does_for_accelerate(run_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.json").write_text('{"zero_optimization": {"stage": 1}}')
    assert resolve(run_config, {FILE: "mine.json"}).zero_stage == 1
    with pytest.raises(UserError, match="^accelerate's deepspeed_config_file: deepspeed.config = 'none.json' does not"):
        resolve(run_config, {FILE: "none.json"})


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"DEEPSPEED_ZERO_STAGE": "3"}, "zero_stage = 3, but by {run} with {json} it is 2;"),
        ({"MIXED_PRECISION": "fp16"}, "mixed_precision = fp16, but by {run} with {json} it is bf16;"),
        ({"MIXED_PRECISION": "fp8"}, "mixed_precision = fp8, but by {run} with {json} it is bf16;"),
        (
            {"MIXED_PRECISION": "no", "CONFIG_DS_FIELDS": "zero3_init_flag,mixed_precision"},
            "mixed_precision = no, but by {run} with {json} it is bf16;",
        ),
        ({"DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, "offload_optimizer_device = cpu, but by {run} with {json}"),
        ({"DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme"}, "offload_param_device = nvme, but by {run} with {json}"),
        ({"GRADIENT_ACCUMULATION_STEPS": "1"}, "gradient_accumulation_steps = 1, but by {run} with {json} it is 4;"),
        ({"GRADIENT_CLIPPING": "0.5"}, "gradient_clipping = 0.5, but by {run} with {json} it is 1.0;"),
        ({"USE_FSDP": "true"}, "distributed_type = FSDP is not what train.py does"),
        ({"USE_MEGATRON_LM": "true"}, "distributed_type = MEGATRON_LM is not what train.py does"),
    ],
)
def test_a_contradiction_is_refused_with_both_sides(run_config, variables, words):
    said = refused(resolve, run_config, {f"ACCELERATE_{name}": value for name, value in variables.items()})
    assert said.startswith("accelerate: " + words.format(run=run_config, json="ds_configs/zero2_bf16.json"))


def test_a_manifest_is_no_mixed_precision_of_accelerate(run_config):
    path = ["precision.path=manifest", "deepspeed.config=ds_configs/zero2_fp32.json"]
    path += ["precision.manifest=config/manifests/bf16.json"]
    with pytest.raises(UserError, match="mixed_precision = bf16, but by .* it is manifest;"):
        resolve(run_config, {"ACCELERATE_MIXED_PRECISION": "bf16"}, *path)


@pytest.mark.parametrize(
    "variables",
    [
        {"MIXED_PRECISION": "no", "CONFIG_DS_FIELDS": "zero3_init_flag"},
        {"MIXED_PRECISION": "bf16", "DEEPSPEED_ZERO_STAGE": "2"},
        {"GRADIENT_CLIPPING": "1", "GRADIENT_ACCUMULATION_STEPS": "4"},
        {"GRADIENT_CLIPPING": "auto", "GRADIENT_ACCUMULATION_STEPS": "auto", "DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none"},
        {"USE_FSDP": "false", "DEEPSPEED_ZERO3_INIT": "false"},
    ],
)
def test_what_agrees_or_says_nothing_is_fine(run_config, variables):
    environment = {f"ACCELERATE_{name}": value for name, value in variables.items()}
    assert resolve(run_config, environment).zero_stage == 2


def test_a_run_resolved_earlier_does_not_hear_of_accelerate_again(run_config):
    environment = {FILE: "ds_configs/zero3_bf16.json", "ACCELERATE_MIXED_PRECISION": "fp16", "RANK": "0"}
    kept = without_accelerate({**environment, "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    assert resolve(run_config, kept).zero_stage == 2
    assert without_accelerate(environment) == {"RANK": "0"}
