"""Plots as inline SVG. Across they use per cent, down pixels: they fill any width, text keeps its size.

Colours and fonts are the page's: every mark only has a class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from clearway.measure.figures import plain, ratio, size
from clearway.measure.markup import Markup, tag

COLOURS = 8
_ROW, _AXIS = 50, 26
_MOST_POINTS = 600
_LABEL = 34  # signs that leave room for the value on a narrow screen
_RATIOS = (0.05, 0.1, 0.2, 0.25, 0.33, 0.5, 0.67, 0.8, 0.9, 0.95, 0.98, 0.99)


Strip = tuple[str, Sequence[float], float, float, float]
"""Label, samples, p20, p50, p80."""


def longest(rows: Sequence[Strip]) -> float:
    """The longest time among rows."""
    return max((max([*samples, p80]) for _, samples, _, _, p80 in rows), default=0.0)


def strips(rows: Sequence[Strip], unit: str = "s", most: float | None = None) -> Markup:
    """Times from zero to `most`: a bar to the median, p20–p80 as a band, each sample a dot."""
    most = most or longest(rows) or 1.0
    ticks = _ticks(most)
    scale = max(most * 1.02, ticks[-1])
    height = _ROW * len(rows) + _AXIS
    parts = [
        _vertical(tick / scale, height, _tick(tick), unit if tick == ticks[-1] else "") for tick in ticks
    ]
    for index, (label, samples, p20, p50, p80) in enumerate(rows):
        top = _ROW * index
        words = f"{plain(p50)} {unit}"
        parts += _titled(label, words, top)
        parts.append(_box(0, p50 / scale, top + 24, 14, "bar"))
        parts.append(_box(p20 / scale, (p80 - p20) / scale, top + 24, 14, "band"))
        parts += [
            tag("circle", cx=_x(one / scale), cy=top + 31 + _scatter(place), r=2.2, class_="dot")
            for place, one in enumerate(samples[:_MOST_POINTS])
        ]
        parts.append(_line(p50 / scale, p50 / scale, top + 21, top + 41, "median"))
    return _figure(parts, height, f"Times of {len(rows)} contenders, from zero")


def forest(rows: Sequence[tuple[str, float, float, float | None, float | None, str]]) -> Markup:
    """Ratios of times on a logarithmic axis about 1, each with its interval over its noise floor.

    A row is label, ratio, low, high (None: no bound), floor as |log ratio| (None: not known), verdict.
    """
    ends = [
        abs(math.log(end))
        for _, middle, low, high, *_ in rows
        for end in (middle, low, high)
        if end and end > 0
    ]
    floors = [floor for *_, floor, _ in rows if floor is not None and floor < 3]
    reach = min(max([*ends, *floors, math.log(1.05)]) * 1.15, math.log(40))
    height = _ROW * len(rows) + _AXIS

    def across(value: float | None) -> float:
        if value is None:
            return 1.0
        return min(max(0.5 + math.log(value) / reach / 2, 0.0), 1.0) if value > 0 else 0.0

    shown = _thin(
        [tick for tick in (*_RATIOS, *(1 / tick for tick in _RATIOS)) if abs(math.log(tick)) < reach], across
    )
    parts = [
        _vertical(across(tick), height, ratio(round(tick, 2)).rstrip("0").rstrip("."), "") for tick in shown
    ]
    for index, (label, middle, low, high, floor, verdict) in enumerate(rows):
        top, kind = _ROW * index, verdict.replace(" ", "-")
        parts += _titled(label, f"{ratio(middle)} · {verdict}", top, f"value {kind}")
        if floor is not None:
            low_floor, high_floor = across(math.exp(-min(floor, 9))), across(math.exp(min(floor, 9)))
            parts.append(_box(low_floor, high_floor - low_floor, top + 22, 18, "floor"))
        parts.append(_line(0.5, across(middle), top + 31, top + 31, f"reach {kind}"))
        parts.append(_line(across(low), across(high), top + 31, top + 31, f"interval {kind}"))
        parts.append(tag("circle", cx=_x(across(middle)), cy=top + 31, r=4.5, class_=f"estimate {kind}"))
    parts.append(_line(0.5, 0.5, 8, height - _AXIS + 4, "one"))
    parts.append(_text(0.5, height - 6, "1", "tick middle"))
    parts.append(_text(0, height - 6, "◂ faster", "tick"))
    parts.append(_text(1, height - 6, "slower ▸", "tick end"))
    return _figure(parts, height, f"Ratios of times of {len(rows)} comparisons")


def stages(rows: Sequence[tuple[str, Mapping[str, float]]]) -> Markup:
    """One bar a contender, made of its stages in milliseconds; below, the stages by colour."""
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    most = max((sum(parts.values()) for _, parts in rows), default=0.0) or 1.0
    parts_drawn: list[Markup] = []
    for index, (label, parts) in enumerate(rows):
        top, at, total = _ROW * index, 0.0, sum(parts.values())
        parts_drawn += _titled(label, f"{plain(total)} ms", top)
        for name, taken in parts.items():
            share, colour = taken / most, names.index(name) % COLOURS
            words = f"{name}: {plain(taken)} ms, {plain(100 * taken / (total or 1), 2)} %"
            parts_drawn.append(_box(at, share, top + 22, 20, f"c{colour} segment", words))
            if share > 0.13:
                percent = f"{100 * taken / (total or 1):.0f} %"
                parts_drawn.append(_text(at + share / 2, top + 36, percent, "inside middle"))
            at += share
    drawn = _figure(parts_drawn, _ROW * len(rows), f"Stages of {len(rows)} contenders")
    return Markup(drawn + legend([(name, "") for name in names]))


def roofline(points: Sequence[tuple[int, str, float, float]], gb_per_s: float, tflop_per_s: float) -> Markup:
    """Operations under the machine's measured roof: FLOP a byte across, TFLOP/s up, both logarithmic.

    A point is its number in the table, label, FLOP a byte, TFLOP/s.
    """
    ridge = tflop_per_s * 1e3 / gb_per_s  # FLOP a byte where the two roofs meet
    low_x, high_x = _decades([ridge, *(x for _, _, x, _ in points)])
    low_y, high_y = _decades([tflop_per_s, *(y for *_, y in points)])
    height = 300

    def across(x: float) -> float:
        return (math.log10(x) - low_x) / (high_x - low_x)

    def down(y: float) -> float:
        return 8 + (height - _AXIS - 8) * (high_y - math.log10(y)) / (high_y - low_y)

    parts = []
    every = -(-(high_x - low_x) // 6)
    for power in range(low_x, high_x + 1, every):
        last = power + every > high_x
        parts.append(_vertical(across(10.0**power), height, _power(power), "FLOP/B" if last else ""))
    for power in range(low_y, high_y + 1):
        parts.append(_line(0, 1, down(10.0**power), down(10.0**power), "rule"))
        if power > low_y:
            unit = " TFLOP/s" if power == high_y else ""
            parts.append(_text(0, down(10.0**power) + 13, f"{_power(power)}{unit}", "tick"))
    start = max(10.0**low_x, 10.0**low_y * 1e3 / gb_per_s)
    parts.append(_line(across(start), across(ridge), down(start * gb_per_s / 1e3), down(tflop_per_s), "roof"))
    parts.append(_line(across(ridge), 1, down(tflop_per_s), down(tflop_per_s), "roof"))
    for place, label, x, y in points:
        words = f"{place} {label}: {plain(x, 3)} FLOP/B, {plain(y, 3)} TFLOP/s"
        at = _x(across(x))
        parts.append(tag("circle", tag("title", words), cx=at, cy=down(y), r=9, class_="point"))
        parts.append(_text(across(x), down(y) + 3.5, str(place), "number middle"))
    return _figure(parts, height, f"Roofline of {len(points)} operations")


def timeline(series: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> Markup:
    """Bytes over seconds, one line a contender, both from zero."""
    last = max((points[-1][0] for _, points in series), default=0.0) or 1.0
    most = max((1.0, *(value for _, points in series for _, value in points)))
    unit = 2**30 if most >= 2**30 else 2**20
    high, wide = _ticks(most / unit), _ticks(last)
    top, height = max(high[-1], most / unit) * unit, 240
    inner = height - _AXIS - 8
    parts = []
    for tick in wide:
        parts.append(
            _vertical(tick / max(last, wide[-1]), height, _tick(tick), "s" if tick == wide[-1] else "")
        )
    for tick in high[1:]:
        y = 8 + inner * (1 - tick * unit / top)
        words = f"{_tick(tick)} {'GiB' if unit == 2**30 else 'MiB'}" if tick == high[-1] else _tick(tick)
        parts += [_line(0, 1, y, y, "rule"), _text(0, y - 4, words, "tick")]
    lines = []
    for index, (label, points) in enumerate(series):
        thin = _peaks(points)
        steps = " ".join(f"{x / max(last, wide[-1]) * 1000:.1f},{1000 * (1 - y / top):.1f}" for x, y in thin)
        lines.append(
            tag("polyline", tag("title", label), points=Markup(steps), class_=f"l{index % COLOURS} curve")
        )
    box = {"viewBox": "0 0 1000 1000", "preserveAspectRatio": "none", "width": "100%"}
    parts.append(tag("svg", *lines, y=8, height=inner, **box))
    peaks = [(label, size(max(value for _, value in points))) for label, points in series]
    drawn = _figure(parts, height, f"Memory of {len(series)} contenders over time")
    return Markup(drawn + legend(peaks))


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Names beside their colours, in order, each with a word more."""
    return tag(
        "ul",
        *(
            tag("li", tag("i", class_=f"c{index % COLOURS}"), name, tag("b", words) if words else None)
            for index, (name, words) in enumerate(entries)
        ),
        class_="legend",
    )


