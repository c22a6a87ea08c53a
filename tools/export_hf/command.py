"""Turn a checkpoint into a Hugging Face model folder: safetensors, config, tokenizer, model card, hashes.

    python -m tools.export_hf CHECKPOINT OUT [--dtype bf16] [--merge-adapters] [--parity parity.json] [--force]
        [--compare-logits [DATA]] [--largest-kl NATS] [--largest-difference NATS] [--push-to-hub REPO_ID]

CHECKPOINT is a `checkpoints/step-N` folder of a run at any ZeRO stage and of any number of ranks; one process, no GPU.
The masters are rounded once, to nearest even, to --dtype: by default the run's compute dtype, since these are the
weights that it evaluated. Every tensor is compared and read back. --compare-logits measures how far the written model's
log-probabilities are from the masters'. OUT appears complete, by one rename; --push-to-hub then uploads it. See
docs/export.md.

Exit code 0: done. 2: not possible, with the reason; if only the upload failed, OUT stays. 3: a tensor differs or is not
finite, or the gap is above its bound; nothing was exported.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from config.cli import Arguments, entry_point
from config.deepspeed.resolve import Dtype
from config.errors import UserError
from config.options import not_negative, positive_int
from config.printable import shown
from config.version import VERSION

TENSORS_DIFFER = 3


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = Arguments("python -m tools.export_hf", __doc__)
    parser.add_argument("checkpoint", type=Path, help="a checkpoints/step-N folder")
    parser.add_argument("out", type=Path, help="folder to make")
    dtype = "dtype of the exported weights (default: the one that the run computed in)"
    parser.add_argument("--dtype", choices=sorted(get_args(Dtype)), help=dtype)
    parser.add_argument("--parity", type=Path, help="parity.json whose verdict the model card is to give")
    parser.add_argument("--run", type=Path, help="the run folder, where the checkpoint does not lie in it")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer folder, where the prepared data are gone")
    parser.add_argument("--shard-size", default="5GB", help="largest file; one is in memory at a time (default 5GB)")
    parser.add_argument("--merge-adapters", action="store_true", help="a whole model: base + adapter, added in FP32")
    base = "add it to the base rounded to the run's compute dtype (default), or to the values of the base's files"
    parser.add_argument("--merge-from", choices=("compute", "fp32"), help=base)
    data = "on rows of DATA, a run config (.yaml) or a file of rows or text (the run's held-out rows); after OUT"
    parser.add_argument("--compare-logits", metavar="DATA", nargs="?", const="", help=data)
    parser.add_argument("--compare-rows", type=positive_int, help="how many rows (default 8)")
    for name, what in (
        ("--largest-kl", "KL allowed at any token or label [nats]"),
        ("--largest-difference", "difference of any log-probability allowed [nats], or of a predicted number"),
        ("--largest-ratio", "mean gap allowed, as a multiple of that of the masters rounded to --dtype (default 1.5)"),
    ):
        parser.add_argument(name, type=not_negative, help=f"largest {what}")
    parser.add_argument("--force", action="store_true", help="replace an exported model that is at OUT")
    parser.add_argument("--push-to-hub", metavar="REPO_ID", help="upload OUT to this repository of the hub")
    parser.add_argument("--private", action="store_true", help="the repository has to be private")
    options = parser.parse_args(arguments)
    of_gap = ("compare_rows", "largest_kl", "largest_difference", "largest_ratio")
    needs = {"private": "push_to_hub", "merge_from": "merge_adapters", **dict.fromkeys(of_gap, "compare_logits")}
    for name, needed in needs.items():
        if getattr(options, name) not in (None, False) and getattr(options, needed) in (None, False):
            raise UserError(f"--{name.replace('_', '-')}: needs --{needed.replace('_', '-')}; give it too")
    # Imported here so that --help and a mistyped option answer at once.
    import transformers

    from tools.export_hf import hub
    from tools.export_hf.export import export, find_source
    from tools.export_hf.gap import Bounds, Comparison
    from tools.export_hf.tensors import TensorsDiffer
    from training.checkpoint.retention import read_lock

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    comparison = None
    if options.compare_logits is not None:
        ratio = Bounds.ratio if options.largest_ratio is None else options.largest_ratio
        bounds = Bounds(options.largest_kl, options.largest_difference, ratio)
        comparison = Comparison(options.compare_logits, options.compare_rows or Comparison.rows, bounds)
    try:
        source = find_source(options.checkpoint, run=options.run, tokenizer=options.tokenizer, parity=options.parity)
        computed: Any = source.config.precision.compute
        dtype = options.dtype or ("fp32" if computed == "auto" else computed)
        if options.dtype is None:
            print(f"--dtype {dtype}: the dtype that the run computed in")
        repo = hub.find_repo(options.push_to_hub, private=options.private) if options.push_to_hub else None
        with read_lock(options.checkpoint):
            facts = export(
                source,
                options.out,
                dtype=dtype,
                shard_size=options.shard_size,
                force=options.force,
                merged=options.merge_adapters,
                merge_from=options.merge_from or "compute",
                comparison=comparison,
            )
        if repo:
            what = f"Export step {facts['training']['step']} of {facts['run']} in {dtype} (Mantissa {VERSION})"
            print(f"uploaded to {hub.upload(repo, options.out, message=what)}")
    except TensorsDiffer as error:
        print(f"error: {shown(error)}; nothing was exported", file=sys.stderr)
        return TENSORS_DIFFER
    return 0
