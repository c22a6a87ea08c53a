"""The table of optimizers, its files, and what a start brings along for optimizers that Mantissa does not have."""

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from config.optimizers import COUNT, OPTIMIZERS, settings_of
from config.schema import OptimizerSection
from tests.support.marks import slow
from tests.training.engine import optimizer_cases
from training.corruption.updates import excess
from training.engine.flat_optimizer import Pieces, WholeParameterOptimizer
from training.engine.optimizer import IMPLEMENTATIONS, build_optimizer
from training.engine.optimizers import muon
from training.engine.optimizers.rule import UpdateInputs

ROOT = Path(__file__).resolve().parents[3]


def test_every_choice_of_the_config_has_a_row_and_a_file() -> None:
    assert set(get_args(get_type_hints(OptimizerSection)["name"])) == OPTIMIZERS.keys() == IMPLEMENTATIONS.keys()
    files = {path.stem for path in (ROOT / "training/engine/optimizers").glob("*.py")}
    assert files - {"__init__", "rule"} == OPTIMIZERS.keys()
    for spec in OPTIMIZERS.values():
        assert set(spec.settings) <= {item.name for item in fields(OptimizerSection)}
        assert spec.momentum is None or spec.momentum in spec.states


@pytest.mark.parametrize(("name", "momentum"), [*((name, None) for name in OPTIMIZERS), ("sgd", 0.0)])
def test_an_optimizer_keeps_what_its_row_says_and_updates_as_its_file_says(name: Any, momentum: float | None) -> None:
    """torch's own in FP32 against the file's `update` and `after` in FP64, on a matrix that decays and a bias that does
    not. Schedules may end at a rate of zero, at which averages still move; without momentum SGD keeps no state."""
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(7, 5)
    section, spec = OptimizerSection(name=name, weight_decay=0.3, eps=1e-4, momentum=momentum), OPTIMIZERS[name]
    optimizer = build_optimizer(model, section, offload=False, device=torch.device("cpu"))
    assert not any(optimizer.state.values())  # nothing before the first update
    if isinstance(optimizer, WholeParameterOptimizer):
        model.weight.grad = torch.ones_like(model.weight)
        with pytest.raises(RuntimeError, match="does not know where parameters begin"):
            optimizer.step()
        optimizer.state.clear()
        optimizer.attached = Pieces()
    for step, lr in enumerate((0.01, 0.02, 0.0, 0.04), start=1):
        before = {}
        for group in optimizer.param_groups:
            group["lr"] = lr
            for parameter in group["params"]:
                parameter.grad = torch.randn_like(parameter)
                kept, settings = optimizer.state.get(parameter, {}), {"section": section, "step": step}
                settings |= {key: group[key] for key in ("weight_decay", "lr", "matrix")}
                held = [kept.get(key, torch.zeros_like(parameter)) for key in spec.states_of(matrix=group["matrix"])]
                before[parameter] = UpdateInputs(parameter.detach(), parameter.grad, held, **settings)
        optimizer.step()
        for parameter, given in before.items():
            states, found = spec.states_of(matrix=given.matrix), parameter.detach()
            expected = given.master + IMPLEMENTATIONS[name].update(given)
            assert torch.allclose(found.double(), expected, rtol=0, atol=3e-7)
            state = {key: kept for key, kept in optimizer.state[parameter].items() if kept is not None}
            after = [found, *(state.get(key, torch.zeros_like(found)) for key in states)]
            assert given.matrix and spec.splits_matrices or bool((excess(given, after) <= 1).all())
            states = () if momentum == 0 else states
            assert set(state) - {COUNT} == set(states) and (COUNT in state) == spec.counts_updates
            for key in states:
                assert state[key].dtype == torch.float32 and state[key].shape == parameter.shape


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw"])
@pytest.mark.parametrize(
    ("stage", "compute", "clipping"),
    [
        *((0, "fp32", 0.05), (1, "fp32", 0), (2, "fp32", 0.05), (3, "fp32", 0), (2, "bf16", 0.05)),
        *((3, "fp16", 0.05), (0, "fp32", 0), (1, "bf16", 0.05), (3, "fp32", 0.05)),
    ],
)
def test_sharded_masters_move_as_those_of_one_process_in_fp64(pair, name, stage, compute, clipping) -> None:
    """Accumulated, clipped or not, over steps of different learning rates; the third of four is skipped."""
    overrides = (clipped(clipping),)
    options = {"name": name, "stage": stage, "compute": compute, "overrides": overrides}
    for result in pair.run(optimizer_cases.sharded_steps, **options):
        require_as_in_fp64(result, clipping)


