"""Programs that the doctor runs on each machine with the job's Python; they import torch, which the doctor does not.

Each receives a JSON object as its argument and prints one after "DOCTOR ".
"""

DEVICE = """
import json, sys, time
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.all_ops import ALL_OPS

given = json.loads(sys.argv[1])
accelerator = get_accelerator()
name = accelerator.device_name()
device = torch.device(name)
answer = {
    "torch": torch.__version__,
    "device": name,
    "devices": torch.cuda.device_count() if name == "cuda" else 0,
    "supported": {"bf16": bool(accelerator.is_bf16_supported()), "fp16": bool(accelerator.is_fp16_supported())},
    "matmul": {},
    "ops": {},
}
generator = torch.Generator().manual_seed(0)
left, right = (torch.randn(512, 512, generator=generator, dtype=torch.float64) for _ in range(2))
exact = left @ right
for kind, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
    worst, seconds, error = 0.0, None, None
    try:
        for index in range(max(1, answer["devices"])):
            there = torch.device(name, index) if name == "cuda" else device
            a, b = left.to(there, dtype), right.to(there, dtype)
            (a @ b).sum().item()
            began = time.perf_counter()
            product = a @ b
            if name == "cuda":
                torch.cuda.synchronize(there)
            seconds = max(seconds or 0.0, time.perf_counter() - began)
            off = (product.cpu().double() - exact).norm() / exact.norm()
            worst = max(worst, float(off)) if torch.isfinite(off) else float("inf")
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
    answer["matmul"][kind] = {"error": error, "off": str(worst), "seconds": seconds}
for op in given["ops"]:
    builder = ALL_OPS.get(op)
    try:
        answer["ops"][op] = bool(builder is not None and builder.is_compatible(verbose=False))
    except Exception as problem:
        answer["ops"][op] = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
print("DOCTOR " + json.dumps(answer), flush=True)
"""
"""Compares 512 x 512 matmuls with FP64 and checks ops. given: `ops`, names of DeepSpeed's op builders."""

ALL_REDUCE = """
import json, os, socket, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist

given = json.loads(sys.argv[1])
cuda = torch.cuda.is_available() and torch.cuda.device_count() > 0
rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
device = torch.device("cuda", local) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=given["seconds"]))
length = max(world, given["bytes"] // 4)
wrong, times = 0, []
for turn in range(4):
    values = torch.full((length,), float(rank + 1 + turn), device=device)
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(values)
    if cuda:
        torch.cuda.synchronize()
    times.append(time.perf_counter() - began)
    wrong += int((values != world * (world + 1) / 2 + world * turn).sum())
slowest = torch.tensor(times[1:], dtype=torch.float64, device=device)
dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
total = torch.tensor([float(wrong)], device=device)
dist.all_reduce(total)
if rank == 0:
    answer = {"seconds": sorted(slowest.tolist())[1], "bytes": 4 * length, "world": world, "wrong": int(total.item())}
    answer["backend"] = dist.get_backend()
    print("DOCTOR " + json.dumps(answer), flush=True)
dist.destroy_process_group()
"""
"""Sums small integers, so that results are exact; takes the median of three all-reduces after a warm-up, each timed on
its slowest rank. given: `bytes` of FP32 and `seconds` to wait."""

RUN = """
import json, sys

given = json.loads(sys.argv[1])
answer = {"key": None, "store": None, "parameters": None, "config": None}
from config.errors import UserError

if given["key"]:
    from training.checkpoint.key import Key

    try:
        Key.from_setting(given["key"])
    except UserError as error:
        answer["key"] = str(error)
if given["store"]:
    from training.checkpoint.store.store import Store

    try:
        Store(given["store"], given["storage_options"], attempts=3).require_usable()
    except UserError as error:
        answer["store"] = str(error)
from config.command_line import parse
from config.extras import require_extras
from config.launcher import as_launched
from config.resolved import resolve_run

try:
    config = resolve_run(parse(given["config"]), as_launched(given["processes"])).config
    require_extras(config)
except UserError as error:
    answer["config"] = str(error)
if given["count"] and not answer["config"] and config.model.architecture is not None:
    from dataclasses import replace
    from launch.plan.model import model_of
    from modeling.build import count_parameters

    shape = {"vocab_size": 32000, **config.model.config}  # a tokenizer, like a model of a name, may have to be fetched
    try:
        answer["parameters"] = count_parameters(model_of(replace(config, model=replace(config.model, config=shape))))
    except (UserError, OSError, ValueError):
        pass  # the check of offload is left out
print("DOCTOR " + json.dumps(answer), flush=True)
"""
"""Checks the run config. given: `config` (train.py's arguments) and `processes` of the job; `key` (setting of the
encryption key), `store` and `storage_options`, each null if unset; `count`: whether to count the model's parameters,
assuming a vocabulary of 32,000 if the config leaves it to the tokenizer."""
