"""ZeRO-1 and 2 with an offloaded optimizer, 16 bits and FP32 accumulation: a skipped step's gradients stay.

Where (DeepSpeed 0.19.8): `runtime/zero/stage_1_and_2.py`, `step`, line 3056: after an overflow `averaged_gradients` are
cleared only where the optimizer is not offloaded. FP32 accumulation (`grad_accum_dtype: fp32`, `_use_compact_grad_
partition_buffer`, line 1259) adds the gradients of the next step to them, so that after one inf none is finite again.

Expected: of eight steps with the first one's gradient inf, seven are applied. Got with the optimizer offloaded: none.

Run: torchrun --standalone --nproc_per_node 1 docs/upstream/offload_keeps_skipped_gradients.py

Printed (torch 2.13.0, gloo on a CPU):

    ZeRO-1, optimizer offloaded to none: 7 of 7 finite steps applied
    ZeRO-1, optimizer offloaded to cpu: 0 of 7 finite steps applied
    ZeRO-2, optimizer offloaded to none: 7 of 7 finite steps applied
    ZeRO-2, optimizer offloaded to cpu: 0 of 7 finite steps applied
    ZeRO-3, optimizer offloaded to none: 7 of 7 finite steps applied
    ZeRO-3, optimizer offloaded to cpu: 7 of 7 finite steps applied
    verdict: the defect is there
"""

import sys

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

logger.setLevel("ERROR")
# torch's FP16 kernels are right, only slow, on a CPU without FP16 instructions, which DeepSpeed refuses.
get_accelerator().is_fp16_supported = lambda: True


def applied_steps(stage: int, device: str) -> int:
    """The steps applied of eight, the first of which has a gradient of inf."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "data_types": {"grad_accum_dtype": "fp32"},
        "fp16": {"enabled": True, "loss_scale": 16.0},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": device}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    model = torch.nn.Linear(8, 1, bias=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    applied = 0
    for step in range(8):
        factor = 60000.0 if step == 0 else 1.0  # times 16 it is above what FP16 holds
        engine.backward(engine(torch.ones(1, 8, device=engine.device).half()).sum().float() * factor)
        engine.step()
        applied += engine.was_step_applied()
    engine.destroy()
    return applied


def main() -> bool:
    deepspeed.init_distributed()
    wrong = False
    for stage in (1, 2, 3):
        for device in ("none", "cpu"):
            found = applied_steps(stage, device)
            wrong |= found != 7
            print(f"ZeRO-{stage}, optimizer offloaded to {device}: {found} of 7 finite steps applied")
    return wrong


if __name__ == "__main__":
    defect = main()
    print("verdict: the defect is there" if defect else "verdict: fixed")
    sys.exit(int(defect))
