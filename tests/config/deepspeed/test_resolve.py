"""The run config and a DeepSpeed JSON become one document without "auto", or one line that says where they disagree."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from config.cli import REPOSITORY
from config.deepspeed.document import offload, read_document, zero_stage
from config.deepspeed.keys import REFUSED, SECTIONS
from config.deepspeed.resolve import resolve_json
from config.errors import UserError
from config.load import load_config
from config.schema import Config
from tests.support.refusals import refused

FOLDER = REPOSITORY / "ds_configs"
FILES = sorted(FOLDER.glob("*.json"))
HERE = Path("my.json")
DISAGREES = "disagrees with the run config"
NO_SUCH_KEY = "DeepSpeed 0.19.8 has no such key"
MASTERS = "bf16_master_weights_and_grads"
CPU = {"device": "cpu"}
PARAM, NEEDS = "zero_optimization.offload_param", "needs zero_optimization.stage"


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """make("key=value", ...) is a Config."""
    path = tmp_path / "demo.yaml"
    path.write_text("model: {architecture: llama}\nbatch: {global_size: 16, micro_size: 2}\n")
    return lambda *overrides: load_config(path, overrides, None)


def zero(stage: Any = 2, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def document(**changes: Any) -> dict[str, Any]:
    return zero() | {"bf16": {"enabled": True}} | changes


def error_of(config: Config, given: dict[str, Any], world_size: int = 2) -> str:
    message = refused(resolve_json, config, HERE, given, world_size=world_size)
    assert message.startswith("my.json: ")
    return message.removeprefix("my.json: ")


def values(tree: Any) -> list[Any]:
    return [leaf for item in tree.values() for leaf in values(item)] if isinstance(tree, dict) else [tree]


def test_to_deepspeed_a_slice_of_a_sequence_is_a_sequence(make: Any) -> None:
    """Its check: train_batch_size = micro-batch x accumulation x processes."""
    resolved = resolve_json(make("parallel.sequence=2"), HERE, document(), world_size=4)
    assert (resolved["train_batch_size"], resolved["gradient_accumulation_steps"]) == (32, 4)
    said = error_of(make("parallel.sequence=2"), document(train_batch_size=16), world_size=4)
    assert f"{DISAGREES}, where batch.global_size x parallel.sequence gives 32" in said
    assert "set parallel.sequence in the run config" in error_of(make(), document(sequence_parallel_size=2))


def test_ranks_that_share_matrices_are_told_to_deepspeed(make: Any) -> None:
    resolved = resolve_json(make("parallel.tensor=2"), HERE, document(), world_size=4)
    assert resolved["tensor_parallel"] == {"autotp_size": 2, "vocab_parallel_lm_head": False}
    assert (resolved["train_batch_size"], resolved["gradient_accumulation_steps"]) == (16, 4)
    assert "set parallel.tensor in the run config" in error_of(make(), document(tensor_parallel={"autotp_size": 2}))


def test_ranks_share_experts_at_the_stages_that_are_right(make: Any) -> None:
    resolved = resolve_json(make("parallel.expert=2"), HERE, document(zero_optimization={"stage": 2}), world_size=4)
    assert (resolved["train_batch_size"], resolved["gradient_accumulation_steps"]) == (16, 2), "they have data"
    given = document(zero_optimization={"stage": 0}, bf16={"enabled": False})
    said = error_of(make("parallel.expert=2"), given, world_size=4)
    assert said.startswith("ZeRO stage 0 with parallel.expert = 2: ")
    assert "by the mean of the ranks' gradient norms" in said
    assert "(measured: an update of 0.062760, not 0.062279)" in said
    assert said.endswith("set deepspeed.stage=1, 2 or 3, or parallel.expert=1")
    kept = resolve_json(make("parallel.expert=2"), HERE, document(**zero(offload_optimizer=CPU)), world_size=4)
    assert offload(kept) == "optimizer"


def test_there_is_a_file_for_every_stage_and_dtype() -> None:
    names = {path.stem for path in FILES}
    dtypes = ("fp32", "bf16", "fp16")
    plain = {f"zero{stage}_{dtype}" for stage, dtype in itertools.product(range(4), dtypes)}
    assert names == plain | {f"zero{stage}_{dtype}_offload" for stage, dtype in itertools.product((1, 2, 3), dtypes)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_file_resolves_or_is_refused_with_the_reason(path: Path, make: Any) -> None:
    stage, dtype, *variant = path.stem.removeprefix("zero").split("_")
    given, config = read_document(path), make("batch.micro_size=8")
    before = copy.deepcopy(given)
    if path.stem in ("zero0_fp16", "zero0_bf16"):
        message = f"{dtype.upper()} with ZeRO-0 is refused: .*measured: .* use ZeRO-1: ds_configs/zero1_{dtype}.json"
        with pytest.raises(UserError, match=message):
            resolve_json(config, path, given, world_size=2)
        return
    resolved = resolve_json(config, path, given, world_size=2)
    assert given == before
    assert "auto" not in values(resolved)
    assert zero_stage(resolved) == int(stage)
    assert offload(resolved) == ("none" if not variant else "optimizer+param" if stage == "3" else "optimizer")
    assert resolved["train_batch_size"] == 16
    assert resolved["gradient_accumulation_steps"] == 1
    assert resolved["communication_data_type"] == "fp32"
    assert resolved["data_types"]["grad_accum_dtype"] == ("fp32" if stage != "0" else dtype)
    assert resolved["zero_optimization"].get("overlap_comm", False) is False
    assert [name for name in ("bf16", "fp16") if name in resolved] == ([dtype] if dtype != "fp32" else [])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_file_repeats_nothing_of_the_run_config(path: Path) -> None:
    given = json.loads(path.read_text())
    owned = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    assert [given[key] for key in owned] == ["auto"] * 4
    assert not {"optimizer", "scheduler"} & given.keys()


def test_everything_the_run_config_owns_is_filled_in(make: Any) -> None:
    config = make("optimizer.gradient_clipping=0.5", "precision.reduce=compute")
    resolved = resolve_json(config, HERE, document(), world_size=2)
    assert resolved == {
        "zero_optimization": {"stage": 2, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True, "check_grad_overflow": True},
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "communication_data_type": "bf16",
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},
    }


def fp16(**given: Any) -> dict[str, Any]:
    return document(fp16={"enabled": True, **given}, bf16={"enabled": False})


DYNAMIC = {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "min_loss_scale": 1}
DYNAMIC |= {"consecutive_hysteresis": False}
SCALES = [
    ("{initial: 4096, window: 50, hysteresis: 1, minimum: 2}", (12, 1), {"loss_scale_window": 50, "min_loss_scale": 2}),
    ("{policy: deepspeed}", (16, 2), {}),
    ("{policy: adaptive}", (12, 1), {}),
]


@pytest.mark.parametrize("given", [fp16(), read_document(FOLDER / "zero2_fp16.json")], ids=["own", "shipped"])
def test_the_json_shows_the_loss_scale(make: Any, given: dict[str, Any]) -> None:
    for settings, (power, hysteresis), more in SCALES:
        config = make(f"precision.loss_scale={settings}")
        found = resolve_json(config, HERE, given, world_size=2)["fp16"]
        assert found == {**DYNAMIC, "initial_scale_power": power, "hysteresis": hysteresis, **more}
        section = config.precision.loss_scale.resolved()
        assert (section.initial, section.hysteresis) == (2.0**power, hysteresis)
        assert section.resolved() == section
    static = make("precision.loss_scale={policy: static, initial: 1000}")
    resolved = resolve_json(static, HERE, given, world_size=2)
    assert resolved["fp16"] == {"enabled": True, "loss_scale": 1000.0} and "bf16" not in resolved
    assert "auto" not in values(resolved)


def test_defaults_of_deepspeed_that_would_not_do_are_replaced_and_a_choice_is_kept(make: Any) -> None:
    offloaded = resolve_json(make(), HERE, document(**zero(3, offload_optimizer=CPU)), world_size=2)
    assert offloaded["zero_optimization"]["overlap_comm"] is False
    assert offloaded["zero_force_ds_cpu_optimizer"] is False
    chosen = document(**zero(overlap_comm=True), zero_allow_untested_optimizer=False)
    resolved = resolve_json(make(), HERE, chosen, world_size=2)
    assert resolved["zero_optimization"]["overlap_comm"] is True
    assert resolved["zero_allow_untested_optimizer"] is False
    assert "zero_force_ds_cpu_optimizer" not in resolved


def test_equal_numbers_in_both_places_are_fine(make: Any) -> None:
    given = document(train_batch_size=16, gradient_clipping=1, gradient_accumulation_steps=4, steps_per_print=5)
    assert resolve_json(make(), HERE, given, world_size=2)["steps_per_print"] == 5


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train_batch_size": 32}, f"train_batch_size = 32 {DISAGREES}, where batch.global_size gives 16"),
        ({"train_micro_batch_size_per_gpu": 1}, "train_micro_batch_size_per_gpu = 1 disagrees"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps = 1 disagrees"),
        ({"gradient_clipping": 0.5}, f"gradient_clipping = 0.5 {DISAGREES}, where optimizer.gradient_cl"),
        ({"communication_data_type": "bf16"}, "communication_data_type = 'bf16' disagrees"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype = 'bf16' disagrees"),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, "bf16.check_grad_overflow = false disagrees"),
        ({"fp16": {"enabled": True, "initial_scale_power": 12}, "bf16": {}}, "fp16.initial_scale_power = 12 disagrees"),
        (fp16(consecutive_hysteresis=True), "fp16.consecutive_hysteresis = true disagrees"),
        (zero(round_robin_gradients=True), "zero_optimization.round_robin_gradients = true is refused at ZeRO-2: Deep"),
        ({"fp16": {"enabled": True}}, "bf16.enabled and fp16.enabled are both true"),
        ({"bf16": {"enabled": "auto"}}, 'bf16.enabled = "auto" and precision.compute = auto leave the dtype open'),
        ({"zero_optimisation": {"stage": 2}}, f"zero_optimisation: {NO_SUCH_KEY}; did you mean zero_opt"),
        ({"zero_optimization": {"stgae": 2}}, f"zero_optimization.stgae: {NO_SUCH_KEY}; did you mean zer"),
        ({"overlap_comm": False}, f"overlap_comm: {NO_SUCH_KEY}; did you mean zero_optimization.overlap"),
        (zero(4), "zero_optimization.stage = 4 is not one of 0, 1, 2, 3"),
        (zero("auto"), "zero_optimization.stage = 'auto' is not one of"),
        (zero(True), "zero_optimization.stage = true is not a whole number"),
        ({"zero_optimization": True}, "zero_optimization = true is not an object"),
        (zero(reduce_bucket_size="auto"), 'zero_optimization.reduce_bucket_size = "auto"'),
        (zero(reduce_bucket_size=1.5), "zero_optimization.reduce_bucket_size = 1.5 is"),
        (zero(overlap_comm=1), "zero_optimization.overlap_comm = 1 is not true or false"),
        ({"communication_data_type": "fp8"}, "communication_data_type = 'fp8' is not one of fp32, bf16, fp16"),
        ({"comms_logger": {"prof_ops": "all_reduce"}}, "comms_logger.prof_ops = 'all_reduce' is not a list"),
        ({"log_level": 3}, "log_level = 3 is not text"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping = NaN is not a number of 0 or more"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer is refused: Mantissa owns the optimizer"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast is refused: with float16"),
        ({"amp": {"enabled": True}}, f"amp: {NO_SUCH_KEY}; the top level has"),
        ({"bf16": {"enabled": True, MASTERS: True}}, f"bf16.{MASTERS} is refu"),
        (zero(offload_param=CPU), f"{PARAM}.device = 'cpu' {NEEDS} 3 or more, not 2"),
        (zero(0, offload_optimizer=CPU), f"zero_optimization.offload_optimizer.device = 'cpu' {NEEDS} 1 or more"),
        (zero(3, offload_param={"device": "nvme"}), f"{PARAM}.nvme_path is missing"),
        (zero(3, offload_param={"device": "disk"}), f"{PARAM}.device = 'disk' is not one of none, cpu, nvme"),
    ],
)
def test_a_mistake_is_one_line(make: Any, changes: dict[str, Any], expected: str) -> None:
    assert error_of(make(), document(**changes)).startswith(expected)


HPZ = "zero_optimization.zero_hpz_partition_size"
SPLIT, KEY = "precision.masters=split", "precision.masters = split in the run config"
ALONE = "zero_optimization.overlap_comm = true is not verified with"


@pytest.mark.parametrize(
    ("setting", "changes", "expected"),
    [
        *(
            ("run.seed=0", zero(3, zero_hpz_partition_size=n), f"{HPZ} = {n} does not divide 4 processes; set")
            for n in (0, 3)
        ),
        *(("run.seed=0", zero(3, zero_hpz_partition_size=n), "") for n in (1, 2, 4, 8)),
        (SPLIT, {"bf16": {}}, f"computes in fp32, but {KEY} holds an FP32 master as its 16-bit"),
        (SPLIT, {"bf16": {}, "fp16": {"enabled": True}}, f"computes in fp16, but {KEY} holds an FP32 master"),
        (SPLIT, zero(offload_optimizer=CPU), f"keeps optimizer in host memory, but {KEY} holds masters"),
        (SPLIT, zero(0), "BF16 with ZeRO-0 is refused"),
        *((SPLIT, zero(stage), "") for stage in (1, 2, 3)),
        ("guard.update_checks=9", zero(offload_optimizer=CPU), "offloads the optimizer, but guard.update_checks = 9"),
        ("guard.update_checks=9", zero(3, offload_param=CPU), ""),
        ("parallel.tensor=2", zero(offload_optimizer=CPU), "offloads optimizer, which is not verified with parallel"),
        ("parallel.tensor=2", zero(overlap_comm=True), f"{ALONE} parallel.tensor = 2; remove one of them"),
        ("parallel.expert=2", zero(overlap_comm=True), f"{ALONE} parallel.expert = 2; remove one of them"),
    ],
)
def test_the_json_fits_what_shares_the_work(make: Any, setting: str, changes: dict[str, Any], expected: str) -> None:
    if expected:
        assert error_of(make(setting), document(**changes), world_size=4).startswith(expected)
    else:
        resolve_json(make(setting), HERE, document(**changes), world_size=4)


def test_the_dtype_of_both_places_must_agree(make: Any) -> None:
    message = error_of(make("precision.compute=fp16"), document())
    assert message == (
        "enables bf16, but precision.compute = fp16 in the run config; remove deepspeed.config, or set it to a JSON "
        "for fp16 such as ds_configs/zero2_fp16.json, or set precision.compute to auto"
    )
    assert error_of(make("precision.compute=bf16"), document(bf16={})).startswith("enables neither bf16 nor fp16")
    both_open = document(bf16={"enabled": "auto"}, fp16={"enabled": "auto", "loss_scale": "auto"})
    assert "fp16" in resolve_json(make("precision.compute=fp16"), HERE, both_open, world_size=2)
    assert not {"fp16", "bf16"} & resolve_json(make("precision.compute=fp32"), HERE, both_open, world_size=2).keys()


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_every_refused_key_is_refused_where_it_stands(make: Any, key: str) -> None:
    *parents, name = key.split(".")
    given = document()
    section = given
    for parent in parents:
        section = section.setdefault(parent, {})
    section[name] = True
    assert error_of(make(), given) == f"{key} is refused: {REFUSED[key]}"


def test_the_sections_of_the_table_are_described_and_no_key_is_both_taken_and_refused() -> None:
    taken = {(f"{name}.{key}" if name else key): kind for name, keys in SECTIONS.items() for key, kind in keys.items()}
    assert not taken.keys() & REFUSED.keys()
    assert {key for key, kind in taken.items() if kind == "section"} == SECTIONS.keys() - {""}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{,}", "not valid JSON: line 1, column 2"),
        ("[1]", "holds [1] where a JSON object is expected"),
        ('{"a": {"b": 1, "b": 2}}', "b is given twice in one object"),
        ("\xff", "not valid JSON"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="utf-8")
    assert refused(read_document, path).startswith(f"{path}: {expected}")


def test_resolving_a_resolved_document_changes_nothing(make: Any) -> None:
    config = make()
    once = resolve_json(config, HERE, document(), world_size=2)
    assert resolve_json(config, HERE, once, world_size=2) == once
    assert "disagrees" in error_of(make("batch.global_size=32"), once)
