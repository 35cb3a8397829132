"""What is known of implementations on this machine: verdicts, the tuned table, what was switched off and why.

A verdict holds for one dtype: a kernel that is wrong in bfloat16 stays in use in float16. It is one file of
verdicts/ in the state folder, named after the op, the implementation, the device family, the dtype and a
digest of device, driver, torch, kernel language, sources and the self-test itself. A file that does not say
just that, or not with its seal, is ignored and the implementation tested anew; each is written in one move,
so that processes side by side never read half of one. The tuned table is tuned/<kind>.json:
{"identity": …, "sources": …, "choices": {"<op>": {"<dtype>|<size class>": "<implementation>"}}}; it holds
only for the identity (device, driver, torch, kernel language) and the sources it was measured with.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import os
import sys
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearway import device, home

if TYPE_CHECKING:
    import torch

    from clearway.ops.contract import Case, Implementation

Tables = Mapping[str, Mapping[str, str]]
"""Op -> "dtype|size class" -> implementation."""

INSIDE = "CLEARWAY_SELFTEST"  # set in the self-test's own process, which must not start another
ANY = "any"
"""Stands for a dtype where what was found wrong lies in none of them."""
_NAMES = (ANY, "float64", "float32", "float16", "bfloat16")
_FIELDS = {
    "op": str,
    "implementation": str,
    "identity": str,
    "dtype": str,
    "sound": bool,
    "taken": bool,
    "reason": str,
    "date": str,
}

_version = 0
_disabled: dict[tuple[str, str, str], str] = {}
_said: dict[tuple[str, str, str], str] = {}
_tuned: dict[str, dict[str, dict[str, str]]] = {}
_identity: dict[str, str] = {}
_digests: dict[tuple[Implementation, str], str] = {}
_verdicts: dict[tuple[Implementation, str, str], Verdict] = {}
_trusting: ContextVar[bool] = ContextVar("clearway_trusting", default=False)
_trial: ContextVar[tuple[int, Tables] | None] = ContextVar("clearway_trial", default=None)


class BuildError(RuntimeError):
    """A kernel could not be built on this machine; the message says why, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a self-test found: sound in `dtypes`, or not and why; without dtypes in none. `taken` False: the
    implementation takes nothing there, so nothing was tested; that is a refusal, and no loss. `tested` False:
    it could not be tested, which says nothing of it and is not kept on the disk."""

    sound: bool
    reason: str
    dtypes: tuple[str, ...] = ()
    date: str = ""
    taken: bool = True
    tested: bool = True

    def sentence(self) -> str:
        """Why the implementation is not used."""
        if not self.tested:
            return f"its self-test could not run: {self.reason}"
        return f"its self-test on this machine failed: {self.reason}" if self.taken else self.reason


def version() -> int:
    """Changes with every change of what routes may be; graphs are keyed on it (`contract.route_key`).

    A table on trial has a version of its own, the same whenever it is tried again.
    """
    trial = _trial.get()
    return _version if trial is None else hash((_version, trial[0]))


def changed() -> None:
    """Says that routes may be different from now on."""
    global _version
    _version += 1


def identity(kind: str) -> str:
    """Device, driver, torch and kernel language of this machine: what a verdict depends on."""
    if kind not in _identity:
        _identity[kind] = device.identity(kind)
    return _identity[kind]


def disable(op: str, implementation: str, reason: str, dtype: torch.dtype | None = None) -> None:
    """Switches one implementation off for this process, in one dtype or (None) in all; says so once."""
    name = "" if dtype is None else dtype_name(dtype)
    _disabled[op, implementation, name] = reason
    _say(op, implementation, name, reason)
    changed()


def disabled(op: str, implementation: str, dtype: torch.dtype | None = None) -> str | None:
    """Why an implementation was switched off in this process, in `dtype` or in all; None where it was not."""
    reason = _disabled.get((op, implementation, ""))
    if reason is None and dtype is not None and _disabled:
        reason = _disabled.get((op, implementation, dtype_name(dtype)))
    return reason


def losses(ops: Container[str] | None = None, dtypes: Container[str] | None = None) -> tuple[str, ...]:
    """What this process found unusable on this machine, a sentence each: all, or what concerns these ops in
    these dtypes."""
    return tuple(
        _loss(op, implementation, dtype, reason)
        for (op, implementation, dtype), reason in list(_said.items())
        if (ops is None or op in ops) and (dtypes is None or not dtype or dtype in dtypes)
    )


def _say(op: str, implementation: str, dtype: str, reason: str) -> None:
    if (op, implementation, dtype) not in _said:
        _said[op, implementation, dtype] = reason
        print(f"clearway: {_loss(op, implementation, dtype, reason)}", file=sys.stderr)


def _loss(op: str, implementation: str, dtype: str, reason: str) -> str:
    return f"{op}/{implementation} is not used{f' in {dtype}' if dtype else ''}: {reason}"


def tuned(op: str, kind: str) -> Mapping[str, str] | None:
    """What was measured best for an op on this machine, by "dtype|size class"; None where nothing was."""
    trial = _trial.get()
    if trial is not None:
        return trial[1].get(op)
    return tuned_tables(kind).get(op)


def tuned_tables(kind: str) -> dict[str, dict[str, str]]:
    """The tuned tables of all ops on `kind`; empty where none was measured with this machine and source."""
    if kind not in _tuned:
        found = _stored("tuned", f"{kind}.json")
        choices = found.get("choices")
        measured = found.get("identity"), found.get("sources")
        if not isinstance(choices, dict) or measured != (identity(kind), sources()):
            choices = {}
        _tuned[kind] = {
            str(name): {key: value for key, value in table.items() if isinstance(value, str)}
            for name, table in choices.items()
            if isinstance(table, dict)
        }
    return _tuned[kind]


@contextmanager
def trying(tables: Tables) -> Iterator[None]:
    """Within it these tables stand in for the tuned ones, in this context alone; nothing is stored."""
    sign = json.dumps({op: dict(table) for op, table in tables.items()}, sort_keys=True)
    token = _trial.set((hash(sign), tables))
    try:
        yield
    finally:
        _trial.reset(token)


@functools.cache
def sources() -> str:
    """A digest of everything in this folder: what was measured with another source is not believed."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.iterdir()):
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def store_tuned(kind: str, choices: dict[str, dict[str, str]]) -> bool:
    """Replaces the tuned table of `kind`; False where the disk did not keep it (it holds for this
    process)."""
    _tuned[kind] = choices
    changed()
    content = {"identity": identity(kind), "sources": sources(), "choices": choices}
    return home.write_json(content, "tuned", f"{kind}.json")


