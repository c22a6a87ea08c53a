"""The model card (README.md) of an exported model: training, precision, agreement with FP32, files and hashes."""

import json
from collections.abc import Mapping
from typing import Any

from config.task import CAUSAL_LM, MASKED_LM, SEQ2SEQ_LM, SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION
from tracking.pages.markdown import Table, code, fenced, page, section, text

_PIPELINES = {
    CAUSAL_LM: "text-generation",
    MASKED_LM: "fill-mask",
    SEQ2SEQ_LM: "text2text-generation",
    SEQUENCE_CLASSIFICATION: "text-classification",
    TOKEN_CLASSIFICATION: "token-classification",
}
_NOT_LISTED = ("merged", "model.config")  # the latter is in the example
LONGEST_MANIFEST = 60
"""[lines] A longer precision manifest is only in mantissa.json."""


def model_card(facts: Mapping[str, Any]) -> str:
    """Markdown with the hub's front matter, from the export's `mantissa.json`; without what was not recorded."""
    model, adapter = facts["model"], facts.get("adapter")
    held = {key: _listed(value) for key, value in (adapter or {}).items() if key not in _NOT_LISTED}
    return page(
        _front_matter(facts),
        f"# {text(facts['run'])}",
        f"{text(model['class'])} with {model['parameters']:,} parameters, {facts['export']['dtype']}, from step "
        f"{facts['training']['step']} of the run {code(facts['run'])}.",
        f"The run started from the weights of {code(model['base'])}." if model["base"] else "",
        f"```python\n{_example(model, adapter)}```",
        section("Adapter", _facts(held)),
        section("Training", _facts(facts["training"])),
        section("Data", _facts(facts["data"])),
        _precision(facts["precision"]),
        _parity(facts["parity"]),
        _gap(facts.get("train-inference gap"), facts["export"]["dtype"]),
        section("Made with", _facts({**facts["versions"], **facts["hardware"]})),
        _export(facts["export"]),
    )


def _example(model: Mapping[str, Any], adapter: Mapping[str, Any] | None) -> str:
    """Python that loads the export."""
    auto, peft, load, given = model["auto_class"], "", list[str](), ""
    names = {auto, "AutoTokenizer"}
    if adapter is None or adapter["merged"] is not None:
        load.append(f'model = {auto}.from_pretrained(FOLDER, dtype="auto")')
    else:
        peft = "PeftModel"
        if adapter["labels"] is not None:
            given = f", num_labels={len(adapter['labels']) or 1}"
        if settings := adapter.get("model.config"):
            names.add("AutoConfig")
            load += [f"config = AutoConfig.from_pretrained(BASE{given})", f"config.update({settings!r})"]
            given = ", config=config"
        if adapter.get("base", "compute") != "compute":
            names.add("BitsAndBytesConfig")
            nf4 = f'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant={adapter["double_quant"]}'
            load.append(f"held = BitsAndBytesConfig({nf4 if adapter['base'] == 'nf4' else 'load_in_8bit=True'})")
            given += ", quantization_config=held"
        if auto == CAUSAL_LM and not settings:
            names, peft = names - {auto}, "AutoPeftModelForCausalLM"
            load.append(f"model = {peft}.from_pretrained(FOLDER{given})")
        else:
            load += [f"base = {auto}.from_pretrained(BASE{given})", "model = PeftModel.from_pretrained(base, FOLDER)"]
    imports = [f"from peft import {peft}"] if peft else []
    imports.append(f"from transformers import {', '.join(sorted(names))}")
    return "\n".join([*imports, "", *load, "tokenizer = AutoTokenizer.from_pretrained(FOLDER)", ""])


def _listed(value: Any) -> Any:
    value = list(value.values()) if isinstance(value, Mapping) else value
    return ", ".join(value) or None if isinstance(value, list | tuple) else value


def _front_matter(facts: Mapping[str, Any]) -> str:
    lines = [
        "library_name: transformers",
        f"pipeline_tag: {_PIPELINES[facts['model']['auto_class']]}",
        f"tags: [mantissa, {json.dumps(facts['model']['type'])}]",
    ]
    if facts["model"]["base"]:
        lines.append(f"base_model: {json.dumps(facts['model']['base'])}")
    return "\n".join(["---", *lines, "---"])


def _precision(precision: Mapping[str, Any]) -> str:
    manifest, blocks = precision.get("manifest"), []
    if manifest is not None:
        written = json.dumps(manifest, indent=1)
        blocks = ["The precision manifest:", fenced(written, "json")]
        if len(written.splitlines()) > LONGEST_MANIFEST:
            blocks = ["The precision manifest is in `mantissa.json`."]
    return section("Precision", _facts({**precision, "manifest": None}), *blocks)


def _parity(parity: Mapping[str, Any] | None) -> str:
    title = "Agreement with FP32"
    if parity is None:
        return section(title, "No parity report was given to this export.")
    lines = ["Measured by `python -m tools.parity`."]
    lines += [f"Not the same conditions as this run: {text(difference)}." for difference in parity["differences"]]
    rows = [
        (check["name"], _text(check["measured"]), _text(check["bound"]), "yes" if check["passed"] else "**no**")
        for check in parity["checks"]
    ]
    checks = Table(("check", "measured", "bound", "passed"), rows)
    return section(title, "\n".join(parity["lines"]), "\n".join(lines), checks)


def _gap(gap: Mapping[str, Any] | None, dtype: str) -> str:
    if gap is None:
        return ""
    unit = gap["unit"]
    keys = ("rows", f"{unit}s", "kl", "largest kl", "difference", "largest difference")
    facts = {key: gap[key] for key in (*keys, f"largest difference of the row's {unit}s") if key in gap}
    for part in ("of rounding alone", "of the masters rounded"):
        facts |= {f"{key}, {part}": value for key, value in gap[part].items()}
    facts |= {f"bound of the largest {name}": bound for name, bound in gap["bounds"].items()}
    positions = [(where, _text(at["kl"]), _text(at["largest difference"])) for where, at in gap["by position"].items()]
    modules = [(code(at["module"]), _text(at["own error"]), _text(at["output error"])) for at in gap["modules"]]
    what = f"KL(masters || export) and differences of log-probabilities in nats a {unit}"
    what = "Differences of the predicted numbers" if unit == "number" else what
    by_position = "By position in the row, and the" if positions else "The"
    return section(
        "Agreement of this export with the FP32 masters",
        _facts(facts),
        f"{what}; this model computes in {dtype}, the masters in FP32. {by_position} modules with the largest "
        "relative errors:",
        Table(("position", "kl", "largest difference"), positions),
        Table(("module", "own error", "output error"), modules),
    )


def _export(export: Mapping[str, Any]) -> str:
    rows = [(code(name), code(digest)) for name, digest in export["files"].items()]
    checked = "`sha256sum -c SHA256SUMS` checks all files."
    return section("Files", export["compared"], checked, Table(("file", "sha256"), rows))


def _facts(facts: Mapping[str, Any]) -> Table:
    return Table(("", ""), [(text(name), _text(value)) for name, value in facts.items() if value is not None])


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else text(value)
