"""The stability envelope: settings that bear less are found, nothing runs twice, and mistakes are one line."""

import json
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from config.load import load_config
from lab.envelope.command import check_data_and_model, main, make_study, model_of_depth, read_arguments, read_rates
from lab.envelope.page import write_results
from lab.envelope.trials import TRIALS, read_trials
from tests.lab.envelope import envelope_cases as cases
from tests.support.refusals import refused

SMALL_MODEL = "{hidden_size: 32, intermediate_size: 48, num_attention_heads: 2, num_key_value_heads: 2}"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The corpus is prepared once."""
    return tmp_path_factory.mktemp("cache")


def arguments(folder, cache, *further: str) -> list[str]:
    """A tiny envelope: one place, two rates, twelve steps; later options win."""
    return [
        *(f"--out={folder}", "--depths=1", "--batches=8", "--precisions=bf16,fp16", "--policies=deepspeed"),
        *("--rates=0.0002,0.01", "--steps=12", "--processes=2", "data.source=text", f"data.path={REPOSITORY}/data"),
        *(f"data.cache_dir={cache}", "data.sequence_length=16", "data.validation_fraction=0.2"),
        f"model.config={SMALL_MODEL}",
        *further,
    ]


def explored(pair, folder, cache, *further: str):
    """Rows of the envelope by label, and what was said about the trials that were run for it."""
    study = make_study(read_arguments(arguments(folder, cache, *further)))
    check_data_and_model(study)
    said = pair.run(cases.explore_study, study=study)[0]
    rows = write_results(study, command=["envelope", "--hf-token=hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345"])
    return {row["label"]: row for row in rows}, said


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / TRIALS).read_text().splitlines()]


@pytest.mark.slow
def test_a_setting_that_bears_less_gets_a_smaller_rate_and_nothing_runs_twice(pair, tmp_path, cache):
    # FP16 starts at a loss scale that overflows in the first steps; at a small rate they are hardly missed.
    planted = "precision.loss_scale.initial=1048576"
    rows, said = explored(pair, tmp_path, cache, planted)
    assert {label: row["largest"] for label, row in rows.items()} == {
        "fp32": 0.01,
        "bf16": 0.01,
        "fp16/deepspeed": 0.0002,
    }
    assert [item["skipped"] > 0 for item in rows["fp16/deepspeed"]["tried"]] == [True, True]
    assert rows["bf16"]["tried"][0]["skipped"] == 0
    failed = rows["fp16/deepspeed"]["tried"][1]
    assert 1 <= failed["step"] <= 12 and "from FP32's" in failed["why"]
    assert len(said) == len(lines(tmp_path)) == 6
    assert all(len(line["losses"]) == 12 and line["validation_loss"] > 0 for line in lines(tmp_path))
    page = (tmp_path / "envelope.md").read_text()
    assert "| fp16/deepspeed | 1 | 8 | 0.0002 | 0.02 |" in page and "hf_AbCd" not in page
    assert (tmp_path / "envelope.png").read_bytes().startswith(b"\x89PNG")

    with (tmp_path / TRIALS).open("a") as file:
        file.write('{"event":"trial","key":"half a li')  # a crash while writing
    again, said = explored(pair, tmp_path, cache, planted)
    assert again == rows and said == []
    further, said = explored(pair, tmp_path, cache, planted, "--rates=0.0002,0.01,0.012", "--precisions=bf16")
    assert len(said) == 2 and all("rate 0.012" in text for text in said)
    assert [item["rate"] for item in further["bf16"]["tried"]] == [0.0002, 0.01, 0.012]

    _, said = explored(pair, tmp_path, cache, planted, "--steps=8", "--precisions=fp32", "--rates=0.01")
    assert len(said) == 1 and len(lines(tmp_path)) == 9  # other conditions share nothing
    assert {len(trial.losses) for trial in read_trials(tmp_path).values()} == {8, 12}
    page = (tmp_path / "envelope.md").read_text()
    assert "1 of 8 steps" in page and "8 more in trials.jsonl" in page


@pytest.mark.slow
def test_the_whole_command(tmp_path, cache, capsys):
    common = ["--precisions=fp32", "--steps=6", "data.sequence_length=16"]
    assert main(arguments(tmp_path, cache, *common, "--rates=0.01,1000,2000")) == 0
    log = (tmp_path / "log.txt").read_text()
    assert "rate 0.01: loss" in log and "rate 1000: failed at step" in log
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"{tmp_path}/envelope.md"
    (row,) = json.loads((tmp_path / "envelope.json").read_text())["rows"]
    assert row["largest"] == row["fp32"] == 0.01
    assert [item["steps"] for item in row["tried"]] == [6, row["tried"][1]["step"], row["tried"][2]["step"]]
    assert "rose from" in row["tried"][1]["why"]
    (tmp_path / "log.txt").unlink()
    assert main(arguments(tmp_path, cache, *common, "--rates=1000,2000")) == 3  # FP32 is stable nowhere
    assert not (tmp_path / "log.txt").exists(), "nothing was missing, so nothing had to be launched"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--precisions=fp8", "'fp8' is not one of fp32, control, bf16, fp16"),
        ("--rates=1e-3:1e-4:3", "--rates 1e-3:1e-4:3: write LOW:HIGH:COUNT"),
        ("run.steps=5", "run.steps=5 is varied or set by the envelope; use --steps"),
        ("--batches=6", "batch.global_size = 6 cannot be cut into micro-batches"),
        ("deepspeed.config=ds_configs/zero0_fp32.json", "ZeRO-0"),
        ("model.config.num_layers=3", "a llama config has no such key"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, cache, refusal, argument, message):
    assert message in refusal(main, arguments(tmp_path, cache, argument))
    assert not (tmp_path / TRIALS).exists()


def test_rates_are_spaced_by_factors():
    assert read_rates("0.001:0.256:9") == [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256]
    assert read_rates("3e-3,1e-3,1e-3") == [0.001, 0.003]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (["model.architecture=llama", "model.config={num_hidden_layers: 4, hidden_size: 64}"], "num_hidden_layers"),
        (["model.architecture=gpt2", "model.config={n_layer: 4, n_embd: 64}"], "n_layer"),
        (["model.architecture=gpt2", "model.config={num_hidden_layers: 4}"], "n_layer"),
    ],
)
def test_depth_goes_under_the_architectures_own_key(model, expected):
    config = load_config(REPOSITORY / "config/recipes/demo.yaml", model, None)
    changed = model_of_depth(config, 7)
    assert changed[expected] == 7
    assert changed.keys() & {"num_hidden_layers", "n_layer"} == {expected}


def test_an_architecture_without_a_depth_is_refused(tmp_path):
    demo = REPOSITORY / "config/recipes/demo.yaml"
    config = load_config(demo, ["model.architecture=gemma3", "model.config={}"], None)
    assert "gemma3 config has no num_hidden_layers" in refused(model_of_depth, config, 2)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 3, "vocab_size": 300}')
    config = load_config(demo, ["model.architecture=null", "model.config={}", f"model.name_or_path={tmp_path}"], None)
    assert model_of_depth(config, 3) == {}
    assert "has 3 layers, and no other depth" in refused(model_of_depth, config, 2)
