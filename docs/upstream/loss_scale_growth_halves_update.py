"""FP16 with ZeRO-1, 2 and 3: on the step on which the loss scale grows, the gradient is divided by the new scale.

Where (DeepSpeed 0.19.8): `runtime/zero/stage_1_and_2.py`, `step`, line 3047: `_update_scale` runs before
`unscale_and_clip_grads`, which divides by `self.loss_scale`, line 3198. `runtime/zero/stage3.py`, `step`, line 2891
(through `_loss_scale_update_and_overflow_cleanup`, line 2826), then line 2981; and line 2897 divides the reported norm
by the new scale too. A gradient that is clipped hides it: the scale cancels.

Expected: SGD moves the masters by learning rate x gradient at every step. Got: half of it on every step on which the
scale grew, and half the norm reported by ZeRO-3.

Run: torchrun --standalone --nproc_per_node 2 docs/upstream/loss_scale_growth_halves_update.py

Printed (torch 2.13.0, gloo on a CPU):

    ZeRO-1 step 0, scale 256 -> 256: plain torch FP32 gradient 1.3349, applied 1.3352, reported norm 1.3352
    ZeRO-1 step 1, scale 256 -> 256: plain torch FP32 gradient 1.2903, applied 1.2904, reported norm 1.2904
    ZeRO-1 step 2, scale 256 -> 512: plain torch FP32 gradient 1.2484, applied 0.6243, reported norm 1.2486
    ZeRO-1 step 3, scale 512 -> 512: plain torch FP32 gradient 1.2287, applied 1.2287, reported norm 1.2287
    ZeRO-2 step 0, scale 256 -> 256: plain torch FP32 gradient 1.3349, applied 1.3352, reported norm 1.3352
    ZeRO-2 step 1, scale 256 -> 256: plain torch FP32 gradient 1.2903, applied 1.2904, reported norm 1.2904
    ZeRO-2 step 2, scale 256 -> 512: plain torch FP32 gradient 1.2484, applied 0.6243, reported norm 1.2486
    ZeRO-2 step 3, scale 512 -> 512: plain torch FP32 gradient 1.2287, applied 1.2287, reported norm 1.2287
    ZeRO-3 step 0, scale 256 -> 256: plain torch FP32 gradient 1.3349, applied 1.3352, reported norm 1.3352
    ZeRO-3 step 1, scale 256 -> 256: plain torch FP32 gradient 1.2903, applied 1.2904, reported norm 1.2904
    ZeRO-3 step 2, scale 256 -> 512: plain torch FP32 gradient 1.2484, applied 0.6243, reported norm 0.6243
    ZeRO-3 step 3, scale 512 -> 512: plain torch FP32 gradient 1.2287, applied 1.2287, reported norm 1.2287
    verdict: the defect is there
"""

import copy
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger, safe_get_full_fp32_param

logger.setLevel("ERROR")
# torch's FP16 kernels are right, only slow, on a CPU without FP16 instructions, which DeepSpeed refuses.
get_accelerator().is_fp16_supported = lambda: True
LR = 0.01


def norm_of(tensors: list[torch.Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(tensors))


def run(stage: int, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, part: slice) -> bool:
    config = {
        "train_micro_batch_size_per_gpu": len(x[part]),
        "gradient_clipping": 0.0,
        "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    reference, wrong = copy.deepcopy(model), False
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), config=config)
    for step in range(4):
        before = [safe_get_full_fp32_param(p).cpu().clone() for p in model.parameters()]
        for parameter, master in zip(reference.parameters(), before, strict=True):
            parameter.data, parameter.grad = master.clone(), None
        torch.nn.functional.mse_loss(reference(x), y).backward()  # the whole batch, FP32, at the same masters
        expected, scale = norm_of([p.grad for p in reference.parameters()]), engine.optimizer.loss_scale
        output = engine(x[part].to(engine.device).half()).float()
        engine.backward(torch.nn.functional.mse_loss(output, y[part].to(engine.device)))
        engine.step()
        after = [safe_get_full_fp32_param(p).cpu() for p in model.parameters()]
        got = norm_of([a - b for a, b in zip(after, before, strict=True)]) / LR
        if dist.get_rank() == 0:
            print(
                f"ZeRO-{stage} step {step}, scale {scale:.0f} -> {engine.optimizer.loss_scale:.0f}: plain torch FP32 "
                f"gradient {expected:.4f}, applied {got:.4f}, reported norm {engine.get_global_grad_norm():.4f}"
            )
        wrong |= abs(got / expected - 1) > 0.1 or abs(float(engine.get_global_grad_norm()) / expected - 1) > 0.1
    engine.destroy()
    return wrong


def main() -> bool:
    deepspeed.init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    x, y = torch.randn(4 * world, 16), torch.randn(4 * world, 1)
    part = slice(4 * rank, 4 * rank + 4)
    return sum(run(stage, copy.deepcopy(model), x, y, part) for stage in (1, 2, 3)) > 0


if __name__ == "__main__":
    defect = main()
    if torch.distributed.get_rank() == 0:
        print("verdict: the defect is there" if defect else "verdict: fixed")
    sys.exit(int(defect))
