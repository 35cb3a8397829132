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
from pathlib import Path, PureWindowsPath
from typing import Any

from clearway.errors import UnavailableError, one_line
from clearway.measure import scenario as scenarios
from clearway.measure.record import Record, to_line

PRIVATE = "(not shared)"
SHORTEST = 3  # signs of a name that is looked for: a shorter one would be found in half of all words
EVERYDAY = ("root", "localhost", "clearway", "diffusers", "torch", "python", "embedded")
"""Names of users and hosts that tell nothing, and stand in records for what they are."""
_PART = r"[/\\]+[^/\\\s'\",;()]+"
_PATH = re.compile(
    r"""(?P<sign>['"])(?:file:|~|[A-Za-z]:)?[/\\][^'"]*[/\\][^'"]*(?P=sign)"""  # quoted: with spaces in it
    rf"|(?<![\w/])(?<!http:)(?<!https:)(?:(?:file:)?(?:{_PART}){{2,}}|(?:~|[A-Za-z]:)(?:{_PART})+)[/\\]?"
)
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
    names = _names()
    if isinstance(settings.get("scenario"), dict):
        given = settings["scenario"]
        settings["scenario"] = _public(given)
        if settings["scenario"].get("model") == PRIVATE:  # its last part stands in the scenario's name too
            model = str(given["model"])
            names = [(model, PRIVATE), (PureWindowsPath(model).name, PRIVATE), *names]
    kept = {key: value for key, value in made.items() if key in _KEPT}
    cleaned = {
        name: _clean(getattr(record, name), names)
        for name in (
            "scenario", "intended", "refused", "failed", "throughput", "operations", "correctness", "memory",
            "comparisons",
        )
    }  # fmt: skip
    return replace(record, provenance={**_clean({**made, "settings": settings}, names), **kept}, **cleaned)


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


def _clean(value: Any, names: list[tuple[str, str]]) -> Any:
    """The value with paths and `names` taken out of every text in it."""
    if isinstance(value, str):
        text = _PATH.sub("<path>", value)
        for name, stand_in in names:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", stand_in, text, flags=re.IGNORECASE)
        return text
    if isinstance(value, dict):
        return {key: _clean(one, names) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(one, names) for one in value]
    return value


def _names() -> list[tuple[str, str]]:
    """The names of this machine and of its user, with what stands for them."""
    found = []
    for read, stand_in in ((socket.gethostname, "<host>"), (getpass.getuser, "<user>")):
        try:
            name = read()
        except (OSError, KeyError, ImportError):  # an account without a name
            continue
        if len(name) >= SHORTEST and name.lower() not in EVERYDAY:
            found.append((name, stand_in))
    return found
