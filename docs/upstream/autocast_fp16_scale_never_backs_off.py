"""`torch_autocast` float16 with ZeRO-1, 2, 3: an overflow does not lower the scale, so that every step is skipped.

Where (DeepSpeed 0.19.8): `runtime/zero/stage_1_and_2.py`, `step`, line 3050: on an overflow it returns before
`_optimizer_step`, line 2978, the only place where the GradScaler's `update()` is called. `runtime/zero/stage3.py`,
`step`, line 2891, likewise.

Expected, as with torch.autocast and torch.amp.GradScaler: some steps are skipped while the scale is halved, then the
model trains. Got: the scale stays at 65536 and no step is ever applied.

Run: torchrun --standalone --nproc_per_node 1 docs/upstream/autocast_fp16_scale_never_backs_off.py

Printed (torch 2.13.0, gloo on a CPU):

    plain torch: 7 of 12 steps applied, scale at the end 2048
    DeepSpeed ZeRO-1: 0 of 12 steps applied, scale at the end 65536
    DeepSpeed ZeRO-2: 0 of 12 steps applied, scale at the end 65536
    DeepSpeed ZeRO-3: 0 of 12 steps applied, scale at the end 65536
    verdict: the defect is there
"""

import copy
import sys

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

logger.setLevel("ERROR")
# torch's FP16 kernels are right, only slow, on a CPU without FP16 instructions, which DeepSpeed refuses.
get_accelerator().is_fp16_supported = lambda: True
STEPS, LR = 12, 1e-4


def loss_of(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 64 * torch.nn.functional.mse_loss(output.float(), y)  # its gradient times 65536 is beyond FP16


def plain_torch(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[int, float]:
    """Steps applied, last scale."""
    optimizer, scaler, applied = torch.optim.SGD(model.parameters(), lr=LR), torch.amp.GradScaler(x.device.type), 0
    for _ in range(STEPS):
        optimizer.zero_grad()
        scale = scaler.get_scale()
        with torch.autocast(x.device.type, torch.float16):
            output = model(x)
        scaler.scale(loss_of(output, y)).backward()
        scaler.step(optimizer)
        scaler.update()
        applied += scaler.get_scale() >= scale  # it is lowered by a skip only
    return applied, scaler.get_scale()


def with_deepspeed(stage: int, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[int, float]:
    """Steps applied, last scale."""
    config = {
        "train_micro_batch_size_per_gpu": len(x),
        "torch_autocast": {"enabled": True, "dtype": "float16"},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), config=config)
    applied = 0
    for _ in range(STEPS):
        engine.backward(loss_of(engine(x), y))
        engine.step()
        applied += engine.was_step_applied()
    scale = engine.optimizer.torch_autocast_gradscaler.get_scale()
    engine.destroy()
    return applied, scale


def main() -> bool:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    device = torch.device(get_accelerator().current_device_name())
    x, y, wrong = torch.randn(8, 16, device=device), torch.randn(8, 1, device=device), False
    expected, scale = plain_torch(copy.deepcopy(model).to(device), x, y)
    print(f"plain torch: {expected} of {STEPS} steps applied, scale at the end {scale:.0f}")
    for stage in (1, 2, 3):
        got, scale = with_deepspeed(stage, copy.deepcopy(model), x, y)
        print(f"DeepSpeed ZeRO-{stage}: {got} of {STEPS} steps applied, scale at the end {scale:.0f}")
        wrong |= got == 0 < expected
    return wrong


if __name__ == "__main__":
    defect = main()
    if torch.distributed.get_rank() == 0:
        print("verdict: the defect is there" if defect else "verdict: fixed")
    sys.exit(int(defect))
