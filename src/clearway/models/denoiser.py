"""Any network -> denoise(x, sigma, embedding) -> denoised.

The network's own convention (noise or v, timesteps) is converted once, here, to x0 at a noise level `sigma`
of x = x0 + sigma * noise. `sigma` is a Python number, so nothing in the loop reads the device.
Source: Karras et al. 2022, section 5 (c_in, c_skip, c_out for a variance-preserving network); the fractional
timestep by interpolating log sigma is what k-diffusion's discrete wrappers do without quantisation.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clearway.types import Embedding


class UNetDenoiser:
    """A UNet with discrete timesteps as x0 estimator.

    `run` is the UNet or an executor around it; `sigmas` the model's ascending training sigmas;
    `prediction` is "epsilon" or "v_prediction"; `dtype` what the network computes in. Results have x's dtype.
    """

    def __init__(self, run: Callable[..., Any], sigmas: Tensor, prediction: str, dtype: torch.dtype) -> None:
        self._run = run
        self._sigmas: list[float] = sigmas.tolist()
        self._prediction = prediction
        self._dtype = dtype

    def timestep(self, sigma: float) -> float:
        """The network's (fractional) timestep for a noise level, clamped to the trained range."""
        low = min(max(bisect.bisect_right(self._sigmas, sigma) - 1, 0), len(self._sigmas) - 2)
        target, below, above = map(math.log, (sigma, *self._sigmas[low : low + 2]))  # not of all of them
        return low + min(max((target - below) / (above - below), 0.0), 1.0)

    def __call__(self, x: Tensor, sigma: float, embedding: Embedding) -> Tensor:
        """x (B, C, h, w) at `sigma` > 0 with an embedding of B rows -> denoised (B, C, h, w)."""
        c_in = 1 / math.sqrt(sigma * sigma + 1)
        # full(), not tensor(): a fill is asynchronous on a GPU, a copy from host memory is not
        timesteps = torch.full((x.shape[0],), self.timestep(sigma), dtype=torch.float32, device=x.device)
        conditions = {}
        if embedding.pooled is not None:
            conditions = {"text_embeds": embedding.pooled, "time_ids": embedding.size_ids}
        output: Tensor = self._run(
            (x * c_in).to(self._dtype),
            timesteps,
            encoder_hidden_states=embedding.context,
            added_cond_kwargs=conditions,
            return_dict=False,
        )[0].to(x.dtype)
        if self._prediction == "v_prediction":
            return x * (c_in * c_in) - output * (sigma * c_in)
        return x - output * sigma
