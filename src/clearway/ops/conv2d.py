"""Convolution with its bias, the weight laid out once as the CPU's library wants it, not at each call.

PyTorch's convolutions on the CPU hand oneDNN a plain weight, which oneDNN reorders into blocks every time.
`packed` keeps the reordered weight beside the plain one, for the last few shapes of x: it costs the weight's
memory once more for each. What was packed is dropped where the weight is another, has another version, or
differs in a sample of its values, since adapters are merged in place without a new version.
Used by every convolution of the UNets and of the VAE.
Sources: torch.nn.functional.conv2d; oneDNN's memory format propagation, as torch.compile's freezing uses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from clearway.ops._cases import normal
from clearway.ops._layout import image_format, refuse_alike, refuse_dtype
from clearway.ops.contract import Case, Given, op

KEPT = 3
"""How many shapes of x a weight stays packed for: a guidance pair, a single row, one other size."""
SAMPLED = 64
_packed: Any = WeakTensorKeyDictionary()  # Tensor -> Packed, by identity


def inputs(
    batch: int, channels: int, out: int, height: int, width: int, kernel: int = 3, stride: int = 1
) -> Case:
    """Arguments of a convolution that keeps the size at stride 1, of about unit gain."""
    weight = normal(out, channels, kernel, kernel, seed=1, deviation=(kernel * kernel * channels) ** -0.5)
    padding = kernel // 2
    return (
        normal(batch, channels, height, width),
        weight,
        normal(out, seed=2, deviation=0.5),
        [stride, stride],
        [padding, padding],
        [1, 1],
        1,
    )


def cases() -> Iterator[tuple[str, Given]]:
    """Convolutions of UNets and VAEs, and small ones."""
    yield "tiny", inputs(1, 2, 3, 3, 4)
    yield "one pixel", inputs(1, 8, 8, 1, 1)
    yield "ragged", inputs(2, 5, 7, 7, 9)
    yield "down", inputs(1, 6, 6, 8, 10, stride=2)
    yield "1x1", inputs(2, 12, 20, 5, 6, kernel=1)
    x, weight, *rest = inputs(1, 16, 8, 6, 10)
    yield "channels-last", (x.contiguous(memory_format=torch.channels_last), weight, *rest)
    yield "every second column", (x[..., ::2], weight, *rest)
    yield "no bias", (x, weight, None, *rest[1:])
    yield "every second bias", (x, weight, normal(16, seed=4)[::2], *rest[1:])
    yield "dilated, in groups", (x, normal(8, 4, 3, 3, seed=3), None, [1, 1], [2, 2], [2, 2], 4)
    yield "SD1.5 64x64", lambda: inputs(2, 320, 320, 64, 64)
    yield "SD1.5 8x8", lambda: inputs(2, 1280, 1280, 8, 8)
    yield "VAE 512, last", lambda: inputs(1, 128, 128, 512, 512)


def refusals() -> Iterator[tuple[str, str, Case]]:
    """What `packed` does not take."""
    x, weight, *rest = inputs(1, 4, 4, 3, 3)
    yield "packed", "float64", (x.double(), weight.double(), None, *rest[1:])
    yield "packed", "agree", (x, weight.bfloat16(), None, *rest[1:])
    yield "packed", "(N, C, H, W)", (x[0], weight, *rest)
    yield "packed", "one channel", inputs(1, 1, 4, 3, 3)


@op(
    cases=cases,
    refusals=refusals,
    bytes_moved=lambda x, weight, *_: (
        x.nbytes * (weight.shape[0] + weight.shape[1]) // weight.shape[1] + weight.nbytes
    ),
    flops=lambda x, weight, bias, stride, *_: 2 * x.numel() * weight[:, 0].numel() // math.prod(stride),
    compile="inline",
)
def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """torch.nn.functional.conv2d, channels-last where x is, else contiguous.

    x (N, C, H, W), weight (O, C / groups, kh, kw), bias (O,) -> (N, O, H', W').
    """
    y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return y.contiguous(memory_format=image_format(x))


def _enabled() -> bool:
    return bool(torch._C._get_mkldnn_enabled())


def _absent() -> str | None:
    if not torch._C._has_mkldnn:
        return "this PyTorch was built without oneDNN"
    needed = (("_convolution_pointwise", torch.ops.mkldnn), ("mkldnn_reorder_conv2d_weight", torch._C._nn))
    missing = [name for name, home in needed if not hasattr(home, name)]
    return f"this PyTorch has no {missing[0]}" if missing else None


def _refuse(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> str | None:
    reason = refuse_dtype("x", x, (torch.float32, torch.bfloat16)) or refuse_alike(
        x, weight=weight, bias=bias
    )
    if reason is None and (x.dim() != 4 or weight.dim() != 4):
        return f"x is {tuple(x.shape)}; it takes (N, C, H, W)"
    if reason is None and x.shape[1] == 1:
        return "x has one channel, where oneDNN reads past it at a stride of (1, 2) (torch 2.13)"
    if reason is None and not _enabled():
        return "oneDNN is switched off (torch.backends.mkldnn)"
    return reason


@dataclass(slots=True)
class Packed:
    """One weight, packed by shape of x, and what it was when that was done."""

    version: int | None
    address: int
    sample: Tensor
    shapes: dict[Any, Tensor] = field(default_factory=dict)


def _sample(weight: Tensor) -> Tensor:
    """Some values from all over the weight, in whatever order they lie in memory.

    The step divides no axis, so that they are of many channels and taps, not of the first one alone.
    """
    count = min(SAMPLED, weight.numel())
    step = max(weight.numel() // count, 1)
    while math.gcd(step, weight.numel()) > 1:
        step -= 1
    return weight.as_strided((count,), (step,), weight.storage_offset())


def _dense(weight: Tensor) -> bool:
    return weight.is_contiguous() or weight.is_contiguous(memory_format=torch.channels_last)


@conv2d.implementation("packed", device="cpu", absent=_absent, refuse=_refuse)
def _packed_run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    blocks = _blocks(x, weight, stride, padding, dilation, groups)
    bias = None if bias is None else bias.contiguous()  # its strides are not read
    out: Tensor = torch.ops.mkldnn._convolution_pointwise(
        x, blocks, bias, padding, stride, dilation, groups, "none", [], ""
    )
    return out.contiguous(memory_format=image_format(x))


def forget(weight: Tensor) -> None:
    """Drops what was packed of a weight."""
    _packed.pop(weight, None)


def _blocks(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    """The weight as oneDNN wants it for this x."""
    version = None if weight.is_inference() else weight._version
    kept = _packed.get(weight)
    if (
        kept is None
        or kept.version != version
        or kept.address != weight.data_ptr()
        or not torch.equal(kept.sample, _sample(weight))
    ):
        kept = Packed(version, weight.data_ptr(), _sample(weight).clone())
        if _dense(weight):
            _packed[weight] = kept
    key = (x.shape, x.is_contiguous(), *stride, *padding, *dilation, groups)
    blocks = kept.shapes.get(key)
    if blocks is None:
        while len(kept.shapes) >= KEPT:
            del kept.shapes[next(iter(kept.shapes))]
        blocks = torch._C._nn.mkldnn_reorder_conv2d_weight(  # type: ignore[call-arg]
            weight.detach().contiguous().to_mkldnn(), padding, stride, dilation, groups, x.shape
        )
        kept.shapes[key] = blocks
    packed: Tensor = blocks
    return packed
