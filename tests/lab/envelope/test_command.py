"""The stability envelope: its rules on known oracles, nothing runs twice; its page; mistakes are one line."""

import json
import math
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from config.cli import REPOSITORY
from config.load import load_config
from config.schema import ParitySection
from lab.envelope.command import check_data_and_model, main, make_study, model_of_depth, read_arguments, read_rates
from lab.envelope.page import draw_envelope, envelope_page, write_results
from lab.envelope.search import (
    PATIENCE,
    Cell,
    DivergenceWatch,
    Setting,
    Trial,
    Tried,
    climb,
    explore,
    parity_failure,
)
from lab.envelope.trials import TRIALS, Missing, device_name, explore_finished, read_trials, trial_key
from tests.lab.envelope import envelope_cases as cases
from tests.support.refusals import refused
from training.tasks.task import prepare

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


def test_trials_of_other_code_are_run_again(tmp_path, cache):
    study = make_study(read_arguments(arguments(tmp_path, cache, "--precisions=fp32", "--rates=0.01")))
    check_data_and_model(study)
    fingerprint = prepare(study.first().config, progress=False).fingerprint
    key = trial_key(study.first(), fingerprint, device_name(), study.code)
    line = {"event": "trial", "key": key, **asdict(trial([4.0] * 12))}
    (tmp_path / TRIALS).write_text(json.dumps(line) + "\n")
    assert explore_finished(study)[1] == {key}
    with pytest.raises(Missing):
        explore_finished(replace(study, code="other"))


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


RATES = [0.001, 0.002, 0.004, 0.008]


def row(label: str, depth: int, batch: int, largest: float | None, *, lucky: tuple[float, ...] = ()) -> dict[str, Any]:
    tried = []
    for rate in RATES:
        passed = (largest is not None and rate <= largest) or rate in lucky
        why = None if passed else "the loss is nan"
        step = None if passed else 7
        tried.append({"rate": rate, "step": step, "why": why, "skipped": 2, "steps": 40 if passed else 7})
    return {
        "depth": depth, "batch": batch, "label": label, "largest": largest, "fp32": 0.008, "control": 0.004,
        "lucky": list(lucky), "tried": tried,
    }  # fmt: skip


ROWS = [
    *(row("fp32", depth, batch, 0.008) for depth in (2, 4) for batch in (8, 16)),
    row("fp16/adaptive", 2, 8, 0.001),
    row("fp16/adaptive", 2, 16, 0.004),
    row("fp16/adaptive", 4, 8, None, lucky=(0.004,)),
    row("fp16/adaptive", 4, 16, 0.008),
]


@pytest.mark.parametrize("rates", [[0.001], RATES])
def test_one_cell_and_one_rate_can_be_drawn(tmp_path: Path, rates: list[float]) -> None:
    png = draw_envelope([row("fp32", 2, 8, 0.001)], rates, tmp_path / "envelope.png", title="Envelope")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_page_says_rates_skips_divergence_steps_and_conditions() -> None:
    page = envelope_page(ROWS, RATES, {"device": "0", "command": "a | b"}, "run: {seed: 0}", picture="x.png")
    lines = page.splitlines()
    assert "| fp16/adaptive | 2 | 16 | 0.004 | 0.5 | 1 | 2 of 40 | 0.008 fails at step 7 |" in lines
    assert "| fp16/adaptive | 4 | 8 | none |  |  |  | 0.001 fails at step 7 |" in lines
    assert "| fp32 | 2 | 8 | 0.008 | 1 | 2 | 2 of 40 | all tried passed |" in lines
    assert "| fp16/adaptive | 4 | 16 | 0.008 | 1 | 2 | 2 of 40 | FP32 fails next |" in lines
    assert "| fp16/adaptive | 2 | 16 | 0.008 | 7 | the loss is nan | 2 of 7 |" in lines
    assert "- fp16/adaptive, 4 layers, batch 8: 0.004" in lines
    assert "run: {seed: 0}" in lines and "| device | 0 |" in lines and "| command | a \\| b |" in lines
    assert "0.001, 0.002, 0.004, 0.008" in page and "(x.png)" in page


