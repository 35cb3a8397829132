"""Steps that become others which do the same work in fewer passes: exact up to rounding.

Linear layers that read one value become one (queries, keys and values; the time embedding of every block).
A gated GELU becomes two linear layers, so that its halves need not be taken apart. Nearest upsampling by two
and the 3x3 convolution after it become one 2x2 convolution at the small size: each of the four output pixels
that a small pixel stands for sees only 2x2 small ones, so the taps that fall on one are added beforehand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from clearway.execution.recorded import Program, Step, Value, aten
from clearway.execution.rewrite import counted, used

JOINED = 2**20
"""Elements up to which weights are joined: above, the layers alone keep the processor as busy."""
_HALF = 2


def fused(program: Program, lasting: Set[Value] = frozenset()) -> Program:
    """The program with all of these; linear layers that read a value of `lasting` stay apart."""
    program = _upsampled(program)
    program = _joined(program, lasting)
    return used(_gated(program))


def constant(tensor: Tensor, sign: Any = None) -> Value:
    """A value that is always this tensor."""
    return Value(tensor.shape, tensor.dtype, tensor, sign=sign)


def signed(what: str, *parts: Value) -> Any:
    """What a constant that is made of others is told by."""
    signs = tuple(part.sign for part in parts)
    return None if None in signs else (what, *signs)


def weights_of(step: Step) -> tuple[Tensor, Tensor | None] | None:
    """(weight, bias) of a linear layer or convolution where both are constants."""
    weight, bias = step.args[1], step.args[2] if len(step.args) > 2 else step.kwargs.get("bias")
    if not weight.constant or (bias is not None and not bias.constant):
        return None
    return weight.tensor, None if bias is None else bias.tensor


def is_linear(step: Step) -> bool:
    """Whether it is a linear layer of constant weight."""
    return step.run is aten.linear.default and weights_of(step) is not None


def _joined(program: Program, lasting: Set[Value]) -> Program:
    """Linear layers of one input as one."""
    groups: dict[tuple[int, torch.dtype], list[Step]] = defaultdict(list)
    for step in program.steps:
        if is_linear(step) and step.args[0] not in lasting:
            groups[id(step.args[0]), step.args[1].dtype].append(step)
    first = {id(group[0]): group for group in groups.values() if len(group) > 1 and _size(group) <= JOINED}
    others = {id(step) for group in first.values() for step in group[1:]}
    steps: list[Step] = []
    for step in program.steps:
        if id(step) in first:
            steps += _one_of(first[id(step)])
        elif id(step) not in others:
            steps.append(step)
    return Program(program.inputs, steps, program.output, program.contiguous)


def _size(group: list[Step]) -> int:
    return sum(int(step.args[1].shape.numel()) for step in group)


def _one_of(group: list[Step]) -> list[Step]:
    found = [weights_of(step) for step in group]
    weights = [pair[0] for pair in found if pair is not None]
    biases = [pair[1] for pair in found if pair is not None]
    with torch.inference_mode(False), torch.no_grad():
        weight = constant(torch.cat(weights), signed("joined", *(step.args[1] for step in group)))
        bias = None
        if any(one is not None for one in biases):
            pairs = zip(weights, biases, strict=True)
            bias = constant(torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in pairs]))
    x, last = group[0].args[0], weight.shape[0]
    whole = Value(torch.Size((*x.shape[:-1], last)), x.dtype)
    sizes = [step.out.shape[-1] for step in group]
    outs: list[Value | None] = [step.out for step in group]
    return [
        Step(aten.linear.default, (x, weight, bias), {}, [whole]),
        Step(aten.split_with_sizes.default, (whole, sizes, -1), {}, outs, True),
    ]


def _gated(program: Program) -> Program:
    """linear, chunk, a * gelu(b): as two linear layers, neither output of which is taken apart."""
    reads, makers = counted(program), _makers(program)
    readers: dict[Value, list[Step]] = defaultdict(list)
    for step in program.steps:
        for value in step.reads():
            readers[value].append(step)
    gone: set[int] = set()
    put: dict[int, list[Step]] = {}
    for chunk in program.steps:
        linear = makers.get(chunk.args[0]) if chunk.args and isinstance(chunk.args[0], Value) else None
        if not _halves(chunk) or linear is None or not is_linear(linear) or reads[linear.out] != 1:
            continue
        plain, gate = chunk.outs
        if plain is None or gate is None or reads[plain] != 1 or reads[gate] != 1:
            continue
        gelu, product = readers[gate][0], readers[plain][0]
        if gelu.run is not aten.gelu.default or product.run is not aten.mul.Tensor:
            continue
        if reads[gelu.out] != 1 or set(product.args) != {plain, gelu.out}:
            continue
        pair = weights_of(linear)
        assert pair is not None
        weight, bias = pair
        x, half = linear.args[0], weight.shape[0] // _HALF
        upper = constant(weight[half:], signed("upper half", linear.args[1]))
        lower = constant(weight[:half], signed("lower half", linear.args[1]))
        put[id(product)] = [
            Step(aten.linear.default, (x, upper, _part(bias, half, None)), {}, [gate]),
            gelu,
            Step(aten.linear.default, (x, lower, _part(bias, 0, half)), {}, [plain]),
            product,
        ]
        gone |= {id(linear), id(chunk), id(gelu)}
    steps = [new for step in program.steps if id(step) not in gone for new in put.get(id(step), [step])]
    return Program(program.inputs, steps, program.output, program.contiguous)


def _halves(step: Step) -> bool:
    return (
        step.run is aten.chunk.default
        and len(step.outs) == _HALF
        and len(step.args) > 2
        and step.args[2] in (-1, len(step.args[0].shape) - 1)
        and step.args[0].shape[-1] % _HALF == 0
    )


def _part(bias: Tensor | None, start: int, stop: int | None) -> Value | None:
    return None if bias is None else constant(bias[start:stop])


def _makers(program: Program) -> dict[Value, Step]:
    return {out: step for step in program.steps for out in step.outs if out is not None}


def _upsampled(program: Program) -> Program:
    reads, makers = counted(program), _makers(program)
    steps: list[Step] = []
    for step in program.steps:
        up = makers.get(step.args[0]) if step.run is aten.conv2d.default else None
        if up is None or not _doubles(up) or reads[up.out] != 1 or not _plain_3x3(step):
            steps.append(step)
            continue
        pair = weights_of(step)
        assert pair is not None
        x: Any = up.args[0]
        weight, bias = phases(*pair)
        batch, _, height, width = x.shape
        small = Value(torch.Size((batch, weight.shape[0], height + 1, width + 1)), x.dtype)
        held = None if bias is None else constant(bias)
        four = constant(weight, signed("phases", step.args[1]))
        steps.append(Step(aten.conv2d.default, (x, four, held, [1, 1], [1, 1]), {}, [small]))
        steps.append(Step(interleaved, (small,), {}, step.outs))
    return Program(program.inputs, steps, program.output, program.contiguous)


def _doubles(step: Step) -> bool:
    names = (aten.upsample_nearest2d.vec, aten.upsample_nearest2d.default)
    if step.run not in names or not isinstance(step.args[0], Value):
        return False
    before, after = step.args[0].shape, step.out.shape
    return (after[2], after[3]) == (2 * before[2], 2 * before[3])


def _plain_3x3(step: Step) -> bool:
    given = [*step.args[3:], [1, 1], [0, 0], [1, 1], 1][: max(len(step.args) - 3, 0)]
    settings = [[1, 1], [0, 0], [1, 1], 1]
    settings[: len(given)] = given
    stride, padding, dilation, groups = settings
    pair = weights_of(step)
    return (
        not step.kwargs
        and pair is not None
        and tuple(pair[0].shape[2:]) == (3, 3)
        and [stride, padding, dilation, groups] == [[1, 1], [1, 1], [1, 1], 1]
    )


def phases(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A 3x3 kernel (K, C, 3, 3) after doubling as a 2x2 one (4 K, C, 2, 2) before; sums in float32 or more.

    Output pixel 2 y + a sees rows y - 1 + a and y + a: at a = 0 tap 0 falls on the first and 1 and 2 on the
    second, at a = 1 taps 0 and 1 on the first and 2 on the second; columns alike.
    """
    with torch.inference_mode(False), torch.no_grad():
        wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
        rows = [
            torch.stack((wide[:, :, 0], wide[:, :, 1] + wide[:, :, 2]), 2),
            torch.stack((wide[:, :, 0] + wide[:, :, 1], wide[:, :, 2]), 2),
        ]
        made = [
            half
            for row in rows
            for half in (
                torch.stack((row[..., 0], row[..., 1] + row[..., 2]), -1),
                torch.stack((row[..., 0] + row[..., 1], row[..., 2]), -1),
            )
        ]
        whole = torch.cat(made).to(weight.dtype)
        return whole, None if bias is None else bias.detach().repeat(4)


def interleaved(small: Tensor) -> Tensor:
    """Four phases (B, 4 K, h + 1, w + 1) -> (B, K, 2 h, 2 w), channels last."""
    batch, stacked, height, width = small.shape
    channels, height, width = stacked // 4, height - 1, width - 1
    out = torch.empty(
        (batch, channels, 2 * height, 2 * width),
        dtype=small.dtype,
        device=small.device,
        memory_format=torch.channels_last,
    )
    for phase in range(4):
        down, right = divmod(phase, 2)
        part = small[:, phase * channels : (phase + 1) * channels, down:, right:]
        out[:, :, down::2, right::2] = part[:, :, :height, :width]
    return out
