"""Negative guidance minimum sigma: below a noise level the unconditional half is not computed.

Late in sampling the two halves differ little, so one of them can be left out: less work, not faster work, and
the picture says so. Source: AUTOMATIC1111/stable-diffusion-webui pull request 9177. There the rule compares a
timestep, not a sigma, for DDIM and its family, so that it practically never fires; here it is sigma for all.
"""

from __future__ import annotations

from collections.abc import Callable

Skip = Callable[[int, float], bool]
"""(call, sigma) -> whether denoiser call number `call`, from 0, leaves its unconditional half out."""


def below(threshold: float, all_steps: bool = False) -> Skip | None:
    """The rule for a sigma `threshold` (0: none): every other call below it, or each with `all_steps`.

    Calls are counted, not steps: odd ones skip, which for a second-order sampler are always the correctors.
    """
    if threshold <= 0:
        return None

    def skip(call: int, sigma: float) -> bool:
        return (all_steps or call % 2 == 1) and sigma < threshold

    return skip
