"""Measurements behind the items of the GPU check: run Mantissa's own tools as real jobs and read off their figures.

Every function takes a `Bench` and returns figures: name to number, string or list, or variant to a dict of those.
`losses` has the loss of every step, for comparison with another item's.
"""

import json
import math
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.gpu_check.bench import Bench, ItemFailed, newest_log
from launch.job import kill
from launch.plan.devices import DEVICES
from tracking.compare.surviving import read_events, surviving
from tracking.events import Event
from tracking.report.measures import peak_flops

Figures = dict[str, Any]
GIB = 2**30
WARM_UP = 3
"""[steps] Not timed."""
SHORT = (
    *("run.resume=never", "evaluate.every_steps=0", "checkpoint.every_steps=0", "checkpoint.at_end=false"),
    *("generate.tokens=0", "tracking.wandb=disabled", "telemetry.every_steps=0"),
)
"""Overrides that turn off everything but the training steps."""
POISONED = "model.layers.1.mlp.down_proj"
"""Module whose output the injected fault sets to NaN."""


# --- training


def demo(bench: Bench, recipe: str) -> Figures:
    """Train an unmodified recipe to the end."""
    # in FP16 the first 7 steps overflow
    size = ("run.steps=20", "schedule.warmup_steps=1", "evaluate.every_steps=20", "generate.tokens=4")
    return trained(bench.train("demo", bench.arguments(recipe, "tracking.wandb=disabled", *bench.either((), size))))


def steps(bench: Bench, *overrides: str, recipe: str = "demo", count: int = 20) -> Figures:
    """Train a few steps of a recipe."""
    return trained(bench.train("steps", short(bench, *overrides, recipe=recipe, count=count)))


def short(bench: Bench, *overrides: str, recipe: str = "demo", count: int = 20) -> list[str]:
    """Arguments to train.py for a few steps of a recipe."""
    return bench.arguments(recipe, *SHORT, f"run.steps={count}", "schedule.warmup_steps=2", *overrides)


def trained(events: Sequence[Event]) -> Figures:
    """Losses, throughput and peak memory of a run."""
    made = [event for event in events if event["event"] == "step"]
    found: Figures = {
        "losses": [event["loss"] for event in made],
        "first loss": made[0]["loss"],
        "last loss": made[-1]["loss"],
        "skipped steps": sum(not event["applied"] for event in made),
        "memory GiB": max(event["memory_bytes"] for event in made) / GIB,
    }
    if len(made) > WARM_UP + 1:
        tokens = made[-1]["tokens"] - made[WARM_UP - 1]["tokens"]
        found["tokens/s"] = tokens / sum(event["step_seconds"] for event in made[WARM_UP:])
    validation = [event["loss"] for event in events if event["event"] == "eval"]
    if validation:
        found["validation loss"] = validation[-1]
    found["attention"] = next(event.get("attention") for event in events if event["event"] == "run_start")
    kernels = [event["text"] for event in events if event["event"] == "note" and "Liger" in event["text"]]
    return found | ({"kernels": kernels[0]} if kernels else {})


def attributed(bench: Bench, *overrides: str) -> Figures:
    """Inject a NaN into one module's output and check which module the run reports."""
    fault = f"faults=[{{kind: nan_activation, step: 5, module: {POISONED}}}]"
    arguments = short(bench, fault, "guard.reactions=[skip, abort]", *overrides, count=8)
    events = bench.train("poisoned", arguments)
    found = [event for event in events if event["event"] == "nonfinite" and event["step"] == 5]
    if not found:
        raise ItemFailed("step 5 was poisoned, and no cause was recorded for it")
    first = found[0]
    later = [event["loss"] for event in events if event["event"] == "step" and event["step"] > 5]
    return {
        "cause": f"{first['kind']} in the {first['tensor']} of {first['module']}",
        "named the right module": first["module"] == POISONED,
        "steps after it are finite": all(map(math.isfinite, later)),
    }


