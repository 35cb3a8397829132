"""How far a picture or a tensor is from its reference."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from clearway.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

WINDOW, SIGMA = 11, 1.5
C1, C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2


def compare_pictures(a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    """`max_error`, `mean_error` (levels of 0..255), `psnr_db`, `ssim`, `identical` of two sets of pictures.

    Both are uint8 (B, H, W, 3). PSNR and SSIM are the worst picture's; PSNR is None where all are identical,
    SSIM where a side is below 11 pixels. Raises RequestError where the shapes differ.
    """
    _check_pictures(a, b)
    errors = np.abs(a.astype(np.int16) - b.astype(np.int16))
    squares = np.square(errors, dtype=np.float64).reshape(len(errors), -1).mean(axis=1)
    worst = float(squares.max())
    return {
        "max_error": int(errors.max()),
        "mean_error": float(errors.mean()),
        "psnr_db": 10 * math.log10(255**2 / worst) if worst else None,
        "ssim": min(ssim(x, y) for x, y in zip(a, b, strict=True)) if min(a.shape[1:3]) >= WINDOW else None,
        "identical": worst == 0,
    }


def ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Structural similarity of two pictures uint8 (H, W, 3), sides from 11 pixels: 1 is identical.

    Z. Wang, A. C. Bovik, H. R. Sheikh, E. P. Simoncelli (2004): Gaussian window 11 x 11 of deviation 1.5, K1
    0.01, K2 0.03, windows inside the picture only. Theirs is of grey pictures; this is the mean over the
    three channels.
    """
    x, y = a.astype(np.float64), b.astype(np.float64)
    mean_x, mean_y = _blurred(x), _blurred(y)
    var_x, var_y = _blurred(x * x) - mean_x**2, _blurred(y * y) - mean_y**2
    shared = _blurred(x * y) - mean_x * mean_y
    top = (2 * mean_x * mean_y + C1) * (2 * shared + C2)
    return float((top / ((mean_x**2 + mean_y**2 + C1) * (var_x + var_y + C2))).mean())


def compare_tensors(a: Tensor, b: Tensor) -> dict[str, Any]:
    """How far `a` is from the reference `b` of the same shape: differences in float64.

    `max_abs`; `max_rel`, that over the reference's largest magnitude; `rel_l2` = |a - b| / |b|; `psnr_db`
    with the reference's range as peak (None where identical); `identical`; `not_finite`, how many numbers of
    either are inf or NaN, which makes the errors inf and the PSNR -inf. Raises RequestError where the shapes
    differ.
    """
    import torch

    _check_shapes(tuple(a.shape), tuple(b.shape))
    x, y = (t.detach().to("cpu", torch.float64) for t in (a, b))
    bad = int((~torch.isfinite(x) | ~torch.isfinite(y)).sum())
    if bad:
        far = math.inf
        return {
            "max_abs": far,
            "max_rel": far,
            "rel_l2": far,
            "psnr_db": -far,
            "identical": False,
            "not_finite": bad,
        }
    away = (x - y).abs()
    worst, mean_square = float(away.max()), float(away.square().mean())
    span = float(y.max() - y.min())
    return {
        "max_abs": worst,
        "max_rel": _over(worst, float(y.abs().max())),
        "rel_l2": _over(float(away.norm()), float(y.norm())),
        "psnr_db": None if worst == 0 else 10 * math.log10(span**2 / mean_square) if span else -math.inf,
        "identical": worst == 0,
        "not_finite": 0,
    }


def difference_map(a: np.ndarray, b: np.ndarray, gain: int = 16) -> np.ndarray:
    """|a - b| times `gain`, clipped: uint8 of the pictures' shape; maps of the same gain can be compared."""
    _check_pictures(a, b)
    away = np.abs(a.astype(np.int32) - b.astype(np.int32)) * gain
    clipped: np.ndarray = np.minimum(away, 255).astype(np.uint8)
    return clipped


def _blurred(x: np.ndarray) -> np.ndarray:
    """(H, W, 3) -> (H - 10, W - 10, 3): the Gaussian window's weighted mean, one axis at a time."""
    steps = np.arange(WINDOW) - WINDOW // 2
    weights = np.exp(-(steps**2) / (2 * SIGMA**2))
    weights /= weights.sum()
    for axis in (0, 1):
        count = x.shape[axis] - WINDOW + 1
        parts = ((x[at : at + count] if axis == 0 else x[:, at : at + count]) for at in range(WINDOW))
        x = sum(weight * part for weight, part in zip(weights, parts, strict=True))
    return x


def _over(value: float, scale: float) -> float:
    return value / scale if scale else math.inf if value else 0.0


def _check_pictures(a: np.ndarray, b: np.ndarray) -> None:
    if a.dtype != np.uint8 or b.dtype != np.uint8:
        raise ValueError(f"pictures are uint8, not {a.dtype} and {b.dtype}")
    _check_shapes(a.shape, b.shape)


def _check_shapes(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    if a != b or 0 in a:
        raise RequestError(f"shapes {a} and {b} cannot be compared: they must be equal and not empty")
