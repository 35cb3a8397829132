"""torch.compile as an executor: whole, or region by region; what it was set to and what it did are recorded.

Regional compilation compiles the blocks that repeat, once for all of one kind: Diffusers' documentation gives
8 to 10 times less compile time. A compiled block is put in place during a call only, so that other executors
of the same module run it as it is. Graph breaks and recompilations are counted (torch._dynamo's counters and
its compile callbacks), with their reasons.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from clearway.errors import RequestError, one_line
from clearway.execution.calls import owner_of
from clearway.ops import contract

SCOPES = ("regional", "full")
REGIONS = ("BasicTransformerBlock", "ResnetBlock2D")
"""Classes compiled one by one where a model names no `_repeated_blocks` of its own beside these."""

LIMIT = 64
"""Variants of one block: SDXL's residual blocks have 12 shapes of weights, each of which is compiled."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What torch.compile is given. None: its own default.

    `options` are Inductor's: conv_1x1_as_mm, coordinate_descent_tuning,
    coordinate_descent_check_all_directions, epilogue_fusion, …; they go on top of `mode`'s.
    `use_duck_shape` False keeps sizes that happen to be equal apart under dynamic shapes.
    """

    scope: str = "regional"
    dynamic: bool | None = None
    fullgraph: bool = False
    mode: str | None = None
    backend: str = "inductor"
    options: tuple[tuple[str, bool | int | str], ...] = ()
    use_duck_shape: bool | None = None
    regions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise RequestError(f"scope {self.scope!r} is not known; it is one of {', '.join(SCOPES)}")
        if self.options and self.backend != "inductor":
            raise RequestError(f"options are Inductor's and the backend is {self.backend!r}")

    def record(self) -> dict[str, Any]:
        """What evidence keeps: these, and where torch.compile keeps compiled code."""
        return asdict(self) | {"cache_folder": os.environ.get("TORCHINDUCTOR_CACHE_DIR", "torch's default")}

    def arguments(self) -> dict[str, Any]:
        """For torch.compile, which takes mode or options, not both."""
        given: dict[str, Any] = {
            "dynamic": self.dynamic,
            "fullgraph": self.fullgraph,
            "backend": self.backend,
        }
        if self.backend != "inductor":
            return given
        options = dict(self.options)
        if self.mode and options:
            return given | {"options": torch._inductor.list_mode_options(self.mode, self.dynamic) | options}
        return given | {"mode": self.mode, "options": options or None}


@dataclass(slots=True)
class Events:
    """What torch.compile did during this executor's calls: how often, and why."""

    compiled: int = 0
    recompiled: int = 0
    graph_breaks: int = 0
    late: int = 0
    over_limit: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def sentences(self) -> list[str]:
        """What the user should know."""
        told = []
        if self.graph_breaks:
            told.append(f"torch.compile broke the graph {self.graph_breaks} times: {_first(self.reasons)}")
        if self.late:
            told.append(
                f"torch.compile compiled {self.late} times after the first call, for a new size or other code"
            )
        if self.over_limit:
            told.append(f"{self.over_limit} calls ran eagerly: more than {LIMIT} variants of one function")
        return told


class Compiled:
    """Calls `module` (or a method of one) compiled as `settings` say; the first call compiles.

    Where nothing can be compiled on this machine (no compiler) it says so once and calls it as it is from
    then on. `ran` says which of the two the last call did.
    """

    def __init__(self, module: Callable[..., Any], settings: Settings) -> None:
        self.module, self.settings, self.events, self.calls = module, settings, Events(), 0
        self.ran, self.failed = "compiled", ""
        self.ignored: dict[str, None] = {}
        self._lock = threading.RLock()  # blocks are put in place for all threads, and taken away for all
        self._whole: Callable[..., Any] | None = None
        self._regions: dict[nn.Module, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit

        if self.failed:
            return self.module(*args, **kwargs)
        self.ignored |= dict.fromkeys(_ignored())
        self.ran = "compiled"
        try:
            with self._lock, self._counted(), self._configured():
                if self.settings.scope == "full":
                    if self._whole is None:
                        self._whole = torch.compile(self.module, **self.settings.arguments())
                    return self._whole(*args, **kwargs)
                with self._in_place():
                    return self.module(*args, **kwargs)
        except FailOnRecompileLimitHit:
            self.events.over_limit += 1
        except BackendCompilerFailed as error:
            self.failed = one_line(getattr(error, "inner_exception", error))[:200]
            print(f"clearway: torch.compile is not used: {self.failed}", file=sys.stderr)
        self.ran = "eager"
        return self.module(*args, **kwargs)

    def sentences(self, name: str) -> list[str]:
        """What torch.compile did with what is called `name` that the user should know."""
        if self.failed:
            return [f"{name} ran eagerly: torch.compile cannot be used here ({self.failed})"]
        named = [
            f"{name}: {one} is not taken in compiled code, where torch.compile fuses the op's reference"
            for one in self.ignored
        ]
        return named + [f"{name}: {told}" for told in self.events.sentences()]

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Within it the regions run compiled."""
        owner = owner_of(self.module)
        names = self.settings.regions or (*(getattr(owner, "_repeated_blocks", None) or ()), *REGIONS)
        placed: list[nn.Module] = []
        try:
            for region in owner.modules() if owner is not None else ():
                if type(region).__name__ not in names or region._compiled_call_impl is not None:
                    continue  # somebody compiled it already
                if region not in self._regions:
                    self._regions[region] = torch.compile(region._call_impl, **self.settings.arguments())
                region._compiled_call_impl = self._regions[region]
                placed.append(region)
            if not placed:
                raise RequestError(
                    f"nothing in {type(owner).__name__} is one of {', '.join(dict.fromkeys(names))}; "
                    "scope 'full' compiles it whole"
                )
            yield
        finally:
            for region in placed:
                del region.__dict__["_compiled_call_impl"]

    @contextmanager
    def _configured(self) -> Iterator[None]:
        """Within it torch.compile may compile one block at more sizes than its 8, and says so where not."""
        from torch._dynamo import config

        with ExitStack() as stack:
            patched = config.patch(recompile_limit=LIMIT, fail_on_recompile_limit_hit=True)
            stack.enter_context(patched)
            if self.settings.use_duck_shape is not None:
                from torch.fx.experimental import _config

                patched = _config.patch(use_duck_shape=self.settings.use_duck_shape)  # type: ignore[attr-defined]
                stack.enter_context(patched)
            yield

    @contextmanager
    def _counted(self) -> Iterator[None]:
        from torch._dynamo.callback import CallbackArgs, callback_handler
        from torch._dynamo.utils import counters

        before = Counter(counters["graph_break"])
        events, late = self.events, self.calls > 0

        def started(args: CallbackArgs) -> None:
            events.compiled += 1
            events.late += late
            # a compile id is "frame/compilation of it"
            events.recompiled += not str(args.compile_id).partition("/")[2].startswith("0")

        callback_handler.register_start_callback(started)
        try:
            yield
        finally:
            self.calls += 1
            callback_handler.remove_start_callback(started)
            fresh = Counter(counters["graph_break"]) - before
            events.graph_breaks += fresh.total()
            events.reasons += fresh


def _ignored() -> list[str]:
    """The routes that a caller named, as "op=implementation", and that compiled code does not take."""
    return [
        f"{op}={name}"
        for op, name in contract.route_key()[1]
        if contract.OPS[op].compile == "inline" and name != contract.REFERENCE
    ]


def _first(reasons: Counter[str]) -> str:
    return "; ".join(reason.strip().splitlines()[0] for reason, _ in reasons.most_common(2))
