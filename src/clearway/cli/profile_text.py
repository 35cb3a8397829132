"""What `clearway profile` found, as text for a terminal of 100 columns."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from clearway.cli.output import plain

WIDTH = 100
MIB = 2**20
KINDS = {
    "same arithmetic": "the same arithmetic, done faster",
    "changed precision": "other precision (pictures differ slightly)",
    "less work": "less work (pictures differ)",
}
WORTH_A_RATE = 0.001  # of the whole: rates of shorter stages say nothing
MOST_OWN = 5


def lines(about: dict[str, Any]) -> Iterator[str]:
    """The report, line by line, none of them wider than 100 signs."""
    for line in _lines(about):
        yield plain(line.rstrip())


def _lines(about: dict[str, Any]) -> Iterator[str]:
    yield from _head(about)
    yield ""
    yield from _stages(about)
    yield ""
    yield from _calls(about)
    yield ""
    yield from _modules(about)
    yield ""
    yield from _facts(about)
    yield ""
    yield from _wrapped("Bottleneck: ", about["bottleneck"])
    yield from _advice(about)


def _head(about: dict[str, Any]) -> Iterator[str]:
    request, machine = about["request"], about["provenance"]
    yield from _wrapped(
        "", f"{request['prompt']!r:.60}, {about['model']['name']} ({about['model']['family']})"
    )
    precision = machine["settings"]["precision"]
    dtypes = {name: precision[name] for name in ("unet", "text_encoder", "vae", "sampling")}
    same = set(dtypes.values())
    dtype = same.pop() if len(same) == 1 else ", ".join(f"{part} {kind}" for part, kind in dtypes.items())
    yield from _wrapped(
        "",
        f"{request['width']} x {request['height']}, {request['steps']} steps, {request['sampler']} "
        f"{request['schedule']}, CFG {request['cfg_scale']:g}, {request['count']} picture(s), seed "
        f"{request['seed']}",
    )
    threads = f", {machine['threads']} thread(s)" if machine["kind"] == "cpu" else ""
    yield from _wrapped("", f"{machine['device']}{threads}, torch {machine['torch']}, {dtype}")
    yield ""
    runs, profiled = about["unprofiled_ms"], about["profiled_ms"]
    yield from _wrapped(
        "",
        f"A generation takes {_ms(about['whole_ms'])} ms ({_runs(runs, 'unprofiled')}), saving included; "
        f"loading the model took {_ms(about['load_ms'])} ms before that.",
    )
    yield from _wrapped(
        "",
        f"Listening to it makes that {about['overhead']:+.1%} ({_runs(profiled, 'profiled')}: "
        f"{_ms(statistics.median(profiled))} ms)"
        + (", less than the noise." if about["overhead"] <= 0 else "."),
    )
    for note in about["notes"]:
        yield from _wrapped("Note: ", f"{note}.")


def _stages(about: dict[str, Any]) -> Iterator[str]:
    rows = about["stages"]
    device = any(row["device_ms"] is not None for row in rows)
    allocator = any(row["allocator_peak_bytes"] for row in rows)
    head = ["stage", "calls", "host ms", "dev ms", "share", "TFLOP/s", "of max", "GB/s", "of max"]
    head += ["alloc MiB", "driver MiB"]
    table = [head]
    for row in rows:
        rated = row["share"] >= WORTH_A_RATE and row["of_copy"] is not None
        worked = rated and row["flops"] > 0
        table.append(
            [
                row["name"],
                str(row["calls"]),
                _ms(row["host_ms"]),
                "" if row["device_ms"] is None else _ms(row["device_ms"]),
                f"{row['share']:.1%}",
                f"{row['tflop_per_s']:.3g}" if worked else "",
                f"{row['of_matmul']:.0%}" if worked else "",
                f"{row['gb_per_s']:.3g}" if rated else "",
                f"{row['of_copy']:.0%}" if rated else "",
                _mib(row["allocator_peak_bytes"]),
                _mib(row["driver_peak_bytes"]),
            ]
        )
    dropped = {index for index, shown in ((3, device), (9, allocator)) if not shown}
    yield from _columns([[cell for index, cell in enumerate(row) if index not in dropped] for row in table])
    yield from _wrapped("", _legend(about, device, allocator))


def _legend(about: dict[str, Any], device: bool, allocator: bool) -> str:
    limits = ", ".join(
        f"{one['flops_per_s'] / 1e12:.3g} TFLOP/s in {dtype} products, {one['bytes_per_s'] / 1e9:.3g} GB/s "
        f"copying, {one['launch_s'] * 1e6:.2g} us a launch"
        for dtype, one in about["ceilings"].items()
    )
    said = f"Maxima measured on this machine: {limits}." if limits else ""
    if not device:
        said += " On the CPU device time is host time."
    if not allocator:
        said += " Torch's allocator tells no peak here; driver MiB is "
        said += "this process's memory." if about["device"] == "cpu" else "what the driver gave."
    return said.strip()


def _calls(about: dict[str, Any]) -> Iterator[str]:
    for part, times in about["calls_ms"].items():
        if len(times) == 1:
            yield f"{part}: one call measured, {_ms(times[0])} ms"
            continue
        yield from _wrapped(
            "",
            f"{part}: {len(times)} calls measured, median {_ms(statistics.median(times))} ms "
            f"({_ms(min(times))} to {_ms(max(times))}; the first {_ms(times[0])})",
        )


def _modules(about: dict[str, Any]) -> Iterator[str]:
    modules = {one["path"]: one for one in about["modules"]}
    if not modules:
        return
    yield f"Inside {about['heaviest_network']}, down into the heaviest"
    table = [["ms a call", "whole", "module"]]
    for depth, path in about["descent"]:
        one = modules[path]
        table.append([_ms(one["ms"]), f"{one['share']:.1%}", f"{' ' * depth}{path} ({one['type']})"])
    yield from _columns(table, last_left=True)
    yield ""
    yield "Most time of their own (what is in them not counted)"
    table = [["ms a call", "whole", "usual", "module"]]
    for one in sorted(modules.values(), key=lambda one: -one["own_share"])[:MOST_OWN]:
        name = f"{one['path']} ({one['type']})" + (" SLOW" if one["slow"] else "")
        table.append([_ms(one["own_ms"]), f"{one['own_share']:.1%}", _ms(one["usual_ms"] or 0.0), name])
    yield from _columns(table, last_left=True)


def _facts(about: dict[str, Any]) -> Iterator[str]:
    yield from _wrapped("Routes: ", ", ".join(f"{key} {count}" for key, count in about["routes"].items()))
    did = [f"{name} {count}" for name, count in {**about["compiler"], **about["graphs"]}.items() if count]
    yield from _wrapped("Graphs: ", (", ".join(did) or "none made, none missed, nothing recompiled") + ".")
    reads = {row["name"]: row["reads"] for row in about["stages"] if row["reads"] >= 0.5}
    loop = sum(reads.get(name, 0) for name in ("unet", "guidance", "sampler arithmetic"))
    where = ", ".join(f"{name} {count:.0f}" for name, count in reads.items()) or "nowhere"
    yield from _wrapped(
        "Waits: ",
        f"numbers read back to the host, which waits for them: {loop:.0f} in the loop; in all: {where}.",
    )
    if about["unknown_operations"]:
        names = ", ".join(about["unknown_operations"])
        yield from _wrapped("Not counted: ", f"work in operations without a formula: {names}.")


def _advice(about: dict[str, Any]) -> Iterator[str]:
    yield ""
    if not about["advice"]:
        yield "Nothing here could save as much as 1 % of it."
        return
    yield "What to try, with the most it could save: a bound (all else stays as it is), no promise"
    number = 0
    for kind, title in KINDS.items():
        chosen = [one for one in about["advice"] if one["kind"] == kind]
        if chosen:
            yield f"  {title}"
        for one in chosen:
            number += 1
            begin = f"    {number}. at most {one['bound']:>4.0%} ({_ms(one['bound_ms'])} ms): "
            yield from _wrapped(begin, f"{one['what']}; {one['why']}", hang=9)


def _columns(table: Sequence[Sequence[str]], last_left: bool = False) -> Iterator[str]:
    """Rows in columns one or two spaces apart: numbers to the right, names (first or last) to the left."""
    widths = [max(len(row[index]) for row in table) for index in range(len(table[0]))]
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH or last_left else " "
    for row in table:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        if last_left:
            line = gap.join([*cells[:-1], row[-1]])
            yield line if len(line) <= WIDTH else line.partition(" (")[0]  # the path, which is never cut
        else:
            cells[0] = row[0].ljust(widths[0])
            yield gap.join(cells)


def _wrapped(begin: str, text: str, hang: int | None = None) -> Iterator[str]:
    indent = " " * (len(begin) if hang is None else hang)
    yield from textwrap.wrap(
        text, WIDTH, initial_indent=begin, subsequent_indent=indent, break_on_hyphens=False
    ) or [begin.rstrip()]


def _runs(times: Sequence[float], kind: str) -> str:
    return f"median of {len(times)} {kind} runs" if len(times) > 1 else f"one {kind} run"


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / MIB:.0f}"
