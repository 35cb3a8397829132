"""The form of what was tried: entries of candidates_tried.py, and how their figures are named."""

from __future__ import annotations

from dataclasses import dataclass

VERDICTS = ("kept", "level", "lost", "not built")
KERNELS, CALLS, WHOLE = "kernels alone", "UNet calls", "whole generations"


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured before and after: a case of a part, and two candidates of it. Several candidates
    after are added up."""

    label: str
    part: str
    case: str
    before: str
    after: tuple[str, ...]
    runs: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that was tried."""

    what: str
    verdict: str
    decided: str
    why: str
    figures: tuple[Figure, ...]


def replays(before: str, *after: str, runs: tuple[int, int] | None = None) -> tuple[Figure, Figure]:
    """Both UNets' captured calls."""
    return (
        Figure("SDXL", "unet replay", "sdxl 128x128", before, after, runs),
        Figure("SD 1.5", "unet replay", "sd15 64x64", before, after, runs),
    )


def calls(after: str) -> tuple[Figure, Figure]:
    """Both UNets' calls with all that surrounds a replay."""
    return (
        Figure("SDXL", "unet call", "sdxl 128x128", "unpacked", (after,)),
        Figure("SD 1.5", "unet call", "sd15 64x64", "unpacked", (after,)),
    )


def many(before: str, after: str) -> tuple[Figure, Figure]:
    """Both UNets' calls, many of them waited for together."""
    return (
        Figure("SDXL", "unet calls", "sdxl 128x128", before, (after,)),
        Figure("SD 1.5", "unet calls", "sd15 64x64", before, (after,)),
    )


def cases(part: str, before: str, after: str | tuple[str, ...], *named: str) -> tuple[Figure, ...]:
    """The same two candidates at several cases."""
    several = (after,) if isinstance(after, str) else after
    return tuple(Figure(name, part, name, before, several) for name in named)


def tiles(words: str, after: str, *named: str) -> tuple[Figure, ...]:
    """Convolutions beside cuDNN's, in tiles that the label names."""
    return tuple(Figure(f"{words}, {one}", "convolution tiles", one, "cuDNN", (after,)) for one in named)
