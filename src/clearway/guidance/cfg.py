"""Classifier-free guidance: denoised = uncond + cfg_scale * (cond - uncond). Source: Ho and Salimans 2022."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from clearway.guidance.ngms import Skip
from clearway.types import Conditioning, Denoiser, Embedding


@dataclass(slots=True)
class Guided:
    """A Denoise: (x (B, C, h, w), sigma) -> denoised, with both conditionings and the scale bound.

    It counts denoiser calls itself (`calls`), since conditionings are timed by them. With `rows` "joined"
    both halves run as one batch of 2B rows where their lengths agree, else, and with "separate", one after
    the other. A call that `skip` names runs B rows
    and returns cond alone (`skipped` counts them); so does every call at cfg_scale 1, where uncond cancels.
    """

    denoiser: Denoiser
    positive: Conditioning
    negative: Conditioning
    cfg_scale: float
    skip: Skip | None = None
    rows: str = "joined"
    calls: int = 0
    skipped: int = 0
    _rows: dict[tuple[int, ...], tuple[tuple[Embedding, ...], Embedding]] = field(default_factory=dict)

    def __call__(self, x: Tensor, sigma: float) -> Tensor:
        call = self.calls
        self.calls += 1
        cond = self.positive.at(call)
        if self.cfg_scale == 1.0:
            return self.denoiser(x, sigma, self._batch(x.shape[0], cond))
        if self.skip and self.skip(call, sigma):
            self.skipped += 1
            return self.denoiser(x, sigma, self._batch(x.shape[0], cond))
        uncond = self.negative.at(call)
        if self.rows == "joined" and cond.context.shape[1] == uncond.context.shape[1]:
            both = self.denoiser(torch.cat([x, x]), sigma, self._batch(x.shape[0], cond, uncond))
            with_cond, without = both.chunk(2)
        else:
            with_cond = self.denoiser(x, sigma, self._batch(x.shape[0], cond))
            without = self.denoiser(x, sigma, self._batch(x.shape[0], uncond))
        return without + (with_cond - without) * self.cfg_scale

    def _batch(self, count: int, *embeddings: Embedding) -> Embedding:
        """Each embedding repeated `count` times, one after the other; made once, kept for the next call."""
        key = (count, *(id(embedding) for embedding in embeddings))
        if key not in self._rows:
            self._rows[key] = (
                embeddings,
                Embedding(
                    torch.cat([e.context.expand(count, -1, -1) for e in embeddings]),
                    _rows([e.pooled for e in embeddings], count),
                    _rows([e.size_ids for e in embeddings], count),
                ),
            )
        return self._rows[key][1]


def _rows(parts: list[Tensor | None], count: int) -> Tensor | None:
    present = [part.expand(count, -1) for part in parts if part is not None]
    return torch.cat(present) if present else None
