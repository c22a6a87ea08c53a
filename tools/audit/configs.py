"""Audits the configs of another trainer's run, without training: which defects of known.yaml it hits, what was measured
as sound, what was never measured, and which dtype everything has.

A trainer's file is recognised by its keys, listed in names.yaml: Hugging Face's TrainingArguments (as passed to a
script or as saved; TRL's and LLaMA-Factory's too), axolotl's YAML, or Accelerate's. A condition in known.yaml is a
value, a list of alternatives, or text that begins with >, <, >=, <=, == or !=, for numbers and versions.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import VERSION_PATTERN, InvalidVersion

from config import json_text, yaml_text
from config.cli import REPOSITORY
from config.deepspeed.combinations import SETTINGS, Combination, scalar
from config.deepspeed.document import leaves, offload, read_document, unknown_keys
from config.deepspeed.keys import DTYPES, REFUSED, SECTIONS
from config.errors import UserError, one_line
from config.load import show
from tracking.environment import package_version


def read_data(name: str) -> Any:
    """A YAML file of this folder."""
    return yaml_text.parse(Path(__file__).with_name(name).read_text(encoding="utf-8"))


MATRIX, MEASURED_WITH = "docs/precision-matrix.md", "0.19.8"
"""The precision matrix, and the DeepSpeed that it was measured with."""
SEVERITIES = ("stops", "wrong", "risk", "note")
"""The severities in order. stops: training does not run. wrong: it trains wrongly. risk: wrong under a condition that
no config shows, or a race. note: right except for what it says."""
BAD = SEVERITIES[:2]
NAMES: dict[str, Any] = read_data("names.yaml")
KINDS: dict[str, Any] = NAMES["trainer_files"]
ACCELERATE = "Accelerate YAML"
ABSENT = "absent"
"""The value of a key that the JSON does not have."""
_OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "!=": operator.ne}
_ELSEWHERE = re.compile(f"({'|'.join(NAMES['no_numerics'])})$")


class TrainerFile(NamedTuple):
    """A trainer's config: the facts that it decides, and the DeepSpeed JSON that it names, contains or implies,
    preceded by that JSON's origin."""

    path: Path
    kind: str
    decided: dict[str, Any]
    json: tuple[str, dict[str, Any]] | None


class Given(NamedTuple):
    """A run as its configs describe it: their origin, the DeepSpeed JSON, the derived facts (None: unknown), and the
    versions of packages (None: neither installed nor given)."""

    sources: list[str]
    document: dict[str, Any]
    facts: dict[str, Any]
    versions: dict[str, str | None]

    def fact(self, name: str) -> Any:
        """A fact, a package's version, or for `json.KEY` the JSON's value of KEY. None: unknown."""
        if not name.startswith("json."):
            return (self.facts | self.versions).get(name)
        value = dict(leaves(self.document)).get(name.removeprefix("json."), ABSENT)
        return None if value == "auto" else value


class Audit(NamedTuple):
    """Result of an audit: the JSON with its verdict, what was audited (one line each), findings shown in full, and
    further lines by heading."""

    report: dict[str, Any]
    head: str
    told: list[dict[str, Any]]
    more: Mapping[str, Sequence[str]]


def verdict_of(found: list[dict[str, Any]], otherwise: str) -> str:
    """The verdict on findings. otherwise: the verdict if none is bad."""
    wrong = sum(finding["severity"] in BAD for finding in found)
    return f"wrong; findings: {wrong}" if wrong else otherwise