def replayed(bench: Bench) -> Figures:
    """`attributed`, and whether replaying the faulty step reproduces it."""
    causes = attributed(bench)
    said = bench.tool("tools.replay", str(bench.folder / "runs/poisoned"), "--step", "5", codes=(0, 1, 3), leads=True)
    if "reproduced" not in said:
        raise ItemFailed(f"the replay gave no verdict: {said.strip().splitlines()[-1:]}")
    different = [line for line in said.splitlines() if "; recorded: " in line]
    return causes | {"reproduced": not different, **({"different": different[0]} if different else {})}


def resumed(bench: Bench) -> Figures:
    """Kill a run with SIGKILL, resume it, and compare it with an uninterrupted run."""
    count = bench.either(400, 120)
    saving = (f"checkpoint.every_steps={count // 10}", "run.resume=auto", "tracking.log_every_steps=50")
    arguments = short(bench, *saving, count=count)
    whole = _by_step(bench.train("undisturbed", arguments))
    killed_at = _kill_after_a_save(bench, arguments)
    events = bench.train("killed", arguments)
    again = [event for event in events if event["event"] == "run_start"][-1]
    if not again["resumed_from"]:
        raise ItemFailed("the killed run started anew instead of resuming")
    since = int(str(again["resumed_from"]).rpartition("step-")[2])
    mine = _by_step(surviving(events))
    if mine.keys() != whole.keys():
        raise ItemFailed(f"the resumed run has {len(mine)} steps, the undisturbed one {len(whole)}")
    before, after = ([step for step in whole if (step > since) is late] for late in (False, True))
    return {
        "killed at step": killed_at,
        "resumed from step": since,
        "steps after it": len(after),
        "bit-equal": all(mine[step] == whole[step] for step in after),
        "largest difference after it": _largest_difference(mine, whole, after),
        "and before it, of two runs": _largest_difference(mine, whole, before),
    }


def _kill_after_a_save(bench: Bench, arguments: Sequence[str]) -> int:
    """Start the run `killed`, kill it two steps after its first checkpoint, and return the step it reached."""
    path = bench.folder / "runs/killed/events.jsonl"
    job = bench.start("killed", arguments)
    try:
        while job.poll() is None:
            events = list(read_events(path)) if path.exists() else []
            saved = [event["step"] for event in events if event["event"] == "checkpoint"]
            reached = max((event["step"] for event in events if event["event"] == "step"), default=0)
            if saved and reached > saved[0] + 1:
                return int(reached)
            if bench.left < 1:
                raise subprocess.TimeoutExpired("train.py", bench.limit)
            time.sleep(0.02)
    finally:
        kill(job)
    raise ItemFailed("the run ended before it could be killed", bench.folder / "logs/killed.log")


def _by_step(events: Sequence[Event]) -> dict[int, tuple[float, float, str]]:
    return {
        event["step"]: (event["loss"], event["grad_norm"], event["sample_ids_sha256"])
        for event in events
        if event["event"] == "step"
    }


def _largest_difference(mine: Mapping[int, Any], whole: Mapping[int, Any], chosen: Sequence[int]) -> float:
    """Largest relative loss difference over the chosen steps."""
    return max((abs(mine[step][0] / whole[step][0] - 1) for step in chosen), default=0.0)


def exported(bench: Bench) -> Figures:
    """Export a checkpoint to Hugging Face format; the exporter compares every tensor with the masters."""
    bench.train("steps", short(bench, "checkpoint.at_end=true", count=5))
    out = bench.folder / "exported"
    checkpoint = bench.folder / "runs/steps/checkpoints/step-5"
    said = bench.tool("tools.export_hf", str(checkpoint), str(out), "--dtype", "bf16", leads=True)
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    return {"bytes": size, "said": next(line for line in said.splitlines() if "compared" in line)}


# --- numerics


