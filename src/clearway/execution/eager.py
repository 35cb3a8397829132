"""Eager execution: the module is called as it is, and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Eager:
    """Calls `module` and counts each call in `routes` as "<part>/<name>", or as what `module.ran` says."""

    module: Callable[..., Any]
    part: str
    routes: Counter[str] = field(default_factory=Counter)
    name: str = "eager"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.module(*args, **kwargs)
        self.routes[f"{self.part}/{getattr(self.module, 'ran', self.name)}"] += 1
        return out

    def sentences(self, name: str) -> list[str]:
        """What `module`, where it is an executor too, says of itself under the name `name`."""
        told = getattr(self.module, "sentences", None)
        return list(told(name)) if callable(told) else []
