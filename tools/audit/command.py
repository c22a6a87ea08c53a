"""Asks whether training by another trainer on DeepSpeed is right: by its configs, without training, or by the steps
that a probe recorded in it.

  python -m tools.audit --deepspeed-config ds.json --trainer-config training_args.json
  python -m tools.audit --write-probe .
  python -m tools.audit PROBE_FOLDER

Exit code 3 where training is found wrong, 2 for bad input, 0 otherwise.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from config.cli import DIVERGED, DONE, Arguments, entry_point
from config.deepspeed.document import read_document
from config.errors import UserError
from config.files import write_atomically
from config.options import positive_int
from tools.audit.given import KINDS, read_given, read_model, read_trainer_file
from tools.audit.static import audit_configs


@entry_point(closed_pipe=DIVERGED)
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = Arguments("python -m tools.audit", __doc__)
    add = partial(parser.add_argument, action="append", default=[])
    parser.add_argument("folder", nargs="?", type=Path, help="what a probe wrote: its steps are recomputed")
    parser.add_argument("--deepspeed-config", type=Path, metavar="FILE", help="DeepSpeed JSON to audit")
    files = f"{', '.join(KINDS)}, told by its keys; may be repeated"
    add("--trainer-config", type=Path, metavar="FILE", help=files)
    trainers = ("hf", "trl", "accelerate", "own")
    parser.add_argument("--trainer", choices=trainers, help="whose loop (default: by the files)")
    parser.add_argument("--optimizer", metavar="NAME", help="where no file names it (default: adamw)")
    parser.add_argument("--model", metavar="NAME_OR_PATH", help="its config.json tells type and dropout")
    parser.add_argument("--ranks", type=positive_int, metavar="N", help="processes")
    versions = "a version in place of the installed one: deepspeed=0.17.6; may be repeated"
    add("--with", dest="versions", metavar="PACKAGE=VERSION", help=versions)
    parser.add_argument("--write-probe", type=Path, metavar="DIR", help="copy mantissa_probe.py there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write a page there (of a probe's folder)")
    parser.add_argument("--reference", metavar="MODEL", help="DPO's reference, where it is not the policy of step 1")
    options = parser.parse_args(arguments)
    configs = options.deepspeed_config is not None or bool(options.trainer_config)
    if [options.folder is not None, options.write_probe is not None, configs].count(True) != 1:
        raise UserError("command line: give one of --deepspeed-config FILE, a probe's folder, or --write-probe DIR")
    if options.write_probe is not None:
        return write_probe(options.write_probe)
    if options.folder is not None:
        from tools.audit.recompute import audit_folder  # loads torch

        return audit_folder(options.folder, options)
    decided = {
        "trainer": "hf" if options.trainer == "trl" else options.trainer,
        "optimizer": options.optimizer,
        "ranks": options.ranks,
        **(read_model(options.model) if options.model else {}),
    }
    path = options.deepspeed_config
    document = None if path is None else (str(path), read_document(path))
    trainer_files = [read_trainer_file(path) for path in options.trainer_config]
    return audit_configs(read_given(trainer_files, document, decided, options.versions), options.json)


def write_probe(folder: Path) -> int:
    """Copy the probe into a folder, and print how it is used. Raises UserError where another file of its name is."""
    source = Path(__file__).with_name("mantissa_probe.py")
    target = folder / source.name
    try:
        probe = source.read_bytes()
        if target.exists() and target.read_bytes() != probe:
            raise UserError(f"{target}: is there already and differs; remove it, or give another folder")
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(target, probe)
    except OSError as error:
        raise UserError(f"--write-probe {folder}: cannot be written: {error.strerror or error}") from error
    print(f"wrote {target}: {ast.get_docstring(ast.parse(probe))}")
    return DONE
