"""The work of every item at its full size is work that the tools accept: configs, options, contestants, modes."""

from collections.abc import Sequence
from typing import Any, NoReturn

import pytest

from config.command_line import read_command_line
from config.launcher import as_launched
from lab.benchmark import command as benchmark
from lab.benchmark.contestants import COMMON_OVERRIDES, OWN, PEERS
from lab.benchmark.largest import read_options as largest_options
from lab.gpu_check.bench import Bench
from lab.gpu_check.items import PARTS, Item

ITEMS = [
    pytest.param(number, item, id=f"{number}-{item.name}") for number, part in PARTS.items() for item in part.items
]
WITHOUT_RUN_CONFIG = ("lab.matrix", "lab.benchmark.loss")


class Asked(Exception):
    """The first job of an item was asked for."""


class Listening(Bench):
    """Starts nothing: reads the first job's command line as the job would, and keeps the runs' configs."""

    def train(self, name: str, arguments: Sequence[str]) -> NoReturn:
        """train.py."""
        self.runs = [read_command_line(arguments, as_launched(1))]
        raise Asked

    def start(self, name: str, arguments: Sequence[str]) -> NoReturn:
        """train.py as well."""
        self.train(name, arguments)

    def tool(self, module: str, *arguments: str, codes: Sequence[int] = (0,), leads: bool = False) -> NoReturn:
        """A tool of Mantissa's, with the configs of the jobs that it would start."""
        self.arguments = arguments
        self.runs = [read_command_line(run, as_launched(1)) for run in self._runs_of(module, arguments)]
        if module in WITHOUT_RUN_CONFIG:
            self.runs = [None]
        raise Asked

    def _runs_of(self, module: str, arguments: Sequence[str]) -> list[list[str]]:
        if module in WITHOUT_RUN_CONFIG:
            return []
        run = list(arguments[arguments.index("--config") :])
        if module == "lab.benchmark":
            options = benchmark.read_options(arguments)
            names = options.contestants.split(",")
            assert set(names) <= {*OWN, *PEERS}
            resolved, own = benchmark.resolve(options, 1)
            layout = {"stage": resolved.zero_stage, "offload": "none" if resolved.offload == "none" else "cpu"}
            return [[*own, *COMMON_OVERRIDES, *(text.format(**layout) for text in OWN.get(name, ()))] for name in names]
        if module == "lab.benchmark.largest":
            depths = largest_options(arguments).layers
            return [[*run, *COMMON_OVERRIDES, f"model.config.num_hidden_layers={depth}"] for depth in depths]
        return [run]


@pytest.mark.parametrize(("number", "item"), ITEMS)
def test_the_work_of_an_item_is_accepted_at_its_full_size(number: int, item: Item, tmp_path) -> None:
    bench: Any = Listening(tmp_path, tmp_path / "cache", 1, tiny=False, limit=60.0, device="NVIDIA H200")
    with pytest.raises(Asked):
        item.measure(bench)
    assert bench.runs
    for run in filter(None, bench.runs):
        assert run.config.schedule.warmup_steps <= run.config.run.steps
        assert run.batch.micro_size <= run.batch.global_size
        if (number, item.name) == (4, "manifest"):
            assert run.zero_stage == 3
    if item.name == "dtypes":
        assert [run.compute for run in bench.runs] == ["bf16", "fp32", "fp16"]
    if number == 3:  # each contestant in turn at both lengths
        assert {run.config.data.sequence_length for run in bench.runs} == {4096 if "4096" in item.name else 2048}
    if item.name == "offload":
        assert {(run.zero_stage, run.offload) for run in bench.runs} == {(3, "optimizer+param")}
