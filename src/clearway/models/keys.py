"""What the key rules share: where a module's tensor comes from, and how it is turned."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]
MAX_BLOCKS = 1000  # SDXL has 70 transformer blocks; a thousand take seconds to build
NUMBER = re.compile(r"(0|[1-9][0-9]{0,5})(\.|$)")


@dataclass(frozen=True, slots=True)
class Source:
    """The file's name for a tensor, and what is done with it (None: nothing).

    `turn` leaves a tensor that it cannot turn as it is, so that its shape is what is found wrong.
    """

    key: str
    turn: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """A module as a file describes it: its Diffusers or transformers config, and a source for each tensor.

    `original` gives the file's name for a tensor of the module, so that one that is not there can be named.
    """

    config: dict[str, Any]
    sources: dict[str, Source]
    original: Callable[[str], str] = str


def below(shapes: Shapes, prefix: str) -> dict[str, tuple[int, ...]]:
    """The tensors whose names begin with `prefix`, without it."""
    return {name[len(prefix) :]: shape for name, shape in shapes.items() if name.startswith(prefix)}


def grouped(shapes: Shapes, depth: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """The tensors by the first `depth` parts of their names ("input_blocks.1"), under their whole names."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        found.setdefault(".".join(name.split(".", depth)[:depth]), {})[name] = shape
    return found


def has(shapes: Shapes, prefix: str) -> bool:
    """Whether any tensor's name begins with `prefix`."""
    return any(name.startswith(prefix) for name in shapes)


def count(shapes: Shapes, prefix: str) -> int:
    """How many blocks `prefix`0, `prefix`1, … there are, each known by any of its tensors.

    KeyError names the first that is not there although a later one is; ValueError says that there are more
    than any network has.
    """
    numbers = set()
    for name in shapes:
        if name.startswith(prefix):
            found = NUMBER.match(name, len(prefix))
            if found:
                numbers.add(int(found[1]))
    for number in range(len(numbers)):
        if number not in numbers:
            raise KeyError(f"{prefix}{number}")
    if len(numbers) > MAX_BLOCKS:
        raise ValueError(f"it has {len(numbers)} blocks {prefix}…, which no network has")
    return len(numbers)


def dims(shapes: Shapes, name: str, *ranks: int) -> tuple[int, ...]:
    """The shape of a tensor; KeyError names it where it is missing, IndexError where its rank is another."""
    shape = shapes[name]
    if len(shape) not in ranks:
        raise IndexError(name)
    return shape


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


def inverse(table: Mapping[str, str]) -> dict[str, str]:
    """A table of names read backwards."""
    return {new: old for old, new in table.items()}


def to_linear(weight: Tensor) -> Tensor:
    """A 1 x 1 convolution's weight (out, in, 1, 1) as a linear layer's (out, in)."""
    return weight.flatten(1) if weight.ndim == 4 and weight.shape[2:] == (1, 1) else weight
