"""Measure a model in FP32 for a few steps and propose a precision manifest from the measurements.

    python -m tools.analyze --config FILE --out manifest.json [--steps 30] [--fp8 ERROR] [key.sub=value ...]

A separate job trains the config's first steps in FP32 on the config's own data and measures each region: the range of
its activations, gradients and weights, and the change of the gradient when it alone computes in BF16 or FP16; and the
largest value stored in 16 bits, with its module and token. The resulting manifest is compared with FP32, and with
uniform BF16 and FP16 as a run without a manifest computes them, on held-out batches. It must be closer to FP32 than
both (else the better of them is proposed) and pass `tools.parity` over a few steps of the real job. Only then is it
written, with its loss scale. With --fp8 as many linear layers as possible compute in FP8 within a gradient error of
ERROR, which replaces that comparison. NAME.analysis.json has every number, NAME.png every region's range, NAME.parity/
the parity report. Exit code 0: a manifest is written, or a uniform dtype is proposed and none is needed; 3: rejected
(see NAME.rejected.json), FP32 itself is not finite, or the config asks for FP16 and stores values beyond it; 2: the
command line or the config is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from config.batch import refuse_sharing
from config.cli import Arguments, entry_point
from config.command_line import read_command_line
from config.deepspeed.document import write_in_fp32
from config.errors import UserError
from config.files import why_not_writable
from config.launcher import as_launched
from config.options import positive_int, share
from config.printable import line
from config.redact import redact_arguments
from config.resolved import Resolved
from launch.job import add_processes_option, default_processes, error_line_of, launch
from precision.manifest import load_manifest
from tools.analyze.plot import plot_ranges
from tools.analyze.proposal import FP16_LARGEST, SCALED, Limits, pattern_of
from tools.analyze.stored import Peak, first_beyond, largest
from tools.parity.gate import gate
from tools.parity.jobs import plan
from tracking.jsonl import plain
from tracking.pages import markdown
from tracking.pages.document import write_document
from tracking.pages.markdown import Table, code, section, text

PROPOSED, CRASHED, REJECTED = 0, 1, 3
_LARGEST = 8
"""Number of modules listed on the page per kind of tensor."""
_NONE_NEEDED = "none that was tried is closer to FP32 than a uniform dtype, which costs less; run with"
_NO_MANIFEST = {"default": "fp32", "rules": []}


def analyze(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run the survey, judge its proposal, write and print. Raises UserError for a wrong option or config."""
    out: Path = options.out
    limits = Limits(floor=options.floor, headroom=options.headroom, fp8=options.fp8)
    given = _resolve(options, overrides)
    # the survey measures on the manifest path, which supports no slices of matrices or experts
    refuse_sharing(given.batch, but=("sequence",), why="the manifest that is proposed needs {what} on each rank")
    reason = why_not_writable(out.parent)
    if reason:
        raise UserError(f"--out {out}: {reason}; name another folder")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        in_fp32 = [*overrides, *_on_the_manifest_path(given, _NO_MANIFEST, work)]
        _resolve(options, in_fp32)
        arguments = ["--config", str(options.config), *in_fp32]
        measured = {
            "steps": options.steps,
            "sequences": options.sequences,
            "most_regions": options.most_regions,
            "held_out": options.held_out,
            "compute": given.compute,
            "limits": asdict(limits),
        }
        log = out.with_suffix(".log")
        print(f"measuring; {log} says how far it is", flush=True)
        found = work / "survey.json"
        program = ("-m", "tools.analyze.survey", "--result", str(found), "--plan", json.dumps(measured), *arguments)
        launch(program, processes=options.processes, log=log)
        if not found.is_file():
            print(f"the survey's job ended without a result: {error_line_of(log)} (see {log})", file=sys.stderr)
            return CRASHED
        result = json.loads(found.read_text(encoding="utf-8"))
    if "error" in result:
        raise UserError(result["error"])
    if "failed" in result:
        print(f"rejected: {result['failed']}", file=sys.stderr)
        return REJECTED
    result = {"config": str(options.config), "overrides": redact_arguments(list(overrides)), **measured, **result}
    if options.parity_steps and rejection_reason(result) is None and result["uniform"] is None:
        result["parity"] = _parity(options, overrides, result["proposal"])
    return _publish(out, result)