def test_the_verdict_compares_with_the_control_where_there_is_one() -> None:
    page = envelope_page(ROWS, RATES, {}, "{}", picture="x.png")
    assert (
        "- **fp16/adaptive** takes 0.25 of the control's largest learning rate at its worst (0.125 of FP32's), 0.001 "
        "with 2 layers and batch 8; at none in 1 of 4 places"
    ) in page
    alone = envelope_page([{**item, "control": None} for item in ROWS[4:6]], RATES, {}, "{}", picture="x.png")
    assert "takes 0.125 of FP32's largest learning rate at its worst, 0.001 with 2 layers" in alone


BOUNDS = ParitySection(loss_gap=0.02, validation_delta=0.005)
RATES_OF_SEARCH = [0.001 * 2**power for power in range(9)]


def watched(losses, *, most_skips=20, norms=None, routine=False, applied=None):
    """(step, reason) of the first failure that the watch sees; None without one."""
    watch = DivergenceWatch(window=5, most_skips=most_skips)
    for index, loss in enumerate(losses):
        norm = norms[index] if norms else 1.0
        here = applied[index] if applied else True
        why = watch.failure(loss, grad_norm=norm, routine=routine, applied=here)
        if why:
            return index + 1, why
    return None


def learning(steps=60, noise=0.03, seed=0):
    """A noisy loss that falls from 5.5 to about 3."""
    generator = random.Random(seed)
    return [(3 + 2.5 * math.exp(-step / 10)) * (1 + generator.gauss(0, noise)) for step in range(steps)]


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_learns_does_not_fail(seed):
    assert watched(learning(seed=seed)) is None


def test_one_wild_step_is_no_divergence_and_a_rise_is():
    losses = learning(noise=0)
    losses[20] *= 3
    assert watched(losses) is None
    risen = losses[:30] + [losses[29] * 1.2] * 10
    step, why = watched(risen)
    assert step in (33, 34) and "rose from 3" in why
    assert watched([5.5, 6.2, 6.2, 6.2])[0] == 3  # above the first loss


def test_what_is_not_finite_fails_unless_the_loss_scale_answers_it():
    assert watched([5.0, math.nan]) == (2, "the loss is nan")
    assert watched([5.0, math.inf], routine=True) == (2, "the loss is inf")
    norms, applied = [1.0, math.inf, 1.0], [True, False, True]
    assert watched([5.0, 5.0, 5.0], norms=norms, applied=applied) == (2, "the gradient is not finite")
    assert watched([5.0, 5.0, 5.0], norms=norms, applied=applied, routine=True) is None


def test_too_many_skips_in_a_row_fail():
    applied = [False, False, True, False, False, False]
    assert watched([5.0] * 6, applied=applied, most_skips=3) == (6, "3 steps in a row were skipped")
    assert watched([5.0] * 6, applied=applied, most_skips=4) is None


def trial(losses, validation=3.0, **further):
    return Trial(tuple(losses), validation, skipped=0, **further)


def test_parity_is_the_running_median_everywhere_and_the_validation_loss_at_the_end():
    curve = learning()
    reference = trial(curve)
    assert parity_failure(trial(curve), reference, BOUNDS) is None
    assert parity_failure(trial([loss * 1.019 for loss in curve]), reference, BOUNDS) is None
    departed = parity_failure(trial(curve[:30] + [loss * 1.03 for loss in curve[30:]]), reference, BOUNDS)
    assert departed is not None and 29 <= departed[0] <= 33
    better = parity_failure(trial([loss * 0.97 for loss in curve]), reference, BOUNDS)
    assert better is not None and better[0] == 1, "better than FP32 is not the same as FP32"
    smooth = learning(noise=0)
    assert parity_failure(trial([*smooth[:30], 9.0, *smooth[31:]]), trial(smooth), BOUNDS) is None, "one wild step"
    assert parity_failure(trial(curve, validation=3.014), reference, BOUNDS) is None
    late = parity_failure(trial(curve, validation=3.016), reference, BOUNDS)
    assert late == (60, "the validation loss is 0.53% from FP32's")
    assert parity_failure(trial(curve, validation=None), reference, BOUNDS) is None
    failed = trial(curve[:7], validation=None, failed_step=7, why="the loss is nan")
    assert parity_failure(failed, reference, BOUNDS) == (7, "the loss is nan")


