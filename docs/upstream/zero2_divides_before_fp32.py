"""ZeRO-2 with `reduce_scatter`: the division by the number of ranks happens in FP16 although the reduction is FP32.

Where (DeepSpeed 0.19.8): `runtime/zero/stage_1_and_2.py`, `average_tensor`, line 1688: `tensor.div_(world size)` on the
16-bit bucket; `communication_data_type` is applied later, in `allreduce_bucket`, line 2377. Without `reduce_scatter`
(`gradient_reduction_w_predivide`, line 1494) and in ZeRO-3 (line 1871) the cast comes first.

Expected, with `communication_data_type: fp32`: the mean over two ranks of the gradient 2^-24, the smallest that FP16
holds, is 2^-24. Got with `reduce_scatter`: 0, because 2^-25 rounds to 0.

Run: torchrun --standalone --nproc_per_node 2 docs/upstream/zero2_divides_before_fp32.py

Printed (torch 2.13.0, gloo on a CPU):

    {'stage': 1}: mean gradient: plain torch FP32 5.960e-08, DeepSpeed 5.960e-08
    {'stage': 2, 'reduce_scatter': False}: mean gradient: plain torch FP32 5.960e-08, DeepSpeed 5.960e-08
    {'stage': 2, 'reduce_scatter': True}: mean gradient: plain torch FP32 5.960e-08, DeepSpeed 0.000e+00
    {'stage': 3}: mean gradient: plain torch FP32 5.960e-08, DeepSpeed 5.960e-08
    verdict: the defect is there
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger, safe_get_full_fp32_param

logger.setLevel("ERROR")
# torch's FP16 kernels are right, only slow, on a CPU without FP16 instructions, which DeepSpeed refuses.
get_accelerator().is_fp16_supported = lambda: True


def mean_gradient(zero: dict[str, object]) -> float:
    """Update of a weight whose gradient is 2^-24 on every rank, SGD with a learning rate of 1."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "fp16": {"enabled": True, "loss_scale": 1.0},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config)
    engine.backward(engine(torch.full((1, 8), 2.0**-24, device=engine.device).half()).sum().float())
    engine.step()
    update = abs(float(safe_get_full_fp32_param(model.weight).flatten()[0]))
    engine.destroy()
    return update


def main() -> bool:
    deepspeed.init_distributed()
    weight = torch.zeros(8, requires_grad=True)
    (weight * 2.0**-24).sum().backward()
    expected, wrong = float(weight.grad[0]), False
    for zero in (
        {"stage": 1},
        {"stage": 2, "reduce_scatter": False},
        {"stage": 2, "reduce_scatter": True},
        {"stage": 3},
    ):
        got = mean_gradient(zero)
        wrong |= got != expected
        if dist.get_rank() == 0:
            print(f"{zero}: mean gradient: plain torch FP32 {expected:.3e}, DeepSpeed {got:.3e}")
    return wrong


if __name__ == "__main__":
    defect = main()
    if torch.distributed.get_rank() == 0:
        print("verdict: the defect is there" if defect else "verdict: fixed")
    sys.exit(int(defect))