def audit_configs(given: Given) -> Audit:
    """Report on a run's configs."""
    known, facts = read_known(), given.facts
    found = [finding for entry in known if (finding := find(entry, given)) is not None]
    certain = [finding for finding in found if not finding["why"]]
    possible = [finding for finding in found if finding["why"] and finding["severity"] in BAD]
    may_be = f"; {len(possible)} may be, see what is open" if possible else ""
    report: dict[str, Any] = {"verdict": verdict_of(certain, f"nothing known to be wrong{may_be}")}
    report |= {"sources": given.sources, "facts": facts, "versions": given.versions}
    report |= {"findings": certain, "possible": possible, "numerics": list(numerics(given))}
    report |= {"measured_as_sound": list(sound(given)), "never_measured": list(never_measured(given, known))}
    head = f"{', '.join(given.sources)}: ZeRO-{facts['stage']}, {(facts['dtype'] or 'dtype open').upper()}, optimizer "
    head += f"{facts['optimizer']}, accumulation {facts['accumulation'] or 'open'}, trainer {facts['trainer']}\n"
    head += ", ".join(f"{package} {version}" for package, version in given.versions.items() if version)
    sections = {
        "May be wrong": [f"{each['says']} [{each['id']}]: {each['why']}" for each in possible],
        "Notes": [f"{each['says']} [{each['id']}]" for each in certain if each["severity"] == "note"],
        f"Measured as sound: bare DeepSpeed {MEASURED_WITH} on CPUs": report["measured_as_sound"],
        "Never measured": report["never_measured"],
        "Numerics": report["numerics"],
    }
    told = [finding for finding in certain if finding["severity"] != "note"]
    return Audit(report, head, told, sections)


def read_known() -> list[dict[str, Any]]:
    """The entries of known.yaml, most severe first."""
    return sorted(read_data("known.yaml"), key=lambda entry: SEVERITIES.index(entry["severity"]))


def holds(wanted: Any, value: Any) -> bool | None:
    """Whether a condition holds for a fact; None if the fact is unknown."""
    if value is None:
        return None
    if isinstance(wanted, list):
        return any(holds(one, value) for one in wanted)
    if not isinstance(wanted, str) or not wanted.startswith(("<", ">", "=", "!")):
        return bool(value == wanted)
    conditions = SpecifierSet(wanted)
    if isinstance(value, int | float):
        return all(_OPERATORS[each.operator](value, float(each.version)) for each in conditions)
    with suppress(InvalidVersion):  # the text is not a version
        return conditions.contains(value, prereleases=True)
    return False


def find(entry: dict[str, Any], given: Given) -> dict[str, Any] | None:
    """The entry for a report, with `why` it is uncertain (empty: it is certain); None if it does not apply."""
    open_ = []
    for name, wanted in (entry.get("versions", {}) | entry["when"]).items():
        answer = holds(wanted, given.fact(name))
        if answer is False:
            return None
        if answer is None:
            text = " or ".join(map(str, wanted)) if isinstance(wanted, list) else str(wanted)
            key = name.removeprefix("json.") if "." in name else name.replace("_", " ")
            open_.append(f"{key} is {text.lower()}")
    tried, why = entry.get("tried"), "if " + " and ".join(open_) if open_ else ""
    if not why and tried and holds(f">={tried[0]},<={tried[-1]}", given.versions["deepspeed"]) is False:
        why = f"measured with DeepSpeed {' to '.join(tried)}, not with {given.versions['deepspeed']}"
    found = {name: entry.get(name) for name in ("id", "severity", "says", "thread", "instead")} | {"why": why}
    measured = entry["measured"]
    return found | {"measured": f"{measured['figure']} ({measured['command']})" if measured else "not here"}


def numerics(given: Given) -> Iterator[str]:
    """Dtypes used to compute, store, sum and reduce; loss scale and clipping."""
    for name, (fact, *keys) in NAMES["numerics"].items():
        value = given.facts[fact]
        text = "open (auto)" if value is None else scalar(value)
        default = "".join(f" ({key} is not set)" for key in keys if given.fact(f"json.{key}") == ABSENT)
        yield f"{name}: {text.upper() if text in DTYPES.split('|') else text}{default}"


