"""Show the plan as tables in a terminal, with lines on what dominates memory and time."""

import shlex

from rich.text import Text

from config.optimizers import OPTIMIZERS
from config.schema import SAMPLING_TASKS
from config.task import CHUNKED_TASKS
from launch.plan.devices import GIB
from launch.plan.layout import Layout
from launch.plan.memory import checkpoint_bytes
from launch.plan.model import Shape
from launch.plan.plan import Option, Plan, communication_bound_from
from launch.plan.speed import traffic
from launch.plan.stages import words_at
from tracking import terminal
from tracking.pages.markdown import Table

_ITEM_NOTES = {
    "parameters": "the weights that the model computes with",
    "second copy": "of the parameters, divided by zero_hpz_partition_size",
    "loading": "the model in FP32, before it is rounded",
    "masters": "FP32 copies that the optimizer updates; split ones without their upper halves",
    "gradients": "summed over micro-batches in FP32",
    "updated parameters": "a rank's part in the compute dtype, on its way back to the device",
    "gradients in flight": "of the block whose backward pass runs, before they are reduced",
    "gathered parameters": "ZeRO-3: at most stage3_max_live_parameters at a time",
    "activations": "kept for the backward pass, and the block that is recomputed",
    "logits": "FP32 softmax over the vocabulary and its gradients, of all tokens or a chunk; docs/loss.md",
    "buckets": "on the way to the network",
    "step": "flattened gradients, or what the optimizer's rule makes besides",
    "teacher": "its weights; its logits are among the logits",
    "sampler": "copies of the weights on each rank: to sample from and for the self-gap, and for grpo.beta",
    "KV cache": "of the answers that are sampled at once (grpo.at_once); a vLLM server has its own",
    "process": "Python, torch, DeepSpeed",
    "checkpoint copy": "while a checkpoint is written in the background",
}


_ROOM_FOR_BOXES = 100
"""Terminal width below which tables have no boxes, so that their last column stays visible."""


def print_plan(plan: Plan) -> None:
    console = terminal.console(columns=120)
    shape, layout, device = plan.shape, plan.configured.layout, plan.device
    title = (
        f"{shape.architecture}, {_sizes(shape)}, on {layout.world} x {device.name} "
        f"({device.memory / GIB:.0f} GiB, {device.peak / 1e12:,.0f} TFLOP/s; {device.source})"
    )
    for part in (
        Text(title, style="bold"),
        _memory_table(plan),
        *_summary(plan),
        *_time_tables(plan),
        _stage_table(plan),
        _scaling_table(plan),
        *_conclusions(plan),
        *_command(plan),
    ):
        if isinstance(part, Table):
            console.print(part.grid(boxed=console.width >= _ROOM_FOR_BOXES))
        elif str(part).startswith(_USE):
            console.print(part, soft_wrap=True)  # unwrapped, to be copied
        else:
            style = part.style if isinstance(part, Text) else ""
            console.print(terminal.paragraph(str(part), console, str(style)), soft_wrap=True)


def _memory_table(plan: Plan) -> Table:
    memory = plan.configured.memory
    spec = OPTIMIZERS[plan.configured.layout.config.optimizer.name]
    own = f"{', '.join(spec.matrix_states)} of hidden matrices, of the rest " if spec.matrix_states else ""
    means = _ITEM_NOTES | {"moments": f"{own}{', '.join(spec.states)}, in FP32"}
    title = f"Memory of one rank at its peak, {memory.moment}"
    table = Table(("item", "GiB", "share", "what it is"), title=title)
    for name, size in sorted(memory.device.items(), key=lambda item: -item[1]):
        table.add(name, f"{size / GIB:.2f}", f"{size / memory.total:.0%}", means[name])
    verdict = "fits" if plan.configured.fits else "DOES NOT FIT"
    style = "bold green" if plan.configured.fits else "bold red"
    usable = f"{verdict} into {plan.usable / GIB:.1f} GiB, what --reserve leaves"
    table.add("total", f"{memory.total / GIB:.2f}", "", Text(usable, style=style), style="bold")
    for name, size in memory.host.items():
        table.add(Text(f"{name} (host)", style="dim"), f"{size / GIB:.2f}", "", means[name])
    return table


_DIVIDED_FROM = {"moments": 1, "masters": 1, "gradients": 2, "parameters": 3}
"""Item to the lowest ZeRO stage that divides it by the ranks."""


