"""Everything that the documentation names exists: links, headings, `python -m` modules and their options, config keys,
events and their fields, repository paths, make targets."""

import dataclasses
import functools
import os
import re
import shlex
import subprocess
import sys
import typing
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import yaml

from config.errors import UserError
from config.help_text import keys as config_keys
from config.load import field_types, load_config
from config.moved import new_name
from config.schema import Config
from tracking.events import COMMON_FIELDS, REQUIRED_FIELDS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FOLDERS = (
    *("config", "data", "docs", "ds_configs", "lab", "launch", "modeling", "precision", "tests", "tools", "tracking"),
    "training",
)
# The reader makes the first by the command above it; the second is a mistake that the page shows the result of.
NOT_IN_THE_TREE = {"launch/deepspeed/hostfile", "launch/deepspeed/hostfle"}

_FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_COMMAND = re.compile(r"(?:(?:python3? -m|--module) ([A-Za-z][\w.]*\w)|(?<![\w/.])train\.py)\b([^\n`]*)")
_ENDINGS = ("py", "md", "json", "jsonl", "yaml", "html", "png", "svg", "txt", "csv", "log", "bin", "idx", "safetensors")
_NO_KEYS = {"deepspeed.initialize", "data.rows"}  # a function of DeepSpeed's; an entry of environment.json
_MODULES = ("model.layers", "model.embed_tokens", "model.norm", "model.decoder", "model.encoder")
"""Beginnings of a model's own module names, which are no keys of the section `model`."""
_PLACE = re.compile(r"`([\w/]+\.py): ([A-Za-z_]\w*)`")
"""A file and a name that it defines."""
_PATH = re.compile(rf"(?<![\w/.:@-])(?:{'|'.join(FOLDERS)})/[\w./*-]*[\w*]")


def prose(text: str) -> str:
    """The text without its fenced blocks of code."""
    return _FENCE.sub("", text)


def code(text: str) -> Iterator[str]:
    """Fenced blocks, and what stands between backticks on one line."""
    yield from (match[0] for match in _FENCE.finditer(text))
    yield from re.findall(r"`([^`\n]+)`", prose(text))


