"""Code that the tests of compiled blocks run in real processes: the same work compiled and not."""

from collections.abc import Sequence
from typing import Any

import torch

from modeling.activation_checkpointing import blocks_of
from modeling.compiling import CompiledBlock
from precision.observe import Observation
from tests.support.models.small_run import batch_of, engine_of, masters_of, resolve, take
from training.attribution import attribute
from training.distributed import World
from training.engine import Engine

MICRO = 2
STEPS = 4
RATE = 0.01
SICK = "model.layers.1.mlp.up_proj"


def parity(world: World, *, stage: int, compute: str, overrides: Sequence[str] = ()) -> dict[str, float]:
    """The distance of a compiled run from the eager one, relative; in 16 bits also the distance of both from FP32.

    loss, norm: the largest of the steps. masters: root mean square, of how far they moved. kept: elements that its
    forward pass keeps for the backward pass, as a share of those of the run as it is.
    """
    plain, compiled = (_train(world, stage, compute, [*overrides, f"model.compile={word}"]) for word in _WORDS)
    found = {
        **_apart(compiled, plain),
        "masters": _size(compiled["masters"], plain["masters"]) / _size(plain["masters"], plain["first"]),
        "compiled_calls": compiled["compiled_calls"],
        "own_calls": compiled["own_calls"],
        "kept": compiled["kept"] / plain["kept"],
    }
    if compute != "fp32":
        exact = _train(world, stage, "fp32", [*overrides, "model.compile=false"])
        for name, run in (("plain", plain), ("compiled", compiled)):
            found |= {f"{name} {key} from FP32": value for key, value in _apart(run, exact).items()}
    return found


def _apart(mine: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    pairs = {"loss": (mine["losses"], other["losses"]), "norm": (mine["norms"], other["norms"])}
    return {key: max(abs(a / b - 1) for a, b in zip(*values, strict=True)) for key, values in pairs.items()}


def _size(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Root of the sum of squares of the differences."""
    return float(sum((mine[name] - other[name]).double().square().sum() for name in other) ** 0.5)


def looks(world: World, *, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The results of observation, evaluation and attribution with and without compiled blocks."""
    found: dict[str, Any] = {}
    for word in _WORDS:
        with _engine(world, 2, "bf16", [*overrides, f"model.compile={word}"]) as engine:
            torch.manual_seed(7)
            batch = batch_of(world, MICRO, seed=0)
            with Observation(engine.model) as seen:
                engine.forward_backward(batch, step=1)
            engine.discard_gradients()
            calls = _calls(engine)
            loss = engine.evaluate([batch]).loss
            with torch.no_grad():
                engine.model.get_submodule(SICK).weight[0, 0] = float("inf")
            outcome = engine.forward_backward(batch, step=1)
            trained = _calls(engine)
            health = engine.health(outcome)
            causes = [
                (rank, cause.module, cause.tensor, cause.kind)
                for rank, cause in attribute(engine, batch, outcome, step=1)
            ]
            found[word] = {
                "computed": seen.computed,
                "flops": dict(seen.flops),
                "eval": loss,
                "finite": health.finite,
                "causes": causes,
            }
            if word == "true":
                found["calls"] = {"observed": calls, "trained": trained, "attributed": _calls(engine)}
    return found


_WORDS = ("false", "true")


def _engine(world: World, stage: int, compute: str, overrides: Sequence[str]) -> Any:
    return engine_of(world, resolve(world, stage=stage, compute=compute, micro=MICRO, overrides=overrides))


def _step(engine: Engine, world: World, step: int) -> tuple[float, float]:
    health, _ = take(engine, batch_of(world, MICRO, seed=step), step=step + 1, lr=RATE)
    return health.loss, health.grad_norm


def _train(world: World, stage: int, compute: str, overrides: Sequence[str]) -> dict[str, Any]:
    with _engine(world, stage, compute, overrides) as engine:
        torch.manual_seed(7)
        before, first = _calls(engine), masters_of(engine)
        steps = [_step(engine, world, step) for step in range(STEPS)]
        after = _calls(engine)
        kept = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        inputs, labels = next(batch_of(world, MICRO, seed=0).micro_batches(world.device))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            engine.loss_path.score(inputs, labels, 1.0)
        return {
            "losses": [loss for loss, _ in steps],
            "norms": [norm for _, norm in steps],
            "first": first,
            "masters": masters_of(engine),
            "kept": kept,
            "compiled_calls": after[0] - before[0],
            "own_calls": after[1] - before[1],
        }


def _calls(engine: Engine) -> tuple[int, int]:
    """Calls of blocks so far: compiled, and not."""
    found = [block.forward for block in blocks_of(engine.model)]
    mine = [forward for forward in found if isinstance(forward, CompiledBlock)]
    return sum(item.compiled_calls for item in mine), sum(item.own_calls for item in mine)
