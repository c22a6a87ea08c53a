"""Whether the Hugging Face hub can be reached, determined in seconds; its own client tries for half a minute."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from config.errors import UserError, meant, one_line
from config.schema import Config

_SECONDS = 3.0
_FIX = "connect, set HF_ENDPOINT or https_proxy, or give a model folder"


def settle_hub(config: Config) -> None:
    """Keep libraries from asking a hub that does not answer. Raises UserError for a model that is nowhere else. A
    missing tokenizer or data set is reported when it is read: prepared data need neither."""
    data: Any = config.data
    models = {"model.name_or_path": config.model.name_or_path, "distill.teacher": config.distill.teacher}
    sets = [item.path for item in (data, *data.sources, *data.validation) if item.source == "hub"]
    tokenizer = None if data.tokenizer.startswith(("bytes", "model", "bpe:")) else data.tokenizer
    asked = [name for name in (*models.values(), tokenizer, *sets) if name and not Path(name).expanduser().exists()]
    if not asked or not (problem := _why_unreachable()):
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    client: Any = sys.modules.get("huggingface_hub.constants")
    if client is not None:  # it has already read the variable
        client.HF_HUB_OFFLINE = True
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    for key, name in models.items():
        kept = cache.glob(f"models--{str(name).replace('/', '--')}/snapshots/*/config.json")
        if name in asked and name is not None and not any(kept):
            fix = meant(name, map(str, Path(name).parent.glob("*/")), _FIX)
            raise UserError(f"{key} = {name}: is neither a folder nor in the cache, and {problem}; {fix}")


def _why_unreachable() -> str:
    """Why the hub does not answer; empty if it sends any answer at all."""
    # imported here: most runs need no hub, and start sooner without
    from ssl import SSLError
    from urllib.error import HTTPError
    from urllib.request import Request, getproxies, urlopen

    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    hub, found = os.environ.get("HF_ENDPOINT") or "https://huggingface.co", [f"no answer in {_SECONDS:g} s"]

    def ask() -> None:
        try:
            urlopen(Request(hub, method="HEAD"), timeout=_SECONDS).close()
            found.append("")
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            answered = isinstance(error, HTTPError) or isinstance(reason, SSLError)  # certificates may be set elsewhere
            found.append("" if answered or "all" in getproxies() else one_line(reason, 100))

    asking = threading.Thread(target=ask, daemon=True)  # a name lookup has no time-out
    asking.start()
    asking.join(_SECONDS)
    return found[-1] and f"the hub, {hub}, cannot be reached ({found[-1]})"
