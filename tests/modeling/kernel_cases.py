"""Code run inside the processes of test_kernels.py. Every function is called on every rank."""

from typing import Any
from unittest import mock

import torch

from modeling import kernels
from modeling.kernels import Norm
from precision.observe import Observation
from tests.support.models import interpreted_liger
from tests.support.models.small_run import batch_of, engine_of, masters_of, resolve
from training.attribution import attribute
from training.distributed import World
from training.engine.tensors import whole_gradient
from training.telemetry import Telemetry

MICRO = 2
SICK = "model.layers.0.mlp.up_proj"
SHAPE = "model.config={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2, "
SHAPE += "num_key_value_heads: 1, tie_word_embeddings: true}"


def two_steps(world: World, *, stage: int, compute: str, kernels: str, overrides=()) -> dict[str, Any]:
    """Two steps from the seeded weights, two micro-batches a rank, and an evaluation."""
    with _engine(world, stage, compute, kernels, overrides) as engine:
        rows: list[tuple[float, float]] = []
        gradients: dict[str, Any] = {}
        for step in (1, 2):
            health = engine.health(engine.forward_backward(batch_of(world, MICRO, seed=step), step=step))
            if not gradients:
                for name, parameter in engine.model.named_parameters():
                    gradient = whole_gradient(engine, parameter)
                    assert gradient is not None, name
                    gradients[name] = gradient.float().cpu()
            rows.append((health.loss, health.grad_norm))
            engine.step(health, 0.01)
        evaluated = engine.evaluate([batch_of(world, MICRO, seed=9)]).loss
        masters = {name: master.cpu() for name, master in masters_of(engine).items()}
        gradients = {name: gradient / engine.loss_scale for name, gradient in gradients.items()}
        notes = [note for note in engine.notes if "Liger" in note]
        return {"rows": rows, "evaluated": evaluated, "gradients": gradients, "masters": masters, "notes": notes}


def looks(world: World, *, kernels: str) -> dict[str, Any]:
    """Telemetry's and the observer's report on a step in BF16, and who is blamed for one that is not finite."""
    with _engine(world, 2, "bf16", kernels, ()) as engine:
        batch = batch_of(world, MICRO, seed=0)
        telemetry = Telemetry(engine, probe=True)
        with telemetry.watching(batch):
            engine.forward_backward(batch, step=1)
        probe = dict(telemetry._reference)
        telemetry.measure()
        event = telemetry.finish(applied=False)
        engine.discard_gradients()
        with Observation(engine.model) as seen:
            engine.forward_backward(batch, step=1)
        engine.discard_gradients()
        matmuls = {name: dtypes for name, dtypes in seen.computed.items() if "norm" not in name}
        with torch.no_grad():
            engine.model.get_submodule(SICK).weight[0, 0] = float("inf")
        outcome = engine.forward_backward(batch, step=1)
        finite, found = engine.health(outcome).finite, attribute(engine, batch, outcome, step=1)
        causes = [(rank, cause.module, cause.tensor, cause.kind) for rank, cause in found]
        observed = {"probe": probe, "event": event, "computed": matmuls, "flops": dict(seen.flops)}
        return observed | {"finite": finite, "causes": causes}


def _engine(world: World, stage: int, compute: str, kernels: str, overrides: tuple[str, ...]) -> Any:
    if kernels != "torch" and not interpreted_liger.why_not():
        interpreted_liger.prepare()
    given = [SHAPE, f"model.kernels={kernels}", *overrides]
    return engine_of(world, resolve(world, stage=stage, compute=compute, micro=MICRO, overrides=given))


def chosen(world: World, *, overrides: tuple[str, ...] = (), lacking: int | None = None) -> tuple[list[str], int]:
    """Each rank's remark on `model.kernels = auto`, and the number of modules whose class was replaced.

    lacking: the rank on whose machine a kernel is found to be wrong.
    """
    wrong = {"llama": Norm(1.0)} if lacking == world.rank else {}
    with mock.patch.dict(kernels.ARCHITECTURES, wrong), _engine(world, 2, "bf16", "auto", overrides) as engine:
        exchanged = sum(type(module).__mro__[1].__name__ == type(module).__name__ for module in engine.model.modules())
        return [note for note in engine.notes if "model.kernels" in note or "Liger" in note], exchanged
