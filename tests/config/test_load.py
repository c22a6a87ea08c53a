"""Files of YAML 1.2 and overrides become a checked Config, or one line that says what to change."""

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config import yaml_text
from config.command_line import read_command_line
from config.errors import UserError
from config.launcher import as_launched
from config.load import all_keys, load_config, to_dict, to_yaml
from config.schema import Config, DeepSpeedSection, Fault, LossScaleSection, ModelSection
from config.task import ALGORITHMS, settle_task
from tests.support.refusals import refused

MINIMAL = "model: {architecture: llama}\n"
SCALE = "precision.loss_scale"
COMPUTES = "auto, fp32, bf16, fp16"


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "demo.yaml"
    path.write_text(MINIMAL)
    return path


def error_of(path: Path, *overrides: str) -> str:
    return refused(load_config, path, overrides, None)


def test_a_minimal_file_is_the_schema_s_defaults(minimal: Path) -> None:
    chosen = DeepSpeedSection(config="ds_configs/zero2_bf16.json")
    assert load_config(minimal, [], None) == Config(model=ModelSection(architecture="llama"), deepspeed=chosen)


def test_overrides_are_yaml_and_the_later_one_wins(minimal: Path) -> None:
    config = load_config(
        minimal,
        [
            *("run.steps=7", "run.steps=20", "optimizer.betas=[0.8, 0.9]", "optimizer.learning_rate=3e-4"),
            *("faults=[{kind: inf_gradient, step: 3, rank: 1}]", "precision.loss_scale.initial=1024"),
            *("model.config.hidden_size=64", "model.config.rope_parameters.rope_theta=1e4", "batch={micro_size: 2}"),
        ],
        "ds_configs/zero1_fp16.json",
    )
    assert config.run.steps == 20
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.optimizer.learning_rate == 3e-4
    assert config.faults == (Fault(kind="inf_gradient", step=3, rank=1),)
    assert config.precision.loss_scale == LossScaleSection(initial=1024.0)
    assert isinstance(config.precision.loss_scale.initial, float)
    assert config.model.config == {"hidden_size": 64, "rope_parameters": {"rope_theta": 1e4}}
    assert (config.batch.micro_size, config.batch.global_size) == (2, 8)
    assert config.deepspeed.config == "ds_configs/zero1_fp16.json"


def test_quoted_text_is_read_as_it_is(minimal: Path) -> None:
    given = ["generate.prompt='class '", 'run.hypothesis="1 # 2"', "run.name=a#b", "run.steps=20 # enough"]
    config = load_config(minimal, given, None)
    found = (config.generate.prompt, config.run.hypothesis, config.run.name, config.run.steps)
    assert found == ("class ", "1 # 2", "a#b", 20)


def test_a_free_mapping_is_merged_by_key_and_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("model: {architecture: llama, config: {hidden_size: 8, num_hidden_layers: 2}}")
    merged = load_config(path, ["model.config.hidden_size=64"], None).model.config
    assert merged == {"hidden_size": 64, "num_hidden_layers": 2}
    assert load_config(path, ["model.config={hidden_size: 3}"], None).model.config == {"hidden_size": 3}


