"""Counts what was emulated in this run, for the lines at its end."""

from __future__ import annotations

from collections import Counter

import evidence
from metal.emulator import Library

_kernels: dict[str, set[str]] = {}
_dispatches: Counter[str] = Counter()


def count(name: str, library: Library) -> None:
    """Notes the dispatches of a library of `name`.metal."""
    mode = "checked" if library.mode.checked else "in order" if library.mode.seed is None else "shuffled"
    _dispatches[mode] += len(library.reports)
    evidence.note(name, "metal", "emulated", "CPU")
    _kernels.setdefault(name, set()).update(report.kernel for report in library.reports)


def lines() -> list[str]:
    """The line; none where nothing was emulated."""
    if not _kernels:
        return []
    kernels = sum(len(names) for names in _kernels.values())
    modes = ", ".join(f"{_dispatches[mode]} {mode}" for mode in ("in order", "shuffled", "checked"))
    return [f"metal: {kernels} kernels of {len(_kernels)} files emulated ({modes} dispatches)"]