OTHER_RANKS = [
    *(
        (name, stage, "fp32", clipping, "")
        for stage in (3, 2, 1, 0)
        for name in ("muon", "lamb")
        for clipping in (0.05, 0)
    ),
    *(
        (name, stage, compute, 0.05, "")
        for stage, compute in ((1, "bf16"), (2, "fp16"), (3, "bf16"))
        for name in ("muon", "lamb")
    ),
    *((name, stage, "fp32", 0, "_offload") for stage in (2, 3) for name in ("muon", "lamb")),
]


@pytest.mark.one_in(len(OTHER_RANKS))
@pytest.mark.parametrize(("name", "stage", "compute", "clipping", "variant"), OTHER_RANKS)
@pytest.mark.parametrize("ranks", ["four", "solo"])
def test_other_ranks_move_masters_as_one_process_in_fp64(request, ranks, name, stage, compute, clipping, variant):
    """Accumulated; of four ranks a matrix is in up to four pieces, and some ranks have none of a parameter."""
    cell = {"name": name, "stage": stage, "compute": compute, "variant": variant, "overrides": (clipped(clipping),)}
    for result in request.getfixturevalue(ranks).run(optimizer_cases.sharded_steps, **cell):
        require_as_in_fp64(result, clipping)


def clipped(norm: float) -> str:
    return f"optimizer.gradient_clipping={norm}"


def require_as_in_fp64(result: dict[str, Any], clipping: float) -> None:
    """A skipped step among applied ones changed nothing, gradients were clipped or not, masters moved by the rule.

    And the momentum's norm is that of its tensors.
    """
    assert result["momentum"] < 1e-6
    assert result["applied"] == [True, True, False, True]
    assert all(clip < 1.0 if clipping else clip == 1.0 for clip in result["clip"])
    assert result["skipped_unchanged"]
    assert result["error"] < 1e-5, result


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("stage", "compute"), [(3, "fp32"), (0, "fp32"), (1, "bf16"), (2, "fp32")])
def test_muon_moves_each_expert_of_a_fused_tensor_by_its_own_matrix(pair: Any, stage: int, compute: str) -> None:
    """An expert sees few tokens: the iteration amplifies FP32's rounding where its gradient has hardly any rank."""
    options = {"name": "muon", "stage": stage, "compute": compute, "overrides": optimizer_cases.EXPERTS}
    for result in pair.run(optimizer_cases.sharded_steps, **options):
        assert result["skipped_unchanged"]
        assert result["error"] < 1e-4, result


