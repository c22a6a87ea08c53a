"""`train.py`'s command line: options, `key.sub=value` overrides, the resolved run, and `--show-config` and `--help`.

Every mistake in the config is found here, before a process group, a model or a file exists.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from config import help_text
from config.cli import CONFIG_ERROR, REPOSITORY, Arguments, is_rank_0
from config.errors import UserError, meant
from config.load import all_keys, nearest, to_dict, to_yaml
from config.printable import shown
from config.redact import redact
from config.resolved import Resolved, resolve_run
from config.schema import Config
from config.version import VERSION

EXAMPLE = "deepspeed --num_gpus 2 train.py --config config/recipes/demo.yaml"


def read_command_line(
    argv: Sequence[str], environment: Mapping[str, str] = os.environ, *, started: bool = False
) -> Resolved:
    """The run that `argv` (without the program's name) and the launcher's environment describe. Raises SystemExit: 2
    after one line on stderr (rank 0 only), 0 after `--help`, `--version` and `--show-config`. started: as in
    `load_config`."""
    prints = is_rank_0(environment)
    try:
        if (about := _help_asked(argv)) is not None:
            text = help_text.render(about)
        elif "--version" in argv:
            text = f"mantissa {VERSION}\n"
        else:
            _require_text([*argv, str(REPOSITORY), str(Path.cwd())])
            options = parse(argv)
            resolved = resolve_run(options, environment, started=started)
            if not options.show_config:
                return resolved
            text = render_config(resolved)
    except (UserError, PermissionError) as error:
        if prints:
            sys.stderr.write(f"error: {shown(error)}\n")
        raise SystemExit(CONFIG_ERROR) from None
    if prints:
        sys.stdout.write(text)
    raise SystemExit(0)


def _help_asked(argv: Sequence[str]) -> str | None:
    """Subject of the help asked for, empty for the overview page; None if no help is asked for."""
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        option, _, about = word.partition("=")
        if option in ("--help", "-h"):
            return about or ("" if following.startswith("-") or "=" in following else following)
    return None


def _require_text(given: Sequence[str]) -> None:
    """Refuse words and paths that could be opened but neither printed nor recorded. Raises UserError."""
    for word in given:
        try:
            word.encode()
        except UnicodeEncodeError:
            shown = word.encode(errors="backslashreplace").decode()
            raise UserError(
                f"command line: {shown} cannot be read in this locale's encoding, {sys.getfilesystemencoding()}; "
                "set LC_ALL=C.UTF-8 or PYTHONUTF8=1, or use a path that it can write"
            ) from None


def render_config(resolved: Resolved) -> str:
    """The resolved run config and DeepSpeed JSON as two YAML documents (JSON is YAML), without secrets."""
    plan = resolved.batch
    shared = f" / {plan.sequence} per sequence" if plan.sequence > 1 else ""
    shared += f" / {plan.tensor} per tensor" if plan.tensor > 1 else ""
    return (
        f"# Run config, resolved from {resolved.config_path}; changed keys show their default\n"
        f"# {plan.global_size} sequences per step: micro-batches of {plan.micro_size} x {plan.accumulation} accumulated"
        f" x {plan.world_size} processes{shared}\n"
        f"{_beside_defaults(redact(to_yaml(resolved.config)), resolved.config)}"
        f"---\n# DeepSpeed JSON, resolved from {resolved.deepspeed_path}\n"
        f"{json.dumps(redact(resolved.deepspeed), indent=2)}\n"
    )


def _beside_defaults(text: str, config: Config) -> str:
    """The YAML text of a config, with a comment naming the default behind each key that differs from it."""
    trees, path, lines = (to_dict(config), to_dict(Config())), list[str](), text.splitlines()
    for number, (line, following) in enumerate(zip(lines, [*lines[1:], ""], strict=True)):
        if key := re.match(r"( *)(\w+):", line):
            indent = len(key[1])
            path[indent // 2 :] = [key[2]]
            value: Any
            usual: Any
            value, usual = trees
            for name in path:
                inside = isinstance(usual, dict) and name in usual
                value, usual = (value[name], usual[name]) if inside else (None, None)
            wraps = isinstance(value, str) and following.startswith(" " * (indent + 1))
            if value != usual and not wraps and (usual == {} or not isinstance(usual, dict)):
                lines[number] += f"  # default: {json.dumps(usual)}"
    return "\n".join(lines) + "\n"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of `resolve_run`. Raises UserError: an option is unknown, or --config is missing."""
    parser = Arguments("train.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--deepspeed_config", "--deepspeed-config")
    parser.add_argument("--local_rank", "--local-rank", type=int)
    parser.add_argument("--show-config", "--show_config", action="store_true")
    # Accepted and ignored: scripts written for other DeepSpeed trainers pass it.
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options, unknown = parser.parse_known_intermixed_args(list(argv))
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        name = unknown[0].partition("=")[0]
        hint = "set run config keys as key.sub=value; see train.py --help"
        if key := nearest(name.lstrip("-").replace("-", "_"), list(all_keys())):
            hint = f"write {key if '=' in key else f'{key}=VALUE'}"
        raise UserError(f"command line: no such option {name}; {meant(name, known, hint)}")
    if options.config is None:
        raise UserError(f"command line: --config FILE is missing; for example: {EXAMPLE}")
    return options
