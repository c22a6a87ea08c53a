"""Which kernels a run computes with: `model.kernels`, the same on every rank."""

from __future__ import annotations

from transformers import PreTrainedModel

from config.errors import UserError
from config.resolved import Resolved
from config.rules import liger_conflicts
from modeling.kernels import Plan, cannot_run_on, plan_liger, use_liger
from precision.dtypes import DTYPES
from training.distributed import World


def choose_kernels(model: PreTrainedModel, resolved: Resolved, world: World) -> list[str]:
    """Let the model compute with Liger's kernels where the config asks for them, or is `auto` and they are available.

    Returns the decision, for the record; nothing where there is no choice, as on a CPU. A collective. Raises UserError
    where the config asks for kernels that are not available.
    """
    wanted, device = resolved.config.model.kernels, world.device
    if wanted == "torch" or (wanted == "auto" and cannot_run_on(device)):
        return []
    if wanted == "liger":
        return [use_liger(model, dtype=DTYPES[resolved.compute], device=device)]
    problem = next((f"liger {problem}" for problem, _ in liger_conflicts(resolved.config)), None)
    if resolved.offload != "none":
        problem = problem or f"liger is not verified with offload of the {resolved.offload}"
    plan: Plan | None = None
    if problem is None:
        try:
            plan = plan_liger(model, dtype=DTYPES[resolved.compute], device=device)
        except UserError as error:
            problem = str(error)
    # one node may lack what the others have; kernels round differently, so all ranks must use the same
    problems = world.gather_objects(problem)
    where, first = next(((rank, each) for rank, each in enumerate(problems) if each is not None), (0, None))
    if plan is not None and first is None:
        return [plan.apply()]
    return [f"model.kernels = auto: torch's on every rank, because of rank {where}: {first}"]
