"""torch.compile around a Diffusers arm: what to compile and how, and the proof that compiled code ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

GRAPHED = ("reduce-overhead", "max-autotune")  # the modes that capture CUDA graphs
_kept: ContextVar[dict[Hashable, dict[Hashable, Any]] | None] = ContextVar(
    "clearway_compiled_kept", default=None
)


@contextmanager
def keeping() -> Iterator[None]:
    """Within it, what one scenario compiled serves later ones of the same model object and sizes.

    Compiling SDXL takes minutes. Compiled code and its graphs hold their memory until it ends.
    """
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)
        torch._dynamo.reset()


def once(work: Hashable, how: Hashable, make: Callable[[], Any]) -> Any:
    """What was made for this work in this way within `keeping`; outside of it a new one.

    For other work everything is dropped first: the compiler would take another size for a reason to make its
    code fit all sizes.
    """
    held = _kept.get()
    if held is None:
        return make()
    if work not in held and held:
        held.clear()
        torch._dynamo.reset()
    found = held.setdefault(work, {})
    if how not in found:
        found[how] = make()
    return found[how]


@dataclass(slots=True)
class Compiled:
    """How an arm's networks are laid out and compiled; `scope` None compiles nothing.

    "regional" compiles the UNet's repeated blocks, "full" the whole UNet and the VAE's decoder as one graph
    each. `mode` is torch.compile's; the ones that capture CUDA graphs count as None off CUDA.
    """

    layout: str = "contiguous"
    scope: str | None = None
    mode: str | None = None
    dynamic: bool | None = None
    recompiled: int = 0
    reused: bool = False
    made: Counter[str] = field(default_factory=Counter)
    _ready: bool = False

    @property
    def label(self) -> str:
        """What to call it in routes."""
        return "eager" if self.scope is None else f"compiled {self.scope}"

    def laid_out(self, parts: Any) -> None:
        """Lays UNet and VAE out channels last where that is asked for: a copy of their weights."""
        if self.layout == "channels_last":
            for module in (parts.unet, parts.vae):
                module.to(memory_format=torch.channels_last)
        self.placed(parts.place)

    def placed(self, place: str) -> None:
        """Gives up a mode that captures CUDA graphs where there are none."""
        if self.mode in GRAPHED and not place.startswith("cuda"):
            self.mode = None

    def compile(self, pipe: Any, parts: Any) -> None:
        """Puts compiled code into the pipeline; the compiler itself works at the first call.

        What an earlier scenario compiled of these parts is taken as it is.
        """
        if self.scope is None:
            return
        if parts.compiled is not None:
            pipe.unet, self.reused = parts.compiled, True
            return
        self._compile(pipe)
        parts.compiled = pipe.unet

    def _compile(self, pipe: Any) -> None:
        how: dict[str, Any] = {"mode": self.mode, "dynamic": self.dynamic}
        if self.scope == "regional":
            pipe.unet.compile_repeated_blocks(fullgraph=True, **how)
            return
        pipe.unet = torch.compile(pipe.unet, fullgraph=True, **how)
        pipe.vae.decode = torch.compile(pipe.vae.decode, fullgraph=True, **how)

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, counting what the compiler does in it, and what it does again at the same size."""
        if self.scope is None:
            return call

        def run(round: int, side_px: int = 0) -> Any:
            before = counts()
            result = call(round, side_px)
            new = {name: count - before[name] for name, count in counts().items()}
            if self._ready and not side_px:
                self.recompiled += new["graphs"]
            self.made.update(new)
            self._ready = True
            return result

        return run

    def intended(self) -> dict[str, Any]:
        """How it is laid out and compiled, in JSON values; what came out of a cache was not compiled here."""
        said: dict[str, Any] = {"layout": self.layout, "compile": self.scope}
        if self.scope:
            said |= {"mode": self.mode or "default", "dynamic": self.dynamic, "fullgraph": True}
            said |= {"graphs": self.made["graphs"], "compile_cache_hits": self.made["cached"]}
            said |= {"compiled_by_an_earlier_scenario": True} if self.reused else {}
        return said

    def proof(self) -> str | None:
        """Why the compiled path did not run as intended; None where it did."""
        if self.scope is None:
            return None
        if not self.made["graphs"] and not self.reused:
            return "nothing was compiled"
        if self.made["breaks"]:
            return f"{self.made['breaks']} graph breaks, where a network was to be one graph"
        if self.recompiled:
            return f"{self.recompiled} graphs were compiled anew at the same size"
        if self.mode in GRAPHED and self.made["skips"]:
            return f"CUDA graphs were skipped {self.made['skips']} times"
        return None

    def close(self) -> None:
        """Drops compiled code and captured graphs of all arms; nothing within `keeping`."""
        if self.scope is not None and _kept.get() is None:
            torch._dynamo.reset()


def counts() -> dict[str, int]:
    """What the compiler counted in this process: graphs, graph breaks, skipped CUDA graphs, cache hits."""
    from torch._dynamo.utils import counters

    return {
        "graphs": int(counters["stats"]["unique_graphs"]),
        "breaks": sum(counters["graph_break"].values()),
        "skips": int(counters["inductor"]["cudagraph_skips"]),
        "cached": int(counters["inductor"]["fxgraph_cache_hit"]),
    }
