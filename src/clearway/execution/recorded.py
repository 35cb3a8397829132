"""record(call): what a call of a module did, as a list of ATen operations on numbered values.

The call is run once, and every operation that reaches PyTorch's dispatcher is written down as it runs. What
is neither an argument nor a weight nor made in the call is refused, and so is a number read from a tensor,
since the next call would need another. In inference mode operations arrive whole (linear, conv2d, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from clearway.execution.kept import Frame, within

aten = torch.ops.aten

_MARK = "_clearway_value"
_READS = ("tolist", "numpy", "__array__", "data_ptr", "untyped_storage", "__dlpack__")
"""Methods of a tensor that give its content away without an operation."""
_FRESH = (aten.lift_fresh.default, aten.lift.default)
"""What wraps a tensor made of Python numbers."""
_FUNCTIONAL = {
    getattr(aten, f"{name}_"): getattr(aten, name)
    for name in ("add", "sub", "mul", "div", "silu", "gelu", "relu", "sigmoid", "tanh", "exp", "clamp", "neg")
}


class UnrecordableError(Exception):
    """A call that no list of operations stands for; the message says why."""


@dataclass(slots=True, eq=False)
class Value:
    """A tensor of a recorded call. `tensor` is there for weights and constants, `number` for arguments."""

    shape: torch.Size
    dtype: torch.dtype
    tensor: Tensor | None = None
    number: int | None = None
    live: bool = False
    """Of a constant: it is the module's own tensor, so a change in place is seen."""
    sign: Any = None
    """Of a constant: what it is made of, equal in all programs of a module; None: like no other."""

    @property
    def constant(self) -> bool:
        """Whether it is the same at every call."""
        return self.tensor is not None