def _parity(options: argparse.Namespace, overrides: Sequence[str], proposal: dict[str, Any]) -> dict[str, Any]:
    """The verdict of `tools.parity` on the manifest over the job's first steps, starting at the proposed loss scale."""
    folder, steps = options.out.with_suffix(".parity").resolve(), options.parity_steps
    folder.mkdir(exist_ok=True)
    arguments = [
        *(f"evaluate.every_steps={steps}", "evaluate.batches=2", *overrides),
        "run.hypothesis=The precision manifest that was proposed trains this model as FP32 does.",
        *_on_the_manifest_path(_resolve(options, overrides), proposal["manifest"], folder),
    ]
    try:
        found = gate(plan(str(options.config), arguments, folder=folder, steps=steps, processes=options.processes))
    except UserError as error:  # the measurements so far are kept
        found = {"verdict": "not judged", "failed": [str(error)]}
    return {"verdict": found["verdict"], "failed": found["failed"], "steps": steps, "report": str(folder)}


def rejection_reason(result: dict[str, Any]) -> str | None:
    """Why the proposal is rejected; None if its gradients are finite, part of it computes in 16 bits, and it passed
    parity if that ran. With FP8, its error must also be within the limit and part of it must compute in FP8."""
    uniform = result["uniform"]
    error = result["validation"][f"uniform {uniform}" if uniform else "proposal"]["error"]
    if not math.isfinite(error):
        return "its gradients are not finite on held-out batches"
    allowed = result["limits"]["fp8"]
    if allowed and not result["proposal"]["fp8_share"] > 0:
        return f"no module tolerates FP8 within a gradient error of {allowed:g}; give --fp8 a larger one"
    if allowed and not error <= allowed:
        return f"its gradient error {error:.3g} on held-out batches is beyond --fp8 {allowed:g}"
    if not uniform and not result["proposal"]["low_precision_share"] > 0:
        return "no matmul of it is in 16 bits"
    parity = result.get("parity")
    if parity and parity["failed"]:
        return f"it does not pass tools.parity: {', '.join(parity['failed'])}; see {parity['report']}"
    return None


def regions_table(result: dict[str, Any]) -> Table:
    """One row per pattern and dtype of regions, the most sensitive first.

    Sensitivity is to BF16, or to FP8 if that was requested; regions that cannot use FP8 then have no share.
    """
    choices, units = result["proposal"]["choices"], result["units"]
    in_fp8 = bool(result["limits"]["fp8"])
    everywhere = sum(map(_squared_in_fp8, units)) or 1.0
    total = sum(unit["flops"] for unit in units) + result["other_flops"]
    rows: dict[tuple[str, str], list[tuple[str, float, float]]] = {}
    for unit in units:
        count = len(unit["names"])
        for name in unit["names"]:
            row = rows.setdefault((pattern_of(name), choices[name]["compute"]), [])
            share = _squared_in_fp8(unit) / everywhere if in_fp8 else choices[name]["sensitivity"]
            row.append((name, share / count, unit["flops"] / count / total))
    found = []
    for (pattern, compute), members in rows.items():
        what = pattern if len(members) > 1 else members[0][0]
        error, flops = sum(member[1] for member in members), sum(member[2] for member in members)
        found.append((error, what, len(members), compute, flops))
    head = ("region", "count", "dtype", f"of {'FP8' if in_fp8 else 'BF16'}'s squared error", "of the FLOPs")
    return Table(
        head,
        [
            (what, count, compute, f"{error:.1%}" if error or not in_fp8 else "-", f"{flops:.1%}")
            for error, what, count, compute, flops in sorted(found, reverse=True)
        ],
    )


def _squared_in_fp8(unit: dict[str, Any]) -> float:
    """The squared gradient error of a unit alone in FP8; 0 where it was not measured or is not finite."""
    error = float(unit["errors"].get("fp8") or 0.0)
    return error**2 if math.isfinite(error) else 0.0


def stored_lines(result: dict[str, Any]) -> list[str]:
    """The largest values that a run stores in 16 bits, and the consequences for FP16."""
    stored = {kind: {name: Peak(**peak) for name, peak in peaks.items()} for kind, peaks in result["stored"].items()}
    value, gradient = largest(stored, "activations", "weights"), largest(stored, *SCALED)
    headroom, scale = result["limits"]["headroom"], result["uniform_fp16_scale"]
    fits, beyond = f"leaves {headroom:g}x headroom in FP16", first_beyond(stored, FP16_LARGEST)
    if beyond is not None:
        fits = f"uniform FP16 cannot work at any loss scale, the first beyond its {FP16_LARGEST:,.0f} is {beyond}"
    elif value.value * headroom > FP16_LARGEST:
        room = math.floor(10 * FP16_LARGEST / value.value) / 10
        fits = f"uniform FP16 has {room:g}x headroom, and is proposed only by --headroom {room:g} or less"
    return [f"largest value {value}: {fits}", f"largest gradient {gradient}: allows a loss scale of {scale:.0f}"]


