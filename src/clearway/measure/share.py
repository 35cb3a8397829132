"""Records for others to read: the same figures, nothing private.

What a record may hold and a stranger must not see: paths, the user's and the machine's name, prompts and
names of models that are not those of a named scenario. One JSON line a record, as `record` reads them.
"""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from clearway.errors import UnavailableError, one_line
from clearway.measure import scenario as scenarios
from clearway.measure.record import Record, to_line

PRIVATE = "(not shared)"
SHORTEST = 3  # signs of a name that is looked for: a shorter one would be found in half of all words
_PATH = re.compile(r"(?<![\w/])(?:~|[A-Za-z]:)?(?:[/\\][^/\\\s'\",;()]+){2,}[/\\]?")
_KEPT = (
    "device",
    "machine",
    "kind",
    "os",
    "driver",
    "torch",
    "python",
)  # a product may be called as a user is


def shared(record: Record) -> Record:
    """The record without what is private."""
    made = dict(record.provenance)
    settings = dict(made.get("settings") or {})
    if isinstance(settings.get("scenario"), dict):
        settings["scenario"] = _public(settings["scenario"])
    kept = {key: value for key, value in made.items() if key in _KEPT}
    return replace(
        record,
        scenario=_clean(record.scenario),
        provenance={**_clean({**made, "settings": settings}), **kept},
        intended=_clean(record.intended),
        refused=_clean(record.refused),
        failed=_clean(record.failed),
        throughput=_clean(record.throughput),
        operations=_clean(record.operations),
        correctness=_clean(record.correctness),
        memory=_clean(record.memory),
        comparisons=_clean(record.comparisons),
    )


def write(path: str | Path, records: Iterable[Record]) -> None:
    """Writes one file of shared records, in place of what is there; UnavailableError where that fails."""
    lines = [to_line(shared(record)) + "\n" for record in records]
    try:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise UnavailableError(f"{path} could not be written: {one_line(error)}") from error


def _public(scenario: dict[str, Any]) -> dict[str, Any]:
    """A scenario's fields: all of them where they are a named one's, else without words and model."""
    base = str(scenario.get("name", "")).partition(" (")[0]
    named = scenarios.find(base).as_dict() if base in scenarios.names() else {}
    private = ("prompt", "negative", "title", "notes", "model")
    return {
        key: PRIVATE
        if key in private and value and value != named.get(key) and not _random(key, value)
        else value
        for key, value in scenario.items()
    }


def _random(key: str, value: Any) -> bool:
    return key == "model" and (value == "embedded" or str(value).endswith("-random"))


def _clean(value: Any) -> Any:
    """The value with paths, user and host taken out of every text in it."""
    if isinstance(value, str):
        text = _PATH.sub("<path>", value)
        for name, stand_in in _names():
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", stand_in, text, flags=re.IGNORECASE)
        return text
    if isinstance(value, dict):
        return {key: _clean(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(one) for one in value]
    return value


def _names() -> list[tuple[str, str]]:
    """The names of this machine and of its user, with what stands for them."""
    found = []
    for read, stand_in in ((socket.gethostname, "<host>"), (getpass.getuser, "<user>")):
        try:
            name = read()
        except (OSError, KeyError, ImportError):  # an account without a name
            continue
        if len(name) >= SHORTEST and name not in ("root", "localhost"):
            found.append((name, stand_in))
    return found
