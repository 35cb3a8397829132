"""The stage table: what each part of a generation took, did and needed, against the machine's ceilings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from clearway.measure.ceilings import Ceilings
from clearway.measure.stages import CALL, MODULE, RUN, STAGE, Recorder, Span

NAMES = {
    "prompt": "prompt parse",
    "text": "text, the rest",
    "sampling": "sampler arithmetic",
    "save": "encode and save",
    "wait": "wait for the device",
    "denoiser": "guidance",
    "generation": "idle gaps",
}
"""Own time of a span -> its row; what is not here is a row of its own name."""
NETWORKS = {"vae": "vae decode"}
STAGES = {"vae": "pixels to bytes"}


@dataclass
class Row:
    """A part of a generation: ms on host and device, its share, what it did and what memory its stage took.

    FLOPs, bytes, operations and scalar reads are the whole generation's. `of_matmul` and `of_copy` are parts
    of the machine's ceilings. The rows of a generation add up to it.
    """

    name: str
    dtype: str
    calls: int = 0
    host_ms: float = 0.0
    device_ms: float | None = None
    share: float = 0.0
    flops: float = 0.0
    bytes_moved: float = 0.0
    operations: float = 0.0
    reads: float = 0.0
    tflop_per_s: float | None = None
    gb_per_s: float | None = None
    of_matmul: float | None = None
    of_copy: float | None = None
    floor_ms: float = 0.0
    allocator_peak_bytes: int | None = None
    driver_peak_bytes: int | None = None

    @property
    def ms(self) -> float:
        """What the row costs: device time where the device was timed, else host time."""
        return self.host_ms if self.device_ms is None else self.device_ms


def row_name(span: Span) -> str:
    """The row that a span's own time belongs to."""
    special = NETWORKS if span.kind == CALL else STAGES if span.kind == STAGE else {}
    return special.get(span.name) or (span.name if span.kind == CALL else NAMES.get(span.name, span.name))


def rows(
    timed: Recorder,
    counted: Recorder,
    scale: Mapping[str, float],
    dtype: Callable[[str], str],
    ceilings: Callable[[str], Ceilings],
) -> list[Row]:
    """The rows of a generation in the order in which they first ran, the gaps between them last.

    `timed` and `counted` are runs of it, `scale` says by stage how often the whole does what `timed` did
    once, `dtype` what a row computes in, `ceilings` the machine's for a dtype.
    """
    work = _work(counted)
    made: dict[str, Row] = {}
    calls: dict[str, float] = defaultdict(float)
    in_stage: dict[str, dict[str, float]] = defaultdict(dict)
    for own in sorted(timed.own(), key=lambda own: own.span.begin):
        span, name = own.span, row_name(own.span)
        stage = _stage(span)
        factor = scale.get(stage.name, 1.0) if stage else 1.0
        row = made.setdefault(name, Row(name, dtype(name)))
        calls[name] += factor * (span.name != "guidance" or span.kind == CALL)  # a guidance holds denoisers
        row.host_ms += own.host_s * 1000 * factor
        if own.device_s is not None:
            row.device_ms = (row.device_ms or 0.0) + own.device_s * 1000 * factor
        did = _nearest(work, span)
        row.flops += did[0] * factor
        row.bytes_moved += did[1] * factor
        row.operations += did[2] * factor
        row.reads += did[3] * factor
        if stage:
            in_stage[stage.name][name] = row.ms
    for span in timed.spans:
        if span.memory and in_stage[span.name]:
            _note_memory(made[max(in_stage[span.name], key=in_stage[span.name].__getitem__)], span)
    idle = made.pop(NAMES["generation"], None)
    ordered = [*made.values(), *([idle] if idle else [])]
    whole = sum(row.ms for row in ordered) or 1.0
    for row in ordered:
        row.calls, row.share = round(calls[row.name]), row.ms / whole
        _rate(row, ceilings)
    return ordered


Work = tuple[float, float, float, float]


def _work(counted: Recorder) -> dict[tuple[str, tuple[tuple[int, ...], ...]], Work]:
    """(FLOPs, bytes, operations, reads) of one span of each row and shape, its modules' included."""
    sums: dict[Span, list[float]] = {}
    for span in counted.spans:
        home = span
        while home.kind == MODULE and home.parent is not None:
            home = home.parent
        here = sums.setdefault(home, [0.0] * 4)
        for index, value in enumerate((span.flops, span.bytes_moved, span.ops, span.reads)):
            here[index] += value
    alike: dict[tuple[str, tuple[tuple[int, ...], ...]], list[list[float]]] = defaultdict(list)
    for span, values in sums.items():
        alike[row_name(span), span.shapes].append(values)
    made = {}
    for key, found in alike.items():
        flops, moved, operations, reads = (sum(column) / len(found) for column in zip(*found, strict=True))
        made[key] = flops, moved, operations, reads
    return made


def _nearest(work: Mapping[tuple[str, tuple[tuple[int, ...], ...]], Work], span: Span) -> Work:
    """The work of a span like this one; of another number of rows, in proportion."""
    name = row_name(span)
    if (name, span.shapes) in work:
        return work[name, span.shapes]
    for (other, shapes), did in work.items():
        if other == name and shapes and span.shapes and shapes[0][1:] == span.shapes[0][1:]:
            ratio = span.shapes[0][0] / max(1, shapes[0][0])
            return did[0] * ratio, did[1] * ratio, did[2], did[3]
    return 0.0, 0.0, 0.0, 0.0


def _stage(span: Span) -> Span | None:
    """The stage that a span is in."""
    found: Span | None = span
    while found is not None and found.kind != STAGE:
        found = None if found.kind == RUN else found.parent
    return found


def _note_memory(row: Row, span: Span) -> None:
    for name in ("allocator_peak_bytes", "driver_peak_bytes"):
        found = span.memory.get(name)
        if found is not None:
            setattr(row, name, max(found, getattr(row, name) or 0))


def _rate(row: Row, ceilings: Callable[[str], Ceilings]) -> None:
    """Rates and their parts of the ceilings, where the row counted any work."""
    seconds = row.ms / 1000
    if not (row.flops or row.bytes_moved) or seconds <= 0:
        return
    limit = ceilings(row.dtype)
    row.tflop_per_s, row.of_matmul = row.flops / seconds / 1e12, row.flops / seconds / limit.flops_per_s
    row.gb_per_s, row.of_copy = row.bytes_moved / seconds / 1e9, row.bytes_moved / seconds / limit.bytes_per_s
    row.floor_ms = min(row.ms, 1000 * limit.floor_s(row.flops, row.bytes_moved))


def without(found: list[Row], name: str) -> list[Row]:
    """The rows with one of them counted to the gaps: for what a device does not have."""
    gone = next((row for row in found if row.name == name), None)
    return [
        replace(row, host_ms=row.host_ms + gone.host_ms, share=row.share + gone.share)
        if gone and row.name == NAMES["generation"]
        else row
        for row in found
        if row is not gone
    ]
