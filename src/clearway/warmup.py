"""warm_up(model, sizes): what a first picture would wait for, made before it is asked for.

Graphs, self-tests of kernels, compiled kernels, libraries' handles and caches are made by real generations of
a few steps, through `generate` itself: so what is made is what a request finds, under the same keys. What is
kept on disk (verdicts, compiled kernels) serves later processes; graphs live in this one.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from clearway.device import describe
from clearway.errors import RequestError
from clearway.execution import pools
from clearway.image import encode
from clearway.models import Model, chosen, load
from clearway.ops import ahead, verdicts
from clearway.pipeline import NAMES, check, generate
from clearway.request import Request
from clearway.types import OnEvent

STEPS = 3
"""Denoising steps of one generation: a sampler of several steps has reached its own by the third."""
WORD = "a"
TOKENS = 75
"""Tokens of a prompt in one window."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """One size: `seconds` by stage ("text", "sampling", "vae", "encode", …), and what ran, as in Result."""

    width: int
    height: int
    batch_sizes: tuple[int, ...]
    seconds: Mapping[str, float]
    routes: Mapping[str, int]
    notes: tuple[str, ...]

    @property
    def total_s(self) -> float:
        """Host seconds of all stages."""
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What `warm_up` did, size by size, on which device; `notes` are sentences worth showing."""

    model: str
    device: str
    sizes: tuple[Warmed, ...]
    total_s: float
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "model": self.model,
            "device": self.device,
            "sizes": [
                {
                    "width": one.width,
                    "height": one.height,
                    "batch_sizes": list(one.batch_sizes),
                    "seconds": {name: round(value, 4) for name, value in one.seconds.items()},
                    "total_s": round(one.total_s, 4),
                    "routes": dict(one.routes),
                    "notes": list(one.notes),
                }
                for one in self.sizes
            ],
            "total_s": round(self.total_s, 4),
            "notes": list(self.notes),
        }


def warm_up(
    model: Model | str = "embedded",
    sizes: Iterable[tuple[int, int]] | None = None,
    *,
    request: Request | None = None,
    windows: int = 1,
    on_event: OnEvent | None = None,
) -> WarmUp:
    """Makes ready what pictures of these `sizes` (width, height in pixels) need; what it cost and what ran.

    A server calls it once a model at start, before it takes requests; `clearway warmup` is this function.
    `request` is like those to come: sampler, guidance, count and batch size decide what is made; where it is
    silent the model's defaults hold (None for `sizes`: their size). Guidance runs as it asks, and without
    where NGMS would skip it. `windows`: prompts of up to that many times 75 tokens, beside a short negative
    prompt and one as long. `on_event` is `generate`'s. Raises RequestError for sizes that are none, before
    anything runs, and what `generate` raises.
    """
    begun = time.perf_counter()
    if windows < 1:
        raise RequestError(f"windows {windows} is out of range; prompts have at least 1")
    model = load(model) if isinstance(model, str) else model
    asked = check(request or Request())
    wanted = [
        replace(asked, width=width, height=height)
        for width, height in dict.fromkeys(sizes or [(asked.width, asked.height)])  # type: ignore[list-item]
    ]
    given_up, waited = _given_up(model), _waited()
    made = tuple(_size(model, _batch(one, model), windows, on_event) for one in wanted)
    notes = [note for one in made for note in one.notes]
    notes += _told(waited)
    for part, count in (_given_up(model) - given_up).items():
        notes.append(
            f"{count} graphs of {NAMES[part]} were given up for others and will be captured anew: "
            "fewer sizes stay ready"
        )
    return WarmUp(
        model.name, describe(model.device), made, time.perf_counter() - begun, tuple(dict.fromkeys(notes))
    )


def _waited() -> tuple[float, int, float]:
    """Of this process so far: seconds that self-tests made it wait, kernels built, and their seconds."""
    built = ahead.times()
    return verdicts.times()["waited_s"], int(built["variants"]), built["seconds"]


def _told(before: tuple[float, int, float]) -> list[str]:
    """What of the time since `before` went to self-tests and to building kernels; nothing where none did."""
    waited_s, kernels, seconds = (now - then for now, then in zip(_waited(), before, strict=True))
    told = [f"{waited_s:.1f} s of it were waiting for self-tests of kernels"] if waited_s >= 0.05 else []
    return told + ([f"{seconds:.1f} s of it were building {kernels} kernels"] if kernels else [])


def _batch(request: Request, model: Model) -> Request:
    """The request for the fewest pictures that run in all of its group sizes, the last smaller one too."""
    whole = replace(request, count=max(request.count, 1 if request.exact_batch else request.batch_size or 1))
    size = chosen.filled(whole, model).resolved(model.defaults).batch_size or 1
    return replace(whole, count=min(whole.count, size + whole.count % size), batch_size=size)


def _size(model: Model, request: Request, windows: int, on_event: OnEvent | None) -> Warmed:
    seconds, routes, notes = dict[str, float](), Counter[str](), list[str]()
    for variant in _variants(request, model, windows):
        result = generate(variant, model, on_event)
        for name, value in result.timings_ms.items():
            seconds[name] = seconds.get(name, 0.0) + value / 1000
        routes.update(result.routes)
        notes += result.notes
    begun = time.perf_counter()
    encode(result.images[0], "PNG", result.infotexts[0])
    seconds["encode"] = time.perf_counter() - begun
    size = request.batch_size or 1
    batch_sizes = tuple(dict.fromkeys((size, request.count % size or size)))
    height, width = result.images.shape[1:3]
    return Warmed(width, height, batch_sizes, seconds, dict(routes), tuple(dict.fromkeys(notes)))


def _variants(request: Request, model: Model, windows: int) -> Iterator[Request]:
    """The generations that between them run the networks in every way that such requests would."""
    few = replace(request, prompt=WORD, negative_prompt=WORD, seed=0, ngms=0.0, steps=STEPS)
    guided = few.resolved(model.defaults).cfg_scale != 1.0
    yield few
    if guided and request.ngms > 0:
        yield replace(few, cfg_scale=1.0)  # the rows that NGMS leaves
    for count in range(2, windows + 1):
        long = _prompt(model, count)
        yield replace(few, prompt=long)
        if guided:
            yield replace(few, prompt=long, negative_prompt=long)


def _prompt(model: Model, windows: int) -> str:
    """A prompt that just needs this many windows."""
    each = max(len(model.tokenizers[0].encode(WORD)), 1)
    return " ".join([WORD] * (math.floor((windows - 1) * TOKENS / each) + 1))


def _given_up(model: Model) -> Counter[str]:
    """How many graphs of each part have gone."""
    texts = enumerate(model.text_encoders, 1)
    parts = {"unet": model.unet, "vae": model.vae}
    parts |= {f"text_encoder_{number}" if number > 1 else "text_encoder": part for number, part in texts}
    return Counter({part: sum(pool.evicted for pool in pools(module)) for part, module in parts.items()})