def _advice(item: str, layout: Layout) -> str:
    """Advice that would reduce a memory item and is not applied yet; empty if there is none."""
    smaller = ["a smaller batch.micro_size"] if layout.micro > 1 else []
    if item == "activations":
        recompute = [] if layout.checkpointing == "full" else ["model.activation_checkpointing=full"]
        return " or ".join([*recompute, *smaller] or ["a larger parallel.sequence"]) + " lowers them"
    if item == "logits":
        chunk = "model.loss=chunked" if layout.config.model.loss == "full" else "a smaller model.loss_chunk_tokens"
        chunks = [chunk] if layout.config.task in CHUNKED_TASKS else []
        lowers = " or ".join([*chunks, *smaller] or ["a shorter data.sequence_length"])
        return f"{lowers} lowers them; activation checkpointing does not"
    if item in _DIVIDED_FROM:
        stage = _DIVIDED_FROM[item]
        if layout.stage >= stage:
            return "more ranks divide them"
        refused = stage == 3 and layout.config.model.compile
        return f"ZeRO-{stage} divides them by the ranks" if layout.zero_ranks > 1 and not refused else ""
    return {
        "second copy": "a larger zero_hpz_partition_size divides it further",
        "teacher": "distill.sharded=true divides it by the ranks, distill.top_k asks it before training",
        "gathered parameters": "a smaller stage3_max_live_parameters lowers them",
        "buckets": "a smaller reduce_bucket_size lowers them",
    }.get(item, "")


def _summary(plan: Plan) -> list[str | Text]:
    """Lines on what dominates memory and the step, and what would change it."""
    configured, layout = plan.configured, plan.configured.layout
    name, size = max(configured.memory.device.items(), key=lambda item: item[1])
    advice = _advice(name, layout)
    moved, step = traffic(plan.shape, layout), configured.speed
    lines: list[str | Text] = [
        f"Memory: mostly {name}, {size / GIB:.2f} GiB" + (f"; {advice}" if advice else "") + ".",
        f"Network: {moved.sent / 1e9:.2f} GB per rank and step, "
        f"{step.communication_seconds:.3f} s of a {step.step_seconds:.3f} s step ({step.share:.0%} waiting)."
        if layout.world > 1
        else "Network: none, there is one rank.",
    ]
    if moved.tokens:
        lines.append(
            f"Experts: {moved.tokens / 1e9:.3g} GB of it are tokens on their way to other ranks' experts and back, "
            f"where all are used alike; the busiest rank sends up to {moved.tokens_at_most / 1e9:.3g} GB where not."
        )
    lines.append(
        f"Speed: {step.tokens_per_second:,.0f} tokens/s at {plan.mfu:.1%} of the peak ({plan.mfu_source}); "
        f"MFU of the whole step {plan.model_mfu:.1%}."
    )
    untimed = ["transfers to host memory and the update there"] if layout.offload != "none" else []
    untimed += ["sampling and scoring"] if layout.config.task in SAMPLING_TASKS else []
    if untimed:
        lines.append(f"Not in this speed: {', '.join(untimed)}.")
    cost = plan.cost(configured)
    price = "" if cost is None else f", {cost:,.2f} at {plan.price:g} per device-hour"
    size = checkpoint_bytes(plan.shape, layout)
    saved = f"{size / GIB:.2f} GiB on disk" if size >= GIB else f"{size / 2**20:.1f} MiB on disk"
    frozen = ", without the frozen weights" if plan.shape.has_adapter else ""
    lines.append(f"Checkpoint: {saved}{frozen}.")
    budget = f"Budget: {_count(plan.token_budget)} tokens take {_hours(plan.hours(configured))}{price}."
    return [*lines, Text(budget, style="bold")]


def _time_tables(plan: Plan) -> list[Table | str]:
    """Where a step's time goes, and what would change it."""
    timed = plan.timed
    if timed is None:
        return ["Where a step's time goes is not known: the model's backward pass asks tensors for their values."]
    ms, title = 1e3, f"Where a step's time goes, modelled, unmeasured: {plan.modelled_mfu(timed):.0%} MFU"
    table = Table(("item", "ms per micro-batch", "ms a step", "share"), title=title)
    for name, seconds in timed.micro.items():
        whole = seconds * timed.accumulation
        table.add(name, f"{seconds * ms:,.1f}", f"{whole * ms:,.1f}", f"{whole / timed.seconds:.0%}")
    for name, seconds in timed.step.items():
        table.add(name, "", f"{seconds * ms:,.1f}", f"{seconds / timed.seconds:.0%}")
    whole = sum(timed.micro.values())
    table.add("total", f"{whole * ms:,.1f}", f"{timed.seconds * ms:,.1f}", "", style="bold")
    changed = Table(("changed", "ms a step", "", "MFU", ""), title="Effect of a single change, modelled, unmeasured")
    for name, other, fits in plan.changed:
        remark = "" if fits else Text("does not fit", style="red")
        gain, mfu = other.seconds / timed.seconds - 1, plan.modelled_mfu(other)
        changed.add(name, f"{other.seconds * ms:,.1f}", f"{gain:+.1%}", f"{mfu:.0%}", remark)
    return [table, changed]