def uniform_overrides(result: dict[str, Any]) -> str | None:
    """Overrides for a run in the proposed uniform dtype; None if a manifest is proposed."""
    if result["uniform"] is None:
        return None
    scale = f" precision.loss_scale.initial={result['uniform_fp16_scale']:.0f}" if result["uniform"] == "fp16" else ""
    return f"precision.path=cast precision.compute={result['uniform']}{scale}"


def verdict(result: dict[str, Any]) -> list[str]:
    """Gradient error and share of 16-bit FLOPs of the proposal, compared with both uniform dtypes."""
    checked, proposal = result["validation"], result["proposal"]
    lines = [
        f"{name:<13} gradient error {found['error']:.3e} (whole vector {found['whole']:.3e}), worst "
        f"{found['parameter_error']:.3e} in {found['parameter']}; {found['finite']:.2%} finite"
        for name, found in checked.items()
    ]
    error, bf16, scale = checked["proposal"]["error"], checked["uniform bf16"]["error"], proposal["loss_scale"]
    tried, one_by_one = result["tried"], result["regions_alone"]["bf16"]
    together, uniform = tried["uniform bf16, FP32 ambient"], tried["uniform bf16"]
    allowed = result["limits"]["fp8"]
    bits = " or fewer" if allowed else ""
    factor = f"a factor of {bf16 / (error or 1e-30):.1f}"
    compared = f"against uniform BF16: parity error {error:.3e} for {bf16:.3e}, {factor}"
    if allowed:
        in_fp8 = f"{proposal['fp8_share']:.1%} of the matmul FLOPs in FP8"
        compared = f"{in_fp8} at a gradient error of {error:.3e}, of {allowed:g} that are allowed"
    return [
        *stored_lines(result),
        *lines,
        f"the errors of BF16 regions one by one add up to {one_by_one:.3e}, together they have {together:.3e}, and "
        f"{uniform:.3e} with everything that is stored in BF16 too",
        compared,
        f"against uniform FP32: {proposal['low_precision_share']:.1%} of the matmul FLOPs in 16 bits{bits} for 0%",
        *([f"the manifest's runs start at a loss scale of {scale:.0f}"] if scale else []),
    ]


def _publish(out: Path, result: dict[str, Any]) -> int:
    """Write the files, print the table and return the exit code."""
    reason = rejection_reason(result)
    out.with_suffix(".analysis.json").write_text(
        json.dumps(plain(result | {"objection": reason}), indent=1) + "\n", encoding="utf-8"
    )
    plot_ranges(result, out.with_suffix(".png"))
    target = out if reason is None else out.with_suffix(".rejected.json")
    manifest, uniform = result["proposal"]["manifest"], uniform_overrides(result)
    if reason is not None or uniform is None:
        target.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        load_manifest(target)
    regions = regions_table(result)
    _write_page(out, result, reason, regions)
    rules = [f"{rule['match']}: {rule['reason']}" for rule in manifest["rules"]]
    print("\n".join(map(line, [*regions.lines(), "", *rules, "", *verdict(result)])))
    if "parity" in result:
        parity = result["parity"]
        print(f"tools.parity over {parity['steps']} steps: {parity['verdict']}; see {parity['report']}")
    if reason is not None:
        print(f"rejected: {reason}; see {target}")
        return REJECTED
    print(f"wrote {target}" if uniform is None else f"no manifest is written: {_NONE_NEEDED} {uniform}")
    return PROPOSED


