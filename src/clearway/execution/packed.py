"""Linear layers and convolutions with weights laid out once as oneDNN or MKL wants them.

PyTorch's own calls lay a weight out anew each time where it is not as the kernel wants it: at a few pixels
and many channels that takes longer than the arithmetic. What follows a layer (a residual addition, GELU,
SiLU) is done by the same kernel. Where few pixels meet many channels, a convolution is a matrix product of
gathered pixels, which an Intel Xeon does quicker than oneDNN's convolution, packed or not. oneDNN's sums all
9 C products in one accumulator, so its rounding error is larger than the product's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from clearway import device as machine
from clearway.device import Device
from clearway.execution.fusions import constant, weights_of
from clearway.execution.recorded import Program, Step, Value, aten
from clearway.execution.rewrite import counted

MAX_GATHERED = {torch.float32: 256, torch.bfloat16: 64, torch.float16: 64}
"""Output pixels up to which a 3x3 convolution of many channels is a product of gathered pixels."""
MIN_GATHERED_CHANNELS = 1024
SMALL = 2**19
"""Weights (elements) up to which oneDNN does what follows a float32 linear layer in the same pass; above,
MKL's product is faster by more than that saves."""
SPARE = 0.25
"""The part of all memory that packing leaves available."""

_NEEDED = (
    "_convolution_pointwise",
    "_linear_pointwise",
    "_reorder_convolution_weight",
    "_reorder_linear_weight",
    "_is_mkldnn_bf16_supported",
    "_is_mkldnn_fp16_supported",
)
_ACTIVATIONS = {aten.silu.default: "swish", aten.gelu.default: "gelu"}
_TOGETHER = {aten.add.Tensor: "add", aten.mul.Tensor: "mul"}


def _has_mkl() -> bool:
    return bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]


def able(dtype: torch.dtype) -> bool:
    """Whether packed layers of a dtype can be had on this machine, and PyTorch's switch for them is on."""
    if not torch.backends.mkldnn.is_available() or not torch._C._get_mkldnn_enabled():  # type: ignore[no-untyped-call]
        return False
    ops = torch.ops.mkldnn
    if not all(hasattr(ops, name) for name in _NEEDED):
        return False
    if dtype == torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(ops._is_mkldnn_fp16_supported())
    return dtype == torch.float32


@dataclass(slots=True)
class _After:
    """What a layer's kernel does with its output: an activation, or `other` added or multiplied."""

    activation: str = ""
    variant: str = ""
    binary: str = ""
    other: Value | None = None
    run: Callable[..., Any] | None = None


@dataclass(eq=False)
class Packs:
    """Packed weights, shared by all programs of a module as long as one of them uses them."""

    held: WeakValueDictionary[Any, Tensor] = field(default_factory=WeakValueDictionary)
    scratch: Tensor | None = None
    """Memory to gather weights in before they are packed, rather than memory of each one's own."""
    short: int = 0
    """How many weights were left as they are for want of memory, when programs were last made."""

    def get(self, key: Any, size_bytes: int, make: Callable[[], Tensor]) -> Tensor | None:
        """make(), or what it gave before for this key, whose second part is the weight's sign (None: like no
        other); None where memory is too short."""
        found = None if key[1] is None else self.held.get(key)
        if found is None:
            memory = machine.memory(Device("cpu"))
            if memory.available_bytes - size_bytes < SPARE * memory.total_bytes:
                self.short += 1
                return None
            with torch.inference_mode(False), torch.no_grad():
                found = make()
            if key[1] is not None:
                self.held[key] = found
        return found

    def room(self, weight: Tensor) -> Tensor:
        """Memory for as many elements as `weight` has, the same each time."""
        count = weight.numel()
        if self.scratch is None or self.scratch.dtype != weight.dtype or self.scratch.numel() < count:
            self.scratch = torch.empty(count, dtype=weight.dtype)
        return self.scratch[:count]


def lowered(program: Program, packs: Packs) -> Program:
    """The program with packed layers, and what follows one done by it."""
    packs.short = 0
    place, after = _plan(program)
    steps: list[Step] = []
    for step in program.steps:
        layer = place.get(id(step))
        if layer is None:
            if id(step) not in after:
                steps.append(step)
            continue
        then = after[id(layer)]
        out = step.out
        made = (
            _linear(layer, then, out, packs)
            if layer.run is aten.linear.default
            else _conv(layer, then, out, packs)
        )
        steps += made if made is not None else _unpacked(layer, then, out)
    packs.scratch = None
    return Program(program.inputs, steps, program.output, program.contiguous)


