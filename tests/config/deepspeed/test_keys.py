"""The static key table is what the installed DeepSpeed takes, and its own models accept every resolved JSON."""

import ast
import inspect
import types
import typing
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from config.cli import REPOSITORY
from config.deepspeed.document import read_document
from config.deepspeed.keys import REFUSED, SECTIONS
from config.deepspeed.resolve import resolve_json
from config.load import load_config

FOLDER = REPOSITORY / "ds_configs"


@pytest.fixture(scope="module")
def runtime() -> types.ModuleType:
    """deepspeed.runtime.config, imported once: it takes seconds."""
    return pytest.importorskip("deepspeed.runtime.config")


def models() -> dict[str, Any]:
    """Section to the pydantic model that DeepSpeed reads it with."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "comms_logger": CommsLoggerConfig,
        "tensorboard": TensorBoardConfig,
        "csv_monitor": CSVConfig,
        "comet": CometConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
    }


def kind_of(annotation: Any) -> str:
    """A pydantic annotation in the table's words; `?` for one the table does not describe."""
    arguments = [item for item in typing.get_args(annotation) if item is not type(None)]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return kind_of(arguments[0])
    if typing.get_origin(annotation) is list or annotation is list:
        return "list"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        members = [item.value for item in annotation]
        return "int" if all(isinstance(item, int) for item in members) else "|".join(members)
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return "section"
    return {bool: "bool", int: "int", float: "float", str: "str", Path: "str"}.get(annotation, "?")


def test_the_version_is_the_one_the_table_was_made_for() -> None:
    assert version("deepspeed") == "0.19.8"


def test_sections_with_a_model_have_its_keys_and_kinds(runtime: types.ModuleType) -> None:
    for section, model in models().items():
        real = {item.alias or name: kind_of(item.annotation) for name, item in model.model_fields.items()}
        refused = {key.rpartition(".")[2] for key in REFUSED if key.rpartition(".")[0] == section}
        assert SECTIONS[section].items() <= real.items(), section
        assert real.keys() == SECTIONS[section].keys() | (refused & real.keys()), section


def test_the_top_level_is_what_deepspeed_reads(runtime: types.ModuleType) -> None:
    """Every key that DeepSpeedConfig looks up is in the table, and every key in the table is looked up."""
    looked_up = keys_read_by(runtime)
    described = SECTIONS[""].keys() | {key for key in REFUSED if "." not in key}
    # These are read for an optimizer, scheduler or autocast section, which the table refuses as a whole.
    removed = set(runtime._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert not looked_up - described - removed
    assert not described & removed
    read_elsewhere = {"bfloat16", "sequence_parallel_size", "wandb", "tensorboard", "csv_monitor", "comet"}
    read_elsewhere |= {"bf16", "fp16", "activation_checkpointing", "aio", "comms_logger", "flops_profiler", "timers"}
    read_elsewhere |= {"zero_optimization", "autotuning", "tensor_parallel", "data_efficiency", "datastates_ckpt"}
    assert described - looked_up <= read_elsewhere
    root = Path(inspect.getfile(runtime)).parents[1]
    sources = "".join(path.read_text(encoding="utf-8") for path in root.rglob("*.py"))
    assert [key for key in read_elsewhere if f'"{key}"' not in sources and f"'{key}'" not in sources] == []


def keys_read_by(module: types.ModuleType) -> set[str]:
    """K of every `get_scalar_param(param_dict, K, ...)`, `param_dict.get(K)`, `param_dict[K]`, `K in param_dict`."""
    found: set[str] = set()

    def add(node: ast.AST) -> None:
        if isinstance(node, ast.Constant):
            found.add(node.value)
        if isinstance(node, ast.Name) and isinstance(getattr(module, node.id, None), str):
            found.add(getattr(module, node.id))

    def is_top(node: ast.AST) -> bool:
        names = {"param_dict", "self._param_dict"}
        return ast.unparse(node).removesuffix(".keys()") in names

    for node in ast.walk(ast.parse(inspect.getsource(module))):
        match node:
            case ast.Call(func=ast.Name(id="get_scalar_param"), args=[top, key, *_]) if is_top(top):
                add(key)
            case ast.Call(func=ast.Attribute(value=top, attr="get"), args=[key, *_]) if is_top(top):
                add(key)
            case ast.Subscript(value=top, slice=key) if is_top(top):
                add(key)
            case ast.Compare(left=key, ops=[ast.In()], comparators=[top]) if is_top(top):
                add(key)
    # A loop variable and the defaults of get_communication_data_type are not spelled at the call.
    return found | {"communication_data_type", "seq_parallel_communication_data_type"}


def test_sections_without_a_model_have_the_keys_that_deepspeed_reads(runtime: types.ModuleType) -> None:
    from deepspeed.profiling import constants as profiling
    from deepspeed.runtime.model_checkpointing.config import CHECKPOINT_DEFAULT_DICT
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    prefix = "FLOPS_PROFILER_"
    names = {value for name, value in vars(profiling).items() if name.startswith(prefix) and "DEFAULT" not in name}
    read = {"flops_profiler": {item for item in names if isinstance(item, str) and "\n" not in item}}
    for section, keys in (read | {"aio": set(AIO_DEFAULT_DICT), "checkpoint": set(CHECKPOINT_DEFAULT_DICT)}).items():
        refused = {key.rpartition(".")[2] for key in REFUSED if key.rpartition(".")[0] == section}
        assert SECTIONS[section].keys() == keys - refused, section


TRAINABLE = sorted(path for path in FOLDER.glob("*.json") if path.stem not in ("zero0_fp16", "zero0_bf16"))


@pytest.mark.parametrize("path", TRAINABLE, ids=lambda path: path.stem)
def test_deepspeed_reads_every_resolved_file_as_meant(path: Path, runtime: types.ModuleType, tmp_path: Path) -> None:
    run_config = tmp_path / "run.yaml"
    run_config.write_text("model: {architecture: llama}\nbatch: {global_size: 6, micro_size: 6}\n")
    config = load_config(run_config, ["optimizer.gradient_clipping=0.5", "precision.loss_scale.initial=1024"], None)
    # Outside a process group DeepSpeed takes the world for one process.
    read = runtime.DeepSpeedConfig(resolve_json(config, path, read_document(path), world_size=1))
    stage, dtype, *variant = path.stem.removeprefix("zero").split("_")
    assert (read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (6, 6, 1)
    assert read.gradient_clipping == 0.5
    assert read.zero_optimization_stage == int(stage)
    assert (read.bfloat16_config.enabled, read.float16_config.enabled) == (dtype == "bf16", dtype == "fp16")
    assert bool(read.zero_config.offload_optimizer) is bool(variant)
    assert bool(read.zero_config.offload_param) is (bool(variant) and stage == "3")
    # At stage 0 there is nothing to overlap, and DeepSpeed's default is off.
    assert read.zero_config.overlap_comm is False
    assert read.grad_accum_dtype == ("fp32" if stage != "0" else dtype)
    if dtype == "fp16":
        assert read.float16_config.dynamic_loss_scale_args()["init_scale"] == 1024
        assert read.float16_config.loss_scale == 0
