"""Adapters through the engine equal plain torch with plain peft; the base stays as it is and has no state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.process_group import ProcessGroup
from tests.training.tasks import sft_cases as cases
from tests.training.tasks.test_sft import folder, require_equal

__all__ = ["folder"]
KINDS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "lora": (
        ["adapter={kind: lora, r: 4, alpha: 8}"],
        {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    ),
    "dora, rslora, modules": (
        ["adapter={kind: dora, r: 4, alpha: 8, rslora: true, target_modules: [q_proj, v_proj]}"],
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "use_dora": True, "use_rslora": True},
    ),
    "lora and the output embedding": (
        ["adapter={kind: lora, r: 2, alpha: 8, init: gaussian, modules_to_save: [lm_head]}"],
        {"r": 2, "lora_alpha": 8, "target_modules": "all-linear", "modules_to_save": ["lm_head"]},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_and_two_ranks_equal_plain_peft(pair: ProcessGroup, solo: ProcessGroup, folder: Path, kind: str) -> None:
    overrides, given = KINDS[kind]
    exact: dict[str, Any] | None = None
    for group, stages in ((pair, (0, 1, 2, 3)), (solo, (0, 2))):
        for stage in stages:
            found, *_ = group.run(cases.steps, folder=folder, stage=stage, overrides=tuple(overrides))
            if exact is None:
                model = cases.base_of(folder, given, found["before"])
                exact = cases.oracle(folder, [step["rows"] for step in found["steps"]], model)
            require_equal(found, exact)