def _figure(parts: Sequence[Markup], height: float, label: str) -> Markup:
    return tag("svg", *parts, class_="plot", width="100%", height=height, role="img", aria_label=label)


def _x(share: float) -> str:
    return f"{100 * share:.3f}%"


def _titled(label: str, words: str, top: float, kind: str = "value") -> list[Markup]:
    short = label if len(label) <= _LABEL else f"{label[: _LABEL - 16]}…{label[-15:]}"
    told = tag("title", label) if short != label else None
    name = tag("text", short, told, x="0", y=top + 15, class_="label")
    return [name, _text(1, top + 15, words, f"{kind} end")]


def _text(x: float, y: float, words: str, kind: str) -> Markup:
    return tag("text", words, x=_x(x), y=y, class_=kind)


def _line(x1: float, x2: float, y1: float, y2: float, kind: str) -> Markup:
    return tag("line", x1=_x(x1), x2=_x(x2), y1=y1, y2=y2, class_=kind)


def _box(x: float, width: float, y: float, height: float, kind: str, words: str = "") -> Markup:
    told = tag("title", words) if words else None
    return tag("rect", told, x=_x(x), width=_x(max(width, 0.0)), y=y, height=height, class_=kind)


def _vertical(x: float, height: float, words: str, unit: str) -> Markup:
    """A rule at x with its tick label; the first and the last label stay inside."""
    place = "tick" if x < 0.02 else "tick end" if x > 0.94 else "tick middle"
    label = _text(x, height - 6, f"{words} {unit}".strip(), place)
    return Markup(_line(x, x, 0, height - _AXIS + 4, "rule") + label)