def known(implementation: Implementation, kind: str, dtype: torch.dtype | None = None) -> Verdict | None:
    """The verdict that covers `dtype` on just this machine of just this source; else None.

    Without a dtype all that is known together: sound where it is sound in any, the reason what speaks
    against others; what it refuses in one dtype speaks against none.
    """
    if dtype is not None:
        return _held(implementation, kind, ANY) or _held(implementation, kind, dtype_name(dtype))
    held = {name: one for name in _NAMES if (one := _held(implementation, kind, name)) is not None}
    found = {name: one for name, one in held.items() if one.taken}
    if not found or ANY in held:
        return held.get(ANY)
    sound = tuple(sorted(name for name, one in found.items() if one.sound))
    wrong = [f"in {name}: {one.reason}" for name, one in found.items() if not one.sound]
    return Verdict(bool(sound), "; ".join(wrong), sound, max(one.date for one in found.values()))


def ruled_out(implementation: Implementation, kind: str, dtype: torch.dtype | None = None) -> str | None:
    """Why an implementation is not used in `dtype` (None: in any) by what is known so far; tests nothing. In
    the self-test's own process, which is to find it anew, nothing is known."""
    if os.environ.get(INSIDE):
        return None
    found = _held(implementation, kind, ANY) if dtype is None else known(implementation, kind, dtype)
    return None if found is None or found.sound else found.sentence()


