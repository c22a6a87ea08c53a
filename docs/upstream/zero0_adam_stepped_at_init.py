"""BF16 or FP16 without ZeRO: the optimizer is stepped once, on zero gradients, while DeepSpeed starts.

Where (DeepSpeed 0.19.8): `runtime/fp16/unfused_optimizer.py`, `initialize_optimizer_states`, line 425; line 130 of
`runtime/fp16/fused_optimizer.py` does the same. The ZeRO optimizers do not (DeepSpeed #5104).

Expected: before the first step Adam has counted no step and the masters are the initial weights; the first AdamW
update of a weight is about the learning rate. Got: Adam's count is 1, weight decay has been applied once (to the
masters, not to the weights of the first forward pass), and the first update is 0.744 of the learning rate, which is
0.1 / (1 - 0.9^2) / sqrt(0.001 / (1 - 0.999^2)).

Run: torchrun --standalone --nproc_per_node 1 docs/upstream/zero0_adam_stepped_at_init.py

Printed (torch 2.13.0, gloo on a CPU):

    before the first step: Adam's step count: expected 0, got 1
    before the first step: largest change of a master: expected 0, got 2.50e-04
    first AdamW update, median size: plain torch FP32 0.009999, DeepSpeed 0.007440
    verdict: the defect is there
"""

import copy
import sys

import deepspeed
import torch
from deepspeed.utils import logger

logger.setLevel("ERROR")
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 0.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 0},
}
ADAMW = {"lr": 0.01, "weight_decay": 0.1}


def main() -> bool:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).bfloat16().float()
    initial, reference = [p.detach().clone() for p in model.parameters()], copy.deepcopy(model)
    x, y = torch.randn(8, 16), torch.randn(8, 1)
    optimizer = torch.optim.AdamW(reference.parameters(), **ADAMW)
    torch.nn.functional.mse_loss(reference(x), y).backward()
    optimizer.step()
    expected = torch.cat([(p.detach() - q).flatten() for p, q in zip(reference.parameters(), initial, strict=True)])

    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), **ADAMW), config=CONFIG
    )
    masters = [p for group in engine.optimizer.fp32_groups for p in group]
    counted = max((float(state["step"]) for state in engine.optimizer.optimizer.state.values()), default=0.0)
    started = [p.detach().cpu().clone() for p in masters]
    decayed = max(float((p - q).abs().max()) for p, q in zip(started, initial, strict=True))
    print(f"before the first step: Adam's step count: expected 0, got {counted:.0f}")
    print(f"before the first step: largest change of a master: expected 0, got {decayed:.2e}")
    loss = torch.nn.functional.mse_loss(engine(x.to(engine.device).bfloat16()).float(), y.to(engine.device))
    engine.backward(loss)
    engine.step()
    got = torch.cat([(p.detach().cpu() - q).flatten() for p, q in zip(masters, started, strict=True)])
    typical_expected, typical = expected.abs().median(), got.abs().median()
    print(f"first AdamW update, median size: plain torch FP32 {typical_expected:.6f}, DeepSpeed {typical:.6f}")
    return counted != 0 or decayed != 0 or bool(typical < 0.9 * typical_expected)


if __name__ == "__main__":
    defect = main()
    if torch.distributed.get_rank() == 0:
        print("verdict: the defect is there" if defect else "verdict: fixed")
    sys.exit(int(defect))
