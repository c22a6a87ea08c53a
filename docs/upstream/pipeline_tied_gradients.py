"""PipelineModule with a tied layer: its gradient is not reduced in FP16, and counts twice at ZeRO-0.

Where (DeepSpeed 0.19.8): `runtime/pipe/engine.py:283`, `_exec_reduce_tied_grads` reads `weight.grad`; where gradients
are accumulated in another dtype than the model's (FP16 with `grad_accum_dtype: fp32`, ZeRO-1) they are in
`weight.grad_accum` and `weight.grad` is None, which is skipped: the two copies part. BF16 has a path of its own
(`_hp_grad`). In FP32 without ZeRO the norm that clips (`engine.py`, `clip_fp32_gradients`) counts the tied weight on
both stages.

Expected: both stages hold the same tied weight, and what plain torch gives.

Run: torchrun --standalone --nproc_per_node 2 docs/upstream/pipeline_tied_gradients.py

Printed (torch 2.13.0, gloo on a CPU):

    ZeRO-0 fp32, accumulated in fp32, clipping 0.0: the copies differ by 0.0e+00, update off by 0.0%
    ZeRO-0 fp32, accumulated in fp32, clipping 0.01: the copies differ by 0.0e+00, update off by 7.3%  <--
    ZeRO-1 fp32, accumulated in fp32, clipping 0.01: the copies differ by 0.0e+00, update off by 0.0%
    ZeRO-1 bf16, accumulated in fp32, clipping 0.0: the copies differ by 0.0e+00, update off by 0.4%
    ZeRO-1 fp16, accumulated in fp16, clipping 0.0: the copies differ by 0.0e+00, update off by 0.0%
    ZeRO-1 fp16, accumulated in fp32, clipping 0.0: the copies differ by 9.0e-01, update off by 33.8%  <--
    verdict: the defect is there
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import logger
from torch.nn import functional as F

logger.setLevel("ERROR")
get_accelerator().is_fp16_supported = lambda: True


class Embed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 12 * 8).view(12, 8).half().float())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class Middle(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-0.5, 0.5, 64).view(8, 8).half().float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.weight)


def head(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x @ module.weight.t()


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


IDS = torch.arange(24).view(2, 12) % 12


def expected(clip: float) -> torch.Tensor:
    embed, first, second = Embed(), Middle(), Middle()
    loss(head(embed, second(first(embed(IDS)))), IDS.flip(1)).backward()
    if clip:
        torch.nn.utils.clip_grad_norm_([embed.weight, first.weight, second.weight], clip)
    return embed.weight.detach() - embed.weight.grad


def trained(stage: int, dtype: str, accumulate: str, clip: float) -> list[torch.Tensor]:
    module = PipelineModule(
        layers=[
            TiedLayerSpec("e", Embed, tied_weight_attr="weight"),
            LayerSpec(Middle),
            LayerSpec(Middle),
            TiedLayerSpec("e", Embed, forward_fn=head, tied_weight_attr="weight"),
        ],
        num_stages=2,
        loss_fn=loss,
        partition_method="uniform",
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": clip,
        "data_types": {"grad_accum_dtype": accumulate},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True} | ({"initial_scale_power": 4} if dtype == "fp16" else {})
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=torch.optim.SGD(module.parameters(), lr=1.0), config=config
    )
    engine.train_batch(iter([(IDS, IDS.flip(1).contiguous())]))
    weight = next(p for n, p in engine.module.named_parameters() if "tied" in n or p.shape == (12, 8))
    both = [torch.empty(12, 8) for _ in range(2)]
    dist.all_gather(both, weight.detach().float().contiguous())
    return both


def main() -> int:
    deepspeed.init_distributed(dist_backend="gloo")
    wrong = False
    for stage, dtype, accumulate, clip in (
        (0, "fp32", "fp32", 0.0),
        (0, "fp32", "fp32", 0.01),
        (1, "fp32", "fp32", 0.01),
        (1, "bf16", "fp32", 0.0),
        (1, "fp16", "fp16", 0.0),
        (1, "fp16", "fp32", 0.0),
    ):
        both = trained(stage, dtype, accumulate, clip)
        apart = float((both[0] - both[1]).abs().max())
        want = expected(clip)
        off = float((both[0] - want).norm() / (want - Embed().weight).norm())
        bad = apart > 1e-3 or off > (0.1 if dtype == "bf16" else 0.02)
        wrong |= bad
        if dist.get_rank() == 0:
            what = f"ZeRO-{stage} {dtype}, accumulated in {accumulate}, clipping {clip}"
            print(f"{what}: the copies differ by {apart:.1e}, update off by {off:.1%}{'  <--' if bad else ''}")
    if dist.get_rank() == 0:
        print("verdict: the defect is there" if wrong else "verdict: fixed")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