def _plan(program: Program) -> tuple[dict[int, Step], dict[int, _After]]:
    """(the layer that is computed at a step, what each layer does after): both by id of step."""
    reads = counted(program)
    order = {id(step): number for number, step in enumerate(program.steps)}
    layers: dict[Value, Step] = {}
    place: dict[int, Step] = {}
    after: dict[int, _After] = {}
    for step in program.steps:
        if _packable(step):
            layers[step.out] = step
            place[id(step)], after[id(step)] = step, _After()
            continue
        if step.many or step.outs[0] is None:
            continue
        if step.run in _ACTIVATIONS and step.args[0] in layers:
            layer = layers[step.args[0]]
            then = after[id(layer)]
            if reads[step.args[0]] == 1 and not then.activation and not then.binary:
                then.activation = _ACTIVATIONS[step.run]
                then.variant = step.kwargs.get("approximate", "none") if then.activation == "gelu" else ""
                then.run = step.run
                _move(layer, step, place, layers)
            continue
        if step.run not in _TOGETHER or step.kwargs or len(step.args) != 2:
            continue
        able_to = []
        for mine, other in (step.args, step.args[::-1]):
            if not isinstance(mine, Value) or not isinstance(other, Value) or mine is other:
                continue
            fits = mine.shape == other.shape == step.out.shape and mine.dtype == other.dtype == step.out.dtype
            layer_of = layers.get(mine)
            if fits and layer_of is not None and reads[mine] == 1:
                then = after[id(layer_of)]
                if (
                    not then.activation
                    and not then.binary
                    and not (step.run is aten.mul.Tensor and _is_conv(layer_of))
                ):
                    able_to.append((order[id(layer_of)], layer_of, other))
        if able_to:
            _, layer, other = max(able_to, key=lambda one: one[0])
            then = after[id(layer)]
            then.binary, then.other, then.run = _TOGETHER[step.run], other, step.run
            _move(layer, step, place, layers)
    return place, after


def _move(layer: Step, step: Step, place: dict[int, Step], layers: dict[Value, Step]) -> None:
    """The layer is computed at `step`, in whose place it comes."""
    for key in [key for key, one in place.items() if one is layer]:
        del place[key]
    place[id(step)] = layer
    layers.pop(next(value for value, one in layers.items() if one is layer))
    layers[step.out] = layer


def _is_conv(step: Step) -> bool:
    return step.run is aten.conv2d.default


def _packable(step: Step) -> bool:
    if step.run is not aten.linear.default and not _is_conv(step):
        return False
    pair = weights_of(step)
    if pair is None or not able(step.out.dtype) or pair[0].dtype != step.out.dtype:
        return False
    if step.args[0].dtype != step.out.dtype or (pair[1] is not None and pair[1].dtype != step.out.dtype):
        return False
    if step.out.shape.numel() == 0:
        return False
    return _is_conv(step) is False or (len(step.args[0].shape) == 4 and _conv_settings(step) is not None)


def _conv_settings(step: Step) -> tuple[list[int], list[int], list[int], int] | None:
    """(stride, padding, dilation, groups); None where padding is a word."""
    given = list(step.args[3:])
    settings: list[Any] = [[1, 1], [0, 0], [1, 1], 1]
    settings[: len(given)] = given
    for number, name in enumerate(("stride", "padding", "dilation", "groups")):
        settings[number] = step.kwargs.get(name, settings[number])
    stride, padding, dilation, groups = settings
    if isinstance(padding, str):
        return None
    stride, padding, dilation = (
        one * 2 if len(one) == 1 else list(one) for one in (stride, padding, dilation)
    )
    return stride, padding, dilation, groups


def _held(bias: Tensor | None) -> Value | None:
    return None if bias is None else constant(bias)


def _linear(layer: Step, then: _After, out: Value, packs: Packs) -> list[Step] | None:
    pair = weights_of(layer)
    assert pair is not None
    weight, bias = pair
    x = layer.args[0]
    rows = x.shape[:-1].numel()
    does_more = bool(then.activation or then.binary)
    if weight.dtype == torch.float32 and _has_mkl() and (not does_more or weight.numel() > SMALL):
        packed = _mkl(weight, layer.args[1].sign, rows, packs)
        if packed is None:
            return None
        made = Value(layer.out.shape, layer.out.dtype) if does_more else out
        run = torch.ops.mkl._mkl_linear.default
        step = Step(run, (x, constant(packed), _absent(weight), _held(bias), rows), {}, [made])
        return [step, *_separate(then, made, out)]
    size = weight.numel() * weight.dtype.itemsize

    def make() -> Tensor:
        made: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), rows)
        return made

    key = ("linear", layer.args[1].sign, rows)
    found = packs.get(key, size, make)
    if found is None:
        return None
    packed_value = constant(found)
    if then.binary:
        run = torch.ops.mkldnn._linear_pointwise.binary
        return [Step(run, (x, then.other, packed_value, _held(bias), then.binary), {}, [out])]
    run = torch.ops.mkldnn._linear_pointwise.default
    arguments: Any = (x, packed_value, _held(bias), then.activation or "none", [], then.variant)
    return [Step(run, arguments, {}, [out])]


def _mkl(weight: Tensor, sign: Any, rows: int, packs: Packs) -> Tensor | None:
    def make() -> Tensor:
        made: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight.detach().contiguous(), rows)
        return made

    return packs.get(("mkl", sign, rows), weight.numel() * 4, make)


def _absent(weight: Tensor) -> Value:
    """In place of the plain weight, which MKL's linear layer reads for other row counts alone: without memory
    of its own, and NaN, so that a mistake here could not go unseen."""
    with torch.inference_mode(False):
        return constant(torch.full((1,), torch.nan, dtype=weight.dtype).expand(weight.shape))