def _stage_table(plan: Plan) -> Table:
    title = f"ZeRO stages on {plan.configured.layout.world}, each with the largest micro-batch that fits"
    table = Table(("stage", "micro", "accum.", "GiB", "tokens/s", "waiting", ""), title=title)
    for stage, option in plan.stages.items():
        if option is None:
            table.add(f"ZeRO-{stage}", *"-----", Text("does not fit", style="red"))
            continue
        mark = Text("the smallest that fits", style="green") if option is plan.smallest else ""
        table.add(f"ZeRO-{stage}", option.layout.micro, option.layout.accumulation, *_figures(option), mark)
    return table


def _scaling_table(plan: Plan) -> Table:
    money = [] if plan.price is None else ["cost"]
    head = ("devices", "batch", "micro", "GiB", "tokens/s", "waiting", "time", *money, "")
    table = Table(head, title=f"ZeRO-{plan.configured.layout.stage} on more or fewer")
    planned = plan.resolved.batch.global_size
    for option in plan.scaling:
        layout = option.layout
        batch = layout.global_size
        remarks = [] if option.fits else ["does not fit"]
        if option.speed.communication_seconds > option.speed.compute_seconds:
            remarks.append("communication dominates")
        if batch != planned:
            remarks.append(f"batch.global_size={batch}")
        cost = plan.cost(option)
        row = [layout.world, batch, layout.micro, *_figures(option), _hours(plan.hours(option))]
        row += [] if cost is None else [f"{cost:,.0f}"]
        style = "red" if not option.fits else "yellow" if remarks else ""
        table.add(*row, "; ".join(remarks), style=style)
    return table


def _conclusions(plan: Plan) -> list[str | Text]:
    """Lines on where communication dominates, and what to change if the run does not fit."""
    devices = communication_bound_from(plan.scaling)
    lines: list[str | Text] = [
        f"Communication takes longer than the matmuls from {devices} devices on."
        if devices
        else "Communication takes less time than the matmuls at every size in the table."
    ]
    if plan.smallest is None:
        layout = plan.configured.layout
        given = ["model.activation_checkpointing=full"] if layout.checkpointing != "full" else []
        given += ["deepspeed.offload=cpu"] if layout.offload == "none" else []
        advice = ", ".join(["take more devices", *given])
        lines.append(Text(f"Nothing fits: {advice} or a shorter data.sequence_length.", style="bold red"))
    elif not plan.configured.fits:
        lines.append(Text("As configured it does not fit.", style="bold yellow"))
    return lines


_USE = "use this:"
_WORTH_A_CHANGE = 1.05
"""Minimum speedup for recommending a change to a configured setting that fits."""
_AS_FAST = 0.98
"""Settings with at least this share of the best speed count as equally fast; the one with least memory is preferred."""


def _command(plan: Plan) -> list[str | Text]:
    """Command that starts the run as configured if that fits and is about as fast as any, else with better settings."""
    fitting = [option for option in plan.stages.values() if option is not None]
    if not fitting:
        return []
    fastest = max(option.speed.tokens_per_second for option in fitting)
    as_fast = [option for option in fitting if option.speed.tokens_per_second >= _AS_FAST * fastest]
    best, configured = min(as_fast, key=lambda option: option.memory.total), plan.configured
    gain = best.speed.tokens_per_second / configured.speed.tokens_per_second
    lines: list[str | Text] = []
    words = shlex.split(plan.resolved.command)
    if not configured.fits or gain >= _WORTH_A_CHANGE:
        if best.layout.stage != configured.layout.stage:
            words = words_at(best.layout.stage, words, plan.resolved)
        words = [word for word in words if word.partition("=")[0] != "batch.micro_size"]
        words.append(f"batch.micro_size={best.layout.micro}")
        than = f", {gain - 1:.0%} faster than as configured" if configured.fits else ""
        lines.append(f"ZeRO-{best.layout.stage} with batch.micro_size={best.layout.micro} fits{than}.")
    return [*lines, Text(f"{_USE} {shlex.join(words)}", style="bold")]


def _figures(option: Option) -> list[str]:
    return [f"{option.memory.total / GIB:.1f}", f"{option.speed.tokens_per_second:,.0f}", f"{option.speed.share:.0%}"]


def _sizes(shape: Shape) -> str:
    trained = f" ({_count(shape.trained_parameters)} trained)" if shape.has_adapter else ""
    trained += f", {_count(shape.codes.parameters)} in codes" if shape.codes is not None else ""
    teacher = f", a teacher of {_count(shape.teacher.shape.parameters)}" if shape.teacher else ""
    return f"{_count(shape.parameters)} parameters{trained}{teacher}"


def _count(number: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f}"


def _hours(hours: float) -> str:
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.1f} min"
