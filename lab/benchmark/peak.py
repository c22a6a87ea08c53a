"""The matmul rate that this machine reaches, all processes of the job at once: the peak in MFU.

    torchrun --nproc_per_node 2 -m lab.benchmark.peak bf16 RESULT

Each process multiplies two square matrices repeatedly; its rate is that of the fastest of at least 20 products, and the
peak is the sum over processes. A data sheet's number is higher; use it with `--peak-tflops`.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from config.cli import is_rank_0
from precision.dtypes import DTYPES

SIZES = {"cpu": 1024, "cuda": 8192}
LEAST, SECONDS = 20, 1.0


def matmul_rate(dtype: torch.dtype, device: torch.device, size: int) -> float:
    """Rate of the fastest product of two (size, size) matrices [FLOP/s]."""
    left, right = torch.randn(2, size, size, device=device).to(dtype).unbind()
    fastest, count, started = float("inf"), 0, time.perf_counter()
    while count < LEAST or time.perf_counter() - started < SECONDS:
        begun = time.perf_counter()
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest, count = min(fastest, time.perf_counter() - begun), count + 1
    return 2.0 * size**3 / fastest


def main(arguments: Sequence[str]) -> None:
    """Measure, sum over processes, write."""
    compute, target = arguments
    on_cuda = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if on_cuda else "cpu")
    size = SIZES[device.type]
    if "MASTER_PORT" in os.environ:
        dist.init_process_group("gloo")
        dist.barrier()  # all at once, as in training
    rate = matmul_rate(DTYPES[compute], device, size)
    total = torch.tensor([rate], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    if is_rank_0():
        how = f"measured: {compute} matmuls of {size} x {size} in all processes at once"
        Path(target).write_text(json.dumps({"flops": float(total), "how": how}) + "\n", encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
