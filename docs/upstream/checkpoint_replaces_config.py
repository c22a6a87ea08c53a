"""Loading a checkpoint replaces `gradient_clipping` and the `fp16` policy of the configuration by the saved run's.

Where (DeepSpeed 0.19.8): `runtime/zero/stage_1_and_2.py`, `_load_global_state`, lines 3668-3675, and
`runtime/zero/stage3.py`, lines 3542 and 3761: the pickled DynamicLossScaler, its policy included, takes the place of
the configured one; ZeRO-1 and 2 also take `clip_grad` from the checkpoint.

Expected: the state (scale, counters) of the saved run under the configured policy, and the configured clipping.
Got: the saved run's policy; its clipping too at ZeRO-1 and 2.

Run: torchrun --standalone --nproc_per_node 1 docs/upstream/checkpoint_replaces_config.py

Printed (torch 2.13.0, gloo on a CPU):

    ZeRO-1: loss_scale_window: configured 500, got 50; min_loss_scale: configured 8, got 1; gradient_clipping:
        configured 0.1, norm of the update 1.0000
    ZeRO-2: loss_scale_window: configured 500, got 50; min_loss_scale: configured 8, got 1; gradient_clipping:
        configured 0.1, norm of the update 1.0000
    ZeRO-3: loss_scale_window: configured 500, got 50; min_loss_scale: configured 8, got 1; gradient_clipping:
        configured 0.1, norm of the update 0.1000
    verdict: the defect is there
"""

import sys
import tempfile

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger, safe_get_full_fp32_param

logger.setLevel("ERROR")
# torch's FP16 kernels are right, only slow, on a CPU without FP16 instructions, which DeepSpeed refuses.
get_accelerator().is_fp16_supported = lambda: True


def build(stage: int, clipping: float, fp16: dict[str, int]) -> deepspeed.DeepSpeedEngine:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": clipping,
        "fp16": {"enabled": True, "initial_scale_power": 4, **fp16},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    return deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config)[0]


def norm_of_update(engine: deepspeed.DeepSpeedEngine) -> float:
    """Norm by which one step at learning rate 1 moves the masters; far more than the clipping without it."""
    before = [safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]
    engine.backward(engine(torch.ones(8, 16, device=engine.device).half()).float().sum())
    engine.step()
    after = [safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    return float(torch.nn.utils.get_total_norm([a - b for a, b in zip(after, before, strict=True)]))


def main() -> bool:
    wrong = False
    for stage in (1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            saved = build(stage, 1.0, {"loss_scale_window": 50, "min_loss_scale": 1})
            norm_of_update(saved)
            saved.save_checkpoint(folder, tag="saved")
            saved.destroy()
            engine = build(stage, 0.1, {"loss_scale_window": 500, "min_loss_scale": 8})
            engine.load_checkpoint(folder, tag="saved")
        scaler, update = engine.optimizer.loss_scaler, norm_of_update(engine)
        print(
            f"ZeRO-{stage}: loss_scale_window: configured 500, got {scaler.scale_window}; "
            f"min_loss_scale: configured 8, got {scaler.min_scale}; "
            f"gradient_clipping: configured 0.1, norm of the update {update:.4f}"
        )
        wrong |= scaler.scale_window != 500 or scaler.min_scale != 8 or abs(update - 0.1) > 0.001
        engine.destroy()
    return wrong


if __name__ == "__main__":
    defect = main()
    if torch.distributed.get_rank() == 0:
        print("verdict: the defect is there" if defect else "verdict: fixed")
    sys.exit(int(defect))