@dataclass(slots=True, eq=False)
class Step:
    """One operation: `run(*args, **kwargs)` gives `outs`, a list of them where `many`; None is no tensor."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[Value | None]
    many: bool = False

    def reads(self) -> Iterator[Value]:
        """The values among the arguments, each as often as it is there."""
        yield from values_in((self.args, self.kwargs))

    @property
    def out(self) -> Value:
        """What it makes, where that is one value."""
        made = self.outs[0]
        assert made is not None and not self.many
        return made


@dataclass(slots=True, eq=False)
class Program:
    """A recorded call: `inputs` in the order of its tensors; `output` has values in place of tensors."""

    inputs: list[Value]
    steps: list[Step]
    output: Any
    contiguous: list[Value] = field(default_factory=list)
    """Outputs that were contiguous."""

    def outputs(self) -> list[Value]:
        """The values in its output, whatever structure that is."""
        return [leaf for leaf in pytree.tree_leaves(self.output) if isinstance(leaf, Value)]


def aliases(run: Any) -> bool:
    """Whether the output of an operation may share memory with what it reads; of other functions, yes."""
    schema = getattr(run, "_schema", None)
    return schema is None or any(one.alias_info is not None for one in schema.returns)


def values_in(given: Any) -> Iterator[Value]:
    """All values in nested tuples, lists and dicts."""
    if isinstance(given, Value):
        yield given
    elif isinstance(given, list | tuple):
        for one in given:
            yield from values_in(one)
    elif isinstance(given, dict):
        for one in given.values():
            yield from values_in(one)


def replaced(given: Any, change: Callable[[Value], Any]) -> Any:
    """The same structure with `change` applied to its values."""
    if isinstance(given, Value):
        return change(given)
    if isinstance(given, list | tuple):
        return type(given)(replaced(one, change) for one in given)
    if isinstance(given, dict):
        return {key: replaced(one, change) for key, one in given.items()}
    return given


def record(
    call: Callable[[], Any], tensors: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Program, Any]:
    """(program, output) of `call()`, which reads `tensors` and `weights`; else UnrecordableError."""
    recorder = _Recorder(tensors, weights)
    with torch.inference_mode(), within(Frame(())), _Reads(recorder), recorder:
        output = call()
    leaves, spec = pytree.tree_flatten(output)
    if not all(isinstance(leaf, Tensor | int | float | str | None) for leaf in leaves):
        raise UnrecordableError(f"its output is a {type(output).__name__}")
    named = [recorder.value(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    contiguous = [
        value
        for value, leaf in zip(named, leaves, strict=True)
        if isinstance(leaf, Tensor) and leaf.is_contiguous()
    ]
    recorder.forget(leaf for leaf in leaves if isinstance(leaf, Tensor))
    made = pytree.tree_unflatten(named, spec)
    return Program(recorder.inputs, recorder.steps, made, contiguous), output


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operation."""

    def __init__(self, tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self.inputs = [Value(t.shape, t.dtype, number=number) for number, t in enumerate(tensors)]
        self._known: dict[int, tuple[Tensor, Value]] = {
            id(t): (t, Value(t.shape, t.dtype, t, live=True, sign=number)) for number, t in enumerate(weights)
        }
        self._alone: set[Value] = set()
        for tensor, value in zip(tensors, self.inputs, strict=True):
            self._known[id(tensor)] = (tensor, value)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler, which takes a second, to keep it out of here."""
        return False

    def find(self, tensor: Tensor) -> Value | None:
        """The value that a tensor is."""
        value: Value | None = tensor.__dict__.get(_MARK)
        if value is None and id(tensor) in self._known:
            value = self._known[id(tensor)][1]
        return value

    def value(self, tensor: Tensor) -> Value:
        found = self.find(tensor)
        if found is None:
            raise UnrecordableError("it reads a tensor that is neither an argument nor a weight of it")
        return found

    def forget(self, tensors: Any) -> None:
        """Takes the marks off."""
        for tensor in tensors:
            tensor.__dict__.pop(_MARK, None)

    def __torch_dispatch__(self, run: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if run is aten.detach_.default:  # what torch.tensor ends with
            return run(*args, **kwargs)
        if run._schema.is_mutable and self._own(run, args):
            return self._functional(run, args, kwargs)
        reason = _refused(run, args, kwargs)
        if reason:
            raise UnrecordableError(reason)
        if run in _FRESH and self.find(args[0]) is None:
            out = run(*args, **kwargs)
            made = args[0].detach().clone()
            out.__dict__[_MARK] = Value(made.shape, made.dtype, made)
            return out
        named = pytree.tree_map_only(Tensor, self.value, (args, kwargs))
        out = run(*args, **kwargs)
        many = isinstance(out, list | tuple)
        outs: list[Value | None] = []
        self._alone -= set(values_in(named)) if aliases(run) else set()
        for one in out if many else [out]:
            if not isinstance(one, Tensor | None):
                raise UnrecordableError(f"{run} reads a number from a tensor")
            value = None if one is None else Value(one.shape, one.dtype)
            if one is not None and value is not None and id(one) not in self._known:
                one.__dict__[_MARK] = value
                if not aliases(run):
                    self._alone.add(value)
            outs.append(value)
        if not all(value is None for value in outs):
            self.steps.append(Step(run, tuple(named[0]), dict(named[1]), outs, many))
        return out

    def _own(self, run: Any, args: Any) -> bool:
        """Whether it writes into its first argument alone, which the call made and which shares no memory."""
        written = [one.alias_info is not None and one.alias_info.is_write for one in run._schema.arguments]
        return (
            written[0]
            and not any(written[1:])
            and run.overloadpacket in _FUNCTIONAL
            and isinstance(args[0], Tensor)
            and self.find(args[0]) in self._alone
        )

    def _functional(self, run: Any, args: Any, kwargs: Any) -> Any:
        """The step as one that writes into nothing: from here on the tensor is what that gives."""
        named = pytree.tree_map_only(Tensor, self.value, (args, kwargs))
        out = run(*args, **kwargs)
        value = Value(out.shape, out.dtype)
        plain = getattr(_FUNCTIONAL[run.overloadpacket], run._overloadname)
        self.steps.append(Step(plain, tuple(named[0]), dict(named[1]), [value]))
        args[0].__dict__[_MARK] = value
        self._alone.add(value)
        return out


class _Reads(TorchFunctionMode):
    """Refuses what reads a tensor's content past the dispatcher."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, run: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(run, "__name__", "") in _READS and args and isinstance(args[0], Tensor):
            found = self._recorder.find(args[0])
            if found is not None and not found.live:
                raise UnrecordableError(f"it calls {run.__name__} on a tensor")
        return run(*args, **(kwargs or {}))


def _refused(run: Any, args: Any, kwargs: Any) -> str | None:
    """Why an operation cannot be repeated from a list."""
    tags = run.tags
    if run._schema.is_mutable:
        return f"{run} changes a tensor in place"
    numbered = run is aten.index.Tensor and not any(
        one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]
    )
    dynamic = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
    if dynamic and not numbered:
        return f"{run} reads a number from a tensor"
    if torch.Tag.nondeterministic_seeded in tags:
        if run is aten.scaled_dot_product_attention.default:
            draws = (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) != 0.0
        elif run in (aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default):
            draws = bool(args[2])
        else:
            draws = True
        if draws:
            return f"{run} draws random numbers"
    return None
