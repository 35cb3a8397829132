"""What `accelerate` and `restore` did, and what has run since: the report that they give back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

_SHOWN = 3


@dataclass
class Ran:
    """How often a part ran, as "<part>/<executor>", and why not as it was meant to; told as it happens."""

    calls: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def sentences(self, part: str) -> list[str]:
        """One for each executor that ran, one for each reason."""
        told = [
            f"{part} ran {_times(count)} by {key.rpartition('/')[2]}"
            for key, count in self.calls.items()
            if count
        ]
        return told + [f"{part} ran eagerly {_times(count)}: {why}" for why, count in self.reasons.items()]


@dataclass
class Report:
    """What `accelerate` and `restore` did: module names by what was put there, and by why they were left.

    `ran` says by part what its executor has done since, `notes` what whoever asked should know of what was
    asked for. It keeps no module and no graph alive.
    """

    placed: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, list[str]] = field(default_factory=dict)
    ran: dict[str, Ran] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def place(self, what: str, name: str) -> None:
        """Notes that `what` was put at the module called `name`."""
        self.placed.setdefault(what, []).append(name)

    def leave(self, reason: str, name: str) -> None:
        """Notes why the module called `name` was left alone."""
        self.left.setdefault(reason, []).append(name)

    def reasons(self) -> dict[str, dict[str, int]]:
        """Why calls since then ran eagerly and not as they were meant to: by part, with how often."""
        return {part: dict(ran.reasons) for part, ran in self.ran.items() if ran.reasons}

    def __str__(self) -> str:
        lines = [f"{what}: {_named(names)}" for what, names in sorted(self.placed.items())]
        lines += [f"left alone, {reason}: {_named(names)}" for reason, names in self.left.items()]
        lines += self.notes
        lines += [line for part, ran in self.ran.items() for line in ran.sentences(part)]
        return "\n".join(lines) or "nothing here that an op is put in place of"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _named(names: list[str]) -> str:
    """How many in which part, or, of a few, which."""
    if len(names) <= _SHOWN:
        return ", ".join(names)
    parts = [name.partition(".")[0] for name in names]
    return ", ".join(f"{parts.count(part)} in {part}" for part in dict.fromkeys(parts))
