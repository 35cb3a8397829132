"""Kernels built by a process beside this one, where there will be many at once.

Part of the time that it takes to build a kernel holds Python's lock, which bounds what threads of one process
can do, however many cores there are. A process that was started when a model was read or accelerated, and
forks for each kernel, has no such bound. What it builds lies in Triton's cache on disk, where this process
finds it; what it does not build is built here.

Started once, where it has built nothing into that folder before; not on systems that cannot fork, nor where
there are few cores. It holds nothing of a device, and ends when nobody has asked it for a while.
"""

from __future__ import annotations

import base64
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from clearway import device, home
from clearway.device import Device
from clearway.ops import forks, state
from clearway.ops._allowance import cores
from clearway.ops._workers import Job, Worker

Launch = tuple[str, str, list[Any], dict[str, Any], bool]
"""Module and name of a kernel, the arguments it is built for, its constants, and whether what launches it is
to be built too."""
COMMAND = ("-P", "-m", "clearway.ops._builders")
ENVIRONMENT = {state.INSIDE: "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
FOLDER, NAME = "kernels", "built.json"
FEWEST_CORES = 4
MOST = 16
"""Forks at once."""
FORK_BYTES = 2**29
"""Of the machine's memory for each of them, at least."""
SPARE_S = 120.0
"""How long it waits for something to build."""
SILENCE_S = 60.0
PATIENCE_S = 4.0
"""How long kernels wait for a process that is still reading PyTorch; threads begin with some meanwhile."""

_lock = threading.Lock()
_builder: Builder | None = None
_expected = False


class Builder:
    """The process, and what it is at."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._turn = threading.Lock()
        self._ready = threading.Event()
        self._used = time.monotonic()
        self._gone = False
        threading.Thread(target=self._live, name="clearway-builder", daemon=True).start()

    def ready(self, patience_s: float) -> bool:
        """Whether it can be asked, waiting for that at most so long."""
        return self._ready.wait(patience_s) and not self._gone

    def build(self, launches: list[Launch], then: Callable[[int], None]) -> None:
        """Builds them, calling `then` with the number of each that is done; returns when no more come."""
        with self._turn:
            if self._gone or self._worker is None:
                return
            job = Job(_told(launches), SILENCE_S, on_line=lambda line: _heard(line, then))
            self._worker.run(job)
            self._used = time.monotonic()
            if job.failed():
                self.close()
            elif any("case" in line for line in job.lines):
                home.write_json(_record(), FOLDER, NAME)

    def close(self) -> None:
        """Ends the process."""
        self._gone = True
        self._ready.set()
        if self._worker is not None:
            self._worker.close()

    def _live(self) -> None:
        with self._turn:
            job = Job({}, SILENCE_S)
            try:
                self._worker = Worker(ENVIRONMENT, COMMAND)
                self._worker.run(job)
            except (OSError, ValueError, TypeError, RuntimeError) as error:  # no process can be had
                job.end = str(error)
            if job.end is not None:
                self.close()
        self._ready.set()
        while not self._gone:
            time.sleep(SPARE_S / 8)
            if time.monotonic() - self._used > SPARE_S and self._turn.acquire(blocking=False):
                self.close()
                self._turn.release()


def possible(kind: str) -> bool:
    """Whether kernels for devices of `kind` can be built by a process that has none: Triton's, on CUDA."""
    from clearway.ops import _triton  # which reads this

    return kind == "cuda" and torch.version.hip is None and _triton.absent() is None


def expect(kind: str) -> bool:
    """Starts the process, once, where a model comes to lie on a device of `kind` and kernels may have to be
    built for it; whether it did."""
    global _builder, _expected
    if not possible(kind) or state.trusted():
        return False
    with _lock:
        if _expected:
            return False
        _expected = True
        if not hasattr(os, "fork") or most() < FEWEST_CORES:
            return False
        try:
            threading.Thread(target=forks.key_of_triton, daemon=True).start()
            record = _record()
            if home.read_json(FOLDER, NAME) == record and Path(record["folder"]).is_dir():
                return False
            forks.expect()
            _builder = Builder()
        except (ImportError, RuntimeError):  # another Triton, or no thread can be had
            return False
    return True


def _in_a_fork() -> None:
    """A program that forks itself leaves the process to the one that started it."""
    global _builder, _lock
    _builder, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_fork)


def builder() -> Builder | None:
    """The process, where there is one that can be asked or will be."""
    made = _builder
    return None if made is None or made._gone else made


def most() -> int:
    """How many kernels may be built at once: by cores, and by the machine's memory."""
    return min(cores(), MOST, device.memory(Device("cpu")).available_bytes // FORK_BYTES)


def _record() -> dict[str, str]:
    """What is kept of having built: where, from which sources, for which device and by which Triton."""
    from triton import knobs

    folder = os.path.abspath(knobs.cache.dir)
    return {"folder": folder, "sources": state.sources(), "identity": state.identity("cuda")}


def _told(launches: list[Launch]) -> dict[str, Any]:
    from triton import knobs
    from triton.runtime import driver

    target = driver.active.get_current_target()
    return {
        "launches": base64.b64encode(pickle.dumps(launches)).decode(),
        "target": [target.backend, target.arch, target.warp_size],
        "folder": os.path.abspath(knobs.cache.dir),
        "most": max(most(), 1),
    }


def _heard(line: dict[str, Any], then: Callable[[int], None]) -> None:
    if line.get("case", "").isdecimal():
        then(int(line["case"]))
