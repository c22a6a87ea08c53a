"""BF16 without ZeRO: micro-batches are summed in BF16, and FP32 accumulation cannot be asked for.

Where (DeepSpeed 0.19.8): `runtime/engine.py`, `_do_optimizer_sanity_check`, lines 2313-2323: BF16 without ZeRO gets
FP16_UnfusedOptimizer, whose micro-batches autograd adds up in the BF16 `.grad`; `data_types.grad_accum_dtype: fp32` is
refused with NotImplementedError, although BF16_Optimizer has an FP32 accumulator and ZeRO-1 uses it.

Expected: 512 equal micro-batches, each with gradient 1, have the mean gradient 1. Got: 0.5. Each adds 1/512, and
the BF16 sum no longer moves at 256/512. ZeRO-1 with FP32 accumulation is shown beside it.

Run: torchrun --standalone --nproc_per_node 1 docs/upstream/bf16_zero0_accumulates_in_bf16.py

Printed (torch 2.13.0, gloo on a CPU):

    mean gradient of 512 micro-batches: plain torch FP32 1.0000, BF16 ZeRO-0 0.5000
    BF16 ZeRO-1 with grad_accum_dtype fp32: 1.0000
    BF16 ZeRO-0 with grad_accum_dtype fp32: NotImplementedError: unsupported mix of model_dtype=torch.bfloat16 and
        grad_accum_dtype=torch.float32
    verdict: the defect is there
"""

import sys

import deepspeed
import torch
from deepspeed.utils import logger, safe_get_full_fp32_param

logger.setLevel("ERROR")
MICRO_BATCHES = 512


def mean_gradient(stage: int, data_types: dict[str, str]) -> float:
    """Update of a weight whose gradient is 1 in each of the micro-batches, SGD with a learning rate of 1."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "data_types": data_types,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config)
    x = torch.ones(1, 4, device=engine.device, dtype=torch.bfloat16)
    for _ in range(MICRO_BATCHES):
        engine.backward(engine(x).sum().float())
        engine.step()
    master = engine.optimizer.fp32_groups[0][0] if stage == 0 else safe_get_full_fp32_param(model.weight)
    return -float(master.detach().flatten()[0])


def main() -> bool:
    weight = torch.zeros(4, requires_grad=True)
    for _ in range(MICRO_BATCHES):
        (weight.sum() / MICRO_BATCHES).backward()
    expected, got = float(weight.grad[0]), mean_gradient(0, {})
    print(f"mean gradient of {MICRO_BATCHES} micro-batches: plain torch FP32 {expected:.4f}, BF16 ZeRO-0 {got:.4f}")
    print(f"BF16 ZeRO-1 with grad_accum_dtype fp32: {mean_gradient(1, {'grad_accum_dtype': 'fp32'}):.4f}")
    try:
        asked = mean_gradient(0, {"grad_accum_dtype": "fp32"})
        print(f"BF16 ZeRO-0 with grad_accum_dtype fp32: {asked:.4f}")
    except NotImplementedError as error:
        asked = 0.0
        print(f"BF16 ZeRO-0 with grad_accum_dtype fp32: NotImplementedError: {error}")
    return abs(got - expected) > 0.01 and abs(asked - expected) > 0.01


if __name__ == "__main__":
    defect = main()
    if torch.distributed.get_rank() == 0:
        print("verdict: the defect is there" if defect else "verdict: fixed")
    sys.exit(int(defect))