def sound(given: Given) -> Iterator[str]:
    """Settings of this run that, as measured in the precision matrix, bare DeepSpeed computes correctly."""
    facts, values = given.facts, dict(leaves(given.document))
    usual = (facts["autocast"], facts["masters"], facts["optimizer"]) == ("none", "fp32", "adamw")
    if facts["dtype"] is None or not usual or given.versions["deepspeed"] not in (MEASURED_WITH, None):
        return
    page = (REPOSITORY / MATRIX).read_text(encoding="utf-8")
    combination = str(Combination("cast", facts["dtype"], facts["stage"], facts["offload"]))
    clipping = "o(?:n|ff)" if facts["clipping"] is None else "on" if facts["clipping"] else "off"
    accumulation = 1 if facts["accumulation"] == 1 else 4
    row = rf"^\| {re.escape(combination)} \| {clipping} \| {accumulation} \|(?:[^|\n]*\|)+? (\S+) \|$"
    errors = re.findall(row, page, re.MULTILINE)
    bound = re.search(rf"(\S+) in {facts['dtype'].upper()}", page)
    if bound and errors and "*" not in "".join(errors):
        sums = "" if facts["summed_in"] == "fp32" else ", summed and reduced in FP32"
        yield f"{combination}{sums}: masters off by {max(errors)}, {bound[1]} allowed ({MATRIX})"
    for setting in SETTINGS:
        measured = setting.in_json and not setting.refused and facts["stage"] in setting.stages
        if measured and facts["dtype"] in setting.computes and values.get(setting.key) == setting.other:
            yield f"{setting.key} = {scalar(setting.other)} ({MATRIX})"


def never_measured(given: Given, known: list[dict[str, Any]]) -> Iterator[str]:
    """Settings that affect the numbers, or may, and were not measured."""
    values, release = dict(leaves(given.document)), given.versions["deepspeed"]
    told = {name.removeprefix("json.") for entry in known for name in entry["when"]}
    for key, value in values.items():
        section, stage = key.rpartition(".")[0], given.facts["stage"]
        off = values.get(f"{section}.enabled") is False or values.get(f"{section}.disable") is True
        refused = any(f"{key}.".startswith(f"{name}.") for name in REFUSED if not _ELSEWHERE.match(name))
        refused |= any(row.in_json and row.key == key and row.refuses(value, stage) for row in SETTINGS)
        if refused and not off and key not in told and value not in (None, False, 0, "auto", "none"):
            yield f"{key} = {scalar(value)}"
    yield from (f"{key}: DeepSpeed {MEASURED_WITH} has no such key" for key in unknown_keys(Path(), given.document))
    optimizers = [["adamw", "lion", "sgd"], *(entry["when"].get("optimizer", []) for entry in known)]
    if not any(holds(names, given.facts["optimizer"]) for names in optimizers):
        yield f"optimizer {given.facts['optimizer']}"
    if release not in (MEASURED_WITH, None):
        yield f"all of the precision matrix with DeepSpeed {release}: it is of {MEASURED_WITH}"


