"""Whether the DeepSpeed that is imported trains as plain torch does, by ZeRO stage, dtype, accumulation and offload.

For releases before the pinned one, whose defects are known by their threads; tools/audit/known.yaml names those that
this script measured. It trains a model of six blocks with matrices and biases for three AdamW steps on two ranks
(AdamW's eps is 0.1, so that an update follows the size of the gradient), and compares the FP32 masters with one process
of plain torch in FP32 on the whole batch, from the same rounded weights: "off" is their distance over how far the
reference moved, and the norm is that of the worst step, over the reference's.

Run: torchrun --standalone --nproc_per_node 2 docs/upstream/older/by_version.py

To run another release: pip install --no-deps --no-build-isolation --target /tmp/older deepspeed==0.18.2, then
PYTHONPATH=/tmp/older before the command.
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import logger, safe_get_full_fp32_param
from torch.utils.checkpoint import checkpoint

logger.setLevel("CRITICAL")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # not built: gloo reduces
BY_CALLER, TWICE = "loss divided by the caller", "a block twice a step, checkpointed reentrantly"
STEPS, WIDTH, ROWS = 3, 16, 128


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.matrix(x))


def build() -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Block() for _ in range(6)])
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def batch(step: int) -> torch.Tensor:
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return rows.bfloat16().float() * (1 + step)


def loss_of(model: torch.nn.Module, rows: torch.Tensor, twice: bool = False) -> torch.Tensor:
    loss = model(rows).float().square().mean()
    if twice:  # once more, behind reentrant activation checkpointing: another graph, so another gradient hook
        again = checkpoint(model, (rows * 0.5).requires_grad_(), use_reentrant=True)
        loss = loss + again.float().square().mean()
    return loss


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=0.1, weight_decay=0.0)


def reference(twice: bool) -> tuple[list[torch.Tensor], list[float]]:
    model = build()
    optimizer, norms = adamw(model), []
    for step in range(STEPS):
        loss_of(model, batch(step), twice).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()], norms


def trained(stage: int, dtype: str, accumulation: int, offload: bool, summed_in: str, how: str) -> tuple[list, list]:
    model, ranks, rank = build(), dist.get_world_size(), dist.get_rank()
    config = {
        "train_micro_batch_size_per_gpu": ROWS // ranks // accumulation,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "overlap_comm": False},
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if summed_in:
        config |= {"data_types": {"grad_accum_dtype": summed_in}, "communication_data_type": summed_in}
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
    given, norms = next(engine.module.parameters()).dtype, []
    for step in range(STEPS):
        own = batch(step)[rank * ROWS // ranks : (rank + 1) * ROWS // ranks]
        for rows in own.chunk(accumulation):
            loss = loss_of(engine, rows.to(given), how == TWICE)
            if how == BY_CALLER:
                engine.backward(loss / accumulation, scale_wrt_gas=False)
            else:
                engine.backward(loss)
            engine.step()
        norm = engine.get_global_grad_norm()
        norms.append(float(norm) if norm is not None else float("nan"))
    masters = [safe_get_full_fp32_param(parameter) for parameter in engine.module.parameters()]
    found = [
        parameter.detach().float() if master is None else master.float()
        for master, parameter in zip(masters, engine.module.parameters(), strict=True)
    ]
    engine.destroy()
    return found, norms


def main() -> int:
    deepspeed.init_distributed(dist_backend="gloo")
    start = [parameter.detach().clone() for parameter in build().parameters()]
    if dist.get_rank() == 0:
        print(f"DeepSpeed {deepspeed.__version__}, torch {torch.__version__}")
    cases = [(s, d, 4, o, "", "") for s in (2, 1, 0, 3) for d in ("bf16", "fp32") for o in (False, True)]
    cases += [(s, "bf16", 4, o, "fp32", "") for s in (1, 2, 3) for o in (False, True)]
    cases += [(s, "bf16", 4, False, "", BY_CALLER) for s in (2, 3)]
    cases += [(s, "bf16", 1, False, "", TWICE) for s in (1, 2, 3)]
    cases += [(2, "bf16", 64, False, summed_in, "") for summed_in in ("", "fp32")]
    for stage, dtype, accumulation, offload, summed_in, how in cases:
        if offload and not stage:
            continue
        expected, norms = reference(how == TWICE)
        moved = torch.cat([(a - b).flatten() for a, b in zip(expected, start, strict=True)]).norm()
        name = f"ZeRO-{stage} {dtype}, accumulation {accumulation}" + (", optimizer on the CPU" if offload else "")
        name += (f", summed and reduced in {summed_in}" if summed_in else "") + (f", {how}" if how else "")
        try:
            found, reported = trained(stage, dtype, accumulation, offload, summed_in, how)
            off = torch.cat([(a - b).flatten() for a, b in zip(found, expected, strict=True)]).norm() / moved
            ratios = [a / b for a, b in zip(reported, norms, strict=True)]
            norm = max(ratios, key=lambda ratio: (ratio != ratio, abs(ratio - 1)))
            text = f"masters off by {float(off):.1e}, norm {norm:.4f} of the reference's"
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"
        if dist.get_rank() == 0:
            print(f"{name}: {text}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
