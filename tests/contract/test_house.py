"""The house rules that a linter does not know."""

import re
from pathlib import Path

import pytest

from clearway.cli.main import command_names

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "clearway"
FILES = sorted(SOURCE.rglob("*.py"))
UNTESTED = {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_files_are_short(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 500


def test_every_source_file_is_named_by_a_test_file_of_its_room() -> None:
    """tests/<room>/ exists for every room, and each module of it is imported or exercised by name there."""
    missing = []
    for file in FILES:
        if file.name in UNTESTED:
            continue
        room = file.parent.relative_to(SOURCE)
        tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / room).glob("*.py"))
        mirrored = (ROOT / "tests" / room / f"test_{file.stem.lstrip('_')}.py").exists()
        if not mirrored and not re.search(rf"\b{re.escape(file.stem)}\b", tests):
            missing.append(str(file.relative_to(SOURCE)))
    assert missing == []


def test_every_command_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert [name for name in command_names() if f"clearway {name}" not in text] == []
