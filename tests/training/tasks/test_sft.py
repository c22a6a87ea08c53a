"""Fine-tuning through the engine equals plain torch on the same rows, one at a time: loss, norm and weights."""

from pathlib import Path

import pytest

from tests.support.jobs.process_group import ProcessGroup
from tests.support.models.plain_steps import require_equal
from tests.training.tasks import sft_cases as cases


@pytest.mark.one_in(2)
@pytest.mark.parametrize("packing", ["best_fit", "none"])
@pytest.mark.parametrize("ranks", ["solo", "pair"])
def test_one_and_two_ranks_equal_plain_torch(
    request: pytest.FixtureRequest, folder: Path, ranks: str, packing: str
) -> None:
    group, exact = request.getfixturevalue(ranks), None
    for stage in (0, 1, 2, 3):
        found, *others = group.run(cases.steps, folder=folder, stage=stage, overrides=(f"data.packing={packing}",))
        exact = exact or cases.oracle(folder, found)
        require_equal(found, exact)
        assert all(other["steps"] == found["steps"] for other in others)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_the_mean_of_each_row_counts_the_same_however_it_is_cut(
    solo: ProcessGroup, pair: ProcessGroup, folder: Path, packing: str
) -> None:
    """`sft.loss: row`: chunked or not, micro-batches of 1 to 8 sequences, every ZeRO stage, one and two ranks."""
    chunked = ("model.loss=chunked", "model.loss_chunk_tokens=7")
    given, exact = (f"data.packing={packing}", "sft.loss=row"), None
    for group, stage, cut in (
        (solo, 0, ("batch.micro_size=8",)),
        (solo, 3, ("batch.micro_size=1", *chunked)),
        (pair, 1, ("batch.micro_size=1",)),
        (pair, 2, ("batch.micro_size=4", *chunked)),
        (pair, 3, ("batch.micro_size=2",)),
    ):
        found = group.run(cases.steps, folder=folder, stage=stage, overrides=(*given, *cut))[0]
        exact = exact or cases.oracle(folder, found, by_row=True)
        require_equal(found, exact)
        for mine, theirs in zip(found["steps"], exact["steps"], strict=True):
            assert mine["metrics"] == pytest.approx({"token_loss": theirs["token_loss"]}, rel=1e-5)
            assert abs(theirs["token_loss"] - theirs["loss"]) > 1e-3, "the two means differ on these rows"
