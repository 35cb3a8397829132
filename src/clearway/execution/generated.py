"""A program as one Python function: no modules, no hooks, a local variable for each value, freed when read.

Where an operand of an elementwise step is not read again, the step writes into it. What depends on arguments
that stay the same for many calls is a function of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from clearway.execution.fusions import interleaved
from clearway.execution.packed import gathered
from clearway.execution.recorded import Program, Step, Value, aliases, aten

IN_PLACE: dict[Any, Any] = {
    aten.silu.default: aten.silu_.default,
    aten.gelu.default: aten.gelu_.default,
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.div.Tensor: aten.div_.Tensor,
}
_EITHER_WAY = {aten.add.Tensor, aten.mul.Tensor}
_OWN = (interleaved, gathered)
_SPREAD = {aten.expand.default, aten.expand_as.default, aten.as_strided.default, aten.broadcast_to.default}
"""Steps whose output may have one place in memory for several elements."""


@dataclass(slots=True, eq=False)
class Function:
    """What a program became: `once(*lasting inputs)` -> tuple, `run(*inputs, *that tuple)` -> output.

    `lasting` are the numbers of the inputs that `once` takes; `source` is the Python text of both.
    """

    once: Callable[..., tuple[Any, ...]]
    run: Callable[..., Any]
    lasting: tuple[int, ...]
    source: str


def lasting_values(program: Program, numbers: Iterable[int]) -> set[Value]:
    """The values that depend on the inputs of these numbers and on constants alone."""
    found = {program.inputs[number] for number in numbers}
    for step in program.steps:
        reads = [value for value in step.reads() if not value.constant]
        if reads and all(value in found for value in reads):
            found.update(out for out in step.outs if out is not None)
    return found


def _shares(step: Step) -> bool:
    """Whether its output may share memory with what it reads."""
    return step.run not in _OWN and aliases(step.run)


def generated(program: Program, numbers: Iterable[int] = ()) -> Function:
    """The program as a function; `numbers` are those of the inputs that stay the same for many calls."""
    numbers = tuple(numbers)
    lasting = lasting_values(program, numbers)
    first = [step for step in program.steps if any(out in lasting for out in step.outs)]
    rest = [step for step in program.steps if not any(out in lasting for out in step.outs)]
    wanted = {value for step in rest for value in step.reads()} | set(program.outputs())
    handed = [out for step in first for out in step.outs if out is not None and out in wanted]
    rest = _in_place(program, rest, set(handed))
    writer = _Writer(program.inputs)
    once = writer.function("once", [program.inputs[n] for n in numbers], first, tuple(handed), set(handed))
    protected = set(program.inputs) | set(handed)
    output = _owned(program, rest, protected, writer)
    stay = set(program.outputs())
    run = writer.function("run", [*program.inputs, *handed], rest, output, stay)
    source = f"{once}\n\n{run}"
    space: dict[str, Any] = dict(writer.space)
    exec(compile(source, "<clearway: a recorded call>", "exec"), space)
    return Function(space["once"], space["run"], numbers, source)


def _in_place(program: Program, steps: list[Step], held: Set[Value]) -> list[Step]:
    """Elementwise steps that write into an operand which nobody reads afterwards."""
    owner: dict[Value, Value] = {}
    spread: set[Value] = set()

    def root(value: Value) -> Value:
        while value in owner:
            value = owner[value]
        return value

    for step in steps:
        if not _shares(step):
            continue
        for value in step.reads():
            for out in step.outs:
                if out is not None and root(out) is not root(value):
                    owner[root(out)] = root(value)
        if step.run in _SPREAD:
            spread |= {root(out) for out in step.outs if out is not None}
    fixed = {root(value) for value in (*program.inputs, *held, *program.outputs())}
    fixed |= {root(value) for step in steps for value in step.reads() if value.constant}
    fixed |= {root(value) for value in spread}
    last: dict[Value, int] = {}
    for number, step in enumerate(steps):
        for value in step.reads():
            last[root(value)] = number
    made: list[Step] = []
    for number, step in enumerate(steps):
        into = IN_PLACE.get(step.run)
        operands = [(step.args[0], 0)] if into is not None else []
        if step.run in _EITHER_WAY and not step.kwargs:
            operands.append((step.args[1], 1))
        for value, place in operands:
            if not isinstance(value, Value) or value.constant:
                continue
            other = step.args[1 - place] if len(step.args) > 1 else None
            whole = value.shape == step.out.shape and value.dtype == step.out.dtype
            mine = root(value) not in fixed and last[root(value)] == number
            apart = not isinstance(other, Value) or root(other) is not root(value)
            if whole and mine and apart:
                rest = (other, *step.args[2:]) if len(step.args) > 1 else ()
                assert into is not None
                step = Step(into, (value, *rest), step.kwargs, step.outs)
                # what it gives is what it was given: as long as that is read, so is the memory
                before, now = root(value), root(step.out)
                owner[now] = before
                last[before] = max(last.get(before, number), last.get(now, number))
                if now in fixed:
                    fixed.add(before)
                break
        made.append(step)
    return made


def _owned(program: Program, steps: list[Step], protected: Set[Value], writer: _Writer) -> Any:
    """The output, with copies of what shares memory with an argument, a constant or a lasting value, and the
    layout it had."""
    shared = set(protected)
    for step in steps:
        if _shares(step) and any(value in shared or value.constant for value in step.reads()):
            shared.update(out for out in step.outs if out is not None)
    plain = set(program.contiguous)

    def change(value: Value) -> Any:
        text = writer.name(value)
        if value in shared or value.constant:
            text += ".clone()"
        return _Text(text + ".contiguous()" if value in plain else text)

    return pytree.tree_map_only(Value, change, program.output)


class _Text(str):
    """An expression, written as it is."""


class _Writer:
    """Python text of steps; what the text names beside values is in `space`."""

    def __init__(self, inputs: list[Value]) -> None:
        self.space: dict[str, Any] = {}
        self._names: dict[Value, str] = {value: f"i{number}" for number, value in enumerate(inputs)}
        self._held: dict[int, str] = {}
        self._kept: list[Any] = []

    def name(self, value: Value) -> str:
        if value not in self._names:
            if value.constant:
                self._names[value] = self._bound("c", value.tensor)
            else:
                self._names[value] = f"v{len(self._names)}"
        return self._names[value]

    def function(
        self, name: str, given: list[Value], steps: list[Step], output: Any, stay: Set[Value]
    ) -> str:
        """The text of one function, which frees each value but `stay` after its last use."""
        last: dict[Value, int] = {}
        for number, step in enumerate(steps):
            last.update(dict.fromkeys((value for value in step.reads() if not value.constant), number))
        lines = []
        for number, step in enumerate(steps):
            targets = ", ".join("_" if out is None else self.name(out) for out in step.outs)
            call = f"{self._bound('f', _entry(step.run))}({self._arguments(step)})"
            lines.append(f"{targets}{',' if step.many else ''} = {call}")
            gone = {
                value
                for value in (*step.reads(), *(out for out in step.outs if out is not None))
                if not value.constant and value not in stay and last.get(value, number) == number
            }
            if gone:
                lines.append(f"del {', '.join(sorted(self.name(value) for value in gone))}")
        lines.append(f"return {self._text(output)}")
        head = f"def {name}({', '.join(self.name(value) for value in given)}):"
        return "\n    ".join([head, *lines])

    def _arguments(self, step: Step) -> str:
        texts = [self._text(one) for one in step.args]
        return ", ".join(texts + [f"{key}={self._text(one)}" for key, one in step.kwargs.items()])

    def _text(self, given: Any) -> str:
        if isinstance(given, _Text):
            return str(given)
        if isinstance(given, Value):
            return self.name(given)
        if type(given) is list:
            return f"[{', '.join(map(self._text, given))}]"
        if type(given) is tuple:
            return f"({''.join(self._text(one) + ', ' for one in given)})"
        if type(given) in (int, str, bool, type(None)):
            return repr(given)
        leaves, spec = pytree.tree_flatten(given)
        if spec.is_leaf():
            return self._bound("k", given)
        # a dict, or a model's output: taken apart here and put together by the code
        inner = ", ".join(map(self._text, leaves))
        return f"{self._bound('f', pytree.tree_unflatten)}([{inner}], {self._bound('k', spec)})"

    def _bound(self, kind: str, thing: Any) -> str:
        if id(thing) not in self._held:
            self._held[id(thing)] = f"{kind}{len(self._held)}"
            self.space[self._held[id(thing)]] = thing
            self._kept.append(thing)
        return self._held[id(thing)]


def _entry(run: Any) -> Any:
    """What is called for an operation: the overload's own entry, without the Python around it."""
    return run._op if isinstance(run, torch._ops.OpOverload) else run