def test_json_and_an_empty_section_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"model": {"architecture": "gpt2"}, "run": null, "optimizer": {"learning_rate": 1e-5}}')
    config = load_config(path, [], None)
    assert (config.model.architecture, config.optimizer.learning_rate) == ("gpt2", 1e-5)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.name=paged_adamw_8bit", "optimizer.name = 'paged_adamw_8bit' is not offered: 8-bit states"),
        ("optimizer.name=Adafactor", "optimizer.name = 'Adafactor' is not offered: its factored moments"),
        ("optimizer.name=onebitadam", "optimizer.name = 'onebitadam' is not offered: it sends compressed updates"),
        ("optimizer.name=AdamWScheduleFree", "optimizer.name = 'AdamWScheduleFree' is not offered: it trains one"),
        ("optimizer.name=adam", "optimizer.name = 'adam' is not one of adamw, muon"),
        ("precision.fp8.scaling=delayed", "precision.fp8.scaling = 'delayed' is not offered: a scale from earlier"),
        ("precision.fp8.scaling=rows", "precision.fp8.scaling = 'rows' is not one of row, block32, tensor; did you"),
        ("precision.masters=bf16", "precision.masters = 'bf16' is not offered: small updates are lost to "),
        ("batch.micro_size=true", "batch.micro_size = true is not an integer"),
        ("run.steps=1e4", "run.steps = 10000.0 is not an integer; write 10000"),
        ("run.steps=0", "run.steps = 0 trains nothing; give a number of steps, or run.epochs"),
        ("run.steps=", "run.steps = 0 trains nothing; give a number of steps, or run.epochs"),
        ("run.epochs=0", "run.epochs = 0.0 is out of range; it must be above 0"),
        ("run.seed=", "run.seed = null is empty; give a value or leave the key out"),
        ("deepspeed.stage=4", "deepspeed.stage = 4 is out of range; it must be at least 0 and at most 3"),
        ("optimizer.eps=0", "optimizer.eps = 0.0 is out of range; it must be above 0"),
        ("optimizer.eps=true", "optimizer.eps = true is not a number"),
        ("optimizer.eps=.inf", "optimizer.eps = Infinity is not a finite number"),
        ("optimizer.betas=[1.0, 2]", "optimizer.betas[0] = 1.0 is out of range; it must be at least 0 and below 1"),
        ("optimizer.betas=[0.9]", "optimizer.betas = [0.9] has 1 elements; optimizer.betas takes 2"),
        ("optimizer.betas=0.9", "optimizer.betas = 0.9 is not a list; write it as [...]"),
        ("precision.compute=bf61", f"precision.compute = 'bf61' is not one of {COMPUTES}; did you mean bf16?"),
        ("data.verify=yes", "data.verify = 'yes' is not true or false"),
        ("run.name=20", "run.name = 20 is not text"),
        ("evaluate.batches=all", "evaluate.batches = 'all' is neither a number nor auto nor null"),
        ("evaluate.batches=0", "evaluate.batches = 0 is out of range; it must be at least 1"),
        ("model.config=3", "model.config = 3 is not a mapping of names to values"),
        ("batch=3", "batch = 3 is not a mapping; it has the keys global_size, micro_size"),
        ("run.steps.x=3", 'run.steps = {"x": 3} is not an integer'),
        ("faults=[{kind: inf_gradient}]", "faults[0].step is missing"),
        ("faults=[{kind: inf_gradient, stp: 3}]", "faults[0].stp: no such key; did you mean faults[0].step?"),
        ("faults=[{kind: oops, step: 3}]", "faults[0].kind = 'oops' is not one of inf_gradient, nan_gradient"),
        ("faults=[{kind: nan_gradient, step: 0}]", "faults[0].step = 0 is out of range"),
        ("guard.reactions=[skip, rolback]", "guard.reactions[1] = 'rolback' is not one of skip, cut_lr, correct"),
        ("guard.reactions=skip", "guard.reactions = 'skip' is not a list; write it as [...]"),
        ("guard.min_update_ratio=0", "guard.min_update_ratio = 0.0 is out of range; it must be above 0"),
        ("run.steps", "'run.steps' is not an override; write key.sub=value"),
        ("=3", "'=3' is not an override"),
        ("run..steps=3", "'run..steps=3' is not an override"),
        ("optimizer.betas=[0.9", "optimizer.betas = '[0.9' is not valid YAML"),
        (
            "run.hypothesis=lr 1 # not 2",
            "'run.hypothesis=lr 1 # not 2' is 'lr 1' in YAML; write run.hypothesis='\"lr 1 #",
        ),
        ("generate.prompt=#é", """'generate.prompt=#é' is null in YAML; write generate.prompt='"#é"'"""),
        ("generate.prompt=class ", "'generate.prompt=class ' is 'class' in YAML"),
        ("generate.prompt=a\nb", r"'generate.prompt=a\nb' is 'a b' in YAML; write generate.prompt='" + r'"a\nb"'),
        ("run.name=&x try", "'run.name=&x try' is 'try' in YAML"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(minimal: Path, override: str, expected: str) -> None:
    assert error_of(minimal, override).startswith(f"command line: {expected}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("defects: [{kind: silent_skip}]", "defects: no such key"),
        ("batch: {micro: 3}", "batch.micro: no such key; did you mean batch.micro_size?"),
        ("batch:\n  micro_size: 1\n  micro_size: 2\n", "not valid YAML: line 3: the key micro_size is a duplicate"),
        ("batch:\n  micro_size: [1\nrun: {}\n", "not valid YAML: line 3: "),
        ("batch:\n\tmicro_size: 1\n", "not valid YAML: line 2: "),
        ("- 1\n- 2\n", "holds [1, 2] where sections"),
        ("a: !!python/object:os.system {}\n", "not valid YAML: line 1: "),
    ],
)
def test_a_mistake_in_the_file_names_the_file(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "demo.yaml"
    path.write_text(text)
    assert error_of(path).startswith(f"{path}: {expected}")


def test_a_section_that_is_gone_may_stand_empty_in_a_recorded_config(minimal: Path, tmp_path: Path) -> None:
    recorded = tmp_path / "config.yaml"
    recorded.write_text(minimal.read_text(encoding="utf-8") + "\ndefects: []\n", encoding="utf-8")
    assert load_config(recorded, [], None) == load_config(minimal, [], None)


def test_a_missing_file_names_its_nearest_neighbour(minimal: Path) -> None:
    missing = minimal.with_name("dmeo.yaml")
    assert error_of(missing) == f"{missing}: no such run config; did you mean {minimal}?"
    assert "cannot be read" in error_of(minimal.parent)
    minimal.write_bytes(b"\xff\xfe\x00\x80")
    assert "cannot be read" in error_of(minimal)


def section_strategy(section: type) -> st.SearchStrategy[typing.Any]:
    """Random instances of a schema dataclass, ignoring the rules between keys."""
    hints = typing.get_type_hints(section)
    return st.builds(
        section, **{item.name: field_strategy(hints[item.name], item.metadata) for item in dataclasses.fields(section)}
    )


def field_strategy(hint: typing.Any, limits: typing.Mapping[str, float]) -> st.SearchStrategy[typing.Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return section_strategy(typing.cast(type, hint))
    if origin in (types.UnionType, typing.Union):
        return st.none() | field_strategy(arguments[0], limits)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(field_strategy(arguments[0], limits), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*(field_strategy(item, limits) for item in arguments))
    if origin is dict:
        leaf = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
        return st.dictionaries(TEXT, leaf | st.lists(leaf, max_size=2), max_size=3)
    if hint is float:
        low = max(limits.get("at_least", limits.get("above", 0)), 0)
        high = limits.get("at_most", limits.get("below", 1e9))
        return st.floats(low, high, exclude_min="above" in limits, exclude_max="below" in limits)
    if hint is int:
        return st.integers(int(limits.get("at_least", 0)), int(limits.get("at_most", 10**12)))
    if hint is bool:
        return st.booleans()
    return TEXT


# Words that YAML 1.1, YAML 1.2 or both read as something other than text are what a round trip gets wrong.
AMBIGUOUS = ["1e-5", "1_000", "off", "yes", "null", "~", "", "007", "0x1f", "1:30", "2024-01-01", ".inf", "<<", "="]
PLAIN_TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
TEXT = PLAIN_TEXT | st.sampled_from([*AMBIGUOUS, "a: b", "- x"])


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(config=section_strategy(Config))
def test_what_is_written_reads_back_equal(config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("config.load.rules.check", lambda config, origin, started: None)
    monkeypatch.setattr("config.load.settle", lambda config, path, place: config)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(path, [], None) == config
    assert yaml_text.parse(to_yaml(config)) == to_dict(config)


@pytest.mark.parametrize(
    ("written", "given", "steps", "epochs"),
    [
        ("{}", [], 100, None),
        ("{steps: 7}", ["run.epochs=3"], 0, 3.0),
        ("{epochs: 3}", [], 0, 3.0),
        ("{epochs: 3}", ["run.steps=7"], 7, None),
        ("{steps: 7, epochs: 3}", [], 7, 3.0),  # as a run records them
        ("{steps: 7, epochs: 3}", ["run.epochs=2"], 0, 2.0),
        ("{steps: 7, epochs: 3}", ["run.epochs=null"], 7, None),
        ("{}", ["run.steps=null", "run.epochs=3"], 0, 3.0),
    ],
)
def test_of_steps_and_epochs_the_later_one_counts(tmp_path, written, given, steps, epochs) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{MINIMAL}run: {written}\n")
    # steps that are not known yet break no rule
    further = [] if steps else ["schedule.name=wsd", "schedule.warmup_steps=9", "faults=[{kind: nan_loss, step: 12}]"]
    run = load_config(path, [*given, *further], None).run
    assert (run.steps, run.epochs) == (steps, epochs)


def test_null_turns_off_what_0_turns_off(minimal: Path) -> None:
    off = [
        key for key in all_keys() if key.rpartition(".")[2] in ("every_steps", "keep_every", "spike_sigmas", "top_k")
    ]
    assert len(off) == 6
    config = to_dict(load_config(minimal, [f"{key}=null" for key in off], None))
    assert config == to_dict(load_config(minimal, [f"{key}=0" for key in off], None))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-2.", -2.0),
        ("1_000_000", 1_000_000),
        *((text, text) for text in ("off", "yes", "1:30", "007", "2024-01-01", "e5", "1e")),
        ("", None),
        ("~", None),
        ("True", True),
        ("'1'", "1"),
    ],
)
def test_scalars(text: str, value: Any) -> None:
    found = yaml_text.parse(text)
    assert (found, type(found)) == (value, type(value))


def test_a_repeated_key_is_an_error_and_a_merge_is_not() -> None:
    with pytest.raises(ValueError, match="line 2: the key a is a duplicate .first on line 1."):
        yaml_text.parse("a: 1\na: 2\n")
    assert yaml_text.parse("base: &b {x: 1, y: 2}\nmine: {<<: *b, y: 3}\n")["mine"] == {"x": 1, "y": 3}


@pytest.mark.parametrize("text", ["[1", "a: b: c", "\t- 1", "*nowhere", "{a: 1", '"open', "\x00"])
def test_bad_yaml_is_a_one_line_value_error(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        yaml_text.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        ["run.resume=/gone"],
        ["model.architecture=null", "model.name_or_path=/gone"],
        ["task=distill", "distill.teacher=/gone"],
        ["data.tokenizer=/gone"],
        ["data.source=text", "data.path=/gone/*.txt"],
        ["data.tokenizer=bytes", "data.sources=[{name: a, source: text, path: /gone}, {name: b, source: stdlib}]"],
        ["data.validation=[{name: a, source: text, path: /gone}]"],
        ["task=sft", "data.source=jsonl", f"data.path={__file__}", "data.chat_template=/gone"],
    ],
)
def test_files_of_a_run_that_has_started_may_be_gone(minimal, given):
    with pytest.raises(UserError, match="= '/gone"):
        load_config(minimal, given, None)
    load_config(minimal, given, None, started=True)