def _conv(layer: Step, then: _After, out: Value, packs: Packs) -> list[Step] | None:
    pair, settings = weights_of(layer), _conv_settings(layer)
    assert pair is not None and settings is not None
    weight, bias = pair
    stride, padding, dilation, groups = settings
    x = layer.args[0]
    if _gathers(layer, weight, settings):
        return _gathered(layer, then, out, packs)

    def make() -> Tensor:
        reorder = torch.ops.mkldnn._reorder_convolution_weight
        made: Tensor = reorder(weight.detach(), padding, stride, dilation, groups, list(x.shape))
        return made

    key = ("conv", layer.args[1].sign, *map(tuple, settings[:3]), groups, tuple(x.shape))
    found = packs.get(key, weight.numel() * weight.dtype.itemsize, make)
    if found is None:
        return None
    shared = (constant(found), _held(bias), padding, stride, dilation, groups)
    if then.binary:
        run = torch.ops.mkldnn._convolution_pointwise.binary
        more: Any = (then.binary, 1.0, None, [], None)
        return [Step(run, (x, then.other, *shared, *more), {}, [out])]
    run = torch.ops.mkldnn._convolution_pointwise.default
    more = (then.activation or "none", [], then.variant)
    return [Step(run, (x, *shared, *more), {}, [out])]


def _gathers(layer: Step, weight: Tensor, settings: tuple[list[int], list[int], list[int], int]) -> bool:
    batch, _, height, width = layer.out.shape
    if weight.dtype == torch.float32 and not _has_mkl():
        return False
    return (
        weight.shape[1] >= MIN_GATHERED_CHANNELS
        and tuple(weight.shape[2:]) == (3, 3)
        and settings == ([1, 1], [1, 1], [1, 1], 1)
        and batch * height * width <= MAX_GATHERED[weight.dtype]
    )


def _gathered(layer: Step, then: _After, out: Value, packs: Packs) -> list[Step] | None:
    pair = weights_of(layer)
    assert pair is not None
    weight, bias = pair
    x = layer.args[0]
    batch, channels, height, width = x.shape
    rows, kernels = batch * height * width, weight.shape[0]
    float32 = weight.dtype == torch.float32

    def make() -> Tensor:
        ops, flat = torch.ops, packs.room(weight).view(kernels, 9 * channels)
        flat.view(kernels, 3, 3, channels).copy_(weight.detach().permute(0, 2, 3, 1))
        reorder = ops.mkl._mkl_reorder_linear_weight if float32 else ops.mkldnn._reorder_linear_weight
        made: Tensor = reorder(flat, rows)
        return made

    found = packs.get(("gathered", layer.args[1].sign, rows), weight.numel() * weight.dtype.itemsize, make)
    if found is None:
        return None
    pixels = Value(torch.Size((rows, 9 * channels)), x.dtype)
    product = Value(torch.Size((rows, kernels)), x.dtype)
    rows_of = Value(torch.Size((batch, height, width, kernels)), x.dtype)
    made = Value(layer.out.shape, x.dtype) if then.activation or then.binary else out
    if float32:
        absent = _absent(torch.empty(0, dtype=weight.dtype).new_empty(1).expand(kernels, 9 * channels))
        run = torch.ops.mkl._mkl_linear.default
        multiply = Step(run, (pixels, constant(found), absent, _held(bias), rows), {}, [product])
    else:
        run = torch.ops.mkldnn._linear_pointwise.default
        multiply = Step(run, (pixels, constant(found), _held(bias), "none", [], ""), {}, [product])
    return [
        Step(gathered, (x,), {}, [pixels]),
        multiply,
        Step(aten.reshape.default, (product, [batch, height, width, kernels]), {}, [rows_of]),
        Step(aten.permute.default, (rows_of, [0, 3, 1, 2]), {}, [made]),
        *_separate(then, made, out),
    ]


def gathered(x: Tensor) -> Tensor:
    """The 3x3 pixels around each, zeros outside: (B, C, H, W) -> (B H W, 9 C), taps before channels."""
    batch, channels, height, width = x.shape
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
    image, row, column, _ = padded.stride()
    windows = padded.as_strided((batch, height, width, 3, 3, channels), (image, row, column, row, column, 1))
    return windows.reshape(batch * height * width, 9 * channels)


def _separate(then: _After, made: Value, out: Value) -> list[Step]:
    """What follows a layer as a step of its own."""
    if then.run is None:
        return []
    if then.binary:
        return [Step(then.run, (made, then.other), {}, [out])]
    given = {"approximate": then.variant} if then.activation == "gelu" else {}
    return [Step(then.run, (made,), given, [out])]


def _unpacked(layer: Step, then: _After, out: Value) -> list[Step]:
    """The layer as it was, for want of memory."""
    if then.run is None:
        return [Step(layer.run, layer.args, layer.kwargs, [out])]
    made = Value(layer.out.shape, layer.out.dtype)
    return [Step(layer.run, layer.args, layer.kwargs, [made]), *_separate(then, made, out)]