def read_given(
    files: list[TrainerFile], json_file: tuple[str, dict[str, Any]] | None, given: dict[str, Any], with_: list[str]
) -> Given:
    """The run. given: the command line's decisions, which take precedence. with_: its versions. Raises UserError."""
    named = json_file or next((file.json for file in files if file.json), None)
    if named is None:
        raise UserError(f"{files[0].path}: names no DeepSpeed JSON; add --deepspeed-config ds.json")
    source, document = named
    decided: dict[str, Any] = {"dtype": "fp32"} if files else {}
    for file in sorted(files, key=lambda file: file.kind != ACCELERATE):  # a script's arguments override Accelerate's
        decided |= file.decided
    if own := dict(leaves(document)).get("optimizer.type"):  # transformers then makes none of its own
        decided["optimizer"] = own
    decided |= {name: value for name, value in given.items() if value is not None}
    if not (SECTIONS[""] | REFUSED).keys() & document.keys():
        keys = ", ".join(list(document)[:5]) or "none"
        raise UserError(f"{source}: is no DeepSpeed JSON: it has none of its keys (it has: {keys})")
    open_ = next((key for key, value in leaves(document) if value == "auto"), None)
    if open_ and decided.get("trainer") == "own":
        problem = "is filled in by Hugging Face's trainers only; write a value, or leave --trainer own out"
        raise UserError(f'{source}: {open_} = "auto" {problem}')
    unknown_keys(Path(source), document)
    if all(document.get(name, {}).get("enabled") is True for name in ("bf16", "fp16")):
        raise UserError(f"{source}: bf16.enabled and fp16.enabled are both true; set one of them to false")
    versions = {package: package_version(package) for package in NAMES["packages"]}
    for text in with_:
        package, _, version = text.replace("==", "=").partition("=")
        if package not in versions or not re.fullmatch(VERSION_PATTERN, version, re.VERBOSE | re.IGNORECASE):
            raise UserError(f"--with {text}: is not one of {', '.join(versions)} and its version, as deepspeed=0.18.2")
        versions[package] = version
    sources = [source, *(str(file.path) for file in files if not source.startswith(str(file.path)))]
    return Given(sources, document, _facts(document, decided, versions), versions)


def _facts(document: dict[str, Any], decided: dict[str, Any], versions: dict[str, str | None]) -> dict[str, Any]:
    """The facts that known.yaml's conditions refer to."""
    values = {key: value for key, value in leaves(document) if value is not None}
    written = {key: None if value == "auto" else value for key, value in values.items()}
    autos = [key for key, value in values.items() if value == "auto" and not key.startswith(tuple(NAMES["filled"]))]
    dtype = _dtype(values, decided)
    lean = [name for name in ("bf16", "fp16") if written.get(f"{name}.{name}_master_weights_and_grads")]
    name = str(decided.get("optimizer") or written.get("optimizer.type") or "adamw").lower()
    known = (one for one, names in NAMES["optimizers"].items() if name in names)
    asked, fixed = decided.get("clipping"), written.get("fp16.loss_scale")
    # DeepSpeed's default, deepspeedai/DeepSpeed#8068
    default = {None: None, True: 1.0, False: 0.0}[holds(">=0.19.3", versions["deepspeed"])]
    clipping = values.get("gradient_clipping", default)
    return {
        **dict.fromkeys(("use_cpu", "tiled_mlp", "precomputed_reference", "router_loss"), False),
        # the Trainer's default, huggingface/transformers#39395
        "tokens_across_devices": holds(">=4.54.0", versions["transformers"]) is not False,
        "sequence_ranks": written.get("sequence_parallel_size", 1),
        "compile": any(key.startswith("compile.") for key in values) and not values.get("compile.disable"),
        "pipeline": any(key.startswith("pipeline.") for key in values),
        "trainer": "hf" if "auto" in values.values() else "own",
        **decided,
        "dtype": dtype,
        "autos_left": len(autos),
        "accumulation": _accumulation(values, decided),
        "stage": int(written.get("zero_optimization.stage") or 0),
        "offload": offload(document),
        "optimizer": next(known, name.removeprefix("deepspeed").removeprefix("fused")),
        "masters": lean[0] if lean else "fp32",
        "summed_in": written.get("data_types.grad_accum_dtype", dtype or "that of the weights"),
        "reduced_in": written.get("communication_data_type", dtype or "that of the weights"),
        "autocast": values.get("torch_autocast.dtype", "bfloat16") if values.get("torch_autocast.enabled") else "none",
        "loss_scale": "none" if dtype in ("fp32", "bf16") else "static" if fixed else "dynamic",
        "clipping": asked if clipping == "auto" else clipping,
        "clipping_ignored": "gradient_clipping" not in values and None not in (asked, default) and asked != default,
    }


