"""The comparisons of a record, computed anew from the rounds of both contenders where the file has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from clearway.measure import figures
from clearway.measure.clock import FEWEST, Samples, compare
from clearway.measure.figures import mapping, number
from clearway.measure.groups import Entry, Group
from clearway.measure.markup import shown
from clearway.measure.signed_rank import ALPHA

OWN, BASE = "clearway", "diffusers"
_SHORTEST_S = 1e-9  # no clock tells less; the logarithms of what is near zero overflow
_LONGEST_S = 1e12  # nobody waits for more, and ratios of such numbers overflow
_MOST_ROUNDS = 2000  # the test takes memory with the square of the rounds


def comparisons(group: Group, entry: Entry, *, every: bool = False) -> list[dict[str, Any]]:
    """Each comparison of an entry: its time over the other's, tested anew where the rounds of both are here.

    The verdict is never more than interval, p-value and noise floor allow; `said` is the record's own row.
    What was refused is not compared. Where two records tell of each other the pair stands once, unless
    `every` is asked for: Clearway's own against others, all against the base.
    """
    found = []
    for given in figures.rows(entry.record.comparisons):
        peer = _peer(group, entry, given.get("against"))
        if peer and not peer.published:
            continue
        if peer and not every and _tells(peer, entry) and _place(group, entry) < _place(group, peer):
            continue
        told = {key: number(given.get(key)) for key in ("ratio", "low", "high", "floor", "n", "p_value")}
        if (told["floor"] or 0.0) < 0:
            told["floor"] = None  # no noise is below none
        anew = _tested(entry, peer, told["floor"])
        told = anew or told
        if told["ratio"] is None:
            continue
        row: dict[str, Any] = {
            **told,
            "against": shown(given.get("against", "")),
            "said": given,
            "anew": anew is not None,
        }
        row |= {"test": shown(given.get("test") or ""), "interval": (told["low"] or 0.0, told["high"])}
        found.append({**row, "verdict": _verdict(told)})
    return found


def _tells(entry: Entry, other: Entry) -> bool:
    """Whether an entry has a comparison against another."""
    name = other.record.contender
    return any(each.get("against") == name for each in figures.rows(entry.record.comparisons))


def _place(group: Group, entry: Entry) -> tuple[bool, bool, int]:
    """The entry with the higher place is the one that is compared, the other the one it is compared with."""
    name = entry.record.contender
    return name.startswith(OWN), name != BASE, -group.entries.index(entry)


def _peer(group: Group, entry: Entry, name: Any) -> Entry | None:
    """The entry of the same run and scenario that a comparison names; None where not exactly one has it."""
    others = [each for each in group.entries if each is not entry and _beside(each) == _beside(entry)]
    found = [each for each in others if each.record.contender == name]
    return found[0] if len(found) == 1 else None


def _beside(entry: Entry) -> tuple[Any, ...]:
    """What entries share that were timed in the same rounds."""
    return entry.file, entry.run, entry.record.scenario, mapping(entry.record.provenance).get("date")


def _tested(entry: Entry, peer: Entry | None, floor: float | None) -> dict[str, float | None] | None:
    """The comparison computed anew from both's rounds; None where they cannot be paired."""
    mine, others = (
        figures.numbers(mapping(one.record.throughput).get("samples_s")) if one else ()
        for one in (entry, peer)
    )
    if not 0 < len(mine) == len(others) <= _MOST_ROUNDS:
        return None
    if min(*mine, *others) < _SHORTEST_S or max(*mine, *others) > _LONGEST_S:
        return None
    a, b = (Samples(wall_s, None, wall_s[0], 0, True) for wall_s in (others, mine))
    found = compare(a, b, math.inf if floor is None else floor)
    return {
        "ratio": found.ratio,
        "low": found.low,
        "high": None if math.isinf(found.high) else found.high,
        "floor": floor,
        "n": float(found.n),
        "p_value": found.p_value,
    }


def _verdict(told: Mapping[str, float | None]) -> str:
    """A difference only where interval and test find one and the ratio lies beyond the noise floor."""
    if told["n"] is not None and told["n"] < FEWEST:
        return "too few rounds"
    middle, low, high, floor, p = (told[key] for key in ("ratio", "low", "high", "floor", "p_value"))
    if middle is None or middle <= 0 or floor is None or abs(math.log(middle)) <= floor or (p or 0) > ALPHA:
        return "no difference"
    if high is not None and high < 1:
        return "faster"
    return "slower" if low is not None and low > 1 else "no difference"
