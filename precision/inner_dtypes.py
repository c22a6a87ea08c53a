"""The dtype of the sums inside a step: softmaxes, norms' statistics, the loss, rotary tables, routers.

A matmul's dtype says nothing about these, so the operators themselves are observed: `precision.observe` calls `see`
with each. A torch kernel given 16 bits accumulates in FP32 and rounds the result once (`KERNEL`); the same computation
written out (exp, sum; pow, mean, rsqrt) rounds at every step, and the narrowest dtype counts. A fused attention kernel
shows only its operands (`FUSED`). docs/numerics.md says what counts for each, and what leaves no operator to see.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from config.schema import Config
from precision.dtypes import DTYPES, NAMES
from precision.findings import LOSS, tensors_of
from precision.manifest import find_regions, router_regions
from precision.regions import Regions

SOFTMAX, NORM, LOSS_SUM, ROTARY = "softmax", "norm statistics", "loss", "rotary table"
ROUTER, RESIDUAL = "router", "residual stream"
_SHOWN = (SOFTMAX, NORM, LOSS_SUM, ROTARY, ROUTER, RESIDUAL)
KERNEL = "fp32 inside torch's kernel"
"""A single torch operator that takes 16-bit operands and accumulates in FP32."""
FUSED = "inside {kernel}, by its kernel"

_WIDTHS = ("fp8", "bf16", "fp16", "fp32", "fp64")  # by bits of the mantissa
_EXPONENTIALS = frozenset({"aten::exp", "aten::exp_", "aten::exp2", "aten::exp2_"})
_SOFTMAXES = frozenset({"aten::_softmax", "aten::_safe_softmax"})
_LOSSES = frozenset({"aten::_log_softmax", "aten::logsumexp", "aten::nll_loss_forward", "aten::nll_loss2d_forward"})
NORM_KERNELS = (
    *("aten::native_layer_norm", "aten::_fused_rms_norm", "aten::native_group_norm", "aten::native_batch_norm"),
    *("aten::_native_batch_norm_legit", "aten::cudnn_batch_norm"),
)
# Operators that compute the statistic of a norm that is written out.
_NORM_STEPS = (
    *("aten::pow", "aten::square", "aten::mean", "aten::sum", "aten::var", "aten::var_mean", "aten::std"),
    *("aten::linalg_vector_norm", "aten::norm", "aten::rsqrt", "aten::sqrt", "aten::reciprocal"),
)
_ANGLES = frozenset({"aten::cos", "aten::sin", "aten::cos_", "aten::sin_", "aten::polar"})
_ADDS = frozenset({"aten::add", "aten::add_"})
# Operators whose results hold the same values, up to rounding, in a new tensor. Views share their storage.
_COPIES = frozenset({"aten::_to_copy", "aten::clone", "aten::masked_fill", "aten::copy_"})
_WITH_NUMBER = frozenset({"aten::add", "aten::sub", "aten::mul", "aten::div", "aten::clamp", "aten::clamp_min"})
_MOST_FREQUENCIES = 65536
_OWN = "it ran without an operator of torch that computes one: a kernel of its own, or none at all"
_INSIDE = "nothing was added to what the block gets in its own forward"
FLEX = "flex_attention"


@dataclass(frozen=True)
class _Known:
    """The dtypes and operations behind a tensor's values."""

    dtype: str
    """The narrowest dtype."""
    where: str | None
    """The module in which they were narrowed; values from an earlier module are that module's output."""
    exponential: bool = False
    """Whether they are exponentials, which a softmax or a loss sums."""


