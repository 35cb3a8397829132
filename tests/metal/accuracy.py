"""What every kernel's test asserts: the error budget of the ops, and what a sound dispatch's report says."""

from __future__ import annotations

import torch
from torch import Tensor

from metal.emulator import Library

MODES = {
    "in order": {},
    "shuffled 1": {"seed": 1},
    "shuffled 2": {"seed": 2},
    "checked": {"checked": True},
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GROUP_BYTES = 32768


def assert_accurate(out: Tensor, exact: Tensor, eager: Tensor, k: float = 3.0) -> None:
    """max|out - exact| <= k max|eager - exact| + an ulp of the largest |exact|, where those are finite.

    `exact` is float64, `eager` PyTorch's own in the type of `out`. NaN and infinities must be where they are
    in `eager`. The budget is that of the op contract.
    """
    assert out.shape == exact.shape
    odd = ~eager.isfinite()
    torch.testing.assert_close(out[odd], eager[odd], equal_nan=True)
    assert bool(out[~odd].isfinite().all())
    if bool(odd.all()):
        return
    truth = exact[~odd]
    ulp = torch.finfo(out.dtype).eps * truth.abs().max().item()
    budget = k * (eager[~odd].double() - truth).abs().max().item() + ulp
    assert (out[~odd].double() - truth).abs().max().item() <= budget


def assert_sound(library: Library, stored: dict[int, Tensor]) -> None:
    """One dispatch, converged, within threadgroup memory; checked: `stored`, by argument, is all it wrote."""
    (report,) = library.reports
    assert report.faults == ()
    assert report.divergent == 0
    assert report.threadgroup_bytes <= GROUP_BYTES
    for index, traffic in enumerate(report.traffic):
        size = stored[index].numel() * stored[index].element_size() if index in stored else 0
        assert (traffic.stored, traffic.distinct_stored) == (size, size), f"argument {index}"


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """An output that shows what was not written."""
    return torch.full(shape, float("nan"), dtype=dtype)


def poisoned_like(x: Tensor) -> Tensor:
    """As `x`, its layout too."""
    return torch.empty_like(x).fill_(float("nan"))


def offset(x: Tensor, by: int) -> Tensor:
    """`x` as a view that begins `by` elements into its storage."""
    store = torch.zeros(x.numel() + by, dtype=x.dtype)
    view = store[by:].view(x.shape)
    view.copy_(x)
    return view
