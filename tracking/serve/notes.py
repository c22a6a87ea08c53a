"""Notes and tags that readers give a run on the overview, stored as `notes.json` in the run folder."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from config import json_text
from config.errors import UserError, one_line
from config.files import write_atomically
from config.printable import line, printable

NOTES = "notes.json"
MOST_BYTES = 1 << 16
"""Maximum size of the file and of a request."""
MOST_TAGS, LONGEST_TAG, LONGEST_NOTE = 20, 40, 4000


@dataclass(frozen=True)
class Notes:
    tags: tuple[str, ...] = ()
    note: str = ""


def read_notes(folder: Path) -> Notes:
    """The notes of a run folder. Raises UserError if the file cannot be read or is damaged."""
    path = folder / NOTES
    try:
        with path.open("rb") as file:
            return parse(file.read(MOST_BYTES + 1))
    except FileNotFoundError:
        return Notes()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error, 200)}); restore or remove it") from error


def write_notes(folder: Path, notes: Notes) -> None:
    """Replace the notes of a run folder atomically. Raises OSError, or UserError if the existing file is damaged."""
    read_notes(folder)
    content = json.dumps(asdict(notes), ensure_ascii=False, indent=1)
    write_atomically(folder / NOTES, f"{content}\n".encode())


def parse(content: bytes) -> Notes:
    """Parse notes from JSON into printable text and distinct tags. Raises ValueError for anything else."""
    if len(content) > MOST_BYTES:
        raise ValueError(f"notes of more than {MOST_BYTES:,} bytes")
    found: Any = json_text.parse(content.decode())
    if not isinstance(found, dict) or not found.keys() <= {"tags", "note"}:
        raise ValueError("notes are an object with tags and note")
    tags, note = found.get("tags", []), found.get("note", "")
    if not isinstance(note, str) or not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise ValueError("tags are a list of texts, and the note is a text")
    tags = list(dict.fromkeys(filter(None, (line(tag).strip() for tag in tags))))
    if len(tags) > MOST_TAGS or any(len(tag) > LONGEST_TAG for tag in tags):
        raise ValueError(f"a run has at most {MOST_TAGS} tags of {LONGEST_TAG} characters")
    if len(note) > LONGEST_NOTE:
        raise ValueError(f"a note has at most {LONGEST_NOTE:,} characters; this one has {len(note):,}")
    return Notes(tuple(tags), printable(note.replace("\r\n", "\n")).strip())
