"""What a dispatch did, and what was wrong with it in words."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass, field

# The numbers of cpp/state.h's FaultKind.
KINDS = {
    1: "race on threadgroup memory",
    2: "race on device memory",
    3: "access out of bounds",
    4: "read of threadgroup memory that was never written",
    5: "barrier that not every thread reaches",
    6: "simdgroup matrix operation with lanes missing",
    7: "more threadgroup memory than a threadgroup may have",
    8: "index outside a private or threadgroup array",
    9: "vector access at an address that is not a multiple of its size",
    10: "access that the host cannot make (a wild pointer, or a vector off its alignment)",
}


class EmulatorError(RuntimeError):
    """A dispatch with faults, or one that only the emulator refuses; `report` where there is one."""

    def __init__(self, message: str, report: Report | None = None) -> None:
        super().__init__(message)
        self.report = report


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `buffer` is the argument's index, None for threadgroup memory or where none is known."""

    kind: str
    threadgroup: int = 0
    thread: int = 0
    other: int | None = None
    buffer: int | None = None
    offset: int = 0
    write: bool = False
    line: int = 0
    address: int = 0
    program: str = ""

    def __str__(self) -> str:
        text = f"{self.kind}: thread {self.thread} of threadgroup {self.threadgroup}"
        if self.other is not None:
            text += " and a thread of another threadgroup" if self.other == 0xFFFF else f" and {self.other}"
        if self.buffer is not None:
            text += f", argument {self.buffer} at byte {self.offset} ({'store' if self.write else 'load'})"
        where = f"line {self.line}" if self.line else self._where()
        return f"{text}, {where}" if where else text

    def _where(self) -> str:
        tool = shutil.which("addr2line")
        if not (self.address and tool):
            return ""
        command = [tool, "-i", "-e", self.program, hex(self.address - 1)]  # -i: the inlined calls too
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if "/cpp/msl/" not in line]
        number = lines[0].split(":")[-1].split()[0] if lines else "?"
        return f"line {number}" if number.isdigit() else ""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one argument in checked mode; distinct ones count each byte once."""

    loaded: int
    stored: int
    distinct_loaded: int
    distinct_stored: int


@dataclass(frozen=True, slots=True)
class Report:
    """Counts of one emulated dispatch. `traffic` is empty unless it was checked."""

    kernel: str
    threads: tuple[int, ...]
    group_size: tuple[int, ...]
    threadgroups: int
    barriers: int
    simd_operations: int
    matrix_operations: int
    divergent: int
    atomics: int
    threadgroup_bytes: int
    faults: tuple[Fault, ...] = ()
    traffic: tuple[Traffic, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        wrong = "; ".join(str(fault) for fault in self.faults[:3]) or "no faults"
        return (
            f"{self.kernel}, emulated: {self.threadgroups} threadgroups, {self.barriers} barriers, "
            f"{self.simd_operations} simdgroup operations, "
            f"{self.threadgroup_bytes} bytes of threadgroup memory; {wrong}"
        )


class CFault(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("kind", "group", "thread", "other")),
        *((name, ctypes.c_int32) for name in ("buffer", "write")),
        *((name, ctypes.c_uint64) for name in ("offset", "address", "line")),
    )

    def read(self, program: str) -> Fault:
        raced = self.kind in (1, 2)
        return Fault(
            KINDS[self.kind],
            self.group,
            self.thread,
            self.other if raced else None,
            self.buffer if self.buffer >= 0 else None,
            self.offset,
            bool(self.write),
            self.line,
            self.address,
            program,
        )


class CCounters(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("threads", "groups", "barriers", "simd_ops", "matrix_ops"),
            *("divergent", "faults", "group_bytes", "atomics"),
        )
    )