def store_verdict(
    implementation: Implementation,
    kind: str,
    sound: bool,
    reason: str,
    dtypes: tuple[str, ...],
    taken: bool = True,
) -> Verdict:
    """Keeps a verdict in `dtypes` for this machine; an unsound one without dtypes holds in all."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    made = Verdict(sound, reason, tuple(sorted(dtypes)), today, taken)
    for dtype in made.dtypes or (ANY,):
        content = {
            "op": implementation.op,
            "implementation": implementation.name,
            "identity": identity(kind),
            "dtype": dtype,
            "sound": sound,
            "taken": taken,
            "reason": reason,
            "date": today,
        }
        seal = _seal(content, _digest(implementation, kind))
        home.write_json({**content, "seal": seal}, *_place(implementation, kind, dtype))
    remember(implementation, kind, made)
    return made


def remember(implementation: Implementation, kind: str, verdict: Verdict) -> None:
    """Holds a verdict for this process; an unsound one is said once and changes routes, a refusal neither."""
    for dtype in verdict.dtypes or (ANY,):
        _verdicts[implementation, kind, dtype] = verdict
        if not verdict.sound and verdict.taken:
            where = "" if dtype == ANY else dtype
            _say(implementation.op, implementation.name, where, verdict.sentence())
    if not verdict.sound and verdict.taken:
        changed()


def forgive(implementation: Implementation, kind: str, dtype: torch.dtype) -> None:
    """Drops that an implementation could not be tested in `dtype`: it may be tested now."""
    found = known(implementation, kind, dtype)
    if found is None or found.tested:
        return
    for name in found.dtypes or (ANY,):
        _verdicts.pop((implementation, kind, name), None)
        _said.pop((implementation.op, implementation.name, "" if name == ANY else name), None)
    changed()


def trusted() -> bool:
    """Whether nobody asks for a verdict here: within `trusting`, and in the self-test's own process."""
    return _trusting.get() or bool(os.environ.get(INSIDE))


def verdict(implementation: Implementation, kind: str, args: Case) -> str | None:
    """None where the implementation may be used on arguments like these; else why not. Tests it if need
    be; within `trusting` only what is known already is heeded, and in the self-test's own process nothing."""
    if os.environ.get(INSIDE):
        return None
    if trusted():
        return ruled_out(implementation, kind, args[0].dtype)
    found = known(implementation, kind, args[0].dtype)
    if found is None:
        from clearway.ops import verdicts

        found = verdicts.found(implementation, kind, args)
    return None if found.sound else found.sentence()


@contextmanager
def trusting() -> Iterator[None]:
    """Within it nobody waits for a verdict: it is being found, or nothing of our own is launched."""
    token = _trusting.set(True)
    try:
        yield
    finally:
        _trusting.reset(token)


def dtype_name(dtype: torch.dtype) -> str:
    """ "float16" for torch.float16."""
    return str(dtype).removeprefix("torch.")


def forget() -> None:
    """Drops what this process knows (the disk keeps its own): for tests and after an upgrade."""
    stores: tuple[dict[Any, Any], ...] = (_disabled, _said, _tuned, _identity, _digests, _verdicts)
    for store in stores:
        store.clear()
    changed()


def _stored(*parts: str) -> dict[str, Any]:
    """An object of the state folder; empty also where it is nested beyond reason."""
    try:
        return home.read_json(*parts)
    except RecursionError:
        return {}


def _digest(implementation: Implementation, kind: str) -> str:
    """Of all that a verdict depends on. Sources are read once a process: the code it runs does not change."""
    key = implementation, kind
    if key not in _digests:
        checks = hashlib.sha256(Path(__file__).with_name("selftest.py").read_bytes()).hexdigest()
        parts = [identity(kind), implementation.source_hash(), checks]
        _digests[key] = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return _digests[key]


def _place(implementation: Implementation, kind: str, dtype: str) -> tuple[str, str]:
    digest = _digest(implementation, kind)[:16]
    return "verdicts", f"{implementation.op}-{implementation.name}-{kind}-{dtype}-{digest}.json"


def _seal(content: dict[str, Any], digest: str) -> str:
    """Ties a file's words to its machine and source: one edited or carried over by hand is not believed."""
    return hashlib.sha256(f"{digest} {json.dumps(content, sort_keys=True)}".encode()).hexdigest()


def _held(implementation: Implementation, kind: str, dtype: str) -> Verdict | None:
    """The verdict in one dtype, from this process or from the disk."""
    key = implementation, kind, dtype
    found = _verdicts.get(key)
    if found is None:
        found = _read(implementation, kind, dtype)
        if found is not None:
            _verdicts[key] = found
    return found


def _read(implementation: Implementation, kind: str, dtype: str) -> Verdict | None:
    content = _stored(*_place(implementation, kind, dtype))
    seal = content.pop("seal", None)
    if not all(isinstance(content.get(name), kind_) for name, kind_ in _FIELDS.items()):
        return None
    if seal != _seal(content, _digest(implementation, kind)):
        return None
    who = content["op"], content["implementation"], content["identity"], content["dtype"]
    if who != (implementation.op, implementation.name, identity(kind), dtype):
        return None
    dtypes = () if dtype == ANY else (dtype,)
    return Verdict(content["sound"], content["reason"], dtypes, content["date"], content["taken"])
