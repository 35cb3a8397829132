"""Records in groups that are never mixed: by machine, and on each machine by build channel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clearway.measure.figures import mapping, number
from clearway.measure.markup import shown
from clearway.measure.record import Record

BUILD = (
    "driver", "os", "python", "torch", "torch_commit", "cuda", "triton", "diffusers", "transformers",
    "clearway", "commit", "dirty",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A record with where it comes from: the file's name, and the letter of its run."""

    record: Record
    file: str
    run: str = "A"

    @property
    def published(self) -> bool:
        """Whether its figures may be shown."""
        return not self.record.refused and not self.record.failed


@dataclass(frozen=True)
class Group:
    """The records of one machine and one build channel; `runs` holds each run's provenance by its letter."""

    machine: str
    channel: str
    runs: dict[str, Mapping[str, Any]]
    entries: list[Entry] = field(default_factory=list)

    def letter(self, entry: Entry) -> str | None:
        """The letter of an entry's run, where there is more than one."""
        return entry.run if len(self.runs) > 1 else None

    def published(self) -> list[Entry]:
        """Those whose figures may be shown."""
        return [entry for entry in self.entries if entry.published]


@dataclass(frozen=True)
class Report:
    """All groups, those of one machine beside one another, in the order of the files."""

    files: list[str]
    groups: list[Group]

    @property
    def machines(self) -> dict[str, list[Group]]:
        """Groups by machine; of each, one a build channel."""
        found: dict[str, list[Group]] = {}
        for group in self.groups:
            found.setdefault(group.machine, []).append(group)
        return found


def arrange(records: Iterable[tuple[str, Record]]) -> Report:
    """The report of records, each with the name of its file.

    A run is one build on one day in one file; when a contender comes up again in a scenario, the
    next has begun.
    """
    groups: dict[tuple[str, str], Group] = {}
    runs: dict[tuple[Any, ...], tuple[str, set[Any]]] = {}
    files: dict[str, None] = {}
    for file, one in records:
        files[file] = None
        made = mapping(one.provenance)
        channel = shown(made.get("torch_channel") or "of an unknown channel")
        group = groups.setdefault((machine_name(made), channel), Group(machine_name(made), channel, {}))
        key = (
            group.machine,
            channel,
            file,
            str(made.get("date"))[:10],
            *(str(made.get(name)) for name in BUILD),
        )
        letter, seen = runs.get(key, ("", set()))
        what = (one.scenario, one.contender, one.work)
        if not letter or what in seen:
            letter, seen = _letter(len(group.runs)), set()
            runs[key] = letter, seen
            group.runs[letter] = made
        seen.add(what)
        group.entries.append(Entry(one, file, letter))
    return Report(list(files), list(groups.values()))


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else f"{chr(ord('A') + index % 26)}{index // 26}"


def machine_name(made: Mapping[str, Any]) -> str:
    """A machine as people call it: device, cores (of a CPU), memory, and which kind of device was used."""
    name = shown(made.get("device") or made.get("machine") or "unknown machine")
    cores, memory = number(made.get("cores")), number(made.get("memory_bytes"))
    kind = shown(made.get("kind") or "")
    name += f", {cores:.0f} cores" if cores and kind == "cpu" and "core" not in name else ""
    name += f", {memory / 2**30:.0f} GiB" if memory and "GiB" not in name else ""
    return f"{name} ({kind.upper()})" if kind else name


def build_words(made: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a run was made with, as pairs of name and value; what is not known is left out."""
    pairs = []
    for name in (*BUILD, "date"):
        value = made.get(name)
        if value in (None, "") or name == "dirty":
            continue
        words = shown(value)[:10] if name in ("commit", "torch_commit") else shown(value)
        dirty = name == "commit" and made.get("dirty") is True
        pairs.append((name.replace("_", " "), f"{words} with uncommitted changes" if dirty else words))
    return pairs


def workload(entry: Entry) -> str:
    """What an entry's scenario asks for, in a few words; "" where its record does not say."""
    given = mapping(mapping(mapping(entry.record.provenance).get("settings")).get("scenario"))

    def words(form: str, *names: str) -> str:
        values = [given.get(name) for name in names]
        return "" if None in values or 0 in values else shown(form.format(*map(str, values)))

    parts = [
        f"one call of {shown(given['what'])}" if given.get("what") not in (None, "whole") else "",
        words("model {}", "model"),
        words("{} × {} px", "width", "height"),
        words("{} steps", "steps"),
        words("{} {}", "sampler", "schedule"),
        words("CFG {}", "cfg_scale"),
        words("NGMS {}", "ngms"),
        words("{} at a time", "batch_size") if given.get("batch_size") != 1 else "",
    ]
    return ", ".join(part for part in parts if part)
