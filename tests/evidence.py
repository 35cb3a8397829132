"""What a test run really did with each implementation of each op, for the table at its end."""

from __future__ import annotations

HOW = ("interpreted", "compiled", "emulated", "run on")
_found: dict[tuple[str, str], dict[str, set[str]]] = {}


def note(op: str, implementation: str, how: str, on: str = "yes") -> None:
    """Notes that `implementation` was checked in one of the ways of HOW."""
    _found.setdefault((op, implementation), {}).setdefault(how, set()).add(on)


def table() -> list[str]:
    """One line an implementation; none where no test of an op ran."""
    if not _found:
        return []
    from clearway.ops.contract import OPS

    rows = [("implementation", *HOW)]
    for op in sorted(name for name, op in OPS.items() if op.module.startswith("clearway.")):
        for name in dict.fromkeys(one.name for one in (*OPS[op].implementations, OPS[op].reference)):
            cells = _found.get((op, name), {})
            rows.append((f"{op}/{name}", *(", ".join(sorted(cells.get(how, ()))) or "-" for how in HOW)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HOW) + 1)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
