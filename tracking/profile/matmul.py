"""The matmuls of a profile: dtype, shape and module; those in FP32, and those whose sizes do not suit tensor cores.

cuBLAS uses tensor cores most efficiently if M, N and K are multiples of 16 bytes (8 elements of 16 bits), and on A100
and later of 128 bytes (64 elements); see NVIDIA, Matrix Multiplication Background, section 4.1.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tracking.profile.timeline import Event

NAMES = {
    "float": "fp32",
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "double": "fp64",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
    "long int": "int64",
    "int": "int32",
    "bool": "bool",
}
"""Dtype name in a trace to ours."""
# Operator to the argument positions of its two matrices.
_OPERATORS = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::_scaled_mm"), (0, 1)),
    **dict.fromkeys(("aten::_grouped_mm", "aten::_scaled_grouped_mm"), (0, 1)),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::addbmm", "aten::_addmm_activation"), (1, 2)),
}
GOOD, BEST = 8, 64
"""[16-bit elements] Sizes should be multiples of GOOD, ideally of BEST."""


@dataclass
class Matmul:
    event: Event
    dtype: str
    batch: int
    m: int
    n: int
    k: int
    seconds: float

    @property
    def cost(self) -> dict[str, Any]:
        """Columns of a row that are added up. flops: number of multiplications and additions."""
        return {"count": 1, "seconds": self.seconds, "flops": 2 * self.batch * self.m * self.n * self.k}


def matmul_of(event: Event) -> Matmul | None:
    """The matmul that an event computes; None for any other operator."""
    if event.kind != "cpu_op" or event.name not in _OPERATORS:
        return None
    first, second = _OPERATORS[event.name]
    dims, types = event.dims, event.dtypes
    if len(dims) <= second or len(types) <= second or len(dims[first]) < 2 or len(dims[second]) < 2:
        return None
    left, right, dtype = dims[first], dims[second], NAMES.get(types[first], types[first])
    batch, seconds = left[0] if len(left) == 3 else 1, (event.end - event.start) / 1e6
    return Matmul(event, dtype, batch, m=left[-2], n=right[-1], k=left[-1], seconds=seconds)


def table(matmuls: Iterable[Matmul]) -> list[dict[str, Any]]:
    """One row per module, phase, dtype and shape, longest first."""
    keys = ("module", "phase", "dtype", "batch", "m", "n", "k")
    shapes = ((m, (m.event.module, m.event.phase, m.dtype, m.batch, m.m, m.n, m.k)) for m in matmuls)
    return added_up([dict(zip(keys, shape, strict=True)) | m.cost for m, shape in shapes], *keys)


def fp32_matmuls(matmuls: list[Matmul], *, compute: str, regions: dict[str, str] | None) -> list[dict[str, Any]]:
    """Modules whose matmuls ran in FP32 or FP64 although the run computes in 16 bits, longest first.

    regions: module to its dtype in the precision manifest; None if the whole run has one dtype, `compute`. "wanted" in
    a row says whether the manifest asks for FP32.
    """
    if not {"bf16", "fp16"} & {compute, *(regions or {}).values()}:
        return []
    wide = [m for m in matmuls if m.dtype in ("fp32", "fp64") and m.event.stage == "forward_backward"]
    rows = added_up([{"module": m.event.module, **m.cost} for m in wide], "module")
    seconds, flops = (sum(m.cost[name] for m in matmuls) for name in ("seconds", "flops"))
    for row in rows:
        own = {m.event.phase for m in wide if m.event.module == row["module"]}
        row["wanted"] = _manifest_dtype(row["module"], regions) == "fp32"
        row["share_of_matmul_time"] = row["seconds"] / seconds if seconds else 0.0
        row["share_of_matmul_flops"] = row["flops"] / flops if flops else 0.0
        row["phases"] = sorted(own - {""})
    return rows


def misaligned_sizes(matmuls: list[Matmul], attention: Iterable[Event] = ()) -> list[dict[str, Any]]:
    """Sizes that are not multiples of 8, then those that are not multiples of 64, by module and size, longest first.

    Checks M, N and K but not the batch of a batched matmul; for fused attention only whether the head size is a
    multiple of 8. FP32 matmuls are included, since they may run in 16 bits later.
    """
    sized = [{"module": m.event.module, "size": n, **m.cost} for m in matmuls for n in {m.m, m.n, m.k} if n % BEST]
    for event in attention:
        if event.name == "aten::scaled_dot_product_attention" and event.dims and event.dims[0][-1] % GOOD:
            cost = {"count": 1, "seconds": (event.end - event.start) / 1e6, "flops": 0}
            sized.append({"module": event.module, "size": event.dims[0][-1], **cost})
    rows = added_up(sized, "module", "size")
    for row in rows:
        size = row["size"]
        row["multiple_of"] = size & -size
        row["next_good"], row["next_best"] = (-(-size // wanted) * wanted for wanted in (GOOD, BEST))
    return sorted(rows, key=lambda row: row["multiple_of"] >= GOOD)


def grouped(rows: Iterable[dict[str, Any]], *keys: str) -> list[list[dict[str, Any]]]:
    """Groups of rows with equal values in `keys`."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(groups.values())


def added_up(rows: Iterable[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """One row per group: numbers outside `keys` are summed, anything else is the first row's. Longest first."""
    found = []
    for group in grouped(rows, *keys):
        counted = [name for name, value in group[0].items() if name not in keys and isinstance(value, int | float)]
        found.append(group[0] | {name: sum(row[name] for row in group) for name in counted})
    return sorted(found, key=lambda row: -row["seconds"])


def _manifest_dtype(module: str, regions: dict[str, str] | None) -> str | None:
    """Dtype of the innermost manifest region that contains a module; None if there is none."""
    while regions is not None and module:
        if module in regions:
            return regions[module]
        module = module.rpartition(".")[0]
    return None
