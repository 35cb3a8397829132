"""executor(name, module, part, routes): one of the executors around a callable, by the name choices give it.

What an executor builds (graphs, compiled code) outlives one generation: it is held by the module itself, in
`Built`, which a copy of the module does not take along and `forget` drops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from clearway.errors import RequestError, nearest
from clearway.execution.attributes import BUILT
from clearway.execution.calls import owner_of
from clearway.execution.capture import TorchCapture
from clearway.execution.compiled import Compiled, Settings
from clearway.execution.cuda_graph import CudaGraph
from clearway.execution.eager import Eager
from clearway.execution.flat import Flat, Functions
from clearway.execution.pool import Pool
from clearway.ops import contract

EXECUTORS = ("eager", "compiled", "cuda_graph", "flat")


class Built:
    """What executors made for a module, by (executor, method, settings)."""

    def __init__(self) -> None:
        self.held: dict[Hashable, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Built, ()

    def __deepcopy__(self, memo: Any) -> Built:
        return Built()


def executor(
    name: str,
    module: Callable[..., Any],
    part: str,
    routes: Counter[str] | None = None,
    *,
    fixed: Iterable[tuple[str, str]] = (),
    key: Hashable = (),
    promised: Sequence[str] = (),
    settings: Settings | None = None,
) -> Callable[..., Any]:
    """A callable that runs `module` (or a method of one) and counts each call in `routes` as "<part>/<name>".

    Within its calls the ops in `fixed` take the implementations named there, or raise. `key` is the caller's
    own part of a graph's key; `promised` names arguments that the caller does not change in place, so that
    the same object means the same content; `settings` are `compiled`'s. Its `sentences(name)` say what did
    not run as it was meant to, and why. RequestError for an unknown name.
    """
    counted = Counter[str]() if routes is None else routes
    owner = owner_of(module)
    run: Callable[..., Any]
    if name == "eager":
        run = Eager(module, part, counted, built=_built(owner, (name, _method(module)), set[Any]))
    elif name == "compiled":
        chosen = settings or Settings()
        compiled = _built(owner, (name, _method(module), chosen), lambda: Compiled(module, chosen))
        run = Eager(compiled, part, counted, name)
    elif name == "cuda_graph":
        pool = _built(owner, (name, _method(module)), lambda: Pool(TorchCapture()))
        run = CudaGraph(module, part, counted, pool, key=key, promised=tuple(promised))
    elif name == "flat":
        functions = _built(owner, (name, _method(module)), Functions)
        run = Flat(module, part, counted, functions, key=key, promised=tuple(promised))
    else:
        raise RequestError(f"executor {name!r} is not known; nearest: {nearest(name, EXECUTORS)}")
    pairs = dict(fixed)
    return Fixed(run, pairs) if pairs else run


@dataclass(slots=True)
class Fixed:
    """Calls `run` with the implementations of some ops fixed."""

    run: Callable[..., Any]
    names: dict[str, str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with contract.use(**self.names):
            return self.run(*args, **kwargs)

    def sentences(self, name: str) -> list[str]:
        """What the executor says of itself under the name `name`."""
        told: list[str] = self.run.sentences(name)  # type: ignore[attr-defined]
        return told


def automatic(kind: str) -> str:
    """The executor for a device of `kind` where nobody named one."""
    return "cuda_graph" if kind == "cuda" else "eager"


def absent(name: str, kind: str) -> str | None:
    """Why an executor can never run on a device of `kind`; None where it can."""
    if name == "cuda_graph" and kind != "cuda":
        return f"CUDA graphs are for CUDA devices, this is {kind}"
    if name == "flat" and kind != "cpu":
        return f"recorded calls are for the CPU, this is {kind}"
    if name == "compiled":
        from torch._dynamo.eval_frame import is_dynamo_supported

        if not is_dynamo_supported():
            return "torch.compile does not support this Python"
    return None


def forget(module: nn.Module) -> None:
    """Drops what executors built for a module."""
    module.__dict__.pop(BUILT, None)


def pools(module: nn.Module) -> list[Pool]:
    """The pools of graphs that executors made for a module and its methods."""
    built = module.__dict__.get(BUILT)
    return [one for one in built.held.values() if isinstance(one, Pool)] if built else []


def _method(run: Callable[..., Any]) -> str:
    return "" if isinstance(run, nn.Module) else getattr(run, "__name__", "")


def _built(owner: nn.Module | None, key: Hashable, make: Callable[[], Any]) -> Any:
    """What was made for `owner` under `key`, else a new one; without an owner always a new one."""
    if owner is None:
        return make()
    built = owner.__dict__.setdefault(BUILT, Built())
    if key not in built.held:
        built.held[key] = make()
    return built.held[key]