def matrix(bench: Bench, text: str) -> Figures:
    """Run the precision-matrix cells whose name contains `text`."""
    folder = bench.folder / "matrix"
    options = ["--only", text, "--folder", str(folder), "--processes", str(bench.processes)]
    said = bench.tool("lab.matrix", *options, codes=(0, 3), leads=True)
    found = [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    measured = [cell for cell in found if cell["errors"]]
    figures: Figures = dict(Counter(cell["verdict"] for cell in found))
    for name in ("loss", "masters"):
        errors = (cell["errors"].get(name, 0.0) for cell in measured)
        figures[f"largest {name} error"] = max(errors, default=None)
    return figures | {"not as expected": [line for line in said.splitlines() if ", ZeRO-" in line]}


def analyzed(bench: Bench, *overrides: str) -> Figures:
    """Have `tools.analyze` propose a manifest; its gradient error beside that of uniform BF16 and FP16."""
    out = bench.folder / "manifest.json"
    counts = ["--steps", str(bench.either(10, 2)), "--held-out", "1", "--parity-steps", "0"]
    counts += ["--processes", str(bench.processes), "--most-regions", str(bench.either(64, 4))]
    arguments = bench.arguments("benchmark_1b", *SHORT, *overrides)
    bench.tool("tools.analyze", *counts, "--out", str(out), *arguments, codes=(0, 3), leads=True)
    path = out.with_suffix(".analysis.json")
    if not path.exists():
        raise ItemFailed("there is no analysis", bench.folder / "logs")
    found = _json(path)
    errors = {f"gradient error, {name}": check["error"] for name, check in found["validation"].items()}
    share = found["proposal"]["low_precision_share"]
    return {**errors, "FLOPs in 16 bits": share, "objection": found["objection"] or "none"}


def parity(bench: Bench, *overrides: str) -> Figures:
    """Run the parity gate: a run against its FP32 twin, plus single steps from the same masters."""
    report = bench.folder / "parity"
    arguments = bench.arguments("benchmark_1b", *overrides, "tracking.wandb=disabled", "evaluate.batches=2")
    arguments += ["parity.oracle_steps=0"]  # it computes on the CPU, in FP64
    options = ["--report", str(report), "--steps", str(bench.either(40, 4)), "--processes", str(bench.processes)]
    bench.tool("tools.parity", *options, *arguments, codes=(0, 3), leads=True)
    found = _json(report / "parity.json")
    checks = {check["name"]: check["measured"] for check in found["checks"]}
    bought = {f"{name} over FP32": each["ratio"] for name, each in found["bought"].items() if each["ratio"]}
    return {"verdict": found["verdict"], "failed": found["failed"], **checks, **bought}


# --- speed, memory, cost


def compared(bench: Bench, contestants: str, *overrides: str, count: int = 10) -> Figures:
    """Run each contestant of `lab.benchmark` once."""
    options = ["--contestants", contestants, "--rounds", "1", "--steps", str(bench.either(count, 3)), "--warm-up", "3"]
    options += bench.either((), ("--peak-tflops", "1"))
    arguments = bench.arguments("benchmark_1b", *overrides)
    return _reported(bench, "lab.benchmark", *options, *arguments, rows=lambda found: _contestants(found, bench))


def _reported(bench: Bench, module: str, *arguments: str, rows: Callable[[Any], Figures]) -> Figures:
    """Rows of the report that a benchmark writes; if a job fails or is killed, the rows written so far are kept."""
    name = module.rpartition(".")[2]
    out = bench.folder / name
    with bench.keeping(lambda: rows(_json(out / f"{name}.json"))):
        where = ("--processes", str(bench.processes), "--out", str(out))
        bench.tool(module, *where, *arguments, codes=(0, 3), leads=True)
        found = _json(out / f"{name}.json")
        if found.get("failed"):
            raise ItemFailed("; ".join(found["failed"].values()), newest_log(out))
    return rows(found)


def _contestants(found: Mapping[str, Any], bench: Bench) -> Figures:
    """Rows from benchmark.json. MFU is relative to the data sheet's dense 16-bit peak if the device is a known one."""
    rows: Figures = {name: f"not measured: {why}" for name, why in found["passed_over"].items()}
    rows |= dict.fromkeys(found["failed"], "failed")
    measured, sheet = found["peak"]["flops"], peak_flops(bench.device)
    for name, mine in found["contestants"].items():
        of_measured = mine["mfu"]
        peaks = {"MFU": of_measured}
        if sheet is not None:
            sheets = sheet * found["conditions"]["processes"]
            peaks = {"MFU": of_measured * measured / sheets, "of the matmul rate": of_measured}
        rows[name] = {
            "tokens/s": mine["tokens_per_second"]["median"],
            **peaks,
            "memory GiB": mine["memory_bytes"] / GIB,
            "first step after s": mine["first_step_seconds"]["median"],
            "last loss": mine["last_loss"],
            "loss difference": mine["loss_difference"],
            "trains the same": mine["trains_the_same"],
            **_over(found["baseline"], mine["ratio"]),
        }
    rate = f"{measured / 1e12:.1f} TFLOP/s, {found['peak']['how']}"
    if sheet is None:
        return rows | {"MFU is of": rate}
    return rows | {"MFU is of": f"{sheet / 1e12:.1f} TFLOP/s a device, its data sheet", "matmul rate": rate}


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _over(baseline: str, ratio: Mapping[str, Any] | None) -> Figures:
    if ratio is None:
        return {f"over {baseline}": "losses differ"}
    return {
        f"tokens/s over {baseline}": ratio["tokens_per_second"]["median"],
        f"memory over {baseline}": ratio["memory_bytes"],
    }


def guarded(bench: Bench, *overrides: str) -> Figures:
    """Time Mantissa's training step against a bare DeepSpeed loop's, alternating in one process."""
    found = _paired(bench, "lab.benchmark.overhead", "--pairs", str(bench.either(40, 3)), overrides=overrides)
    middle, low, high = found["median"]
    return {
        "tokens/s over a plain loop": middle,
        "95% of resamples": [low, high],
        "step ms": found["mantissa_seconds"] * 1e3,
        "plain step ms": found["bare_seconds"] * 1e3,
        "loss difference": found["loss_difference"],
    }


def by_stage(bench: Bench, *overrides: str) -> Figures:
    """Time what guarding adds to a step, stage by stage."""
    options = ["--by-stage", "--pairs", str(bench.either(10, 2)), "--steps", "2"]
    found = _paired(bench, "lab.benchmark.overhead", *options, overrides=(*overrides, "guard.spike_sigmas=6"))
    added = {name: found[name] for name in ("health", "guard", "record", "other")}
    named = {f"{name} ms": value for name, value in added.items()}
    return {"bare step ms": found["bare"], **named, "guarded over bare": 1 + sum(added.values()) / found["bare"]}


def extra(bench: Bench, of: str, *overrides: str, pairs: int = 20) -> Figures:
    """Time steps with and without one optional feature, alternating in one process."""
    options = ["--of", of, "--pairs", str(bench.either(pairs, 2)), "--steps", str(bench.either(16, 2))]
    found = _paired(bench, "lab.benchmark.overhead", *options, codes=(0, 3), overrides=overrides)
    share, low, high = found["cost"]  # of a block, as a share of one step
    return {
        "with over without": found["ratio"],
        "steps in a block": found["steps"],
        "cost, of one step": share,
        "95% of resamples": [low, high],
        "amortised": share / found["every"],
        "over steps": found["every"],
        "step ms": found["step_seconds"] * 1e3,
    }


def _paired(bench: Bench, module: str, *options: str, overrides: Sequence[str], codes: Sequence[int] = (0,)) -> Any:
    path = bench.folder / "paired.json"
    arguments = bench.arguments("benchmark_1b", "schedule.warmup_steps=1", *overrides)
    bench.tool(module, *options, "--json", str(path), *arguments, codes=codes)
    return _json(path)


def loss_of_logits(bench: Bench) -> Figures:
    """Time the loss of one micro-batch with all logits materialised and in chunks."""
    vocabulary, hidden, tokens = bench.either(("131072", "2048", "8192"), ("2048", "32", "64"))
    options = ["--vocabulary", vocabulary, "--hidden", hidden, "--tokens", tokens]
    options += ["--json", "--repeats", str(bench.either(5, 2))]
    with bench.keeping(lambda: _ways(bench)):
        bench.tool("lab.benchmark.loss", *options, codes=(0, 3), leads=True)
        rows = _ways(bench)
        failed = [f"{way} {row}" for way, row in rows.items() if isinstance(row, str)]
        if failed:
            raise ItemFailed("; ".join(failed))
    return rows


def _ways(bench: Bench) -> Figures:
    """The JSON rows that `lab.benchmark.loss` printed."""
    log = newest_log(bench.folder)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log else []
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    if not rows:
        raise ItemFailed("there are no rows")
    return {
        row["way"]: f"failed: {row['failed']}"
        if "failed" in row
        else {"ms": row["seconds"] * 1e3, "peak MiB": row["peak_bytes"] / 2**20, "loss": row["loss"]}
        for row in rows
    }


def largest(bench: Bench, depths: str, *overrides: str) -> Figures:
    """Train the 1B shape at increasing depths; each with the planner's prediction."""
    options = ["--layers", bench.either(depths, "1,2"), "--steps", str(bench.either(3, 2))]
    arguments = bench.arguments("benchmark_1b", *overrides)
    rows = bench.found = _reported(bench, "lab.benchmark.largest", *options, *arguments, rows=_depths)
    for name, row in rows.items():
        if name != "largest":
            depth = name.removesuffix(" layers")
            row |= predicted(bench, *arguments, f"model.config.num_hidden_layers={depth}")
    return rows


def depths_around(bench: Bench, planned: Mapping[int, float]) -> str:
    """The deepest model that certainly fits in device memory and the next one; every depth on a CPU.

    planned: [GiB] planned memory by depth, ascending.
    """
    depths = list(planned)
    if bench.device_bytes is not None:
        surely = sum(planned[depth] * GIB < 0.9 * bench.device_bytes for depth in depths)
        depths = depths[max(0, surely - 1) : surely + 1]
    return ",".join(map(str, depths))


def _depths(found: Mapping[str, Any]) -> Figures:
    """Rows from largest.json."""
    rows: Figures = {}
    for depth, row in found["depths"].items():
        measured = {name: row[name] / GIB for name in ("memory_bytes", "host_bytes") if row[name]}
        rows[f"{depth} layers"] = {
            "parameters": row["parameters"],
            "memory GiB": measured.get("memory_bytes"),
            "host GiB": measured.get("host_bytes"),
            **({"failed": row["failed"]} if row["failed"] else {"tokens/s": row["tokens_per_second"]}),
        }
    return rows | {"largest": found["largest"]}


def predicted(bench: Bench, *arguments: str) -> Figures:
    """Memory that `launch.plan` predicts for the same config; empty for a device it does not know."""
    words = re.findall(r"[a-z0-9]+", bench.device.lower())
    known = (*DEVICES, "cpu")
    fits = [name for name in known if all(any(word.startswith(part) for word in words) for part in name.split("-"))]
    if not fits:
        return {}
    device = max(fits, key=len)
    options = ["--json", "--gpus", str(bench.processes), "--device", device]
    said = bench.tool("launch.plan", *options, *arguments, codes=(0, 3), leads=True)
    memory = json.loads(said[said.index("{") :])["memory"]
    return {"planned GiB": memory["peak"] / GIB, "planned host GiB": sum(memory["host"].values()) / GIB}
