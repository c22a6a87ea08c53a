"""Whether the Hugging Face hub can be reached, found out in seconds where its own client tries for half a minute."""

from __future__ import annotations

import difflib
import os
import sys
import threading
from pathlib import Path

from config.errors import UserError, one_line
from config.schema import Config

WAIT_SECONDS = 3.0
_MADE = ("bytes", "model", "bpe:")


def settle_hub(config: Config) -> None:
    """Keep libraries from asking a hub that does not answer. Raises UserError for a model that is nowhere else.

    A tokenizer or a data set that is missing then is told where it is read: prepared data need neither.
    """
    data, models = (
        config.data,
        {"model.name_or_path": config.model.name_or_path, "distill.teacher": config.distill.teacher},
    )
    models = {key: name for key, name in models.items() if _of_hub(name)}
    sets = [item.path for item in (data, *data.sources, *data.validation) if item.source == "hub"]
    tokenizer = None if data.tokenizer.startswith(_MADE) else data.tokenizer
    if not models and not any(map(_of_hub, [tokenizer, *sets])):
        return
    problem = _why_unreachable()
    if not problem:
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    if client := sys.modules.get("huggingface_hub.constants"):
        client.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    for key, name in models.items():
        if not any((_cache() / f"models--{name.replace('/', '--')}").glob("snapshots/*/config.json")):
            beside = [str(item) for item in Path(name).parent.glob("*/")]
            near = difflib.get_close_matches(name, beside, n=1)
            fix = "connect, set HF_ENDPOINT or https_proxy, or give a model folder"
            fix = f"did you mean {near[0]}?" if near else fix
            raise UserError(f"{key} = {name}: is no folder and not in the cache, and {problem}; {fix}")


def _of_hub(name: str | None) -> bool:
    """Whether a name can only be the hub's."""
    return name is not None and not Path(name).expanduser().exists()


def _cache() -> Path:
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _why_unreachable() -> str:
    """Why the hub does not answer; empty where it does, whatever it answers."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    # imported here: most runs need no hub, and start sooner without
    from ssl import SSLError
    from urllib.error import HTTPError
    from urllib.request import Request, getproxies, urlopen

    if "all" in getproxies():  # a proxy that urllib cannot use
        return ""
    hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    found = [f"no answer in {WAIT_SECONDS:g} s"]

    def ask() -> None:
        try:
            urlopen(Request(hub, method="HEAD"), timeout=WAIT_SECONDS).close()
            found.append("")
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            answered = isinstance(error, HTTPError) or isinstance(reason, SSLError)  # certificates may be set elsewhere
            found.append("" if answered else one_line(reason, 100))

    # in a thread: looking up a name has no time-out of its own
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(WAIT_SECONDS)
    return found[-1] and f"the hub, {hub}, cannot be reached ({found[-1]})"