def _write_page(out: Path, result: dict[str, Any], reason: str | None, regions: Table) -> None:
    """Write OUT.analysis.md and .html: the verdict on the manifest first, how it was measured last.

    reason: why the proposal is rejected; None if it is not.
    """
    parity = result.get("parity")
    judged = f" `tools.parity` over {parity['steps']} steps: {text(parity['verdict'])}." if parity else ""
    uniform = uniform_overrides(result)
    outcome = f"**accepted**: written to {code(out.name)}."
    if uniform is not None:
        outcome = f"**not needed**: {_NONE_NEEDED} {code(uniform)}."
    if reason is not None:
        outcome = f"**rejected**: {text(reason)}."
    alone = "FP8" if result["limits"]["fp8"] else "BF16"
    rules = [f"{code(rule['match'])}: {text(rule['reason'])}" for rule in result["proposal"]["manifest"]["rules"]]
    content = markdown.page(
        f"# Precision manifest for {text(Path(result['config']).name)}",
        f"{outcome}{judged}",
        [text(line) for line in verdict(result)],
        f"![exponent ranges of every region](<{out.with_suffix('.png').name}>)",
        section("Largest values", _largest_table(result)),
        section("Rules", rules or "None: one dtype for all."),
        section("Regions", Table(regions.head, [(code(cells[0]), *map(text, cells[1:])) for cells, _ in regions.rows])),
        section(
            "How it was measured",
            "The gradient error is the relative distance of the gradients from FP32's on held-out batches. A region's "
            f"share of {alone}'s squared error is measured with that region alone in {alone}. docs/analyze.md has the "
            "method" + (", and docs/fp8.md says what FP8 is." if result["limits"]["fp8"] else "."),
            f"Config {code(result['config'])}, overrides {code(' '.join(result['overrides']) or 'none')}, "
            f"{result['steps']} FP32 steps before the measurement.",
        ),
    )
    write_document(out.with_suffix(".analysis.md"), content, tone="bad" if reason else "good")


def _largest_table(result: dict[str, Any]) -> Table:
    """The modules that store the largest values in 16 bits, and those with the largest gradients, unscaled."""
    rows = []
    for kind, peaks in result["stored"].items():
        for peak in sorted(peaks.values(), key=lambda peak: -float(peak["value"]))[:_LARGEST]:
            of = ("-", "-") if peak["token"] is None else (code(repr(peak["token"])), peak["position"])
            rows.append((kind.replace("_", " "), f"{peak['value']:,.6g}", code(peak["place"]), *of))
    return Table(("kind", "largest", "at", "token", "position"), rows)


def _on_the_manifest_path(given: Resolved, manifest: dict[str, Any], folder: Path) -> list[str]:
    """Overrides for a manifest, which is written into `folder` with the DeepSpeed JSON."""
    path, deepspeed = folder / "manifest.json", folder / "deepspeed.json"
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    write_in_fp32(given.deepspeed_path, deepspeed)
    return [
        *("precision.path=manifest", "precision.compute=fp32", f"precision.manifest={path}"),
        *("precision.masters=fp32", f"deepspeed.config={deepspeed}", "model.kernels=torch", "faults=[]"),
        f"model.attention={given.config.model.wide_attention}",
    ]


def _resolve(options: argparse.Namespace, overrides: Sequence[str]) -> Resolved:
    return read_command_line(["--config", str(options.config), *overrides], as_launched(options.processes))


def _count(text: str) -> int:
    return 0 if text == "0" else positive_int(text)


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    defaults = Limits()
    parser = Arguments("python -m tools.analyze", __doc__, allow_abbrev=False)
    parser.add_argument("--config", type=Path, required=True, help="run config")
    parser.add_argument("--out", type=Path, required=True, help="manifest to write")
    add_processes_option(parser)
    more = "above it, patterns are measured instead of regions"
    fp8 = "largest gradient error, such as 0.1, at which linear layers may compute in FP8"
    for name, kind, default, what in (
        ("--steps", _count, 30, "FP32 training steps; 0 measures the weights as given"),
        ("--sequences", positive_int, 2, "sequences a process in one measurement"),
        ("--held-out", positive_int, 2, "global batches to validate on"),
        ("--parity-steps", _count, 12, "steps of tools.parity; 0 leaves it out"),
        ("--most-regions", positive_int, 64, more),
        ("--floor", share, defaults.floor, "smallest share of the FLOPs in 16 bits"),
        ("--fp8", share, defaults.fp8, fp8),
        ("--headroom", float, defaults.headroom, "margin below FP16's largest value"),
    ):
        parser.add_argument(name, type=kind, default=default, help=f"{what} (%(default)s)")
    options, overrides = parser.parse_known_args(arguments)
    options.processes = options.processes or default_processes()
    return analyze(options, overrides)
