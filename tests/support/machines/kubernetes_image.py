"""launch/docker/Dockerfile, taken at its word without a docker daemon: what it copies, its user, its environment."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from config.cli import REPOSITORY

DOCKERFILE = REPOSITORY / "launch/docker/Dockerfile"
IGNORE = REPOSITORY / "launch/docker/Dockerfile.dockerignore"


def instructions() -> Iterator[tuple[int, str, str]]:
    """(stage, instruction, its arguments), lines joined and comments left out; stage 0 is before the first FROM."""
    lines = [line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    stage = 0
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        stage += word == "FROM"
        if word:
            yield stage, word, rest.strip()


def last_stage(word: str) -> list[str]:
    """The arguments of every such instruction of the image itself."""
    found = list(instructions())
    return [rest for stage, name, rest in found if name == word and stage == found[-1][0]]


def environment() -> dict[str, str]:
    """The variables that ENV sets."""
    return dict(item.split("=", 1) for rest in last_stage("ENV") for item in rest.split())


def uid() -> int:
    """The user that the image runs as."""
    return int(last_stage("USER")[-1].partition(":")[0])


def sent(path: Path) -> bool:
    """Whether the build gets to see a file of the repository: the last rule that matches it or a folder of it."""
    relative = path.relative_to(REPOSITORY)
    names = [parent.as_posix() for parent in (relative, *relative.parents) if parent.name]
    seen = True
    for line in IGNORE.read_text(encoding="utf-8").splitlines():
        rule = line.strip()
        if rule and not rule.startswith("#") and any(_pattern(rule.lstrip("!")).fullmatch(name) for name in names):
            seen = rule.startswith("!")
    return seen


def _pattern(rule: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", rule)
    meaning = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(meaning.get(part, re.escape(part)) for part in parts))


def assemble(folder: Path) -> None:
    """Put what the COPY lines of the image copy out of the repository into `folder`, which stands for its WORKDIR."""
    for rest in last_stage("COPY"):
        if rest.startswith("--from="):
            continue
        *sources, target = rest.split()
        for source in sources:
            whole = REPOSITORY / source
            if not whole.exists():
                raise FileNotFoundError(f"COPY {rest}: {source} is not in the repository")
            for path in sorted(whole.rglob("*")) if whole.is_dir() else [whole]:
                if path.is_file() and sent(path):
                    place = folder / target / (path.relative_to(whole) if whole.is_dir() else path.name)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, place)
