"""What a placement says of itself: sentences with their numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from clearway.errors import UnavailableError
from clearway.models import tiles
from clearway.models._options import STREAMED, VISITING, Fit, Order, Way
from clearway.models.estimate import Parts

GIB = 2**30
SMALLER = (7 / 8, 3 / 4, 5 / 8, 1 / 2, 3 / 8, 1 / 4, 1 / 8)


def gib(size: float) -> str:
    """ "1.5 GiB"."""
    return f"{size / GIB:.1f} GiB"


def notes(
    fit: Fit, first: Way, parts: Parts, whole_bytes: int, room_bytes: int, device: str
) -> tuple[str, ...]:
    """Why the model is not simply on the device, and what was done instead; nothing where it is."""
    way, done = fit.way, list[str]()
    visiting = [
        f"{name} ({gib(size)})"
        for name, place, size in (
            ("the text encoders", way.text, parts.text_weights),
            ("the UNet", way.unet, parts.unet_weights),
            ("the VAE", way.vae, parts.vae_weights),
        )
        if place == VISITING
    ]
    if visiting:
        done.append(f"{_listed(visiting)} {_are(visiting)} on it only while at work")
    if way.unet == STREAMED:
        done.append(
            f"the UNet ({gib(parts.unet_weights)}) comes block by block, {gib(fit.keep_bytes)} of it staying"
        )
    if way.batch < first.batch:
        done.append(f"{way.batch} at a time are drawn and not {first.batch}")
    if first.joined and not way.joined:
        done.append("guidance's halves run one after the other")
    captured = set(first.graphs) - set(way.graphs)
    lost = [name for part, name in (("unet", "the UNet"), ("vae", "the VAE")) if part in captured]
    if lost:
        done.append(f"{_listed(lost)} run without graphs" if lost[1:] else f"{lost[0]} runs without a graph")
    if not done:
        return ()
    return (
        f"all of the model at once needs about {gib(whole_bytes)} of {device} and {gib(room_bytes)} is free "
        f"for it: {'; '.join(done)} (about {gib(fit.need_bytes)} at most)",
    )


def tiles_note(whole_bytes: int, room_bytes: int, asked: bool) -> str:
    """That the VAE decoded by tiles, and why."""
    why = (
        "as was asked"
        if asked
        else f"decoding it whole needs about {gib(whole_bytes)} and {gib(room_bytes)} is free"
    )
    return f"the VAE decoded by tiles ({tiles.LABEL}), {why}: the picture differs slightly from one decode"


def refusal(
    order: Order, device: str, room_bytes: int, search: Callable[[Order, int], Fit | None]
) -> UnavailableError:
    """Nothing fits: what the least way needs, what is free, and the largest smaller size that would fit.

    `search` is the cheapest way for an order in so much room.
    """
    least = _least(order, room_bytes, search)
    what = f"{order.width} x {order.height}" + (f" with {order.count} pictures" * (order.count > 1))
    sentence = (
        f"{what} needs about {gib(least)} of {device} at the least, with its parts moved in one by one, and "
        f"{gib(room_bytes)} is free"
    )
    for factor in SMALLER:
        width, height = (max(64, round(side * factor / 64) * 64) for side in (order.width, order.height))
        if max(width, height) == 64 or (width, height) == (order.width, order.height):
            continue
        if search(replace(order, width=width, height=height), room_bytes) is not None:
            needed = _least(replace(order, width=width, height=height), 0, search)
            return UnavailableError(f"{sentence}; {width} x {height} would need {gib(needed)}")
    return UnavailableError(f"{sentence}; a smaller model or a device with more memory would do")


def _least(order: Order, low: int, search: Callable[[Order, int], Fit | None]) -> int:
    """The least room in which an order fits, to a hundredth."""
    high = max(low, 2**28)
    while search(order, high) is None:
        low, high = high, high * 2
    while high - low > high / 100:
        middle = (low + high) // 2
        low, high = (middle, high) if search(order, middle) is None else (low, middle)
    return high


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 and not names[0].startswith("the text encoders") else "are"
