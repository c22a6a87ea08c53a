"""One key is enough: the DeepSpeed JSON follows dtype, manifest, stage and offload, and contradictions are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.cli import REPOSITORY
from config.command_line import read_command_line, render_config
from config.load import to_yaml
from config.resolved import Resolved

DEMO = REPOSITORY / "config/recipes/demo.yaml"
MANIFEST = "precision.manifest=config/manifests/llama_mixed.json"
MODEL = "model: {architecture: llama}\n"
OFFLOADED = "optimizer+param"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def resolve(config: Path, *arguments: str) -> Resolved:
    return read_command_line(["--config", str(config), *arguments], {})


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(MODEL + text)
        return path

    return write


CHOSEN = [
    ([], "zero2_bf16"),
    (["precision.compute=fp16"], "zero2_fp16"),
    (["precision.compute=fp32"], "zero2_fp32"),
    (["deepspeed.stage=3"], "zero3_bf16"),
    (["deepspeed.offload=cpu"], "zero2_bf16_offload"),
    (["deepspeed.stage=3", "deepspeed.offload=cpu", "precision.compute=fp16"], "zero3_fp16_offload"),
    (["deepspeed={stage: 1, offload: cpu}"], "zero1_bf16_offload"),
    ([MANIFEST], "zero2_fp32"),
    ([MANIFEST, "deepspeed.stage=3"], "zero3_fp32"),
    ([MANIFEST, "precision.compute=fp32"], "zero2_fp32"),
    # both, as it had to be written before
    (["precision.compute=fp16", "deepspeed.config=ds_configs/zero1_fp16.json"], "zero1_fp16"),
    (["--deepspeed_config", "ds_configs/zero3_bf16.json"], "zero3_bf16"),
    (["precision.path=manifest", MANIFEST, "precision.compute=auto", "deepspeed.stage=1"], "zero1_fp32"),
]


@pytest.mark.parametrize(("arguments", "expected"), CHOSEN)
@pytest.mark.parametrize("start", ["demo", "nothing", "keys"])
def test_one_key_is_enough(write, start, arguments, expected):
    """Whether the run config names both keys, as the demo does, or none, or the new ones."""
    texts = {"nothing": "", "keys": "precision: {compute: bf16}\ndeepspeed: {stage: 2, offload: none}\n"}
    resolved = resolve(DEMO if start == "demo" else write(texts[start]), *arguments)
    assert resolved.deepspeed_path.resolve() == REPOSITORY / f"ds_configs/{expected}.json"
    stage, compute, *offload = expected.removeprefix("zero").split("_")
    assert (resolved.zero_stage, resolved.compute) == (int(stage), compute)
    assert resolved.offload == ("none" if not offload else OFFLOADED if stage == "3" else "optimizer")
    assert resolved.config.precision.path == ("manifest" if MANIFEST in arguments else "cast")


@pytest.mark.parametrize(("arguments", "expected"), CHOSEN)
def test_what_was_chosen_is_shown_and_saved_and_starts_the_same_run(tmp_path, arguments, expected):
    resolved = resolve(DEMO, *arguments)
    shown = render_config(resolved)
    assert (
        f"  config: ds_configs/{expected}.json  # default: null\n" in shown
        and f"ds_configs/{expected}.json\n{{" in shown
    )
    saved = tmp_path / "config.yaml"
    saved.write_text(to_yaml(resolved.config))
    again = resolve(saved)
    assert again.config == resolved.config and again.deepspeed == resolved.deepspeed
    # and another stage, dtype, JSON or path needs one key there as well
    assert resolve(saved, "deepspeed.stage=1").zero_stage == 1
    assert resolve(saved, f"deepspeed.config=ds_configs/zero1_{resolved.compute}.json").zero_stage == 1
    if MANIFEST not in arguments:
        assert resolve(saved, "precision.compute=fp32").compute == "fp32"
        assert resolve(saved, MANIFEST).config.precision.path == "manifest"
    else:
        assert resolve(saved, "precision.manifest=null").config.precision.path == "cast"


OWN = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
OPEN = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
MINE, ZERO_2 = "deepspeed: {config: mine.json}\n", "deepspeed: {config: ds_configs/zero2_bf16.json"
REFUSED = [
    (MINE, OWN, ["precision.compute=fp16"], "mine.json: enables bf16, but precision.compute = fp16 in the run config"),
    (MINE, OWN, ["deepspeed.stage=2"], "mine.json: zero_optimization.stage = 1, but deepspeed.stage = 2 in the run"),
    (MINE, OWN, ["deepspeed.offload=cpu"], "mine.json: offloads none, but deepspeed.offload = cpu in the run config"),
    (MINE, OWN, [MANIFEST], "mine.json: enables bf16, but precision.path = manifest keeps parameters in FP32; remove"),
    (MINE, OPEN, [], 'mine.json: bf16.enabled = "auto" and precision.compute = auto leave the dtype open'),
    # two keys of one place
    ("precision: {compute: fp16}\n" + ZERO_2 + "}\n", OWN, [], "enables bf16, but precision.compute = fp16 in the run"),
    (ZERO_2 + ", stage: 3}\n", OWN, [], "zero2_bf16.json: zero_optimization.stage = 2, but deepspeed.stage = 3 in the"),
    ("", OWN, ["deepspeed={config: ds_configs/zero3_bf16.json, offload: cpu}"], "offloads none, but deepspeed.offload"),
    (
        "precision: {compute: bf16}\n",
        OWN,
        ["deepspeed.config=ds_configs/zero2_fp16.json"],
        "zero2_fp16.json: enables fp16, but precision.compute = bf16 in the run config; remove deepspeed.config",
    ),
    ("precision: {compute: bf16, manifest: m.json}\n", OWN, [], "precision.compute = bf16 cannot be combined with"),
]


@pytest.mark.parametrize(("text", "document", "arguments", "words"), REFUSED)
def test_what_disagrees_is_refused_naming_both(write, refusal, text, document, arguments, words):
    path = write(text)
    (path.parent / "mine.json").write_text(json.dumps(document))
    assert words in refusal(lambda given: resolve(path, *given), arguments)


@pytest.mark.parametrize(
    ("document", "arguments", "mine"),
    [
        (OWN, ["deepspeed.stage=1", "deepspeed.offload=none", "precision.compute=bf16"], True),
        (OPEN, ["precision.compute=fp16"], True),
        (OPEN, ["deepspeed.config=null", "precision.compute=fp16"], False),
    ],
)
def test_a_json_of_the_users_own_is_never_replaced_in_silence(write, document, arguments, mine):
    path = write(MINE)
    (path.parent / "mine.json").write_text(json.dumps(document))
    expected = path.parent / "mine.json" if mine else REPOSITORY / "ds_configs/zero2_fp16.json"
    assert resolve(path, *arguments).deepspeed_path.resolve() == expected


def test_the_command_line_says_how_to_shard_whatever_the_file_says(write):
    path = write("deepspeed: {stage: 2, offload: cpu}\n")
    resolved = resolve(path, "deepspeed.config=ds_configs/zero3_bf16.json")
    assert (resolved.zero_stage, resolved.offload) == (3, "none")
