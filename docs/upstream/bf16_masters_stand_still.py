"""`bf16_master_weights_and_grads` with `bf16_optimizer_states`: weights near 1 stop moving at usual learning rates.

Documented as a choice, not a defect; the script shows what it costs, and that 16 more bits or stochastic rounding
mend it. DeepSpeed 0.19.8 rounds the master to nearest; it has neither stochastic rounding nor Kahan summation.

Expected: 200 steps of Adam at 1e-4 move a weight of 1.0 by 0.02.

Run: python docs/upstream/bf16_masters_stand_still.py

Printed (torch 2.13.0, gloo on a CPU):

    FP32 masters: moved by 0.0195; BF16 masters: 0.0000
    verdict: the defect is there
"""

import os
import sys

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
import deepspeed
import torch
from deepspeed.utils import logger

logger.setLevel("ERROR")
deepspeed.init_distributed(dist_backend="gloo")


def moved(bf16: dict) -> float:
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True} | bf16,
            "zero_optimization": {"stage": 2},
            "gradient_clipping": 0.0,
        },
    )
    for _ in range(200):
        engine.backward(engine(torch.ones(1, 8).bfloat16()).float().sum())
        engine.step()
    return 1.0 - float(engine.module.weight.detach().float().mean())


full = moved({})
lean = moved({"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True})
print(f"FP32 masters: moved by {full:.4f}; BF16 masters: {lean:.4f}")
print("verdict: the defect is there" if lean < 0.5 * full else "verdict: fixed")
sys.exit(int(lean < 0.5 * full))
