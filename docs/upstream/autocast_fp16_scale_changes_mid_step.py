"""`torch_autocast` float16 with ZeRO-1, 2, 3: the GradScaler is updated once per parameter group, amid a step.

Where (DeepSpeed 0.19.8): `runtime/zero/stage_1_and_2.py`, `_optimizer_step`, lines 2977-2978, called for each group by
`step`; `runtime/zero/stage3.py`, `_optimizer_step`, lines 1241-1242, called for each sub-group. When the scale grows
after one group, the groups after it are unscaled by a scale that their gradients never had.

Expected, as with one `scaler.update()` a step: growth after `growth_interval` steps, every group moved by learning rate
x gradient. Got: growth after `growth_interval / groups` steps, and half the update for the later groups of that step.
The interval, 2000 by default, is made 3 here to see it at once.

Run: torchrun --standalone --nproc_per_node 1 docs/upstream/autocast_fp16_scale_changes_mid_step.py

Printed (torch 2.13.0, gloo on a CPU):

    ZeRO-1 step 0, scale 65536 -> 65536, first group: plain torch FP32 gradient 1.0926, applied 1.0927
    ZeRO-1 step 0, scale 65536 -> 65536, second group: plain torch FP32 gradient 1.5085, applied 1.5085
    ZeRO-1 step 1, scale 65536 -> 131072, first group: plain torch FP32 gradient 1.0148, applied 1.0148
    ZeRO-1 step 1, scale 65536 -> 131072, second group: plain torch FP32 gradient 1.4080, applied 0.7040
    ZeRO-2 step 0, scale 65536 -> 65536, first group: plain torch FP32 gradient 1.0926, applied 1.0927
    ZeRO-2 step 0, scale 65536 -> 65536, second group: plain torch FP32 gradient 1.5085, applied 1.5085
    ZeRO-2 step 1, scale 65536 -> 131072, first group: plain torch FP32 gradient 1.0148, applied 1.0148
    ZeRO-2 step 1, scale 65536 -> 131072, second group: plain torch FP32 gradient 1.4080, applied 0.7040
    ZeRO-3 step 0, scale 65536 -> 65536, first group: plain torch FP32 gradient 1.0926, applied 1.0927
    ZeRO-3 step 0, scale 65536 -> 65536, second group: plain torch FP32 gradient 1.5085, applied 1.5085
    ZeRO-3 step 1, scale 65536 -> 131072, first group: plain torch FP32 gradient 1.0148, applied 1.0148
    ZeRO-3 step 1, scale 65536 -> 131072, second group: plain torch FP32 gradient 1.4080, applied 0.7040
    verdict: the defect is there
"""

import copy
import sys

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger, safe_get_full_fp32_param

logger.setLevel("ERROR")
# torch's FP16 kernels are right, only slow, on a CPU without FP16 instructions, which DeepSpeed refuses.
get_accelerator().is_fp16_supported = lambda: True
LR = 0.01


def run(stage: int, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> bool:
    config = {
        "train_micro_batch_size_per_gpu": len(x),
        "gradient_clipping": 0.0,
        "torch_autocast": {"enabled": True, "dtype": "float16"},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    reference, wrong = copy.deepcopy(model), False
    groups = [{"params": list(layer.parameters())} for layer in (model[0], model[2])]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(groups, lr=LR), config=config)
    scaler = engine.optimizer.torch_autocast_gradscaler
    scaler.set_growth_interval(3)
    for step in range(2):
        before = [safe_get_full_fp32_param(p).cpu().clone() for p in model.parameters()]
        for parameter, master in zip(reference.parameters(), before, strict=True):
            parameter.data, parameter.grad = master.clone(), None
        torch.nn.functional.mse_loss(reference(x), y).backward()
        engine.backward(torch.nn.functional.mse_loss(engine(x.to(engine.device)).float(), y.to(engine.device)))
        scale = scaler.get_scale()
        engine.step()
        moved = [a - safe_get_full_fp32_param(p).cpu() for a, p in zip(before, model.parameters(), strict=True)]
        gradients = [p.grad for p in reference.parameters()]
        for name, group in (("first", slice(0, 2)), ("second", slice(2, 3))):
            expected = float(torch.nn.utils.get_total_norm(gradients[group]))
            got = float(torch.nn.utils.get_total_norm(moved[group])) / LR
            print(
                f"ZeRO-{stage} step {step}, scale {scale:.0f} -> {scaler.get_scale():.0f}, {name} group: plain torch "
                f"FP32 gradient {expected:.4f}, applied {got:.4f}"
            )
            wrong |= abs(got / expected - 1) > 0.1
    engine.destroy()
    return wrong


def main() -> bool:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1, bias=False))
    x, y = torch.randn(8, 16), torch.randn(8, 1) / 4
    return sum(run(stage, copy.deepcopy(model), x, y) for stage in (1, 2, 3)) > 0


if __name__ == "__main__":
    defect = main()
    if torch.distributed.get_rank() == 0:
        print("verdict: the defect is there" if defect else "verdict: fixed")
    sys.exit(int(defect))
