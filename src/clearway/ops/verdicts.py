"""Verdicts on implementations, found by their self-tests in other processes: one, or many at once.

`prepare` begins the self-tests of ops about to be used, side by side, while the program goes on; a call that
needs a verdict waits for that one alone (`found`). `isolated` finds one in a process of its own, in every
case if need be: `clearway ops check`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from clearway import device
from clearway.ops import state
from clearway.ops._implementation import Case, Implementation
from clearway.ops._workers import Crew, Job, Worker
from clearway.ops.contract import OPS

SILENCE_S = 60.0  # no line for so long is a hang: building one kernel takes less
MOST = 12  # workers at once
WORKER_BYTES = device.CONTEXT_BYTES + 2**28
"""What a worker takes of a GPU: its context and its cases."""
SHARE = 4  # workers take one part of so many of the GPU memory that is free: a model may be on its way there
ON_DEMAND = ("cpu",)
"""Kinds on which nothing is begun before it is needed."""
NOTHING = "it takes none of the cases that its op is tested with in "

_Key = tuple[Implementation, str, str]

_lock = threading.Lock()
_pending: dict[_Key, Job] = {}
_expected: dict[str, tuple[int, ...] | None] = {}
_seconds: dict[str, float] = {}
_waited_s = 0.0


def prepare(
    ops: Iterable[str],
    kind: str,
    dtype: torch.dtype,
    likes: Mapping[str, tuple[int, ...]] | None = None,
) -> int:
    """Begins the self-tests of what `ops` will take on devices of `kind` in `dtype`; how many it began.

    Comes back at once; what is known, or under way, is not begun again. `likes`: by op a shape of its first
    argument as it will be. On the CPU, and in a self-test's own process, nothing is begun: but the ops are
    remembered, and tested together when the first of them is used on a GPU.
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
    """The verdict for arguments like these: waits for the self-test that finds it, begun here if need be."""
    global _waited_s
    dtype = args[0].dtype
    began = time.monotonic()
    job, _ = _begun(implementation, kind, dtype, tuple(args[0].shape))
    if job is not None:
        _crew.hurry(job)
        if kind not in ON_DEMAND:  # what is likely to be asked for next
            for name, like in list(_expected.items()):
                prepare((name,), kind, dtype, {} if like is None else {name: like})
        job.done.wait()
        with _lock:
            _waited_s += time.monotonic() - began
    return state.known(implementation, kind, dtype) or state.Verdict(False, "its self-test told nothing")


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
        worker = Worker({state.INSIDE: "1"})
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
    implementation: Implementation, kind: str, dtype: torch.dtype, like: tuple[int, ...] | None
) -> tuple[Job | None, bool]:
    """The self-test under way and whether it was begun here; none where the verdict is known."""
    key = implementation, kind, state.dtype_name(dtype)
    with _lock:
        job = _pending.get(key)
        if job is not None:
            return job, False
        if state.known(implementation, kind, dtype) is not None:
            return None, False
        most = _most(kind)
        content = {**_content(implementation, kind, dtype, like, False), "threads": max(_cores() // most, 2)}

        def then(job: Job) -> None:
            try:
                _concluded(implementation, kind, job)
            finally:
                with _lock:
                    _pending.pop(key, None)
                    _seconds[f"{implementation.op}/{implementation.name} {key[2]}"] = job.seconds

        job = _pending[key] = Job(content, SILENCE_S, then=then)
        _crew.give(job, most)
    return job, True


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
    if job.scarce is not None or (job.end or "").startswith("could not"):
        # which says nothing of the implementation
        what = job.end or f"had too little {job.scarce}"
        verdict = state.Verdict(False, f"its process {what}", asked)
        state.remember(implementation, kind, verdict)
        return verdict
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


def _most(kind: str) -> int:
    """How many workers may be at work at once: by cores, and by the GPU memory that is free."""
    most = max(min(_cores() - 1, MOST), 1)
    if kind == "cpu":
        return most
    free = device.memory(device.Device(kind, 0 if kind == "cuda" else None)).available_bytes
    return max(min(most, int(free // (SHARE * WORKER_BYTES))), 1)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start() -> Worker:
    threads = str(max(_cores() // MOST, 1))
    return Worker({state.INSIDE: "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)})


_crew = Crew(_start)
