"""The meter of lost updates agrees with whole masters before and after the step, at every stage."""

from pathlib import Path

import pytest

from precision.dtypes import DTYPES
from tests.support.jobs.process_group import ProcessGroup
from tests.training.tasks import sft_cases as cases


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("stage", "compute", "overrides"),
    [
        (0, "auto", ("precision.manifest=config/manifests/bf16.json",)),
        (1, "bf16", ()),
        (2, "fp16", ()),
        (3, "bf16", ()),
        (3, "bf16", ("adapter={kind: lora, r: 4}",)),
        (2, "bf16", ("adapter={kind: lora, r: 4}",)),
    ],
)
def test_it_counts_what_rounding_hides(
    pair: ProcessGroup, folder: Path, stage: int, compute: str, overrides: tuple[str, ...]
) -> None:
    for rate in (1e-5, 1e-2):
        options = {"stage": stage, "compute": compute, "overrides": overrides, "rate": rate}
        found, other = pair.run(cases.lost_updates, folder=folder, **options)
        assert found["said"] == other["said"]
        dtype = DTYPES[compute if compute != "auto" else "bf16"]
        modules = dict.fromkeys(name.rpartition(".")[0] for name in found["before"])
        assert found["said"].keys() <= modules.keys()
        for module in modules if compute != "auto" else found["said"]:  # a manifest's norms compute in FP32
            lost = updated = 0
            for name, old in found["before"].items():
                if name.rpartition(".")[0] == module:
                    new = found["after"][name]
                    updated += int((new != old).sum())
                    lost += int(((new != old) & (new.to(dtype) == old.to(dtype))).sum())
            assert found["said"].get(module, 0.0) == pytest.approx(lost / max(updated, 1), rel=1e-5)
        if rate == 1e-5 and compute != "fp16":
            assert max(found["said"].values()) > 0.5


def test_there_is_none_where_the_masters_compute(pair: ProcessGroup, folder: Path) -> None:
    found = pair.run(cases.lost_updates, folder=folder, stage=2, compute="fp32", rate=1e-5)[0]
    assert found["said"] == {}
