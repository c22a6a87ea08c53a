"""FP16 without ZeRO: the loss is never scaled, the gradients are divided by the loss scale all the same.

Where (DeepSpeed 0.19.8): `runtime/engine.py`, `DeepSpeedEngine.backward`, line 3417: the loss is scaled only if the
optimizer is a `ZeROOptimizer`, which FP16_UnfusedOptimizer (and FP16_Optimizer) is not;
`runtime/fp16/unfused_optimizer.py`, `unscale_and_clip_grads`, line 256, divides by the scale all the same. The engine
never calls `FP16_UnfusedOptimizer.backward`, line 260, which would scale.

Expected: SGD with a learning rate of 1 moves the masters by the gradient. Got: by the gradient / 65536.

Run: torchrun --standalone --nproc_per_node 1 docs/upstream/fp16_zero0_loss_not_scaled.py

Printed (torch 2.13.0, gloo on a CPU):

    norm of the first SGD update: plain torch FP32 1.334931, DeepSpeed FP16 ZeRO-0 2.038e-05
    ratio 65503, loss scale 65536
    verdict: the defect is there
"""

import copy
import importlib
import sys

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

logger.setLevel("ERROR")
# Else the first run compiles an op for a minute that has nothing to do with this.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
# torch's FP16 kernels are right, only slow, on a CPU without FP16 instructions, which DeepSpeed refuses.
get_accelerator().is_fp16_supported = lambda: True
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 0.0,
    "fp16": {"enabled": True, "initial_scale_power": 16},
    "zero_optimization": {"stage": 0},
}


def main() -> bool:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    reference = copy.deepcopy(model)
    x, y = torch.randn(8, 16), torch.randn(8, 1)
    torch.nn.functional.mse_loss(reference(x), y).backward()
    expected = float(torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()]))

    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=CONFIG)
    masters = [p for group in engine.optimizer.fp32_groups for p in group]
    before = [p.detach().clone() for p in masters]
    x, y = x.to(engine.device), y.to(engine.device)
    engine.backward(torch.nn.functional.mse_loss(engine(x.half()).float(), y))
    engine.step()
    got = float(torch.nn.utils.get_total_norm([p.detach() - q for p, q in zip(masters, before, strict=True)]))
    print(f"norm of the first SGD update: plain torch FP32 {expected:.6f}, DeepSpeed FP16 ZeRO-0 {got:.3e}")
    print(f"ratio {expected / got:.0f}, loss scale {engine.optimizer.loss_scale:.0f}")
    return abs(got / expected - 1) > 0.01


if __name__ == "__main__":
    defect = main()
    if torch.distributed.get_rank() == 0:
        print("verdict: the defect is there" if defect else "verdict: fixed")
    sys.exit(int(defect))
