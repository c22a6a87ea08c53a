"""Describe a run's task, adapter and samples, from its resolved config."""

from typing import Any

from tracking.numbers import number, percent
from tracking.run_dir import setting


def task_in_words(config: dict[str, Any]) -> str:
    """The task with the settings that determine its loss; empty if the config has none."""
    task = str(setting(config, "task") or "")
    own = setting(config, {"dpo": "preference"}.get(task, task))
    own = own if isinstance(own, dict) else {}
    match task:
        case "sft" if own.get("loss") == "row":
            return "sft, mean over rows"
        case "classify":
            return f"classify, {own.get('kind')}"
        case "mlm":
            what = "words" if own.get("whole_word") else "tokens"
            return f"mlm, {percent(own.get('probability', 0))} of the {what} chosen"
        case "dpo":
            weight = own.get("sft_weight")
            further = f", {number(weight)} x cross-entropy of the chosen answer" if weight else ""
            held = str(own.get("reference")).replace("_", " ")
            return f"dpo, {own.get('loss')} with beta {own.get('beta')}, reference {held}{further}"
        case "distill":
            weight, top = own.get("ce_weight") or 0, own.get("top_k")
            further = f", its {top} likeliest tokens" if top else ""
            further += f", {number(weight)} x cross-entropy of the labels" if weight else ""
            what = f"{own.get('loss')} at temperature {own.get('temperature')}"
            return f"distill, {what} from {own.get('teacher')}{further}"
    return task


def adapter_in_words(config: dict[str, Any]) -> str:
    """Kind, rank and base of the adapter; empty without one."""
    kind, base = setting(config, "adapter.kind"), setting(config, "adapter.base")
    if kind in (None, "none"):
        return ""
    held = "" if base in (None, "compute") else f", on a base in {base}"
    return f"{kind}, rank {setting(config, 'adapter.r')}, alpha {setting(config, 'adapter.alpha')}{held}"


def samples_in_words(config: dict[str, Any]) -> str:
    """Unit in which a batch is counted, with its length in tokens."""
    task, length = setting(config, "task"), setting(config, "data.sequence_length")
    if task == "dpo":
        return f"pairs of at most {length} tokens a side"
    if task == "seq2seq":
        return f"rows of at most {length} tokens and {setting(config, 'data.target_length') or length} of the target"
    padded = task == "classify" or setting(config, "data.packing") == "none"
    return f"rows of at most {length} tokens" if padded else f"sequences of {length} tokens"
