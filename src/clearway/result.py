"""Result: the pictures of one generation with everything that says how they came about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clearway.types import Choices

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from clearway.request import Request


@dataclass(frozen=True)
class Result:
    """What `generate` returns.

    `images` is uint8 (B, H, W, 3); `seeds` and `infotexts` have one entry an image. `timings_ms` maps a stage
    to milliseconds, on CUDA of the device's time. `routes` maps "part/implementation" to how often it ran;
    `choices` is how the networks were to run. `request` is the request with nothing left open; `notes` are
    sentences worth showing (a precision retry, an ignored setting, a part that ran otherwise than chosen).
    """

    images: np.ndarray
    seeds: tuple[int, ...]
    infotexts: tuple[str, ...]
    request: Request
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    routes: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    choices: Choices = field(default_factory=Choices)

    def pillow(self) -> list[Image]:
        """The pictures as Pillow images, without metadata; `clearway.save` writes files that carry it."""
        from PIL import Image

        return [Image.fromarray(image) for image in self.images]


def joined(results: Sequence[Result], told: bool = False) -> Result:
    """One result of a generation's groups; timings and routes are the last one's, which are totals.

    With `told` somebody has the groups' results, whose pictures are then none of these: either may be
    changed.
    """
    import numpy as np

    last = results[-1]
    images = [result.images for result in results]
    return Result(
        images=np.concatenate(images) if told or len(images) > 1 else images[0],
        seeds=tuple(seed for result in results for seed in result.seeds),
        infotexts=tuple(text for result in results for text in result.infotexts),
        request=last.request,
        timings_ms=last.timings_ms,
        routes=last.routes,
        notes=tuple(dict.fromkeys(note for result in results for note in result.notes)),
        choices=last.choices,
    )
