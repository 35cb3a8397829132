"""Verdicts on implementations, found by their self-tests in other processes: one, or many at once.

`prepare` begins the self-tests of ops about to be used, side by side, while the program goes on; a call that
needs a verdict waits for that one alone (`found`). `isolated` finds one in a process of its own, in every
case if need be: `clearway ops check`.

These processes share the GPU with a model. What there is no room for (_allowance.py) is held back, and so is
what failed for want of memory: it is tested when it is needed, or by `settle`, for which whoever plans for
the device makes room. What still cannot be tested is not used in this process, which says so; nothing of
that is kept on the disk.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from clearway import device
from clearway.device import Device
from clearway.ops import _allowance, state
from clearway.ops._implementation import Case, Implementation
from clearway.ops._workers import Crew, Job, Worker
from clearway.ops.contract import OPS

SILENCE_S = 60.0  # no line for so long is a hang: building one kernel takes less
ON_DEMAND = ("cpu",)
"""Kinds on which nothing is begun before it is needed."""
NOTHING = "it takes none of the cases that its op is tested with in "

NO_ROOM = (
    "there was no memory for it beside what is on the device (`clearway ops check` tests it while nothing is)"
)
KILLED = "died (signal 9)"
"""The end of a process that somebody else ended: a system that runs out of memory does."""

_Key = tuple[Implementation, str, str]

_lock = threading.Lock()
_pending: dict[_Key, Job] = {}
_held: dict[_Key, tuple[tuple[int, ...] | None, str]] = {}
"""What was to be tested and could not be, with the shape it will be asked for, and why."""
_expected: dict[str, tuple[int, ...] | None] = {}
_seconds: dict[str, float] = {}
_waited_s = 0.0


def _in_a_fork() -> None:
    """A program that forks itself leaves what is under way to the one that began it."""
    global _lock
    _lock = threading.Lock()
    _pending.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_fork)


def prepare(
    ops: Iterable[str],
    kind: str,
    dtype: torch.dtype,
    likes: Mapping[str, tuple[int, ...]] | None = None,
) -> int:
    """Begins the self-tests of what `ops` will take on devices of `kind` in `dtype`; how many it began.

    Comes back at once; what is known, or under way, is not begun again. `likes`: by op a shape of its first
    argument as it will be. On the CPU, and in a self-test's own process, nothing is begun: but the ops are
    remembered, and tested together when the first of them is used on a GPU; nor where there is no room.
    """
    likes = likes or {}
    for name in ops:
        if name in OPS:
            _expected[name] = likes.get(name, _expected.get(name))
    if kind in ON_DEMAND or state.trusted():
        return 0
    begun = 0
    for name in ops:
        for implementation in _candidates(name, kind):
            _, new = _begun(implementation, kind, dtype, likes.get(name))
            begun += new
    return begun


def found(implementation: Implementation, kind: str, args: Case) -> state.Verdict:
    """The verdict for arguments like these: waits for the self-test that finds it, begun here if need be.

    Where there is no room for one, or it had too little memory, that the implementation could not be tested.
    """
    global _waited_s
    dtype, shape = args[0].dtype, tuple(args[0].shape)
    key, began = (implementation, kind, state.dtype_name(dtype)), time.monotonic()
    job, own = _begun(implementation, kind, dtype, shape)
    if job is None and state.known(implementation, kind, dtype) is None and _regained(kind):
        job, own = _begun(implementation, kind, dtype, shape)
    while job is not None:
        _crew.hurry(job)
        if kind not in ON_DEMAND:  # what is likely to be asked for next
            for name, like in list(_expected.items()):
                prepare((name,), kind, dtype, {} if like is None else {name: like})
        job.done.wait()
        if own or state.known(implementation, kind, dtype) is not None:
            break
        job, own = _begun(implementation, kind, dtype, shape)  # one begun ahead had too little memory
    with _lock:
        _waited_s += time.monotonic() - began
        _, why = _held.get(key, (None, "it told nothing"))
    return state.known(implementation, kind, dtype) or _untested(implementation, kind, key[2], why)


def claimed_bytes(where: Device) -> int:
    """Bytes of a device that self-tests have or will want: those at work, and one where any is held back."""
    if where.kind in ON_DEMAND or (where.index or 0) != 0:  # kernels are tested on the first of a kind
        return 0
    with _lock:
        under_way = any(kind == where.kind for _, kind, _ in _pending)
    waiting = under_way or held_back(where.kind)
    return max(_crew.at_work, int(waiting)) * _allowance.WORKER_BYTES


def held_back(kind: str) -> bool:
    """Whether there is a self-test on devices of `kind` that is not begun for want of memory."""
    return bool(_waiting(kind))


def leaving(spare_bytes: int | None) -> AbstractContextManager[None]:
    """Within it self-tests take no more than so many bytes of a GPU: the rest is promised. None: any."""
    return _allowance.leaving(spare_bytes)


def has_room(kind: str) -> bool:
    """Whether one self-test could be at work now on a device of `kind`."""
    return _allowance.most(kind, 1) > 0


def settle(kind: str) -> None:
    """Tests what is under way or held back, as many at once as there is room for, and comes back when all is
    known and every process is gone, with what it had of the device.

    For who plans for a device on which there is too little room for both. What cannot be tested even so is
    said, and not tried again.
    """
    global _waited_s
    began = time.monotonic()
    for implementation, name, like, _ in _waiting(kind):
        dtype = getattr(torch, name)
        state.forgive(implementation, kind, dtype)
        _begun(implementation, kind, dtype, like, share=1)
    _crew.hire(_allowance.most(kind, 1))
    _crew.wait()
    for implementation, name, _, why in _waiting(kind):
        with _lock:
            _held.pop((implementation, kind, name), None)
        _untested(implementation, kind, name, why)
    with _lock:
        _waited_s += time.monotonic() - began


def isolated(
    implementation: Implementation,
    kind: str,
    *,
    like: Case | None = None,
    every_case: bool = False,
    limit_s: float | None = None,
    on_line: Callable[[str, str], None] | None = None,
) -> state.Verdict:
    """The verdict on an implementation, found in a process of its own and kept as this machine's.

    With `like` only its dtype is tested, cases like it first. `limit_s` is how long the process may be
    silent. `on_line` hears each case and its problem (empty: sound) as it ends.
    """

    def heard(line: dict[str, Any]) -> None:
        if on_line is not None and "problem" in line:
            on_line(line["case"], line["problem"])

    dtype = like[0].dtype if like else None
    shape = tuple(like[0].shape) if like else None
    content = _content(implementation, kind, dtype, shape, every_case)
    job = Job(content, SILENCE_S if limit_s is None else limit_s, heard)
    try:
        worker = Worker({state.INSIDE: "1"}, afresh=True)
    except (OSError, ValueError, TypeError) as error:
        job.end = f"could not be started ({error})"
    else:
        try:
            worker.run(job)
        finally:
            worker.close()
    return _concluded(implementation, kind, job)


def times() -> dict[str, Any]:
    """Of this process: seconds of each self-test, and how long the program waited for them in all."""
    with _lock:
        return {
            "waited_s": round(_waited_s, 3),
            "checks_s": {key: round(s, 3) for key, s in _seconds.items()},
        }


def _candidates(name: str, kind: str) -> list[Implementation]:
    """The kernels of our own that an op has for devices of `kind`, as far as this machine can run them."""
    if name not in OPS:
        return []
    mine = [one for one in OPS[name].implementations if one.device == kind and not one.stock]
    return [one for one in mine if one.absent() is None and not state.disabled(name, one.name)]


def _begun(
    implementation: Implementation,
    kind: str,
    dtype: torch.dtype,
    like: tuple[int, ...] | None,
    share: int = _allowance.SHARE,
) -> tuple[Job | None, bool]:
    """The self-test under way and whether it was begun here; none where the verdict is known, and where
    there is no room for it, which is held back then."""
    key = implementation, kind, state.dtype_name(dtype)
    with _lock:
        job = _pending.get(key)
        if job is not None:
            return job, False
        if state.known(implementation, kind, dtype) is not None:
            return None, False
        most = _allowance.most(kind, share)
        content = {
            **_content(implementation, kind, dtype, like, False),
            "threads": max(_allowance.cores() // max(most, 1), 2),
            "limit_bytes": None if kind in ON_DEMAND else _allowance.WORKER_BYTES,
        }

        def then(job: Job) -> None:
            try:
                why = _scarcity(job, kind)
                if why is None:
                    _concluded(implementation, kind, job)
                else:  # begun ahead, it is tried again: who waits for it says so
                    with _lock:
                        _held[key] = like, why
            finally:
                with _lock:
                    _pending.pop(key, None)
                    _seconds[f"{implementation.op}/{implementation.name} {key[2]}"] = job.seconds

        job = Job(content, SILENCE_S, then=then)
        if not _crew.give(job, most):
            _held[key] = like, NO_ROOM
            return None, False
        _held.pop(key, None)
        _pending[key] = job
    return job, True


def _waiting(kind: str) -> list[tuple[Implementation, str, tuple[int, ...] | None, str]]:
    """(implementation, dtype, shape, why) of what is held back on a kind of device."""
    with _lock:
        return [(one, name, *held) for (one, where, name), held in _held.items() if where == kind]


def _regained(kind: str) -> bool:
    """Whether there is room for a self-test once the allocator has given back what it does not use."""
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if started and torch.cuda.is_current_stream_capturing():
        return False
    device.release_memory(_allowance.tested(kind))
    return has_room(kind)


def _scarcity(job: Job, kind: str) -> str | None:
    """What a self-test lacked, where its failure says nothing of the implementation; else None.

    Whatever fails on a GPU that has no more free than one of them may need is not believed: libraries tell
    want of memory in many words, and drivers by crashing.
    """
    if job.scarce is not None:
        return f"its process had too little {job.scarce}"
    if job.end is not None and (job.end.startswith("could not") or job.end == KILLED):
        return f"its process {job.end}"
    if job.failed() and _allowance.short(kind):
        return "its process failed while the device had too little memory"
    return None


def _untested(implementation: Implementation, kind: str, dtype: str, why: str) -> state.Verdict:
    """That it could not be tested, held for this process alone; in all dtypes where `dtype` is empty."""
    verdict = state.Verdict(False, why, (dtype,) if dtype else (), tested=False)
    state.remember(implementation, kind, verdict)
    return verdict


def _content(
    implementation: Implementation,
    kind: str,
    dtype: torch.dtype | None,
    like: tuple[int, ...] | None,
    every_case: bool,
) -> dict[str, Any]:
    op = OPS[implementation.op]
    return {
        "module": op.module,
        "source": str(op.source),
        "op": op.name,
        "implementation": implementation.name,
        "kind": kind,
        "every": every_case,
        "dtype": state.dtype_name(dtype) if dtype is not None else None,
        "like": list(like) if like is not None else None,
    }


def _concluded(implementation: Implementation, kind: str, job: Job) -> state.Verdict:
    """What the job's lines say, kept: in each dtype for itself."""
    asked = (job.content["dtype"],) if job.content["dtype"] else ()
    lacked = _scarcity(job, kind)
    if lacked is not None:
        return _untested(implementation, kind, job.content["dtype"] or "", lacked)
    wrong: dict[str, list[str]] = {}
    for line in job.lines:
        if line.get("problem"):
            wrong.setdefault(str(line.get("dtype") or ""), []).append(f"{line['case']}: {line['problem']}")
    checked = {str(line["dtype"]) for line in job.lines if line.get("problem") == "" and line.get("dtype")}
    if job.end is not None:
        last = next((line for line in reversed(job.lines) if line.get("begin")), None)
        where = f" in {last['case']!r}" if last else " before the first case"
        wrong.setdefault(str((last or {}).get("dtype") or ""), []).insert(0, f"its process {job.end}{where}")
        checked = set()  # it did not come to the end of any
    elif not checked and not wrong:
        return state.store_verdict(
            implementation, kind, False, NOTHING + (asked[0] if asked else "any dtype"), asked, taken=False
        )
    made = []
    for dtype, problems in wrong.items():
        reason = problems[0] if len(problems) == 1 else f"{problems[0]} (and {len(problems) - 1} more)"
        dtypes = (dtype,) if dtype else asked
        made.append(state.store_verdict(implementation, kind, False, reason, dtypes))
    sound = () if "" in wrong else tuple(sorted(checked - wrong.keys()))
    if sound:
        made.append(state.store_verdict(implementation, kind, True, "", sound))
    return made[0]


def _start() -> Worker:
    threads = str(max(_allowance.cores() // _allowance.MOST, 1))
    return Worker({state.INSIDE: "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)})


_crew = Crew(_start)
