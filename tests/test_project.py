"""What the project says of itself in more than one file agrees: version, license, pinned packages, commands of make."""

from __future__ import annotations

import re
from pathlib import Path

from config.version import VERSION

ROOT = Path(__file__).parent.parent


def test_the_newest_entry_of_the_changelog_is_the_version() -> None:
    entries = re.findall(r"^## \[(.+?)\] - \d{4}-\d{2}-\d{2}$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entries[0] == VERSION
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)


def test_the_license_is_apache_2_in_full() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text and "9. Accepting Warranty" in text and text.endswith("the License.\n")
