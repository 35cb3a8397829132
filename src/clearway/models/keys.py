"""What the key rules share: where a module's tensor comes from, and how it is turned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Source:
    """The file's name for a tensor, and what is done with it (None: nothing)."""

    key: str
    turn: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """A module as a file describes it: its Diffusers or transformers config, and a source for each tensor."""

    config: dict[str, Any]
    sources: dict[str, Source]


def below(shapes: Shapes, prefix: str) -> dict[str, tuple[int, ...]]:
    """The tensors whose names begin with `prefix`, without it."""
    return {name[len(prefix) :]: shape for name, shape in shapes.items() if name.startswith(prefix)}


def count(shapes: Shapes, pattern: str) -> int:
    """How many of pattern.format(0), pattern.format(1), … there are before the first that is not."""
    number = 0
    while pattern.format(number) in shapes:
        number += 1
    return number


def swap(name: str, blocks: Mapping[str, str], depth: int) -> tuple[str, str] | None:
    """(the new name of the block that `name` lies in, the rest), by its first `depth` parts or fewer."""
    parts = name.split(".")
    for size in range(min(depth, len(parts) - 1), 0, -1):
        new = blocks.get(".".join(parts[:size]))
        if new is not None:
            return new, ".".join(parts[size:])
    return None


def rename(rest: str, table: Mapping[str, str]) -> str:
    """`rest` with its leading parts replaced by the first entry of `table` that fits; otherwise as it is."""
    for old, new in table.items():
        if rest == old or rest.startswith(f"{old}."):
            return new + rest[len(old) :]
    return rest


def to_linear(weight: Tensor) -> Tensor:
    """A 1 x 1 convolution's weight (out, in, 1, 1) as a linear layer's (out, in)."""
    return weight.reshape(weight.shape[0], -1)
