"""How a weight changes an embedding."""

from __future__ import annotations

from torch import Tensor


def original(z: Tensor, weights: Tensor) -> Tensor:
    """z (B, L, D) with each token's vector times its weight (B, L), rescaled to the mean z had before.

    The mean is over all of z, which is one window of one text. Source: the WebUI's default ("Original")
    emphasis; like there, a mean that vanishes after weighting is not guarded against anything but zero.
    """
    before = z.mean()
    weighted = z * weights.unsqueeze(-1).to(z.dtype)
    after = weighted.mean()
    scale = (before / after).where(after != 0, before.new_ones(()))
    return weighted * scale
