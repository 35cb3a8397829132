"""Executors put in place in a pipeline that a user already has: at a network's own forward, and taken away.

`module.forward` of the UNet (or ControlNet, transformer), of the VAE's decoder and of the text encoders is
shadowed by a Bound which runs the class's own forward through `execution.executor`; hooks on the module, its
`__call__` and what the pipeline does around it stay as they are. Graphs are kept at the module, so a copy has
none, and nothing is promised of a user's tensors: see `CudaGraph`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from clearway.execution import EXECUTORS, automatic, executor, forget
from clearway.execution.compiled import REGIONS
from clearway.execution.fingerprint import moves
from clearway.models._bound import Bound, occupied, own
from clearway.models._report import Ran, Report
from clearway.ops.attention_torch import WithoutCudnn

AUTO = "auto"
CHOICES = (AUTO, *EXECUTORS)
"""What `accelerate` takes: "auto" is, call by call, what is best on the device that the arguments lie on."""

_NETWORKS = ("UNet2DConditionModel", "ControlNetModel", "Transformer2DModel")
"""How the names of classes end that a pipeline calls at each step."""
_DECODERS = ("AutoencoderKL", "AutoencoderTiny")
TEXT = "text_encoder"
"""How the names of a pipeline's text encoders begin."""
MOVED = "hooks are at work on it that may move its weights (offloading, caching)"


def place(label: str, part: nn.Module, name: str, report: Report) -> None:
    """Puts the executor called `name` in place in what of `part` is called as a whole, again and again."""
    if name == "eager" or (name == AUTO and not _ever(part)):
        return
    if "_orig_mod" in part._modules:  # torch.compile(module)
        report.leave("run as it is: it is compiled", label)
    for found, module in _called(label, part):
        reason = occupied(module)
        if reason is None and moves(part.__dict__):
            reason = MOVED
        if reason is None and name == "compiled" and not _regions(module):
            reason = "no block of it repeats that torch.compile could take"
        if reason is not None:
            report.leave(f"run as it is: {reason}", found)
            continue
        ran = report.ran.setdefault(found, Ran())
        bound = Bound(forward, module, part, name, found, ran)
        bound.before = module.__dict__.get("forward")
        module.forward = bound
        report.place(name if name != AUTO else _automatically(module), found)


def forward(
    module: nn.Module, part: nn.Module, name: str, label: str, ran: Ran, *args: Any, **kwargs: Any
) -> Any:
    """The class's own forward by the executor called `name`; as it is within somebody else's torch.compile.

    `part` is what holds the module (a decoder's VAE): hooks on that move weights too.
    """
    if torch.compiler.is_compiling():
        return own(module, *args, **kwargs)
    given = _first((*args, *kwargs.values()))
    wanted = automatic(given.device.type) if name == AUTO and given is not None else name
    if given is None or wanted in (AUTO, "eager"):
        forget(module)  # of a module that was moved away: what was made for it holds memory there
        return _plainly(module, label, ran, args, kwargs)
    if moves(part.__dict__):
        ran.reasons[MOVED] += 1
        return _plainly(module, label, ran, args, kwargs)
    own_forward = words if label.startswith(TEXT) and wanted == "cuda_graph" else type(module).forward
    run = executor(wanted, MethodType(own_forward, module), label, ran.calls, key=backend)
    if hasattr(run, "reasons"):
        run.reasons = ran.reasons
    return run(*_with_timestep(module, given.device, args, kwargs), **kwargs)


def words(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A text encoder's own forward, without what takes long to make ready for few tokens."""
    with WithoutCudnn():
        return type(module).forward(module, *args, **kwargs)


def backend() -> Any:
    """What the attention dispatchers of Diffusers and Transformers are set to for everybody: a graph has it
    baked in."""
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    registry = getattr(dispatch, "_AttentionBackendRegistry", None)
    encoders = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
    functions = {**getattr(encoders, "_global_mapping", {}), **getattr(encoders, "_local_mapping", {})}
    return str(getattr(registry, "_active_backend", None)), tuple(functions.items())


def _plainly(module: nn.Module, label: str, ran: Ran, args: Any, kwargs: Any) -> Any:
    ran.calls[f"{label}/eager"] += 1
    return own(module, *args, **kwargs)


def _with_timestep(
    module: nn.Module, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """The arguments with `timestep` a tensor where the others lie, in `kwargs` in place.

    A number would be baked into a graph, one graph a step. Its dtype is what Diffusers would make of it;
    neither the fill nor the copy makes the host wait.
    """
    at = _position(type(module))
    named = "timestep" in kwargs
    if at is None or not (named or len(args) > at):
        return args
    value = kwargs["timestep"] if named else args[at]
    if isinstance(value, int | float) and not isinstance(value, bool):
        dtype = torch.float64 if isinstance(value, float) else torch.int64
        value = torch.full((), value, dtype=dtype, device=device)
    elif isinstance(value, Tensor) and value.device != device:
        value = value.to(device, non_blocking=True)
    else:
        return args
    if named:
        kwargs["timestep"] = value
        return args
    return (*args[:at], value, *args[at + 1 :])


_positions: dict[type, int | None] = {}


def _position(kind: type[nn.Module]) -> int | None:
    """Which of a network's positional arguments is `timestep`, beginning at 0; None where there is none."""
    if kind not in _positions:
        names = list(inspect.signature(kind.forward).parameters)[1:]
        _positions[kind] = names.index("timestep") if "timestep" in names else None
    return _positions[kind]


def _first(values: tuple[Any, ...]) -> Tensor | None:
    """The first tensor that is an argument itself, leaving the timestep out: some keep it on the CPU."""
    return next((value for value in values if isinstance(value, Tensor) and value.dim() > 0), None)


def _called(label: str, part: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of what in a part is called as a whole."""
    kind = type(part)
    library = kind.__module__.partition(".")[0]
    if library == "diffusers" and kind.__name__ in _DECODERS and isinstance(part.decoder, nn.Module):
        yield f"{label}.decoder", part.decoder
    elif library == "diffusers" and kind.__name__.endswith("MultiControlNetModel"):
        nets: Any = part.nets
        for number, net in enumerate(nets):
            yield f"{label}.{number}", net
    elif library == "diffusers":
        if kind.__name__.endswith(_NETWORKS):
            yield label, part
    elif library == "transformers" and label.startswith(TEXT):
        yield label, part


def _regions(module: nn.Module) -> bool:
    """Whether `compiled` finds blocks in it to compile."""
    names = (*(getattr(module, "_repeated_blocks", None) or ()), *REGIONS)
    return any(type(one).__name__ in names for one in module.modules())


def _kind(module: nn.Module) -> str | None:
    first = next(module.parameters(), None)
    return None if first is None else first.device.type


def _automatically(module: nn.Module) -> str:
    here = automatic(_kind(module) or "cpu")
    return f"{automatic('cuda')} once on a CUDA device" if here == "eager" else here


def _ever(part: nn.Module) -> bool:
    """Whether the automatic choice may be more than eager: for where it lies, or where it may be moved to."""
    kinds = {_kind(part) or "cpu", "cuda" if torch.cuda.is_available() else "cpu"}
    return any(automatic(kind) != "eager" for kind in kinds)