class InnerDtypes:
    """Records a pass that `precision.observe` watches, and reports on it."""

    def __init__(self, model: torch.nn.Module, *, root: str) -> None:
        """root: the value of `where` in the model's own forward."""
        kinds = find_regions(model)
        modules = dict(model.named_modules())
        self._norms = {name for name, kind in kinds.items() if kind == "norm"}
        self._attentions = {name for name, kind in kinds.items() if kind == "attention"}
        routers = router_regions(model)
        self._routers = {*routers, *routers.values()}
        self._tables = {name for name, module in modules.items() if _makes_table(module)}
        inner = self._norms | self._attentions
        self._blocks = {
            name
            for name, module in modules.items()
            if name.rpartition(".")[2].isdigit()
            and any(f"{name}.{child}" in inner for child, _ in module.named_children())
        }
        head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        self._ends = {None, root, *(name for name, module in modules.items() if module is head)}
        self.found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        """Maps an operation to module names (or LOSS, outside all modules), and these to its dtypes there."""
        self.ran: set[str] = set()
        """Modules whose forward was entered."""
        self._compiled: set[str] = set()
        # Keyed by storage address, which the reference keeps from being reused.
        self._of: dict[int, tuple[StorageWeakRef, _Known]] = {}
        self._stream: dict[int, StorageWeakRef] = {}

    def enter(self, where: str, given: Any) -> None:
        """Record the start of a module's forward. given: its arguments."""
        self.ran.add(where)
        if where in self._blocks:
            stream = next((tensor for tensor in tensors_of(given) if tensor.is_floating_point()), None)
            if stream is not None:
                self._add_to_stream(stream)

    def see(self, where: str | None, name: str, args: Sequence[Any], output: Any) -> None:
        """Record an operator after it ran. where: the innermost module whose forward is running; None outside all."""
        if where in self._tables:
            self._follow_table(where, name, args, output)
            return
        given = args[0] if args else None
        result = output[0] if isinstance(output, tuple | list) and output else output
        if not (is_float(given) and isinstance(result, torch.Tensor)):
            return
        if where in self._norms and self._is_norm_step(where, name, args, result):
            return
        if name in _EXPONENTIALS:
            self._know(result, _Known(_name(result), where, exponential=True))
        elif name in _COPIES or (name in _WITH_NUMBER and not isinstance(args[1], torch.Tensor)):
            self._copied(where, name, args, result)
        elif name == "aten::sum":
            known = self._known(given)
            if known is not None and known.exponential:
                what = LOSS_SUM if where in self._ends else SOFTMAX
                self._found(what, where, _narrowest(known.dtype, _name(given), _name(result)))
        elif name in _LOSSES:
            self._found(LOSS_SUM, where, _narrowest(_name(given), _name(result), *self._narrowed_here(where, given)))
        elif where is None:
            return
        elif name in _SOFTMAXES:
            self._found(SOFTMAX, where, self._of_kernel(where, given))
        elif name in _ANGLES:
            self._found(ROTARY, where, _narrowest(*map(_name, filter(is_float, args))))
        elif name in _ADDS and where in self._blocks and args[1].shape == given.shape and given.dim() > 1:
            stream = [item for item in args[:2] if self._is_stream(item)]
            if stream:
                self._found(RESIDUAL, where, _narrowest(*map(_name, (*stream, result))))
                self._add_to_stream(result)

    def see_attention(self, where: str, kernel: str) -> None:
        """Record a fused attention. kernel: the operator's name, such as aten::_scaled_dot_product_flash_attention."""
        if kernel == FLEX:
            self._compiled.add(where)
            return
        known = "scaled_dot_product_attention" if "_scaled_dot_product_" in kernel else kernel.rpartition("::")[2]
        self._found(SOFTMAX, where, FUSED.format(kernel=known))

    def see_matmul(self, where: str, dtypes: Sequence[str]) -> None:
        """Record the dtypes of a matmul's operands, which matter in a router only."""
        if where in self._routers:
            self.found[ROUTER][where].update(dtypes)

    def forget(self) -> None:
        """Forget all tensors between two forward passes: no value of one leads to the other."""
        self._of.clear()
        self._stream.clear()

    def report(
        self,
        promised: Mapping[str, str] | None = None,
        *,
        stream: str = "fp32",
        routers: str = "fp32",
        compiled: bool = False,
    ) -> dict[str, Any]:
        """The report: dtypes by operation, those lower than promised, and whatever could not be observed.

        promised: module name to the dtype that a manifest promises for a norm's statistics or a router's products.
        stream: dtype of the residual stream; routers: of routers' products without an entry in `promised`. compiled:
        whether steps that are not observed run a compiled graph instead. docs/run-folder.md has the format.
        """
        computed: dict[str, dict[str, int]] = {}
        lower: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        usual = {ROUTER: routers, RESIDUAL: stream}
        for what in (what for what in _SHOWN if what in self.found):
            counts: Counter[str] = Counter()
            for name, dtypes in self.found[what].items():
                promise = usual.get(what, "fp32")
                if what in (NORM, ROUTER):
                    promise = (promised or {}).get(name, promise)
                counts.update(sorted(dtypes))
                for dtype in dtypes:
                    if dtype in _WIDTHS and _WIDTHS.index(dtype) < _WIDTHS.index(promise):
                        lower[what, dtype, promise].append(name)
            computed[what] = dict(counts)
        return {
            "computed": computed,
            "lower": _entries(sorted(lower.items())),
            "unobserved": self._unobserved(compiled),
        }

    def _unobserved(self, compiled: bool) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if compiled:
            why = "steps run a compiled graph, which shows no operators; the blocks' own code was observed beside one"
            found.append({"what": "compiled blocks", "why": why, "modules": []})
        if self._compiled:
            why = "flex_attention is a compiled graph, which shows no operators"
            found.append({"what": SOFTMAX, "why": why, "modules": sorted(self._compiled)})
        expected = {SOFTMAX: self._attentions - self._compiled, NORM: self._norms, ROTARY: self._tables}
        for what, modules in (expected | {RESIDUAL: self._blocks}).items():
            if silent := sorted((modules & self.ran) - self.found.get(what, {}).keys()):
                found.append({"what": what, "why": _INSIDE if what == RESIDUAL else _OWN, "modules": silent})
        if self.ran and LOSS_SUM not in self.found:
            found.append({"what": LOSS_SUM, "why": _OWN, "modules": []})
        return found

    def _found(self, what: str, where: str | None, dtype: str) -> None:
        self.found[what][LOSS if where is None else where].add(dtype)

    def _is_norm_step(self, where: str | None, name: str, args: Sequence[Any], result: torch.Tensor) -> bool:
        given = args[0]
        if name in NORM_KERNELS:
            self._found(NORM, where, self._of_kernel(where, given))
            return True
        if name not in _NORM_STEPS and not (name == "aten::mul" and self._is_square(where, *args[:2])):
            return False
        self._found(NORM, where, _narrowest(_name(given), _name(result), *self._narrowed_here(where, given)))
        return True

    def _is_square(self, where: str | None, one: torch.Tensor, other: Any) -> bool:
        if one is other:
            return True
        narrowed = [is_float(item) and bool(self._narrowed_here(where, item)) for item in (one, other)]
        return all(narrowed) and one.shape == other.shape

    def _of_kernel(self, where: str | None, given: torch.Tensor) -> str:
        """Dtype of a kernel that accumulates in FP32: its operand's only if this module narrowed the operand for it."""
        narrowed = self._narrowed_here(where, given)
        return narrowed[0] if narrowed else KERNEL if _is_narrow(_name(given)) else _name(given)

    def _narrowed_here(self, where: str | None, given: torch.Tensor) -> list[str]:
        known = self._known(given)
        return [known.dtype] if known is not None and known.where == where and _is_narrow(known.dtype) else []

    def _copied(self, where: str | None, name: str, args: Sequence[Any], result: torch.Tensor) -> None:
        source = args[1] if name == "aten::copy_" else args[0]
        if not is_float(source):
            return
        if self._is_stream(source):
            self._add_to_stream(result)
        known = self._known(source)
        if known is not None:
            self._know(result, replace(known, dtype=_narrowest(known.dtype, _name(result))))
        elif _is_narrow(_name(result)) and not _is_narrow(_name(source)):
            self._know(result, _Known(_name(result), where))

    def _follow_table(self, where: str | None, name: str, args: Sequence[Any], output: Any) -> None:
        """Record an operator of a module that computes a rotary table: every one of them leads to cos and sin."""
        if not isinstance(output, torch.Tensor):
            return
        listed = (item for given in args for item in (given if isinstance(given, tuple | list) else (given,)))
        dtypes = [self._narrowest_of(item) for item in listed if is_float(item)]
        if name in _ANGLES:
            self._found(ROTARY, where, _narrowest(*dtypes))
        if is_float(output):
            self._know(output, _Known(_narrowest(*dtypes, _name(output)), where))

    def _narrowest_of(self, tensor: torch.Tensor) -> str:
        known = self._known(tensor)
        return known.dtype if known is not None else _rounded_to(tensor) or _name(tensor)

    def _is_stream(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._stream

    def _add_to_stream(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._stream[storage._cdata] = StorageWeakRef(storage)

    def _know(self, tensor: torch.Tensor, known: _Known) -> None:
        storage = tensor.untyped_storage()
        self._of[storage._cdata] = (StorageWeakRef(storage), known)

    def _known(self, tensor: torch.Tensor) -> _Known | None:
        found = self._of.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]


def promises(config: Config, compute: str, regions: Regions | None) -> dict[str, Any]:
    """The dtypes that a run's config promises, as arguments of `report`. compute: the dtype of its weights."""
    return {
        "promised": regions and regions.dtypes,
        "stream": "fp32" if regions else compute,
        "routers": "fp32" if regions or config.precision.routers == "fp32" else compute,
        "compiled": config.model.compile,
    }


def over_ranks(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first rank's report, with what any rank computed in a lower dtype. reports: by rank."""
    lower: dict[tuple[str, str, str], dict[str, None]] = {}
    for report in reports:
        for entry in report["lower"]:
            named = lower.setdefault((entry["what"], entry["computed"], entry["promised"]), {})
            named.update(dict.fromkeys(entry["modules"]))
    return {**reports[0], "lower": _entries(lower.items())}


def _entries(lower: Iterable[tuple[tuple[str, str, str], Iterable[str]]]) -> list[dict[str, Any]]:
    """The entries of a report on operations in a dtype lower than promised."""
    return [
        {"what": what, "computed": dtype, "promised": promise, "modules": list(names)}
        for (what, dtype, promise), names in lower
    ]


def _makes_table(module: torch.nn.Module) -> bool:
    named = any(word in type(module).__name__.lower() for word in ("rotary", "rope"))
    frequencies = any("inv_freq" in name for name, _ in module.named_buffers(recurse=False))
    return (named or frequencies) and next(module.parameters(), None) is None


def _rounded_to(tensor: torch.Tensor) -> str | None:
    """The 16-bit dtype to which all values of an FP32 tensor were rounded; None if there is none. Integers and powers
    of two are exact in any dtype, so at least three other values have to be exact in 16 bits."""
    values = tensor.detach()
    if values.dtype != torch.float32 or values.numel() > _MOST_FREQUENCIES:
        return None
    telling = (values != values.round()) & (torch.frexp(values).mantissa.abs() != 0.5)
    if int(telling.sum()) < 3:
        return None
    return next((name for name in ("bf16", "fp16") if torch.equal(values.to(DTYPES[name]).float(), values)), None)


def is_float(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether a leaf of a tree is a floating-point tensor."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _name(tensor: torch.Tensor) -> str:
    return NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


def _narrowest(*dtypes: str) -> str:
    return min(dtypes, key=lambda dtype: _WIDTHS.index(dtype) if dtype in _WIDTHS else len(_WIDTHS))


def _is_narrow(dtype: str) -> bool:
    return dtype in ("fp8", "bf16", "fp16")
