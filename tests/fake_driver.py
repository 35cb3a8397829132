"""A CUDA driver without a device: graphs of nodes and edges, by the C functions that nodes.py calls."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from clearway.execution.nodes import KERNEL, MEMSET, NOT_FOUND

FAILED = 999
SIZES = (8, 4, 8, 8)  # of the parameters of every kernel here: an address, a count, two of Triton's own


@dataclass
class Node:
    """`params` of a memset: address, pitch, value, bytes of an element, width, height; of a kernel that was
    added: function, address, count; of others a name."""

    kind: int
    params: tuple[Any, ...]


@dataclass
class FakeDriver:
    """`fails` are the numbers of the calls that do nothing but fail, from 0 on; one that adds edges adds all
    but the last of them first. `calls` are the names of all calls so far."""

    fails: Collection[int] = ()
    nodes: dict[int, Node] = field(default_factory=dict)
    edges: set[tuple[int, int]] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    launched: list[tuple[Any, ...]] = field(default_factory=list)
    last: int = 0x7F00_0000_0000

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        function = functools.partial(self._called, name)  # takes argtypes and restype, as a C function does
        self.__dict__[name] = function
        return function

    def add(self, kind: int, *params: Any, after: Collection[int] = ()) -> int:
        """A node that waits for others."""
        self.last += 64
        self.nodes[self.last] = Node(kind, params)
        self.edges |= {(one, self.last) for one in after}
        return self.last

    def work(self) -> tuple[set[Any], set[Any]]:
        """What the nodes do, and what waits for what, whether a memset does it or a kernel."""
        names = {node: _does(self.nodes[node]) for node in self.nodes}
        return set(names.values()), {(names[one], names[other]) for one, other in self.edges}

    def kinds(self) -> list[int]:
        """Of all nodes, sorted."""
        return sorted(node.kind for node in self.nodes.values())

    def _called(self, name: str, *args: Any) -> int:
        number = len(self.calls)
        self.calls.append(name)
        assert len(args) == len(self.__dict__[name].argtypes) and self.__dict__[name].restype is ctypes.c_int
        if number in self.fails:
            if name == "cuGraphAddDependencies":
                self._link(*args[1:3], args[3] - 1)
            return FAILED
        return int(getattr(self, f"_{name}")(*args) or 0)

    def _link(self, sources: Any, targets: Any, count: int) -> None:
        for source, target in zip(sources[:count], targets[:count], strict=True):
            assert source in self.nodes and target in self.nodes and (source, target) not in self.edges
            self.edges.add((source, target))

    def _cuGraphGetNodes(self, graph: int, found: Any, count: Any) -> None:
        _give(list(self.nodes), found, count)

    def _cuGraphNodeGetType(self, node: int, kind: Any) -> None:
        kind.contents.value = self.nodes[node].kind

    def _cuGraphMemsetNodeGetParams(self, node: int, found: Any) -> None:
        assert self.nodes[node].kind == MEMSET
        for (name, _), value in zip(found.contents._fields_, self.nodes[node].params, strict=True):
            setattr(found.contents, name, value)

    def _cuGraphNodeGetDependencies(self, node: int, found: Any, count: Any) -> None:
        assert node in self.nodes
        _give([one for one, other in self.edges if other == node], found, count)

    def _cuGraphNodeGetDependentNodes(self, node: int, found: Any, count: Any) -> None:
        assert node in self.nodes
        _give([other for one, other in self.edges if one == node], found, count)

    def _cuGraphAddKernelNode_v2(self, node: Any, graph: int, before: Any, count: int, launch: Any) -> None:
        assert all(one in self.nodes for one in before[:count])
        node.contents.value = self.add(KERNEL, *_read(launch.contents), after=before[:count])

    def _cuGraphAddDependencies(self, graph: int, sources: Any, targets: Any, count: int) -> None:
        self._link(sources, targets, count)

    def _cuGraphDestroyNode(self, node: int) -> None:
        del self.nodes[node]
        self.edges = {edge for edge in self.edges if node not in edge}

    def _cuFuncGetParamInfo(self, function: int, index: int, offset: Any, size: Any) -> int:
        if index >= len(SIZES):
            return NOT_FOUND
        size.contents.value = SIZES[index]
        return 0

    def _cuLaunchKernel(self, function: int, *rest: Any) -> None:
        *sizes, stream, pointers, extra = rest
        assert extra is None
        self.launched.append((*_values(function, pointers), *sizes, stream))


def _give(values: list[int], found: Any, count: Any) -> None:
    if found is not None:
        found[: len(values)] = values
        assert count.contents.value == len(values)
    count.contents.value = len(values)


def _read(launch: Any) -> tuple[int, int, int]:
    assert not launch.extra and not launch.kernel and not launch.context
    function, address, count = _values(launch.function, launch.parameters)
    grid, block = tuple(launch.grid), tuple(launch.block)
    assert grid[0] * 1024 >= count > (grid[0] - 1) * 1024 and grid[1:] == (1, 1) and block == (128, 1, 1)
    return function, address, count


def _values(function: int, pointers: Any) -> tuple[int, int, int]:
    kinds = {8: ctypes.c_uint64, 4: ctypes.c_int32}
    values = [kinds[size].from_address(pointers[index]).value for index, size in enumerate(SIZES)]
    assert values[2:] == [0, 0]
    return function, values[0], values[1]


def _does(node: Node) -> Any:
    """A kernel's function is, here, the bytes of its words."""
    if node.kind == MEMSET:
        address, _, value, element, width, height = node.params
        return "fill", address, value, element * width, height
    if node.kind == KERNEL and isinstance(node.params[0], int):
        word, address, count = node.params
        return "fill", address, 0, word * count, 1
    return node.params
