"""torchao's default FP8 recipe: the gradient depends on how the batch is cut into micro-batches or ranks.

Where (torchao 0.18.0): `float8/config.py`, `round_scales_to_power_of_2` is off in the tensor-wise recipe (it is on in
the row-wise ones, https://github.com/pytorch/ao/pull/1670). A scale amax / 448 of each micro-batch shifts the grid that
its values are rounded to; a power of two shifts the exponents alone.

Expected: cutting a batch in four changes its summed gradient by FP32's rounding.

Needs torchao (`pip install --no-deps torchao==0.18.0`), which Mantissa does not.
Run: python docs/upstream/fp8_tensorwise_depends_on_cut.py

Printed (torch 2.13.0, torchao 0.18.0, emulated on a CPU):

    no FP8: cutting the batch in 4 changes the gradient by 1.4e-07
    tensor-wise, the default: by 8.1e-02; FP8 itself is 7.5e-02 off
    tensor-wise, scales that are powers of two: by 1.1e-09; FP8 itself is 7.1e-02 off
    row-wise: by 2.0e-09; FP8 itself is 5.7e-02 off
    verdict: the defect is there
"""

import sys
from dataclasses import replace

import torch

try:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
except ImportError:
    sys.exit("needs torchao: pip install --no-deps torchao==0.18.0")


def gradient(config: Float8LinearConfig | None, cut: int) -> torch.Tensor:
    """The gradient of the first of two layers, for 64 rows in `cut` micro-batches."""
    torch.manual_seed(1)
    layers = torch.nn.Linear(64, 64, bias=False), torch.nn.Tanh(), torch.nn.Linear(64, 64, bias=False)
    model = torch.nn.Sequential(*layers)
    if config is not None:
        convert_to_float8_training(model, config=config)
    for part in torch.randn(64, 64).chunk(cut):
        model(part).square().sum().backward()
    return model[0].weight.grad


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


exact = gradient(None, 1)
print(f"no FP8: cutting the batch in 4 changes the gradient by {off(gradient(None, 4), exact):.1e}")
changes = {}
for name, config in {
    "tensor-wise, the default": Float8LinearConfig(emulate=True),
    "tensor-wise, scales that are powers of two": Float8LinearConfig(emulate=True, round_scales_to_power_of_2=True),
    "row-wise": replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True),
}.items():
    whole = gradient(config, 1)
    changes[name] = off(gradient(config, 4), whole)
    print(f"{name}: by {changes[name]:.1e}; FP8 itself is {off(whole, exact):.1e} off")
found = changes["tensor-wise, the default"] > 1e-3
print("verdict: the defect is there" if found else "verdict: fixed")
sys.exit(int(found))
