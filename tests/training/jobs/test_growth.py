"""Mantissa's own work, memory and files do not grow with a model's parameters or the length of a run.

Counted in lines of Python, tensor operators and bytes; the times are in docs/performance.md.
"""

import json
import re
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from config.cli import REPOSITORY
from config.errors import UserError
from config.schema import GuardSection, OptimizerSection
from lab.benchmark.overhead import ADDED, llama_shape, read_options
from lab.benchmark.spec import flops_per_token
from modeling.build import count_parameters
from modeling.parameter_groups import parameter_groups
from precision.guard import Guard, Judgement, Verdict
from precision.manifest import Manifest, Rule
from precision.regions import Regions
from precision.step_health import Health
from tests.support.jobs.process_group import ProcessGroup
from tests.training.jobs import step_cost_cases
from training.checkpoint.contents import parameter_shapes

MANIFEST = Manifest("bf16", (Rule("fp16", "to have one", "*.q_proj"),), Path("a manifest"))
AT_START: dict[str, Callable[[PreTrainedModel], Any]] = {
    "regions": lambda model: Regions(model, MANIFEST).close(),
    "parameter groups": lambda model: parameter_groups(model, OptimizerSection(weight_decay=0.1)),
    "count": count_parameters,
    "identity": parameter_shapes,
    "flops": lambda model: flops_per_token(model, 2048),
}


def llama(*, width: int, layers: int) -> PreTrainedModel:
    """Without memory for its weights."""
    options = {"intermediate_size": 4 * width, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(LlamaConfig(hidden_size=width, num_hidden_layers=layers, **options))


class _Operators(TorchDispatchMode):
    """Counts tensor operators: those on tensors of the meta device take no time, but on real ones they would."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Lines of Mantissa's Python and tensor operators that run inside."""
    found: dict[str, int] = {}
    with _Operators() as operators, step_cost_cases.lines_of_python() as lines:
        yield found
    found |= {"lines": lines.total(), "operators": operators.count}


def cost(what: str, model: PreTrainedModel) -> dict[str, int]:
    """Cost of one piece of bookkeeping, once it is warm."""
    AT_START[what](model)
    with counted() as found:
        AT_START[what](model)
    return found


@pytest.fixture(scope="module")
def models() -> dict[tuple[int, int], PreTrainedModel]:
    """Models by width and blocks."""
    return {(width, layers): llama(width=width, layers=layers) for width, layers in [(128, 4), (1280, 4), (4096, 4)]}


@pytest.mark.parametrize("what", AT_START)
def test_bookkeeping_at_the_start_does_not_look_at_elements(
    what: str, models: dict[tuple[int, int], PreTrainedModel]
) -> None:
    sizes = [count_parameters(model) for model in models.values()]
    assert sizes[0] < 2e6 and sizes[-1] > 1e9
    costs = [cost(what, model) for model in models.values()]
    assert all(found == costs[0] for found in costs), costs
    assert costs[0]["lines"] > 3 and costs[0]["operators"] == 0


@pytest.mark.parametrize("what", AT_START)
def test_bookkeeping_at_the_start_is_linear_in_modules(what: str) -> None:
    two, four, eight = (cost(what, llama(width=64, layers=layers))["lines"] for layers in (2, 4, 8))
    assert eight - four == 2 * (four - two) >= 0


def healthy(step: int) -> Health:
    return Health(step=step, loss=2 + 1 / step, grad_norm=1 + 1 / step)


def test_what_the_guard_saves_does_not_grow_once_its_window_is_full() -> None:
    """Incidents occur on the way, as many as their budgets allow."""
    guard, sizes = Guard(GuardSection(spike_sigmas=6.0)), {}
    for step in range(1, 2001):
        refused = step % 100 == 0 and guard.used["skip"] < GuardSection().skip_budget
        judgement = Judgement(Verdict.SKIP, "a test") if refused else Judgement(Verdict.STEP)
        guard.note(healthy(step), judgement, applied=not refused)
        sizes[step] = len(re.sub(r"\d+(\.\d+)?", "0", json.dumps(guard.state_dict())))
    assert sizes[20] < sizes[150] == sizes[2000] < 2000


def test_regions_that_change_to_and_fro_leave_nothing_behind() -> None:
    """As the probe of telemetry changes all of them, twice each time."""
    regions = Regions(llama(width=64, layers=4), MANIFEST)

    def to_and_fro(times: int) -> None:
        for _ in range(times):
            for name, compute in regions.dtypes.items():
                regions.set(name, "fp32", "a probe")
                regions.set(name, compute, "a probe")

    to_and_fro(2)
    tracemalloc.start()
    to_and_fro(50)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 20_000, f"{held} bytes"


def without_digits(line: str) -> str:
    return re.sub(r"-?\d+(\.\d+)?(e[-+]?\d+)?", "0", re.sub(r'"[0-9a-f]{64}"', '"sha256"', line))


def test_an_event_is_as_long_after_a_million_steps(pair: ProcessGroup) -> None:
    early, late = (pair.run(step_cost_cases.step_events, after=after)[0] for after in (10, 10**6))
    early, late = ([line for line in lines if '"event":"step"' in line] for lines in (early, late))
    assert len(early) == len(late) == 3
    assert {without_digits(line) for line in late} == {without_digits(line) for line in early}
    # step and position have 5 digits more, tokens 5, and no float more than 17
    assert max(map(len, late)) - min(map(len, early)) < 60


@pytest.mark.slow
def test_a_checkpoint_is_as_large_later_in_the_run(pair: ProcessGroup, tmp_path: Path) -> None:
    early, late = pair.run(step_cost_cases.files_of_checkpoints, folder=str(tmp_path), at=(20, 120))[0]
    assert early.keys() == late.keys() >= {"manifest.json", "state.json", "rng-rank-0.pt", "rng-rank-1.pt"}
    for name, size in early.items():
        assert abs(late[name] - size) <= 100, name  # numbers have more digits, or fewer


@pytest.mark.parametrize("layers", [2, 24])
@pytest.mark.parametrize("parameters", [1e6, 3e7, 1e9])
def test_the_model_of_the_benchmark_has_the_size_that_was_asked_for(parameters: float, layers: int) -> None:
    shape = llama_shape(parameters, layers=layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape))
    assert count_parameters(model) == pytest.approx(parameters, rel=0.15)


def test_the_benchmark_measures_every_stage(pair: ProcessGroup) -> None:
    (row, again), _ = pair.run(step_cost_cases.overhead_rows)
    assert row["parameters"] == again["parameters"] > 50_000 and row["tensors"] == 20
    assert min(row["health"], row["guard"], row["record"]) > 0
    assert sum(row[stage] for stage in ADDED) < row["bare"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parameters", "1e6,many"], "argument --parameters: many is not a number above 0"),
        (["--parameters", "1e4"], "argument --parameters: 1e4 is not a number from 100,000"),
        (["--steps", "0"], "argument --steps: 0 is not a whole number of 1 or more"),
        (["--layers", "0"], "argument --layers: 0 is not a whole number"),
        (["--steps", "few"], "command line: argument --steps: few is not a whole number"),
    ],
)
def test_mistakes_are_reported_before_anything_starts(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        read_options(["--config", f"{REPOSITORY}/config/recipes/demo.yaml", *arguments])
