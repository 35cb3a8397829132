"""Noise per image, equal to the last bit however images are grouped: seeded generators and Brownian paths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from clearway.errors import RequestError
from clearway.sampling.registry import Sampler, find_sampler
from clearway.types import Noise

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PHILOX = "philox"
_streams: dict[torch.device, Any] = {}
"""By CUDA device the stream on which Brownian paths are drawn, for all threads: streams are few."""


class ImageNoise:
    """N(0, 1) for B images, one generator each.

    The initial noise comes first, then every draw of an ancestral sampler. `shape` is one image's (C, h, w),
    `seeds` has one seed an image. Drawn in float32 on `drawn_on` (on MPS A1111 draws on the CPU; "philox": on
    the CPU as an NVIDIA GPU would), then moved to `device` and `dtype` (None: float32). Raises RequestError
    for seeds that are none.
    Source: A1111 v1.10.1's ImageRNG and its replacement of k-diffusion's randn_like.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        shape: Sequence[int],
        *,
        drawn_on: str | torch.device = "cpu",
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        import torch

        self._shape = tuple(shape)
        self._device = torch.device(device)
        self._dtype = torch.float32 if dtype is None else dtype
        self._in_flight: list[Tensor] = []
        self.seeds = _checked_seeds(seeds)
        self.drawn_on = drawn_on if drawn_on == PHILOX else torch.device(drawn_on)
        self._draws = [_source(seed, self.drawn_on) for seed in self.seeds]

    def initial(self) -> Tensor:
        """The starting noise (B, C, h, w), N(0, 1): the first draw, so call it before anything else draws."""
        return self._draw()

    def __call__(self, sigma: float, sigma_next: float) -> Tensor:
        """The next draw (B, C, h, w); the sigmas do not matter, draws are independent."""
        return self._draw()

    def _draw(self) -> Tensor:
        import torch

        rows = [draw(self._shape) for draw in self._draws]
        return _moved(torch.stack(rows), self._device, self._dtype, self._in_flight)


def _source(seed: int, drawn_on: str | torch.device) -> Callable[[tuple[int, ...]], Tensor]:
    """(shape) -> the next N(0, 1) of one image, float32."""
    import torch

    if drawn_on == PHILOX:
        from clearway.sampling import philox

        return philox.Generator(seed).normal
    generator = torch.Generator(drawn_on).manual_seed(seed)
    return lambda shape: torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)


def _filled_by_philox(seed: int, row: Tensor, scale: float) -> None:
    from clearway.sampling import philox

    row.copy_(philox.Generator(seed).normal(row.shape)).mul_(scale)


def brownian_noise(
    x: Tensor, sigmas: Tensor, seeds: Sequence[int], *, device: str | torch.device | None = None
) -> Noise:
    """Noise for SDE samplers: (sigma, sigma_next) -> N(0, 1) of x's shape, device and dtype.

    One Brownian path an image over [smallest sigma above 0, largest], seeded with the image's seed; the noise
    is the path's increment divided by sqrt(|sigma_next - sigma|), so overlapping steps get matching noise.
    Sigmas outside the range count as its ends. Below a resolution of 1e-6 the increment is 0. Drawn in
    float32 on `device` (None: x's; "philox" as in ImageNoise). On CUDA it is drawn beside what the device was
    asked for before, a call of the network: it is a hundred small kernels, and reads nothing of x. Raises
    RequestError where seeds do not match the rows of x.
    Source: k-diffusion's BatchedBrownianTree and BrownianTreeNoiseSampler, over torchsde's BrownianTree.
    """
    import torch

    from clearway.sampling.brownian import BrownianTree

    if len(_checked_seeds(seeds)) != len(x):
        raise RequestError(f"Brownian noise needs one seed an image, found {len(seeds)} for {len(x)} images")
    levels = [value for value in sigmas.tolist() if value > 0]
    if not levels:
        raise RequestError("Brownian noise needs a sigma above 0, found none")
    emulated = device == PHILOX
    where = torch.device("cpu" if emulated else x.device if device is None else device)
    if str(where) == "cuda":  # without an index it is whichever is the current one at a draw
        where = torch.device("cuda", torch.cuda.current_device())
    with _aside(where):  # its memory is that stream's
        tree = BrownianTree(
            min(levels),
            max(levels),
            seeds,
            x.shape[1:],
            device=where,
            fill=_filled_by_philox if emulated else None,
        )
    target, dtype = x.device, x.dtype  # not x itself, which would keep the first latents alive
    in_flight: list[Tensor] = []

    def noise(sigma: float, sigma_next: float) -> Tensor:
        before, after = sorted((sigma, sigma_next))
        length = math.sqrt(after - before) or 1.0  # without length the increment is 0
        with _aside(where) as handed:
            increments = tree.increment(before, after)
            drawn = increments / (length if sigma_next > sigma else -length)
            return handed(_moved(drawn, target, dtype, in_flight))

    return noise


@contextmanager
def _aside(device: torch.device) -> Iterator[Callable[[Tensor], Tensor]]:
    """Within it CUDA work is done on a stream of its own, which waits for nothing; what the function that it
    gives is called with is the current stream's from then on. Elsewhere nothing happens."""
    import torch

    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        yield lambda made: made
        return
    before = torch.cuda.current_stream(device)
    stream = _streams.get(device)
    if stream is None:
        # of high priority: its small kernels go first, and no capture takes a stream of that kind
        made = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        stream = _streams.setdefault(device, made)

    def handed(made: Tensor) -> Tensor:
        if made.is_cuda:  # on the CPU the copy was waited for
            current = before if made.device == device else torch.cuda.current_stream(made.device)
            current.wait_stream(stream)
            made.record_stream(current)  # its memory is not given away before that is done with it
        return made

    with torch.cuda.stream(stream):
        yield handed


def noise_for(sampler: str | Sampler, images: ImageNoise, x: Tensor, sigmas: Tensor) -> Noise:
    """What `sampler` draws from: Brownian paths with the same seeds and place of drawing, or `images`."""
    found = sampler if isinstance(sampler, Sampler) else find_sampler(sampler)
    if found.noise != "brownian":
        return images
    return brownian_noise(x, sigmas, images.seeds, device=images.drawn_on)


def _moved(noise: Tensor, device: torch.device, dtype: torch.dtype, in_flight: list[Tensor]) -> Tensor:
    """Drawn noise where it is needed; the host does not wait for the device, as it would in a plain copy."""
    noise = noise.to(dtype)
    if noise.device.type != "cpu" or device.type == "cpu":
        return noise.to(device)
    if device.type == "cuda":
        noise = noise.pin_memory()  # a copy from pageable memory waits
    else:  # MPS reads the source when the copy runs; freed before, it gives garbage (pytorch#189690)
        in_flight.append(noise)
    return noise.to(device, non_blocking=True)


def _checked_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise RequestError(
                f"seed {seed!r} cannot be used; it must be a whole number from 0 to {2**63 - 1}"
            )
    return tuple(seeds)
