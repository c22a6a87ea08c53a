"""Whether this machine has the memory that the gate needs, estimated before anything trains."""

from __future__ import annotations

from collections.abc import Iterator

from config.errors import UserError
from config.resolved import Resolved
from launch.doctor.facts import gpus, memory
from launch.plan.layout import layout_of
from launch.plan.memory import peak_memory
from launch.plan.model import Shape, read_shape
from launch.plan.plan import PROCESS_BYTES
from tools.parity.jobs import Plan

REFERENCE, BESIDE, ORACLE = 8, 20, 24
"""[bytes per trained parameter] What a rank of the single-step job holds besides its engine, at least (the FP32
reference and its gradients) and at its peak; and what the oracle's process holds (docs/parity.md, "Limits")."""


def estimates(chosen: Plan) -> Iterator[str]:
    """A line on the memory that each job probably needs, a warning if less is free; none if a launcher is given, since
    its machines may differ.

    Raises UserError if a job certainly needs more than there is.
    """
    if chosen.launcher:
        return
    on_cpu, host = not chosen.gpus, memory()
    try:
        shape, engine, passing = _needed(chosen, chosen.resolved)
        twin = None if chosen.twin is None else _needed(chosen, chosen.twin)[1:]
    except UserError as problem:
        yield f"memory was not estimated: {problem}"
        return
    whole = float(min(filter(None, (host["total"], host["cgroup_limit"]))))
    free = min(float(host["available"] or 0), whole)
    ranks, there, known, place = chosen.processes if on_cpu else 1, free, whole, "this machine"
    fewer = "give the model fewer layers" + (f", or start fewer than --processes {ranks}" if ranks > 1 else "")
    if not on_cpu:
        found = gpus(chosen.gpus)
        given = [[row[f"memory.{key}"] for key in ("total", "used")] for row in found["list"]]
        if not given or not all(number.isdecimal() for row in given for number in row):  # such as "[N/A]"
            yield f"memory was not estimated: {found['error'] or 'nvidia-smi reports none for a GPU'}"
            return
        cards = [[float(number) * 2**20 for number in row] for row in given]
        known, there, place = min(card[0] for card in cards), min(card[0] - card[1] for card in cards), "a GPU"

    def of_job(what: str, least: float, about: float) -> str:
        least, about = ranks * least, ranks * about
        fix = fewer if least > there else f"set a smaller batch.micro_size, or {fewer}"
        return _estimate(what, least, about, there, known, place, fix)

    trained, frozen = shape.trained_parameters, shape.parameters - shape.trained_parameters
    if twin is not None:
        yield of_job("the FP32 twin", twin[0], sum(twin))
        passing = max(passing, twin[1])  # the reference's, beside the engine
    engine += 4 * frozen
    yield of_job("single steps", engine + REFERENCE * trained, engine + passing + BESIDE * trained)
    if chosen.resolved.config.parity.oracle_steps:
        size = float(ORACLE * trained + 8 * frozen)
        yield _estimate("the oracle", size, size, free, whole, "this machine", "set parity.oracle_steps=0")


def _needed(chosen: Plan, resolved: Resolved) -> tuple[Shape, float, float]:
    """The model, and the bytes of a rank of its run at the peak: without those of a micro-batch, and these."""
    on_cpu = not chosen.gpus
    layout = layout_of(resolved, world=chosen.processes, on_cpu=on_cpu)
    shape = read_shape(resolved.config, layout)
    peak = peak_memory(shape, layout, process=PROCESS_BYTES if on_cpu else 0.0)
    passing = sum(peak.device.get(item, 0.0) for item in ("activations", "logits"))
    return shape, peak.total + (sum(peak.host.values()) if on_cpu else 0.0) - passing, passing


def _estimate(what: str, least: float, about: float, free: float, whole: float, place: str, fix: str) -> str:
    """How many bytes are needed, a warning if fewer are free. Raises UserError if `least` are more than there are."""
    if least > whole:
        raise UserError(f"{what} would take at least {least / 1e9:.1f} GB, and {place} has {whole / 1e9:.1f}; {fix}")
    line = f"{what} will take about {about / 1e9:.1f} GB, and {free / 1e9:.1f} are free on {place}"
    return line if about <= free else f"warning: {line}; {fix}"
