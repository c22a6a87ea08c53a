"""Telemetry of made-up models for the tests of the heat maps, written through the real sink."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.runs.compare_runs import CONFIG, ENVIRONMENT, RunWriter, merged

PARTS = (
    *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn"),
    *("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp"),
)
_PLAIN = ("self_attn", "mlp")  # without parameters of their own


def modules(layers: int) -> list[str]:
    """Names of a Llama's modules, in the order in which their forward passes end."""
    inside = [f"model.layers.{layer}.{part}" for layer in range(layers) for part in (*PARTS, "")]
    return ["model.embed_tokens", *(name.rstrip(".") for name in inside), "model.norm", "model", "lm_head"]


def telemetry(
    step: int,
    layers: int,
    *,
    activation: Callable[[str, int], float] | None = None,
    lost: Callable[[str, int], float] | None = None,
) -> dict[str, Any]:
    """The fields of a plausible `telemetry` event. activation: largest activation by module and step, or None. lost:
    share of its updates that a module's rounding hides."""
    names, noise = modules(layers), random.Random(step)
    measured = [name for name in names if name.rpartition(".")[2] not in _PLAIN and not name[-1].isdigit()]
    measured.remove("model")
    gradients = {}
    for name in measured:
        rms = 1e-5 * noise.lognormvariate(0, 0.2)
        gradients[name] = {"norm": 100 * rms, "maximum": 20 * rms, "rms": rms, "below_normal": 0.002, "flushed": 0.0}
    return {
        "gradients": gradients,
        "activation_max": {
            name: (activation(name, step) if activation else None) or 8.0 * noise.lognormvariate(0, 0.1)
            for name in names
        },
        "probe": {},
        "drift": {"maximum": 0.0, "rms": 0.0, "by_module": {}},
        "update_ratio": 1e-3,
        "update_ratios": {name: 1e-3 * noise.lognormvariate(0, 0.3) for name in measured},
        "lost_updates": {name: lost(name, step) for name in measured} if lost else {},
        "gradient_exponents": {"lowest": -30, "counts": [1, 2, 1]},
    }


def growing(layers: Sequence[int], *, limit_step: int, per_100: float) -> Callable[[str, int], float | None]:
    """Activations of MLPs in `layers` that grow by the factor `per_100` each 100 steps, to 65504 at `limit_step`."""
    names = {f"model.layers.{layer}.mlp.down_proj" for layer in layers}

    def activation(name: str, step: int) -> float | None:
        if name not in names:
            return None
        spread = random.Random(f"{name} {step}").lognormvariate(0, 0.02)
        return 65504.0 * per_100 ** ((step - limit_step) / 100) * spread

    return activation


def write_heat_run(
    root: Path, name: str, *, layers=4, steps=400, every=10, activation=None, lost=None, compute="fp16", config=None
) -> Path:
    """A finished run with a telemetry event every so many steps."""
    writer = RunWriter(root, name)
    settings = merged(CONFIG, {"run.name": name, "run.steps": steps, "precision.compute": compute, **(config or {})})
    writer.run_dir.write_inputs(settings, {"zero": 2}, ENVIRONMENT)
    writer.start(compute=compute)
    for step in range(1, steps + 1):
        writer.step(step)
        if step % every == 0:
            writer.event("telemetry", step, **telemetry(step, layers, activation=activation, lost=lost))
    return writer.end(steps).path