@pytest.mark.parametrize(
    ("shape", "dtype"), [((24, 40), torch.float64), ((40, 24), torch.float32), ((7, 7), torch.float64)]
)
def test_muons_step_is_the_quintic_of_the_singular_values(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Computed by an SVD in FP64."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / (matrix.norm() + 1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    expected = left @ torch.diag(values) @ right * 0.2 * max(shape) ** 0.5
    found = muon.step_of(matrix.to(dtype), bf16=False)
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)
    rough = muon.step_of(matrix.to(dtype), bf16=True).double()
    assert 1e-4 < float((rough - expected).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize("rank", [1, 32])
def test_two_iterations_in_bf16_are_as_far_apart_as_muon_says(rank: int) -> None:
    """The directions start one FP32 rounding apart. In FP32 there is nothing to say."""
    generator = torch.Generator().manual_seed(5)
    apart, allowed = [], []
    for _ in range(5):
        left, right = torch.randn(2, 32, rank, generator=generator, dtype=torch.float64)
        gradient = left @ right.mT
        section, zeros = OptimizerSection(name="muon", orthogonalization="bf16"), torch.zeros(32, 32)
        settings = {"section": section, "weight_decay": 0.0, "lr": 1.0, "step": 1, "matrix": True}
        kept = UpdateInputs(zeros, gradient, [zeros], **settings)
        noise = 1 + 1e-7 * torch.randn(32, 32, generator=generator, dtype=torch.float64)
        other = replace(kept, gradient=gradient * noise)
        size = float(muon.update(kept).norm())
        apart.append(float((muon.update(kept) - muon.update(other)).norm()) / size)
        allowed.append(muon.rounding(kept) / size)
        assert muon.rounding(replace(kept, section=OptimizerSection(name="muon"))) == 0.0
        assert muon.rounding(replace(kept, matrix=False)) == 0.0
    assert all(found <= most for found, most in zip(apart, allowed, strict=True))
    assert min(allowed) > 0.01 and max(allowed) <= 0.3
    if rank == 1:
        assert max(allowed) > 0.29


def test_muon_moves_as_torchs_own() -> None:
    """torch's Muon always orthogonalizes in BF16, and supports only matrices on one device."""
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(24, 40, generator=generator)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    group = {"params": [ours], "weight_decay": 0.1, "lr_factor": 1.0, "matrix": True}
    section = OptimizerSection(name="muon", orthogonalization="bf16")
    optimizer = muon.build([group], {"lr": 0.02, **settings_of(section)}, offload_to_host=False)
    assert isinstance(optimizer, WholeParameterOptimizer)
    optimizer.attached = Pieces()
    of_torch = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        ours.grad = torch.randn(24, 40, generator=generator)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        of_torch.step()
    assert float((ours - theirs).detach().norm() / (theirs - start).detach().norm()) < 0.02


@pytest.mark.parametrize(
    ("stage", "overrides"), [(1, ()), (2, ()), (3, ()), (3, optimizer_cases.EXPERTS), slow(2, optimizer_cases.EXPERTS)]
)
def test_a_matrix_is_orthogonalized_once_and_pieces_travel_twice(pair, stage, overrides) -> None:
    """Ranks share the work, expert by expert: what a rank sends is its own part at most, to the owners, and back."""
    results = pair.run(optimizer_cases.shared_work, stage=stage, overrides=overrides)
    matrices = results[0]["matrices"]
    values = sum(map(math.prod, matrices))
    assert sorted(shape for result in results for shape in result["computed"]) == sorted(matrices)
    work = [sum(math.prod(shape) * min(shape) for shape in result["computed"]) for result in results]
    assert max(work) < 1.2 * min(work)
    for result in results:
        assert result["sent"][0] == result["own"]
        assert sum(result["sent"]) <= 2 * values
    assert sum(sum(result["sent"]) for result in results) == 2 * values


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("stage", "compute"), [(3, "fp16"), (2, "bf16"), (0, "fp32"), (1, "fp32")])
@pytest.mark.parametrize("name", ["adamw", *(slow(name) for name in OPTIMIZERS if name != "adamw")])
def test_a_gradient_that_is_not_finite_reaches_no_state(pair: Any, name: str, stage: int, compute: str) -> None:
    fault = f"faults=[{{kind: inf_gradient, step: {optimizer_cases.SKIPPED}, rank: 1}}]"
    overrides = (fault, "precision.loss_scale.hysteresis=1")
    options = {"name": name, "stage": stage, "compute": compute, "overrides": overrides}
    for result in pair.run(optimizer_cases.sharded_steps, **options):
        require_as_in_fp64(result, 0.05)
        assert result["clip"][optimizer_cases.SKIPPED - 1] == 0.0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["lamb", "lion", "muon"])
@pytest.mark.parametrize("stage", [2, 3])
def test_states_in_host_memory_change_nothing(pair: Any, name: str, stage: int) -> None:
    options = {"name": name, "stage": stage, "compute": "fp32", "variant": "_offload"}
    assert all(result["error"] < 1e-5 for result in pair.run(optimizer_cases.sharded_steps, **options))
