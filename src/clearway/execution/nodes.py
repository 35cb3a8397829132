"""The nodes of a CUDA graph that is not instantiated yet, by the driver's own functions.

Symbols are taken as libcuda exports them. CUDA 13's headers give some of these names another argument for
edge data; the plain symbols have none, and refuse where an edge has such data (programmatic launches).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

KERNEL, MEMSET = 0, 2
MOST_PARAMETERS = 16
NOT_FOUND = 1  # CUDA_ERROR_INVALID_VALUE: the number of a parameter that a kernel has not


class DriverError(RuntimeError):
    """A function of the driver that gave another result than success."""


class Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS: `height` rows of `width` elements, `pitch` bytes apart where many."""

    _fields_ = (
        ("address", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element_bytes", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class Launch(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("parameters", POINTER(c_void_p)),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )

    def __init__(self, function: int, programs: int, threads: int, shared_bytes: int, values: Any) -> None:
        """`values` are ctypes' own, one for each parameter of the kernel."""
        pointers = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        super().__init__(
            function,
            (programs, 1, 1),
            (threads, 1, 1),
            shared_bytes,
            ctypes.cast(pointers, POINTER(c_void_p)),
        )
        self.held = values, pointers


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuGraphGetNodes": (c_void_p, POINTER(c_void_p), POINTER(c_size_t)),
    "cuGraphNodeGetType": (c_void_p, POINTER(c_int)),
    "cuGraphMemsetNodeGetParams": (c_void_p, POINTER(Memset)),
    "cuGraphNodeGetDependencies": (c_void_p, POINTER(c_void_p), POINTER(c_size_t)),
    "cuGraphNodeGetDependentNodes": (c_void_p, POINTER(c_void_p), POINTER(c_size_t)),
    "cuGraphAddKernelNode_v2": (POINTER(c_void_p), c_void_p, POINTER(c_void_p), c_size_t, POINTER(Launch)),
    "cuGraphAddDependencies": (c_void_p, POINTER(c_void_p), POINTER(c_void_p), c_size_t),
    "cuGraphDestroyNode": (c_void_p,),
    "cuFuncGetParamInfo": (c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t)),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), POINTER(c_void_p)),
}


class Driver:
    """The functions of `library`; graphs and nodes are their handles. Each raises DriverError."""

    def __init__(self, library: Any = None) -> None:
        """Loads the driver unless one is given; OSError or AttributeError where it has not what is needed."""
        library = ctypes.CDLL("libcuda.so.1") if library is None else library
        self._functions = {name: getattr(library, name) for name in _SIGNATURES}
        for name, types in _SIGNATURES.items():
            self._functions[name].argtypes, self._functions[name].restype = types, c_int

    def nodes(self, graph: int) -> list[int]:
        """All nodes of a graph, but not those within its nodes."""
        return self._all("cuGraphGetNodes", graph)

    def kind(self, node: int) -> int:
        """KERNEL, MEMSET, or another number."""
        kind = c_int()
        self._call("cuGraphNodeGetType", node, ctypes.pointer(kind))
        return kind.value

    def memset(self, node: int) -> Memset:
        """What a memset node fills."""
        found = Memset()
        self._call("cuGraphMemsetNodeGetParams", node, ctypes.pointer(found))
        return found

    def before(self, node: int) -> list[int]:
        """The nodes that it waits for."""
        return self._all("cuGraphNodeGetDependencies", node)

    def after(self, node: int) -> list[int]:
        """The nodes that wait for it."""
        return self._all("cuGraphNodeGetDependentNodes", node)

    def add(self, graph: int, before: Sequence[int], launch: Launch) -> int:
        """A new node that waits for those of `before`; the values of `launch` are copied."""
        node, handles = c_void_p(), (c_void_p * len(before))(*before)
        launched = ctypes.pointer(launch)
        self._call("cuGraphAddKernelNode_v2", ctypes.pointer(node), graph, handles, len(before), launched)
        assert node.value is not None
        return node.value

    def link(self, graph: int, node: int, after: Sequence[int]) -> None:
        """Has those of `after` wait for `node`."""
        count = len(after)
        sources, targets = (c_void_p * count)(*[node] * count), (c_void_p * count)(*after)
        self._call("cuGraphAddDependencies", graph, sources, targets, count)

    def destroy(self, node: int) -> None:
        """Takes a node out of its graph, with its edges."""
        self._call("cuGraphDestroyNode", node)

    def parameters(self, function: int) -> list[int]:
        """Bytes of each parameter of a kernel."""
        sizes: list[int] = []
        offset, size = c_size_t(), c_size_t()
        while len(sizes) < MOST_PARAMETERS:
            given = function, len(sizes), ctypes.pointer(offset), ctypes.pointer(size)
            code = self._functions["cuFuncGetParamInfo"](*given)
            if code == NOT_FOUND:
                return sizes
            _check("cuFuncGetParamInfo", code)
            sizes.append(size.value)
        raise DriverError(f"a kernel has more than {MOST_PARAMETERS} parameters")

    def launch(self, launch: Launch, stream: int) -> None:
        """Runs a kernel once, in a stream."""
        sizes = *launch.grid, *launch.block, launch.shared_bytes
        self._call("cuLaunchKernel", launch.function, *sizes, stream, launch.parameters, None)

    def _all(self, name: str, of: int) -> list[int]:
        count = c_size_t()
        self._call(name, of, None, ctypes.pointer(count))
        found = (c_void_p * count.value)()
        if count.value:
            self._call(name, of, found, ctypes.pointer(count))
        return [int(one) for one in found[: count.value] if one is not None]

    def _call(self, name: str, *args: Any) -> None:
        _check(name, self._functions[name](*args))


def _check(name: str, code: int) -> None:
    if code != 0:
        raise DriverError(f"{name} gave CUDA error {code}")
