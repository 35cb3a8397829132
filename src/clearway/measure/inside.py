"""Inside the networks: which module takes how long, by dotted path, and which is slower than its like."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from clearway.measure.ceilings import Ceilings
from clearway.measure.stages import CALL, MODULE, Recorder, Span

PEERS = 3  # so many alike make a measure of what is usual
SLOWER_THAN_PEERS = 5.0
SLOWER_THAN_TYPICAL = 10.0  # kernels differ this much in how near they come to a ceiling; a fault is beyond
WORTH = 0.03  # of the whole

Shapes = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Inner:
    """A module's times in ms for one call of its network: with what is in it, and its own.

    `usual_ms` is what its own work takes in modules like it, or at the pace that is typical for its network;
    `slow` whether its own time is far beyond that.
    """

    path: str
    type: str
    part: str
    calls: float
    ms: float
    own_ms: float
    share: float = 0.0
    own_share: float = 0.0
    flops: float = 0.0
    bytes_moved: float = 0.0
    usual_ms: float | None = None
    slow: bool = False
    children: list[str] = field(default_factory=list)


def inner(
    timed: Sequence[Recorder],
    counted: Recorder,
    types: Mapping[str, str],
    networks: Mapping[str, tuple[float, float]],
    ceilings: Callable[[str], Ceilings],
) -> list[Inner]:
    """Every module that ran, the heaviest first.

    `timed` and `counted` are runs listened to with their model, `types` the modules' class names by path,
    `networks` each network's (ms a call, share of the whole), `ceilings` the machine's for a network. Of
    calls with the same shapes the quickest counts: what else the machine did then is not the module's.
    """
    calls: Counter[str] = Counter()
    times: dict[str, dict[Shapes, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    first: dict[str, Span] = {}
    for recorder in timed:
        calls += _calls(recorder)
        for own in recorder.own(kinds=(CALL, MODULE)):
            span, total = own.span, recorder.device_seconds(own.span)
            if span.kind == MODULE:
                pair = span.seconds, own.host_s
                if total is not None and own.device_s is not None:
                    pair = total, own.device_s
                times[span.name][span.shapes].append(pair)
                first[span.name] = span
    work = _work(counted)
    found: dict[str, Inner] = {}
    for path, by_shapes in times.items():
        part = path.partition(".")[0]
        ms, own_ms = (
            sum(min(pair[index] for pair in pairs) * len(pairs) for pairs in by_shapes.values())
            / calls[part]
            * 1000
            for index in (0, 1)
        )
        count = sum(map(len, by_shapes.values())) / calls[part]
        flops, moved, _ = work.get(path, (0.0, 0.0, 0.0))
        found[path] = Inner(
            path, types.get(path, ""), part, count, ms, own_ms, flops=flops, bytes_moved=moved
        )
    _relate(found, first, networks)
    for part, network in networks.items():
        mine = [one for one in found.values() if one.part == part]
        _judge(mine, first, work, ceilings(part), network)
    return sorted(found.values(), key=lambda one: -one.share)


def descend(
    found: Iterable[Inner], part: str, widest: int = 3, least: float = 0.05
) -> list[tuple[int, Inner]]:
    """(depth, module) from the network's blocks down into the heaviest of each level: where its time is.

    `least` is the part of its network that a module must take to be shown; the heaviest is always followed.
    """
    by_path = {one.path: one for one in found if one.part == part}
    inside = {child for one in by_path.values() for child in one.children}
    level = [path for path in by_path if path not in inside]
    whole = sum(by_path[path].ms for path in level) or 1.0
    shown: list[tuple[int, Inner]] = []

    def show(paths: list[str], depth: int) -> None:
        heaviest = sorted((by_path[path] for path in paths), key=lambda one: -one.ms)[:widest]
        for index, one in enumerate(heaviest):
            if one.ms / whole < least:
                break
            shown.append((depth, one))
            if index == 0:
                show(one.children, depth + 1)

    show(level, 0)
    return shown


def _calls(recorder: Recorder) -> Counter[str]:
    return Counter(span.name for span in recorder.spans if span.kind == CALL)


def _work(counted: Recorder) -> dict[str, tuple[float, float, float]]:
    """(FLOPs, bytes, operations) of each module itself, for one call of its network."""
    calls = _calls(counted)
    work: dict[str, tuple[float, float, float]] = {}
    for span in counted.spans:
        if span.kind == MODULE:
            n = calls[span.name.partition(".")[0]]
            flops, moved, ops = work.get(span.name, (0.0, 0.0, 0.0))
            work[span.name] = (flops + span.flops / n, moved + span.bytes_moved / n, ops + span.ops / n)
    return work


def _relate(
    found: dict[str, Inner], first: Mapping[str, Span], networks: Mapping[str, tuple[float, float]]
) -> None:
    """Who was called in whom, and shares of the whole from the network's."""
    tops: dict[str, float] = defaultdict(float)
    for path, span in first.items():
        if span.parent is not None and span.parent.kind == MODULE and span.parent.name in found:
            found[span.parent.name].children.append(path)
        else:
            tops[found[path].part] += found[path].ms
    for one in found.values():
        ms, share = networks.get(one.part, (0.0, 0.0))
        scale = share / max(ms, tops[one.part], 1e-9)
        one.share, one.own_share = one.ms * scale, one.own_ms * scale


def _judge(
    mine: list[Inner],
    first: Mapping[str, Span],
    work: Mapping[str, tuple[float, float, float]],
    ceilings: Ceilings,
    network: tuple[float, float],
) -> None:
    """What each module's own work usually takes: the median of its like, else the network's typical pace."""
    alike: dict[tuple[object, ...], list[float]] = defaultdict(list)
    least: dict[str, float] = {}

    def key(one: Inner) -> tuple[object, ...]:
        return one.type, first[one.path].shapes, one.flops, one.bytes_moved

    for one in mine:
        alike[key(one)].append(one.own_ms)
        flops, moved, ops = work.get(one.path, (0.0, 0.0, 0.0))
        least[one.path] = 1000 * (ceilings.floor_s(flops, moved) + (ops + 1) * ceilings.launch_s)
    pace = statistics.median([one.own_ms / least[one.path] for one in mine]) if mine else 1.0
    ms, share = network
    for one in mine:
        like = alike[key(one)]
        one.usual_ms, factor = least[one.path] * pace, SLOWER_THAN_TYPICAL
        # where all of a kind are slow, only the pace of the others tells: hence the smaller of both
        if len(like) >= PEERS and (usual := statistics.median(like)) < one.usual_ms * 2:
            one.usual_ms, factor = usual, SLOWER_THAN_PEERS
        excess = (one.own_ms - one.usual_ms) / max(ms, 1e-9) * share
        one.slow = one.own_ms >= factor * one.usual_ms and excess >= WORTH
