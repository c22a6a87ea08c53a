"""`torch_autocast` float16 without ZeRO: a step that the GradScaler skipped is reported as applied.

Where (DeepSpeed 0.19.8): `runtime/engine.py`, `_take_model_step`, lines 3535-3538: `_step_applied` is read from
`optimizer.overflow`, which a plain torch optimizer does not have, so `skipped_steps` is not counted and the learning
rate schedule goes on.

Expected: `was_step_applied()` says whether the weights moved. Got: True for skipped steps.

Run: torchrun --standalone --nproc_per_node 1 docs/upstream/autocast_zero0_skip_reported_as_applied.py

Printed (torch 2.13.0, gloo on a CPU):

    steps that moved the weights 7 of 12, was_step_applied() 12
    steps that did not 5, engine.skipped_steps 0
    verdict: the defect is there
"""

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
    "torch_autocast": {"enabled": True, "dtype": "float16"},
    "zero_optimization": {"stage": 0},
}
STEPS = 12


def main() -> bool:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-4), config=CONFIG
    )
    x, y = torch.randn(8, 16, device=engine.device), torch.randn(8, 1, device=engine.device)
    moved = applied = 0
    for _ in range(STEPS):
        before = [p.detach().clone() for p in model.parameters()]
        # The gradient times 65536 is beyond FP16: the first steps overflow.
        engine.backward(64 * torch.nn.functional.mse_loss(engine(x).float(), y))
        engine.step()
        moved += any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        applied += engine.was_step_applied()
    print(f"steps that moved the weights {moved} of {STEPS}, was_step_applied() {applied}")
    print(f"steps that did not {STEPS - moved}, engine.skipped_steps {engine.skipped_steps}")
    return applied != moved or engine.skipped_steps != STEPS - moved


if __name__ == "__main__":
    defect = main()
    if torch.distributed.get_rank() == 0:
        print("verdict: the defect is there" if defect else "verdict: fixed")
    sys.exit(int(defect))
