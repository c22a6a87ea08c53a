"""FP16 with ZeRO-1, 2 and 3: an overflow at the smallest loss scale raises a bare Exception that names nothing.

Where (DeepSpeed 0.19.8): `runtime/fp16/loss_scaler.py`, `DynamicLossScaler.update_scale`, line 258. The switch
`raise_error_at_min_scale` exists, but no key of the config sets it.

Expected: an exception that can be told from others and that says which parameter is not finite, or, as without ZeRO and
as with torch.amp.GradScaler, a skipped step. Got at ZeRO-1, 2 and 3: `Exception`; the same config goes on at ZeRO-0.

Run: torchrun --standalone --nproc_per_node 1 docs/upstream/loss_scale_minimum_raises.py

Printed (torch 2.13.0, gloo on a CPU):

    ZeRO-0: step skipped
    ZeRO-1: Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.
    ZeRO-2: Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.
    ZeRO-3: Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.
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


def overflow_at_minimum(stage: int) -> Exception | None:
    """The error of two steps whose gradient is inf, with the scale already at `min_loss_scale`."""
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "fp16": {"enabled": True, "initial_scale_power": 0, "min_loss_scale": 1, "hysteresis": 1},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    model = torch.nn.Linear(16, 1)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), config=config
    )
    try:
        for _ in range(2):
            engine.backward(engine(torch.ones(8, 16, device=engine.device).half()).float().sum() * 1e6)
            engine.step()
    except Exception as error:
        return error
    finally:
        engine.destroy()
    return None


def main() -> bool:
    torch.manual_seed(0)
    wrong = False
    for stage in (0, 1, 2, 3):
        error = overflow_at_minimum(stage)
        print(f"ZeRO-{stage}: " + ("step skipped" if error is None else f"{type(error).__name__}: {error}"))
        wrong |= type(error) is Exception
    return wrong


if __name__ == "__main__":
    defect = main()
    if torch.distributed.get_rank() == 0:
        print("verdict: the defect is there" if defect else "verdict: fixed")
    sys.exit(int(defect))