def _accumulation(values: dict[str, Any], decided: dict[str, Any]) -> int | None:
    """Micro-batches per rank and step."""
    written = values.get("gradient_accumulation_steps", decided.get("accumulation"))
    if written is not None:
        return decided.get("accumulation") if written == "auto" else written
    batch, micro = (values.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu"))
    if not (isinstance(batch, int) and isinstance(micro, int)):
        return 1
    return batch // (micro * decided["ranks"]) if "ranks" in decided else None


def _dtype(values: dict[str, Any], decided: dict[str, Any]) -> str | None:
    """Dtype that the model is cast to: from the JSON or, if that leaves it open, from the trainer."""
    flags = {name: values.get(f"{name}.enabled", ABSENT) for name in ("bf16", "fp16", "bfloat16")}
    on = [name for name, flag in flags.items() if flag is True]
    wanted = decided.get("dtype")
    if on or (wanted in flags and flags[wanted] is not False):
        return "fp16" if (on[0] if on else wanted) == "fp16" else "bf16"
    return None if wanted is None and "auto" in flags.values() else "fp32"


def read_model(model: str) -> dict[str, Any]:
    """Numerics named in a model's config.json. model: a folder, or a name whose config is cached."""
    from huggingface_hub import try_to_load_from_cache

    path = Path(model) / "config.json"
    if not path.is_file():
        with suppress(ValueError):  # not a valid hub id
            path = Path(str(try_to_load_from_cache(model, "config.json")))
    if not path.is_file():
        raise UserError(f"--model {model}: is no folder with a config.json, nor in the Hugging Face cache here")
    config = json_text.read_object(path, "model's config")
    inner = config.get("text_config") or config
    drops = any(value for key, value in inner.items() if "drop" in key and isinstance(value, int | float))
    asked = bool(inner.get("output_router_logits"))
    return {"model_type": inner.get("model_type"), "dropout": drops, "router_loss": asked}


def read_trainer_file(path: Path) -> TrainerFile:
    """A trainer's config. Raises UserError if it is of none of these trainers, or does not start DeepSpeed."""
    try:
        values: Any = yaml_text.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as YAML or JSON: {one_line(error)}") from error
    values = {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}
    kind = next((kind for kind, known in KINDS.items() if values.keys() & set(known["told_by"])), None)
    if kind is None:
        raise UserError(f"{path}: is no {', '.join(KINDS)}: its keys are {', '.join(list(values)[:6]) or 'none'}")
    if kind == ACCELERATE and (used := values.get("distributed_type")) != "DEEPSPEED":
        raise UserError(f"{path}: distributed_type = {show(used)} does not start DeepSpeed; give the file that does")
    written = {key: value for key, value in leaves(values) if value is not None}
    found, own = dict[str, Any](trainer="hf"), dict[str, Any]()
    for name, keys in KINDS[kind]["decides"].items():
        value = next((written[key] for key in keys.split() if key in written), KINDS[kind]["otherwise"].get(name))
        if name.startswith("json."):
            *sections, last = name.split(".")[1:]
            reduce(lambda section, part: section.setdefault(part, {}), sections, own)[last] = value
        elif value not in (None, "auto"):
            found[name] = value
    mixed = {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}.get(values.get("mixed_precision"))
    if dtype := next((name for name in ("bf16", "fp16") if values.get(name) not in (None, False)), mixed):
        found["dtype"] = dtype
    for name in found.keys() & {"clipping", "accumulation", "ranks", "sequence_ranks"}:
        if not isinstance(found[name], int | float):
            raise UserError(f"{path}: {name} = {show(found[name])} is not a number")
    named = written.get("deepspeed_config.deepspeed_config_file") or values.get("deepspeed")
    if isinstance(named, str):
        file = next((base / named for base in (Path(), path.parent) if (base / named).exists()), Path(named))
        return TrainerFile(path, kind, found, (str(file), read_document(file)))
    where, document = ("deepspeed", named) if isinstance(named, dict) else ("deepspeed_config", own)
    return TrainerFile(path, kind, found, (f"{path}: {where}", document) if document else None)
