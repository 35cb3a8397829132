"""AdaLN modulation: y = layer_norm(x) * (1 + scale) + shift, without weight and bias; scale, shift per image.

Used twice in every block of Flux, SD 3.5, PixArt and LTX, and before their last layer (D = 1152 to 3072);
scale and shift come out of one linear layer of the time embedding, as slices of a row.
Source: Peebles and Xie 2023 (arXiv 2212.09748), adaLN-Zero; diffusers.models.normalization.AdaLayerNormZero.
"""

# mypy: disable-error-code="no-untyped-def"
# Kernels are in Triton's language: their arguments are no Python types.
from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn import functional as F

from clearway.ops import _triton
from clearway.ops._cases import normal
from clearway.ops._layout import refuse_alike, refuse_dtype, refuse_rows, row_stride
from clearway.ops._triton import kernel, tl
from clearway.ops.contract import Case, Given, op


def inputs(batch: int, length: int, width: int, mean: float = 0.5) -> Case:
    """Arguments for x of (batch, length, width), scale and shift as slices of one row of six."""
    rows = normal(batch, 6 * width, seed=1, deviation=0.5)
    return normal(batch, length, width, mean=mean), rows[:, width : 2 * width], rows[:, :width], 1e-6


def cases() -> Iterator[tuple[str, Given]]:
    """Blocks of Flux, SD 3.5, PixArt and LTX, and small ones."""
    yield "tiny", inputs(1, 2, 8)
    yield "least", inputs(1, 1, 1)
    yield "ragged", inputs(3, 7, 77)
    yield "tiles across images", inputs(3, 11, 40)
    yield "mean 1000", inputs(1, 5, 320, mean=1000.0)
    x, *rest = inputs(1, 14, 64)
    yield "rows of a larger tensor", (x[:, ::2], *rest)
    x, *rest = inputs(2, 9, 48)
    yield "what follows the text", (x[:, 4:], *rest)
    yield "Flux 1024", lambda: inputs(1, 4096, 3072)
    yield "SD3.5 1024", lambda: inputs(2, 4096, 2432)
    yield "PixArt 1024", lambda: inputs(2, 4096, 1152)
    yield "LTX", lambda: inputs(1, 4992, 2048)


def refusals() -> Iterator[tuple[str, str, Case]]:
    """What the kernel does not take."""
    x, *rest = inputs(4, 6, 8)
    yield "triton", "contiguous rows", (normal(4, 8, 6).transpose(1, 2), *rest)
    yield "triton", "scale is (4, 9)", (x, normal(4, 9), *rest[1:])
    yield "triton", "x is (6, 8)", (x[0], *rest)
    yield "triton", "float64", (x.double(), *rest)
    yield "triton", "up to 16384", inputs(1, 1, 16385)


@op(
    cases=cases,
    refusals=refusals,
    bytes_moved=lambda x, *_: 2 * x.nbytes,
    flops=lambda x, *_: 10 * x.numel(),
    # One node: H200, fp16, 0.020 ms for Flux at 1024 px against 0.035 from torch.compile, 0.032 against 0.061
    # for SD3.5, with what precedes and follows it compiled apart (2026-11-29).
    compile="opaque",
)
def adaln_modulate(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """layer_norm(x) * (1 + scale) + shift, contiguous. x (B, L, D), scale and shift (B, D)."""
    normalised = F.layer_norm(x, (x.shape[-1],), None, None, eps)
    return (normalised * (1 + scale[:, None]) + shift[:, None]).contiguous()


def _refuse(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> str | None:
    if x.dim() != 3:
        return f"x is {tuple(x.shape)}; it takes (B, L, D)"
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return f"x has strides {x.stride()}; it takes contiguous rows"
    if x.shape[-1] > _triton.WIDEST:
        return f"rows have {x.shape[-1]} elements; it takes up to {_triton.WIDEST}"
    for name, other in (("scale", scale), ("shift", shift)):
        if other.shape != (x.shape[0], x.shape[2]):
            return f"{name} is {tuple(other.shape)}, x {tuple(x.shape)}; it takes (B, D)"
        reason = refuse_rows(name, other)
        if reason is not None:
            return reason
    reason = refuse_dtype("x", x, _triton.DTYPES)
    return reason or refuse_alike(x, scale=scale, shift=shift)


@kernel
def _forward(
    x, scale, shift, out, rows, length, width, x_image, x_row, scale_row, shift_row, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    image = row // length
    c = tl.arange(0, BLOCK)
    live = (row < rows)[:, None] & (c < width)[None, :]
    at = image * x_image + (row % length) * x_row
    value = tl.load(x + at[:, None] + c[None, :], mask=live, other=0.0).to(tl.float32)
    mean = tl.sum(value, 1) / width
    difference = tl.where(live, value - mean[:, None], 0.0)
    variance = tl.sum(difference * difference, 1) / width
    y = difference * tl.rsqrt(variance + eps)[:, None]
    by = tl.load(scale + (image * scale_row)[:, None] + c[None, :], mask=live, other=0.0)
    plus = tl.load(shift + (image * shift_row)[:, None] + c[None, :], mask=live, other=0.0)
    y = y * (1.0 + by.to(tl.float32)) + plus.to(tl.float32)
    tl.store(out + (row * width)[:, None] + c[None, :], y.to(out.dtype.element_ty), mask=live)


@adaln_modulate.implementation(
    "triton", device="cuda", absent=_triton.absent, refuse=_refuse, sources=("_triton.py",)
)
def _triton_run(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    out = x.new_empty(x.shape)
    batch, length, width = x.shape
    tile, block = _triton.row_tile(width)
    _forward.launch(
        (-(-batch * length // tile),),
        *(x, scale, shift, out, batch * length, length, width),
        *(x.stride(0), x.stride(1), row_stride(scale), row_stride(shift), eps),
        ROWS=tile,
        BLOCK=block,
        num_warps=_triton.warps(2 * tile * block),
    )
    return out
