"""Fine-tuning of each family of causal models equals plain torch (with plain peft) on the same rows, one at a time."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs.process_group import ProcessGroup
from tests.support.models.plain_steps import require_equal
from tests.support.rows.chats import write_folder
from tests.training.tasks import sft_cases

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"tie_word_embeddings": True, "sliding_window": 8, "head_dim": 16},
    "qwen3": {},
    "gemma": {"tie_word_embeddings": True, "head_dim": 16},
    "gpt2": {"tie_word_embeddings": True},
    "mixtral": {},
}
"""Features of their public models: tied embeddings, windows shorter than a row."""
LORA = "adapter={kind: lora, r: 4, alpha: 8}"
GIVEN = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of one family, chats and pairs."""
    return write_folder(tmp_path_factory.mktemp(request.param), request.param, **FAMILIES[request.param])


@pytest.mark.one_in(20)
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize(("packing", "stages"), [("best_fit", (3, 2)), ("none", (1, 0))])
def test_chats(pair: ProcessGroup, folder: Path, packing: str, stages: tuple[int, ...], adapter: bool) -> None:
    exact, given = None, (f"data.packing={packing}", *((LORA,) if adapter else ()))
    for stage in stages:
        found, _ = pair.run(sft_cases.steps, folder=folder, stage=stage, overrides=given)
        exact = exact or sft_cases.oracle(folder, found, adapter=GIVEN if adapter else None)
        require_equal(found, exact)
