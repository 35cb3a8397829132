"""Launches the kernels of the .metal files beside this one: argument order, threads and group sizes.

Each function is named after its kernel, takes a library (torch.mps.compile_shader of the file's text, or what
stands in for it) and outputs that the caller allocated, and makes one dispatch. Only metadata of tensors is
read, so nothing waits for the device. What a kernel cannot take raises ValueError; the ops refuse it before.
Sources: the headers of the .metal files; torch.mps.compile_shader's rules (torch/csrc/mps/Module.cpp):
tensors are bound at their storage offset with no check of type or stride; ints go as int64, floats as
float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

TYPES = {torch.float16: "half", torch.bfloat16: "bfloat", torch.float32: "float"}
HEAD_SIZES = (40, 64, 80, 96, 128, 160)
PAD_AXES = 5


class Kernels:
    """`library` with its kernel objects kept: torch's own looks the name up at every access."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._library, name)
        setattr(self, name, kernel)
        return kernel


def attention(lib: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float) -> None:
    """softmax(scale * q k^T) v. q, out (B, N, Lq, E); k, v (B, N, Lk, E), E in HEAD_SIZES; any strides."""
    batch, heads, queries, size = q.shape
    keys = k.shape[2]
    if size not in HEAD_SIZES or v.shape[3] != size:
        raise ValueError(
            f"attention: heads of {size} and {v.shape[3]}; the Metal kernel takes equal ones of {HEAD_SIZES}"
        )
    if keys == 0:
        raise ValueError("attention: there are no keys")
    if out.numel() == 0:
        return
    strides = [_strides(tensor) for tensor in (q, k, v, out)]
    _offsets_fit("attention", *((32 * s[2] + size * s[3]) for s in strides))
    vectors = all(s[3] == 1 for s in strides[1:3]) and _fours(*_offsets(k, v))
    vectors = vectors and _fours(*strides[1][:3], *strides[2][:3])
    getattr(lib, f"attention_{_type('attention', q, k, v, out)}_{size}")(
        *(q, k, v, out),
        [queries, keys, *(stride for tensor in strides for stride in tensor), int(vectors)],
        float(scale),
        threads=[_up(queries, 32) * 4, heads, batch],
        group_size=[128, 1, 1],
    )


def group_norm_silu(
    lib: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, out: Tensor
) -> None:
    """silu(group_norm(x)). x, out (B, C, ...): all axes after C at one common stride; weight, bias (C,)."""
    batch, channels = x.shape[0], x.shape[1]
    if channels % groups:
        raise ValueError(f"group_norm_silu: {channels} channels do not make {groups} groups")
    if out.numel() == 0:
        return
    per_group = channels // groups
    size, x_strides = _planes("group_norm_silu", x)
    _, out_strides = _planes("group_norm_silu", out)
    channels_inner = size > 1 and x_strides[1] == 1 and x_strides[2] != 1
    for strides in (x_strides, out_strides):
        _offsets_fit("group_norm_silu", per_group * strides[1] + size * strides[2])
    inner, at, over = (per_group, 1, 2) if channels_inner else (size, 2, 1)
    both = (x_strides, out_strides)
    fours = all(s[at] == 1 or inner == 1 for s in both) and _fours(
        inner,
        *(number for s in both for number in (s[0], s[over])),
        *_offsets(x, out, weight, bias),
    )
    parameters, has = _parameters("group_norm_silu", x, weight, bias)
    names = f"{_type('group_norm_silu', x, out)}_{_type('group_norm_silu', parameters[0])}"
    getattr(lib, f"group_norm_silu_{names}_{4 if fours else 1}")(
        *(x, *parameters, out),
        [groups, per_group, size, *x_strides, *out_strides, int(channels_inner), has],
        float(eps),
        threads=[batch * groups * 256],
        group_size=[256],
    )


def geglu(lib: Any, x: Tensor, out: Tensor) -> None:
    """x[..., :D] * gelu(x[..., D:]). x (..., 2 D), out (..., D): rows at one common stride each."""
    if out.numel() == 0:
        return
    width = out.shape[-1]
    (rows, x_row), (_, out_row) = _rows("geglu", x), _rows("geglu", out)
    fours = _fours(width, x_row, out_row, *_offsets(x, out))
    across = width // 4 if fours else width
    getattr(lib, f"geglu_{_type('geglu', x, out)}_{4 if fours else 1}")(
        *(x, out, [width, x_row, out_row]),
        threads=[across, rows],
        group_size=[min(256, _up(across, 32)), 1],
    )


def layer_norm(
    lib: Any,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out: Tensor,
    residual: Tensor | None = None,
    summed: Tensor | None = None,
) -> None:
    """layer_norm(x + residual) over the last axis; `summed` gets the sum. All (..., D), weight, bias (D,)."""
    if out.numel() == 0:
        return
    width = x.shape[-1]
    others = (x if residual is None else residual, out, out if summed is None else summed)
    rows = _rows("layer_norm", x)[0]
    strides = [_rows("layer_norm", tensor)[1] for tensor in (x, *others)]
    parameters, has = _parameters("layer_norm", x, weight, bias)
    fours = _fours(width, *strides, *_offsets(x, *others, weight, bias))
    names = f"{_type('layer_norm', x, *others)}_{_type('layer_norm', parameters[0])}"
    getattr(lib, f"layer_norm_{names}_{4 if fours else 1}")(
        *(x, others[0], *parameters, *others[1:]),
        [width, *strides, has + 4 * (residual is not None) + 8 * (summed is not None)],
        float(eps),
        threads=[rows * 32],
        group_size=[256],
    )


