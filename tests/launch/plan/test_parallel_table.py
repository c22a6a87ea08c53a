"""docs/parallel.md opens with what to set for N GPUs, a size and a length: its numbers are what the planner says."""

import re

import pytest

from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.launcher import as_launched
from launch.plan.devices import GIB
from launch.plan.layout import layout_of
from launch.plan.memory import peak_memory
from launch.plan.model import read_shape

_TOKENS = {"4k": 2**12, "32k": 2**15, "128k": 2**17, "512k": 2**19}
_SHAPES = {"1B": "llama_1b_1gpu", "8B": "llama_8b_8gpu", "70B": "llama_70b_64gpu"}
_USED = 72
"""[GiB] Of a GPU, as the page says."""


def _cells() -> list[tuple[int, str, str, str, int]]:
    """(GPUs, size, length, setting, GiB) of each cell with a number; a cell that adds to its left one in full."""
    found = []
    for line in (REPOSITORY / "docs/parallel.md").read_text(encoding="utf-8").splitlines():
        row = re.match(r"\| (\d+) GPUs?, (\w+) \|(.*)\|$", line)
        setting = ""
        for length, cell in zip(_TOKENS, row[3].split("|") if row else [], strict=False):
            number = re.search(r"\((\d+)(?: GiB)?\)", cell)
            if number is None:
                continue
            setting = cell if "`stage" in cell else f"{setting} {cell}"
            found.append((int(row[1]), row[2], length, setting, int(number[1])))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", _SHAPES)
def test_every_number_of_the_table_is_the_planners(size, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cells = [cell for cell in _cells() if cell[1] == size]
    assert len(cells) >= 7
    said, planned = {}, {}
    for gpus, _, length, setting, gib in cells:
        arguments = [f"data.sequence_length={_TOKENS[length]}", "model.config.vocab_size=128256"]
        arguments += ["batch.micro_size=1", f"batch.global_size={gpus}"]
        arguments += [f"deepspeed.stage={n}" for n in re.findall(r"`stage: (\d)`", setting)]
        arguments += ["deepspeed.offload=cpu"] if "`offload: cpu`" in setting else []
        arguments += [f"model.activation_checkpointing={'full' if '`full`' in setting else 'none'}"]
        arguments += [f"parallel.sequence={n}" for n in re.findall(r"`sequence: (\d)`", setting)[-1:]]
        recipe = REPOSITORY / f"config/recipes/{_SHAPES[size]}.yaml"
        resolved = read_command_line(["--config", str(recipe), *arguments], as_launched(gpus))
        layout = layout_of(resolved, world=gpus, on_cpu=False)
        peak = peak_memory(read_shape(resolved.config, layout), layout).total / GIB
        said[gpus, length], planned[gpus, length] = gib, round(peak)
    assert said == planned
    assert max(planned.values()) <= _USED
