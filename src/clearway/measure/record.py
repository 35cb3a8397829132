"""One result as one JSON line: what ran, where, and its four ledgers, which nothing multiplies together."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clearway.errors import RequestError, one_line

SCHEMA = 1
DEEPEST = 50  # levels of nesting: what reports do to values takes Python's stack
WORK = ("same", "changed precision", "less work")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One contender's result in one scenario.

    `work` is whether it did the same arithmetic as the reference. `intended` is what was to run, `routes`
    what did; `refused` says why this must not be published, `failed` why there is nothing. Then the four
    ledgers: `throughput` (images, calls, n, p20_s, p50_s, p80_s, samples_s, device_p50_s, first_s, ready_s,
    new_size_s, png_p50_s, outliers, images_per_hour, cost_per_1000), `operations` (name, n, p20_ms, p50_ms,
    p80_ms, bytes_moved, flops, gb_per_s, tflop_per_s), `correctness` (reference, verified, max_error,
    psnr_db, ssim, …), `memory` (see `Meter`). `comparisons` are `Comparison`s with the contender they are
    against.
    """

    schema: int = SCHEMA
    scenario: str
    contender: str
    work: str = "same"
    provenance: dict[str, Any]
    intended: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None
    failed: str | None = None
    throughput: dict[str, Any] | None = None
    operations: list[dict[str, Any]] | None = None
    correctness: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None
    routes: dict[str, int] = field(default_factory=dict)
    comparisons: list[dict[str, Any]] = field(default_factory=list)


_OBJECTS = ("provenance", "intended")
_LEDGERS = ("throughput", "correctness", "memory")


def to_line(record: Record) -> str:
    """The record as one line of JSON without its end; numbers that are not finite become null."""
    return json.dumps(_plain(dataclasses.asdict(record)), ensure_ascii=False, allow_nan=False)


def append(path: str | Path, record: Record) -> None:
    """Adds the record's line to the file at `path`, made with its folder where it is missing.

    A line that an earlier run left unfinished is ended first, so that it spoils no other.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "a+b") as file:
        start = b""
        if file.tell():
            file.seek(-1, 2)
            start = b"" if file.read(1) == b"\n" else b"\n"
        file.write(start + to_line(record).encode("utf-8") + b"\n")


def replace(path: str | Path, records: Iterable[Record]) -> None:
    """Makes the file at `path` hold these records alone: whoever reads it finds the old or the new ones."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f"{target.name}.new")
    draft.write_text("".join(f"{to_line(one)}\n" for one in records), encoding="utf-8")
    draft.replace(target)


def read(path: str | Path) -> list[Record]:
    """The records of a file, one a line, empty lines skipped.

    Raises RequestError, naming file and line, for what is not a record or is one of a newer schema.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or one_line(error)}") from error
    return [
        _record(line, f"{path}, line {number}")
        for number, line in enumerate(data.split(b"\n"), 1)
        if line.strip()
    ]


def _record(line: bytes, where: str) -> Record:
    try:
        found = json.loads(line.decode("utf-8-sig"), parse_constant=_number, parse_float=_number)
        json.dumps(found, ensure_ascii=False).encode("utf-8")  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not JSON: {one_line(error)}") from error
    if not isinstance(found, dict):
        raise RequestError(f"{where} is not a record: it is no JSON object")
    if _nested(found, DEEPEST):
        raise RequestError(f"{where} is not a record: it is nested more than {DEEPEST} deep")
    schema = found.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise RequestError(f"{where} is not a record: it has no schema number")
    if schema > SCHEMA:
        raise RequestError(
            f"{where} was written by a newer Clearway (schema {schema}, this one reads up to {SCHEMA}); "
            "a newer Clearway reads it"
        )
    known = {each.name: each for each in dataclasses.fields(Record)}
    for name in found:
        if name not in known:
            raise RequestError(f"{where} is not a record: field {name!r} is not known")
    for name, each in known.items():
        required = each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        if name not in found and required:
            raise RequestError(f"{where} is not a record: field {name!r} is missing")
        if name in found and not _fits(name, found[name]):
            raise RequestError(f"{where} is not a record: field {name!r} holds {str(found[name])[:40]!r}")
    return Record(**found)


def _fits(name: str, value: Any) -> bool:
    if name == "work":
        return value in WORK
    if name in ("scenario", "contender"):
        return isinstance(value, str) and value != ""
    if name in ("refused", "failed"):
        return value is None or isinstance(value, str)
    if name in _OBJECTS:
        return isinstance(value, dict)
    if name == "routes":
        return isinstance(value, dict) and all(type(count) is int for count in value.values())
    if name in _LEDGERS:
        return value is None or isinstance(value, dict)
    if name in ("operations", "comparisons"):
        listed = isinstance(value, list) and all(isinstance(each, dict) for each in value)
        return listed or (value is None and name == "operations")
    return True


def _nested(value: Any, most: int) -> bool:
    """Whether objects and lists lie more than `most` deep in one another."""
    level = [value]
    for _ in range(most + 1):
        held = [one for one in level if isinstance(one, dict | list)]
        level = [item for one in held for item in (one.values() if isinstance(one, dict) else one)]
    return any(isinstance(one, dict | list) for one in level)


def _number(text: str) -> float:
    """`text` as a finite number; ValueError for NaN, Infinity and 1e999."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _plain(value: Any) -> Any:
    """`value` of JSON's own types: tuples as lists, numpy's scalars as Python's, not finite as None."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "item") and not isinstance(value, str):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