def softmax(lib: Any, x: Tensor, out: Tensor) -> None:
    """softmax(x) over the last axis. x, out (..., D): rows at one common stride each."""
    if out.numel() == 0:
        return
    width = x.shape[-1]
    (rows, x_row), (_, out_row) = _rows("softmax", x), _rows("softmax", out)
    fours = _fours(width, x_row, out_row, *_offsets(x, out))
    group = min(256, _up(width // 4 if fours else width, 32))
    getattr(lib, f"softmax_{_type('softmax', x, out)}_{4 if fours else 1}")(
        *(x, out, [width, x_row, out_row]),
        threads=[rows * group],
        group_size=[group],
    )


def constant_pad(lib: Any, x: Tensor, pad: Sequence[int], value: float, out: Tensor) -> None:
    """torch.nn.functional.pad(x, pad, value=value): `pad` from the last axis on, (before, after) each."""
    missing = PAD_AXES - x.dim()
    if missing < 0:
        raise ValueError(f"constant_pad: {x.dim()} axes; the Metal kernel takes up to {PAD_AXES}")
    if out.numel() == 0:
        return
    before = [0] * PAD_AXES
    for axis, amount in enumerate(pad[::2]):
        before[PAD_AXES - 1 - axis] = int(amount)
    ones, zeros = [1] * missing, [0] * missing
    sizes = [*ones, *out.shape]
    getattr(lib, f"constant_pad_{_type('constant_pad', x, out)}")(
        *(x, out),
        [
            *(*sizes, *ones, *x.shape),
            *(*zeros, *_strides(x), *zeros, *_strides(out)),
            *before,
        ],
        float(value),
        threads=[sizes[4], sizes[3], sizes[0] * sizes[1] * sizes[2]],
        group_size=[min(256, _up(sizes[4], 32)), 1, 1],
    )


def linear_row(lib: Any, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """x weight^T + bias. x (..., K) of few rows, weight (N, K), bias (N,), out (..., N)."""
    if out.numel() == 0:
        return
    inputs, outputs = x.shape[-1], weight.shape[0]
    used = (x, weight, weight if bias is None else bias)
    (rows, x_row), (_, out_row) = _rows("linear_row", x), _rows("linear_row", out)
    weight_row = _rows("linear_row", weight)[1]
    if bias is not None:
        _rows("linear_row", bias)
    fours = _fours(inputs, x_row, weight_row, *_offsets(x, weight))
    getattr(lib, f"linear_row_{_type('linear_row', *used, out)}_{4 if fours else 1}")(
        *(*used, out, [inputs, x_row, weight_row, out_row, int(bias is not None)]),
        threads=[outputs * 32, rows],
        group_size=[256, 1],
    )


def _type(kernel: str, *tensors: Tensor) -> str:
    """Metal's name of the one type of `tensors`."""
    found = {tensor.dtype for tensor in tensors}
    if len(found) != 1 or not found <= set(TYPES):
        names = ", ".join(sorted(str(dtype) for dtype in found))
        raise ValueError(
            f"{kernel}: inputs are {names}; the Metal kernel takes one of {', '.join(TYPES.values())}"
        )
    return TYPES[found.pop()]


def _parameters(
    kernel: str, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[tuple[Tensor, Tensor], int]:
    """What to bind as weight and bias (something of the right type where absent), and 1 weight + 2 bias."""
    given = [tensor for tensor in (weight, bias) if tensor is not None]
    for tensor in given:
        _rows(kernel, tensor)
    stand_in = given[0] if given else x
    if _type(kernel, *given, stand_in) not in (_type(kernel, x), "float"):
        raise ValueError(
            f"{kernel}: weight is {stand_in.dtype}, x {x.dtype}; it takes the type of x or float32"
        )
    bound = (stand_in if weight is None else weight, stand_in if bias is None else bias)
    return bound, (weight is not None) + 2 * (bias is not None)


def _strides(tensor: Tensor) -> list[int]:
    """Strides in elements; 0 for axes of size 1, whose stride torch leaves open."""
    return [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


def _collapsed(sizes: Iterable[int], strides: Iterable[int]) -> tuple[int, int] | None:
    """Length and stride of axes taken as one; None where they have no common stride."""
    length, inner = 1, 0
    for size, stride in reversed(list(zip(sizes, strides, strict=True))):
        if size == 1:
            continue
        if length == 1:
            inner = stride
        elif stride != inner * length:
            return None
        length *= size
    return length, inner


def _rows(kernel: str, tensor: Tensor) -> tuple[int, int]:
    """Number and stride of the rows along the last axis."""
    strides = _strides(tensor)
    found = _collapsed(tensor.shape[:-1], strides[:-1])
    if found is None or strides[-1] > 1 or (strides[-1] == 0 and tensor.shape[-1] > 1):
        raise ValueError(
            f"{kernel}: strides {tensor.stride()} of {tuple(tensor.shape)}; "
            "it takes contiguous rows at one stride"
        )
    return found


def _planes(kernel: str, tensor: Tensor) -> tuple[int, list[int]]:
    """Elements after the channel axis, and the strides of batch, channel and those."""
    strides = _strides(tensor)
    found = _collapsed(tensor.shape[2:], strides[2:])
    if found is None:
        raise ValueError(
            f"{kernel}: strides {tensor.stride()} of {tuple(tensor.shape)}; it takes planes at one stride"
        )
    return found[0], [strides[0], strides[1], found[1]]


def _offsets(*tensors: Tensor | None) -> list[int]:
    """Where each given tensor begins in its storage, in elements."""
    return [int(tensor.storage_offset()) for tensor in tensors if tensor is not None]


def _fours(*numbers: int) -> bool:
    return all(number % 4 == 0 for number in numbers)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _offsets_fit(kernel: str, *offsets: int) -> None:
    if max(offsets) >= 2**32:
        raise ValueError(f"{kernel}: offsets within a tile or group reach 2**32 elements")