def anchors(page: Path) -> set[str]:
    """GitHub's anchors for the headings of a page."""
    headings = re.findall(r"^#+ +(.+)$", prose(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for link in _LINK.findall(prose(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists():
            yield f"no such file: {link}"
        elif anchor and anchor not in anchors(target):
            yield f"no such heading: {link}"


def is_runnable(module: str) -> bool:
    """Whether `python -m MODULE` finds something to run. Imports nothing.

    Only the paths are searched: setuptools' own finder takes a look for pip for the beginning of an import of it, and
    lets torch.compile import no setuptools from there on.
    """
    package, *rest = module.split(".")
    if package in FOLDERS:
        place = ROOT / module.replace(".", "/")
        sources = [path for path in (place.with_suffix(".py"), place / "__main__.py") if path.is_file()]
        return any('__name__ == "__main__"' in path.read_text(encoding="utf-8") for path in sources)
    found = PathFinder.find_spec(package)
    if found is None or not rest:
        return found is not None
    places = [Path(folder, *rest) for folder in found.submodule_search_locations or ()]
    return any(place.with_suffix(".py").is_file() or (place / "__main__.py").is_file() for place in places)


def missing_modules(page: Path) -> Iterator[str]:
    named = re.findall(r"(?:python3? -m|--module) ([A-Za-z][\w.]*\w)", page.read_text(encoding="utf-8"))
    yield from (f"cannot be run: python -m {name}" for name in named if not is_runnable(new_name(name) or name))


@functools.cache
def sources_of(module: str) -> str:
    """The source that reads the options of `python -m MODULE`, with what all tools share."""
    place = ROOT / module.replace(".", "/")
    shared = [*place.parent.glob("harness.py"), *ROOT.glob("config/*.py")]
    files = [*place.parent.glob(f"{place.name}.py"), *place.glob("*.py"), *shared]
    return "".join(path.read_text(encoding="utf-8") for path in files)


def missing_options(page: Path) -> Iterator[str]:
    for snippet in code(page.read_text(encoding="utf-8")):
        for command in _COMMAND.finditer(re.sub(r"\\\n", " ", snippet)):
            module, rest = (
                new_name(command[1] or "") or command[1] or "train",
                re.sub(r"'[^']*'|\"[^\"]*\"", "TEXT", command[2]),
            )
            if module.partition(".")[0] not in (*FOLDERS, "train"):
                continue
            own = re.split(r"\s(?:--(?=\s)|#|;|&&|\|)", rest)[0]
            for option in re.findall(r"(?<!\S)\[?(--[a-z][\w-]*)", own):
                if f'"{option}"' not in sources_of(module):
                    yield f"no such option: {module} {option}"


def refused_configs(page: Path) -> Iterator[str]:
    """Commands whose overrides the repository's config that they name does not take; not those with placeholders."""
    for snippet in code(page.read_text(encoding="utf-8")):
        for text in re.sub(r"\\\n *", " ", snippet).splitlines():
            config = re.search(r"--config (config/[\w/]+\.yaml)", text)
            if config is None or not (ROOT / config[1]).is_file() or text.count('"') % 2:
                continue
            words = shlex.split(text.partition(" #")[0])
            given = [word for word in words if word.partition("=")[0] in _KEYS - {"data.path", "data.source"}]
            if not any(re.search(r"\.\.\.|%|=[A-Z]+$", word) for word in given):
                try:
                    load_config(ROOT / config[1], [word for word in given if "=" in word], None)
                except UserError as error:
                    yield f"{text.strip()}: {error}"


def keys_of(section: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key, those of the entries of lists included; `KEY.*` for what is below a free mapping."""
    for name, hint in field_types(section).items():
        yield prefix + name
        for inner in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(inner):
                yield from keys_of(inner, f"{prefix}{name}.")
        if typing.get_origin(hint) is dict:
            yield f"{prefix}{name}.*"


_KEYS = frozenset(keys_of(Config))
_SECTIONS = sorted({key.partition(".")[0] for key in _KEYS if "." in key})
_KEY = re.compile(rf"(?<![\w./*$-])((?:{'|'.join(_SECTIONS)})(?:\.[a-z_]\w*)+)(?=[=:]|`$)")


def is_key(name: str) -> bool:
    parts = name.split(".")
    return name in _KEYS or any(".".join([*parts[:depth], "*"]) in _KEYS for depth in range(1, len(parts)))


def keys_in(mapping: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in mapping.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict) and not is_key(f"{prefix}{name}.*"):
            yield from keys_in(value, f"{prefix}{name}.")


def unknown_keys(page: Path) -> Iterator[str]:
    """Keys of the run config that the schema lacks, but for those of a line that shows the mistake, and of the past."""
    if page.name == "CHANGELOG.md":
        return
    text = page.read_text(encoding="utf-8")
    for snippet in code(text):
        shown = "\n".join(line for line in f"{snippet}`".splitlines() if "no such key" not in line)
        for name in _KEY.findall(shown):
            other = name in _NO_KEYS or name.rpartition(".")[2] in _ENDINGS or name.startswith(_MODULES)
            if not other and not is_key(name) and not is_runnable(name):
                yield f"no such key: {name}"
    for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        loaded = yaml.safe_load(block)
        if isinstance(loaded, dict) and all(name in _SECTIONS for name in loaded):
            yield from (f"no such key: {name}" for name in keys_in(loaded) if name not in _KEYS)


def missing_paths(page: Path) -> Iterator[str]:
    for snippet in code(page.read_text(encoding="utf-8")):
        for path in _PATH.findall(snippet):
            if path not in NOT_IN_THE_TREE and not any(ROOT.glob(path)):
                yield f"no such path: {path}"


def missing_names(page: Path) -> Iterator[str]:
    for path, name in _PLACE.findall(page.read_text(encoding="utf-8")):
        source = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
        if not re.search(rf"^\s*(?:(?:def|class) {name}\b|{name}(?:: [^=]+)? =)", source, re.MULTILINE):
            yield f"{path} defines no {name}"


def missing_targets(page: Path) -> Iterator[str]:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for snippet in code(page.read_text(encoding="utf-8")):
        for name in re.findall(r"^make ([a-z-]+)", snippet.removeprefix("```\n"), re.MULTILINE):
            if name not in targets:
                yield f"no such target: make {name}"


def stray_rows(page: Path) -> list[str]:
    """Rows that belong to no table, or have another number of cells than its head."""
    lines, wrong, cells = prose(page.read_text(encoding="utf-8")).splitlines(), [], 0
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        row = line.strip()
        if not row.startswith("|"):
            cells = 0
            continue
        found = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", row))) - 1
        if not cells and re.fullmatch(r"\|[\s|:-]+\|", below.strip()):
            cells = found
        if found != cells:
            wrong.append(f"no row of a table: {row[:60]}")
    return wrong


CHECKS = (
    *(broken_links, missing_modules, missing_options, unknown_keys),
    *(refused_configs, missing_paths, missing_names, missing_targets, stray_rows),
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_everything_a_page_names_exists(page: Path) -> None:
    assert [problem for check in CHECKS for problem in check(page)] == []


def test_what_does_not_exist_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n[a](gone.md) [b](#page) [c](#other) `docs/gone.md` `config/recipes/*.yaml` `make gone` "
        "`config/cli.py: gone`\n"
        "```\npython -m training.gone --config config/recipes/gone.yaml\npython -m tools.parity\nmake test\n"
        "python -m tools.parity --launch 'x --y' \\\n  --gone run.steps=3 model.gone=4 -- --z\n```\n"
        "`python train.py --config config/recipes/demo.yaml run.steps=5 'generate.prompt=a b'` `data.gone` "
        "`guard.x.y(` `model.layers.0=1 model.config.any=2 canary.steps: 3 data.sources.weight data.md`\n"
        "```yaml\nrun: {steps: 3, gone: 4}\nmodel: {config: {any: 1}}\n```\n"
        "| far | from it |\n\n| a | b |\n|---|---|\n| `|` \\| | c |\n| of | a | third |\n"
    )
    assert [problem for check in CHECKS for problem in check(page)] == [
        "no such file: gone.md",
        "no such heading: #other",
        "cannot be run: python -m training.gone",
        "no such option: tools.parity --gone",
        "no such key: model.gone",
        "no such key: data.gone",
        "no such key: run.gone",
        "python train.py --config config/recipes/demo.yaml run.steps=5 'generate.prompt=a b': "
        f"{ROOT}/config/recipes/demo.yaml: schedule.warmup_steps = 40 is more than run.steps = 5; make it smaller",
        "no such path: config/recipes/gone.yaml",
        "no such path: docs/gone.md",
        "config/cli.py defines no gone",
        "no such target: make gone",
        "no row of a table: | far | from it |",
        "no row of a table: | of | a | third |",
    ]


def test_the_table_of_events_has_every_event_and_field() -> None:
    page = (ROOT / "docs/run-folder.md").read_text(encoding="utf-8")
    section = page.partition("\n## events.jsonl\n")[2].partition("\n## ")[0]
    table, *below = re.split(r"^### Fields of ", section, flags=re.MULTILINE)
    found = re.findall(r"^\| `(\w+)` \|(.*)$", table, re.MULTILINE)
    rows = {name: set(re.findall(r"`(\w+)`", row)) for name, row in found}
    for text in below:
        rows[text.partition("\n")[0]] |= set(re.findall(r"`(\w+)`", text))
    assert set(rows) == set(REQUIRED_FIELDS)
    missing = {name: set(fields) - rows[name] for name, fields in REQUIRED_FIELDS.items()}
    assert not any(missing.values()), missing
    assert set(COMMON_FIELDS) <= set(re.findall(r"`(\w+)`", table.partition("\n| event |")[0]))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 90


def test_the_pages_to_read_have_at_most_70000_words() -> None:
    """Words are those of `wc -w`, the README included; neither evidence nor generated pages count."""
    listed, _, evidence = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("- Evidence:")
    pages = [ROOT / "docs" / name for name in re.findall(r": (\S+\.md)$", listed, re.MULTILINE)]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(page for page in pages if page.is_file())]
    assert len(pages) > 50 and "performance.md" in evidence
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 70_000


def test_the_index_links_every_page() -> None:
    index = ROOT / "docs/README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in _LINK.findall(index.read_text("utf-8"))}
    pages = {page.resolve() for page in PAGES if page.is_relative_to(index.parent)}
    assert pages - linked == {index.resolve()}


def test_the_checkpoints_of_recipes_that_are_named_are_saved() -> None:
    recipes = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in ROOT.glob("config/recipes/*.yaml")]
    runs = {recipe["run"]["name"]: recipe for recipe in recipes}
    wrong = []
    for page in [*PAGES, *ROOT.glob("config/recipes/*.yaml")]:
        for name, number in re.findall(r"runs/(\w+)/checkpoints/step-(\d+)", page.read_text(encoding="utf-8")):
            if name in runs and int(number) != (last := runs[name]["run"]["steps"]):
                every = runs[name].get("checkpoint", {}).get("every_steps", 0)
                if int(number) > last or not every or int(number) % every:
                    wrong.append(f"{page.name}: runs/{name} has no step-{number}, it ends at {last}")
    assert not wrong


def test_the_site_builds_with_every_page_key_and_command(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    keys = (tmp_path / "reference" / "keys.html").read_text(encoding="utf-8")
    assert all(f'id="{item.key.replace("[]", "")}"' in keys for item in config_keys())
    commands = (tmp_path / "reference" / "commands.html").read_text(encoding="utf-8")
    assert all(f"python -m {name}" in commands for name in ("tools.audit", "launch.plan", "tracking.serve"))
    walk = (tmp_path / "architecture.html").read_text(encoding="utf-8")
    assert "flowchart" not in walk and "<td>train.py</td>" in walk
    assert 'src="http' not in keys and 'href="http' not in (tmp_path / "index.html").read_text(encoding="utf-8")