def _scatter(place: int) -> float:
    """A little up or down, so that equal times do not hide one another; the same for the same place."""
    return (place * 7 % 11 - 5) * 0.9


def _ticks(most: float) -> list[float]:
    """Three to six round numbers from 0 to about `most`; 0 alone where no float is small enough for more."""
    if most < 1e-300:
        return [0.0]
    step = 10 ** math.floor(math.log10(most / 3))
    step *= next(times for times in (1, 2, 5, 10) if most / (step * times) < 6)
    return [step * index for index in range(math.floor(most / step + 1e-9) + 1)]


def _tick(value: float) -> str:
    """A round number without needless zeros."""
    return f"{value:,.10g}" if value < 1e15 else f"{value:.0e}"


def _thin(ticks: Sequence[float], across: Any) -> list[float]:
    """Those that leave room for one another, for 1 in the middle and for the words at both ends."""
    kept: list[float] = []
    for tick in sorted(ticks, key=lambda one: -abs(math.log(one))):
        x = across(tick)
        if 0.2 < x < 0.8 and all(abs(x - other) > 0.11 for other in (0.5, *(across(one) for one in kept))):
            kept.append(tick)
    return kept


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Powers of ten below and above all values."""
    logs = [math.log10(value) for value in values]
    return math.floor(min(logs)), max(math.ceil(max(logs)), math.floor(min(logs)) + 1)


def _power(power: int) -> str:
    return f"{10.0**power:,.0f}" if power >= 0 else f"{10.0**power:.{-power}f}"


def _peaks(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most _MOST_POINTS of them, the highest of each stretch."""
    stride = -(-len(points) // _MOST_POINTS)
    return [max(points[at : at + stride], key=lambda one: one[1]) for at in range(0, len(points), stride)]