def test_a_model_in_the_home_folder_is_named_by_its_whole_path(minimal, tmp_path, monkeypatch):
    """Transformers takes ~/base for a name on the hub."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base").mkdir()
    given = ["task=distill", "model.architecture=null", "model.name_or_path=~/base", "distill.teacher=~/base"]
    config = load_config(minimal, given, None)
    assert config.model.name_or_path == config.distill.teacher == str(tmp_path / "base")
    monkeypatch.setenv("HOME", "/elsewhere")
    with pytest.raises(UserError, match=r"model.name_or_path = '/elsewhere/base' is not a folder"):
        load_config(minimal, given, None)
    with pytest.raises(UserError, match=r"= '~nobody-of-that-name/base' is not a folder"):
        load_config(minimal, [*given, "model.name_or_path=~nobody-of-that-name/base"], None)


@pytest.mark.parametrize("change", [*(f"grpo.algorithm={it}" for it in ALGORITHMS), f"{SCALE}.policy=adaptive"])
def test_what_a_changed_key_decides_is_decided_anew_in_a_run_s_own_config(minimal: Path, change: str) -> None:
    given = [*("task=grpo", "grpo={rewards: [exact_match], loss: token}"), "data={source: hub, path: a/b}"]
    recorded = minimal.with_name("recorded.yaml")

    def resolved(path: Path, *overrides: str) -> Config:
        return read_command_line(["--config", str(path), *overrides], as_launched(1)).config

    recorded.write_text(to_yaml(resolved(minimal, *given)))
    new = resolved(minimal, *given, change)
    assert new.grpo.loss == "token" and resolved(recorded, change) == new
    kept = resolved(recorded, change, "grpo.clip_low=0.2", f"{SCALE}.hysteresis=2")
    assert kept.grpo.clip_low == 0.2 and kept.precision.loss_scale.hysteresis == 2


@pytest.mark.parametrize(
    ("given", "change"),
    [
        ([], "model.name_or_path={}/B"),
        ([], "data.path={}/rows.parquet"),
        (["task=seq2seq"], "data.sequence_length=1024"),
        (["task=grpo", "grpo.rewards=[length]"], "grpo.max_new_tokens=256"),
        (["task=dpo"], "adapter.kind=lora"),
    ],
)
def test_what_followed_from_a_changed_key_follows_again(minimal: Path, given: list[str], change: str) -> None:
    folder = minimal.parent
    for name in ("A", "B"):
        (folder / name).mkdir()
    for name in ("rows.jsonl", "rows.parquet"):
        (folder / name).touch()
    base = [f"model={{architecture: null, name_or_path: {folder}/A}}", "data.tokenizer=model", *given]
    base += [f"data.path={folder}/rows.jsonl", "data.source=auto"]
    recorded, change = folder / "recorded.yaml", change.format(folder)
    recorded.write_text(to_yaml(settle_task(load_config(minimal, base, None))))
    assert settle_task(load_config(recorded, [change], None)) == settle_task(
        load_config(minimal, [*base, change], None)
    )


def test_a_source_that_is_named_beside_a_file_stays_with_a_folder(minimal: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    minimal.write_text(minimal.read_text() + f"data: {{source: jsonl, path: {tmp_path}/rows.jsonl}}\n")
    assert load_config(minimal, [f"data.path={tmp_path}"], None).data.source == "jsonl"
