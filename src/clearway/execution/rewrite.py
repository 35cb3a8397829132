"""What a recorded call does for nothing: steps that change no value, are there twice, or read weights alone.

Everything here keeps values as they are, to the bit; only memory layouts may differ, since every layer takes
every layout. A view becomes a reshape for that reason, and a copy that only changes the layout goes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils import _pytree as pytree

from clearway.execution.recorded import Program, Step, UnrecordableError, Value, aten, replaced

_SAME = {
    aten.contiguous.default,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.lift_fresh.default,
}
"""Steps whose first argument has the values of their output (dropouts are recorded in inference alone)."""
_CASTS = {
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten._to_copy.default,
    aten.type_as.default,
    aten.expand.default,
    aten.expand_as.default,
}
"""The same where neither dtype nor shape becomes another."""
_VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.view_as.default,
    aten.reshape_as.default,
}
_BY_ONE = {aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar}
_BY_LAYOUT = {
    aten.as_strided.default,
    aten.view.dtype,
    aten.view_as_complex.default,
    aten.view_as_real.default,
}
"""Steps that mean memory, not values."""
FOLDED_BYTES = 2**24
"""The largest constant that is made once and kept."""


def simplified(program: Program) -> Program:
    """The program without steps that do nothing, are there twice, are not used or depend on weights alone."""
    same: dict[Value, Value] = {}
    seen: dict[Any, Step] = {}
    steps: list[Step] = []

    def current(value: Value) -> Value:
        while value in same:
            value = same[value]
        return value

    for given in program.steps:
        if given.run in _BY_LAYOUT:
            raise UnrecordableError(f"{given.run} depends on how memory is laid out")
        step = _reshaped(
            Step(
                given.run,
                replaced(given.args, current),
                replaced(given.kwargs, current),
                given.outs,
                given.many,
            )
        )
        first = step.args[0] if step.args else None
        if isinstance(first, Value) and _does_nothing(step, first):
            same[step.out] = first
            continue
        if _is_constant(step):
            _fold(step)
            continue
        key = _key(step)
        twin = seen.get(key)
        if twin is not None:
            pairs = zip(step.outs, twin.outs, strict=True)
            same.update({mine: other for mine, other in pairs if mine is not None and other is not None})
            continue
        seen[key] = step
        steps.append(step)
    output = pytree.tree_map_only(Value, current, program.output)
    contiguous = [current(value) for value in program.contiguous]
    return used(Program(program.inputs, steps, output, contiguous))


def used(program: Program) -> Program:
    """The program without steps that nobody reads."""
    wanted = set(program.outputs())
    kept: list[Step] = []
    for step in reversed(program.steps):
        if any(out in wanted for out in step.outs):
            kept.append(step)
            wanted.update(step.reads())
    return Program(program.inputs, kept[::-1], program.output, program.contiguous)


def counted(program: Program) -> Counter[Value]:
    """How often each value is read, by steps and as output."""
    reads = Counter(program.outputs())
    for step in program.steps:
        reads.update(step.reads())
    return reads


def _reshaped(step: Step) -> Step:
    """A view as a reshape to the shape it had, of what was there before another reshape."""
    if step.run not in _VIEWS:
        return step
    return Step(aten.reshape.default, (step.args[0], list(step.out.shape)), {}, step.outs)


def _does_nothing(step: Step, first: Value) -> bool:
    if step.many or step.outs[0] is None:
        return False
    alike = first.dtype == step.out.dtype and first.shape == step.out.shape
    if step.run in _SAME:
        return alike
    if step.run in _CASTS or step.run is aten.reshape.default:
        return alike
    return step.run in _BY_ONE and alike and _is_one(step.args[1])


def _is_one(value: Any) -> bool:
    return isinstance(value, int | float) and value == 1


def _is_constant(step: Step) -> bool:
    """Whether it may be computed once; it then lives as long as the program."""
    if not all(value.constant for value in step.reads()):
        return False
    sizes = [out.shape.numel() * out.dtype.itemsize for out in step.outs if out is not None]
    return sum(sizes) <= FOLDED_BYTES


def _fold(step: Step) -> None:
    def tensor(value: Value) -> Any:
        return value.tensor

    with torch.inference_mode(False), torch.no_grad():
        made = step.run(*replaced(step.args, tensor), **replaced(step.kwargs, tensor))
    for out, one in zip(step.outs, made if step.many else [made], strict=True):
        if out is not None:
            out.tensor = one


def _key(step: Step) -> Any:
    """Equal for steps that make equal values."""
    return step.run, _hashable(step.args), _hashable(step.kwargs)


def _hashable(given: Any) -> Any:
    if isinstance(given, list | tuple):
        return tuple(map(_hashable, given))
    if isinstance(given, dict):
        return tuple(sorted((key, _hashable(one)) for key, one in given.items()))
    return id(given) if isinstance(given, Value) else (type(given).__name__, given)
