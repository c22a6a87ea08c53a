"""FP32 without ZeRO: no gradient norm is reported, and one infinite gradient turns every weight into nan.

Where (DeepSpeed 0.19.8): `runtime/engine.py`, `_take_model_step`, lines 3505-3522: `clip_fp32_gradients` drops the norm
that `clip_grad_norm_` returns, nothing looks at it, and `_global_grad_norm` is only copied from ZeRO's and the
half-precision optimizers. Clipping by an infinite norm multiplies inf by 0.

Expected, as at ZeRO-1, 2 and 3 in the same configuration: a norm, and a step that is refused when it is not finite
(`was_step_applied()` False, weights unchanged). Got at ZeRO-0: None, nan weights, `was_step_applied()` True.

Run: torchrun --standalone --nproc_per_node 2 docs/upstream/fp32_zero0_not_guarded.py

Printed (torch 2.13.0, gloo on a CPU):

    ZeRO-0: norm None (plain torch 1.334931); after an inf gradient 577 nan weights of 577, was_step_applied() True
    ZeRO-1: norm 1.3349313735961914 (plain torch 1.334931); after an inf gradient 0 nan weights of 577,
        was_step_applied() False
    ZeRO-2: norm 1.3349313735961914 (plain torch 1.334931); after an inf gradient 0 nan weights of 577,
        was_step_applied() False
    ZeRO-3: norm 1.3349313620746457 (plain torch 1.334931); after an inf gradient 0 nan weights of 577,
        was_step_applied() False
    verdict: the defect is there
"""

import copy
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import logger, safe_get_full_fp32_param

logger.setLevel("ERROR")


def run(stage: int, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[float | None, int, bool]:
    """Reported norm of a healthy step; then, after one with an inf gradient: weights that are nan, step applied."""
    config = {
        "train_micro_batch_size_per_gpu": len(x),
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    x, y = x.to(engine.device), y.to(engine.device)
    norm = None
    for factor in (1.0, float("inf")):
        output = engine(x)
        if factor != 1.0:  # one entry of one gradient overflows
            output.register_hook(lambda grad: grad.index_fill(0, torch.tensor([0], device=grad.device), torch.inf))
        engine.backward(torch.nn.functional.mse_loss(output, y))
        engine.step()
        norm = engine.get_global_grad_norm() if factor == 1.0 else norm
    weights = [p if stage == 0 else safe_get_full_fp32_param(p) for p in model.parameters()]
    nans, applied = sum(int(p.detach().isnan().sum()) for p in weights), engine.was_step_applied()
    engine.destroy()
    return None if norm is None else float(norm), nans, applied


def main() -> bool:
    deepspeed.init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    x, y, reference = torch.randn(4 * world, 16), torch.randn(4 * world, 1), copy.deepcopy(model)
    torch.nn.functional.mse_loss(reference(x), y).backward()
    expected, wrong = float(torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])), False
    for stage in (0, 1, 2, 3):
        part = slice(4 * rank, 4 * rank + 4)
        norm, nans, applied = run(stage, copy.deepcopy(model), x[part], y[part])
        if rank == 0:
            print(
                f"ZeRO-{stage}: norm {norm} (plain torch {expected:.6f}); after an inf gradient {nans} nan weights of "
                f"{sum(p.numel() for p in reference.parameters())}, was_step_applied() {applied}"
            )
        wrong |= norm is None or nans > 0 or applied
    return wrong


if __name__ == "__main__":
    defect = main()
    if torch.distributed.get_rank() == 0:
        print("verdict: the defect is there" if defect else "verdict: fixed")
    sys.exit(int(defect))
