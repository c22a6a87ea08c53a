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
from config.files import why_not_writable, write_atomically
from config.options import positive_int
from tools.audit.configs import KINDS, audit_configs, read_given, read_model, read_trainer_file


@entry_point(closed_pipe=DIVERGED)
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = Arguments("python -m tools.audit", __doc__)
    add, repeat = parser.add_argument, partial(parser.add_argument, action="append", default=[])
    add("folder", nargs="?", type=Path, help="what a probe wrote: its steps are recomputed")
    add("--deepspeed-config", type=Path, metavar="FILE", help="DeepSpeed JSON to audit")
    told = f"{', '.join(KINDS)}, told by its keys; may be repeated"
    repeat("--trainer-config", type=Path, metavar="FILE", help=told)
    trainers = ("hf", "trl", "accelerate", "own")
    add("--trainer", choices=trainers, help="whose loop (default: by the files)")
    add("--optimizer", metavar="NAME", help="where no file names it (default: adamw)")
    add("--model", metavar="NAME_OR_PATH", help="its config.json tells type and dropout; a probe's steps began with it")
    add("--ranks", type=positive_int, metavar="N", help="processes")
    versions = "a version in place of the installed one: deepspeed=0.17.6; may be repeated"
    repeat("--with", dest="versions", metavar="PACKAGE=VERSION", help=versions)
    add("--write-probe", type=Path, metavar="DIR", help="copy mantissa_probe.py there")
    add("--json", type=Path, metavar="FILE", help="write the findings there")
    add("--page", type=Path, metavar="FILE", help="write a page there")
    add("--reference", metavar="MODEL", help="DPO's reference, where it is not the policy of step 1")
    given = parser.parse_args(arguments)
    path, configs = given.deepspeed_config, given.deepspeed_config is not None or bool(given.trainer_config)
    if [given.folder is not None, given.write_probe is not None, configs].count(True) != 1:
        raise UserError("command line: give one of --deepspeed-config FILE, a probe's folder, or --write-probe DIR")
    for output in (given.json, given.page):
        if output is not None and (why := why_not_writable(output.parent)):
            raise UserError(f"{output}: cannot be written: {why}")
    if given.write_probe is not None:
        return write_probe(given.write_probe)
    if given.folder is not None:
        from tools.audit.judge import audit_folder  # loads torch

        return audit_folder(given.folder, given)
    decided = {"trainer": "hf" if given.trainer == "trl" else given.trainer, "ranks": given.ranks}
    decided |= {"optimizer": given.optimizer, **(read_model(given.model) if given.model else {})}
    document = None if path is None else (str(path), read_document(path))
    files = [read_trainer_file(path) for path in given.trainer_config]
    return audit_configs(read_given(files, document, decided, given.versions), given)


def write_probe(folder: Path) -> int:
    """Copy the probe into a folder, and print how it is used. Raises UserError where another file of its name is."""
    source = Path(__file__).with_name("mantissa_probe.py")
    target, probe = folder / source.name, source.read_bytes()
    if target.exists() and target.read_bytes() != probe:
        raise UserError(f"{target}: is there already and differs; remove it, or give another folder")
    if why := why_not_writable(folder):
        raise UserError(f"--write-probe {folder}: cannot be written: {why}")
    write_atomically(target, probe)
    print(f"wrote {target}: {ast.get_docstring(ast.parse(probe))}")
    return DONE