def climbed(passes):
    """A cell whose trials, one after the other, pass or do not; the rates that were asked for."""
    asked = []

    def attempt(rate):
        asked.append(rate)
        step, why = (None, None) if passes[len(asked) - 1] else (1, "bad")
        return Tried(rate, step, why, skipped=0, steps=5)

    return Cell(Setting(2, 8, "bf16"), climb(RATES_OF_SEARCH, attempt)), asked


@pytest.mark.parametrize("bearable", range(len(RATES_OF_SEARCH) + 1))
def test_climbing_finds_the_largest_rate_and_stops_after_two_failures(bearable):
    cell, asked = climbed([True] * bearable + [False] * len(RATES_OF_SEARCH))
    assert cell.largest == (RATES_OF_SEARCH[bearable - 1] if bearable else None)
    assert asked == RATES_OF_SEARCH[: bearable + PATIENCE]
    assert cell.lucky == []


def test_a_pass_above_a_failure_is_luck():
    cell, _ = climbed([True, False, True, False, False, True])
    assert cell.largest == RATES_OF_SEARCH[0] and cell.lucky == [RATES_OF_SEARCH[2]]
    assert [item.rate for item in cell.tried] == RATES_OF_SEARCH[:5]


class Oracle:
    """Trials that are stable up to a rate of their own by setting, within parity up to another."""

    def __init__(self, stable, agrees):
        self.stable, self.agrees = stable, agrees
        self.asked = []

    def __call__(self, setting, rate):
        self.asked.append((setting, rate))
        if rate > self.stable.get(setting, 1.0):
            return Trial((5.0, 9.0), None, 0, failed_step=2, why="it rose")
        return trial([4.0] * 10, validation=3.0 if rate <= self.agrees.get(setting, 1.0) else 3.3)


def test_every_setting_is_compared_with_fp32_of_its_own_place():
    sound, weak, shaky = Setting(2, 8, "bf16"), Setting(4, 8, "bf16"), Setting(4, 8, "fp16", "adaptive")
    small, large = Setting(2, 8, "fp32"), Setting(4, 8, "fp32")
    oracle = Oracle(stable={small: 0.064, large: 0.016, shaky: 0.004}, agrees={weak: 0.008})
    cells = {cell.setting: cell for cell in explore([sound, weak, shaky], RATES_OF_SEARCH, BOUNDS, oracle)}
    found = {setting: cell.largest for setting, cell in cells.items()}
    assert found == {small: 0.064, sound: 0.064, large: 0.016, weak: 0.008, shaky: 0.004}
    assert max(rate for setting, rate in oracle.asked if setting == weak) == 0.016, "no further than FP32 holds"
    assert (cells[shaky].tried[-1].step, cells[shaky].tried[-1].why) == (2, "it rose")


def test_where_fp32_holds_nowhere_nothing_else_is_tried():
    place = Setting(2, 8, "fp32")
    oracle = Oracle(stable={place: 0.0}, agrees={})
    cells = list(explore([Setting(2, 8, "bf16")], RATES_OF_SEARCH, BOUNDS, oracle))
    assert [cell.largest for cell in cells] == [None, None]
    assert oracle.asked == [(place, RATES_OF_SEARCH[0]), (place, RATES_OF_SEARCH[1])]
