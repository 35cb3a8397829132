"""Small memsets of a captured graph, made kernels before the graph is instantiated.

cuBLAS and cuDNN clear a few bytes before some of their kernels. Within a graph a memset runs on another
engine than kernels do, and going there and back leaves the device idle for longer than the fill takes: see
bench/memsets_on_device.py. A kernel that does the same fill waits for the same nodes, and the same nodes
wait for it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from ctypes import c_int32, c_uint64
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clearway.errors import one_line
from clearway.execution.nodes import MEMSET, Driver, DriverError, Launch, Memset
from clearway.ops import _triton
from clearway.ops._triton import counting, tl

MOST_BYTES = 2**16
"""What a memset may clear to be replaced: more takes long enough that where it runs matters less."""
BLOCK, WARPS, LANES = 1024, 4, 32
WORDS = {4: torch.int32, 1: torch.uint8}  # bytes stored at once, the widest first


class AbsentError(RuntimeError):
    """There is no kernel that clears."""


class BrokenError(RuntimeError):
    """A graph that could neither be changed nor left as it was: not to be run."""


@counting("count")
def clear(pointer, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Zeros in `count` elements from `pointer`."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(pointer + at, tl.zeros_like(at), mask=at < count)


@dataclass(frozen=True, slots=True)
class Built:
    """The kernel for words of one size: the driver's handle, and what launches it has to be told."""

    function: int
    shared_bytes: int
    more: int
    """Parameters after ours, which Triton appends: addresses of memory that this kernel has no need of."""
    owner: Any = None
    """What unloads the kernel when it goes."""

    def launch(self, address: int, count: int) -> Launch:
        """Clears `count` words from `address`."""
        values = [c_uint64(address), c_int32(count), *(c_uint64(0) for _ in range(self.more))]
        return Launch(self.function, -(-count // BLOCK), WARPS * LANES, self.shared_bytes, values)


@dataclass(slots=True)
class Memsets:
    """What became of the memsets of the graphs that went through here; `wanted` False leaves all of them.

    `sizes` counts those found by their bytes, `left` those that stayed by why, and `reason` says why the last
    graph that could not be changed, or not to its end, was not. `clearway` never tells a user of it.
    """

    wanted: bool = True
    replaced: int = 0
    sizes: Counter[int] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    reason: str | None = None

    def graph(self) -> Any:
        """A torch.cuda.CUDAGraph to capture in, which `finish` makes ready; within the graphs' lock."""
        self.reason = absent() if self.wanted else "it is switched off"
        return torch.cuda.CUDAGraph() if self.reason else torch.cuda.CUDAGraph(keep_graph=True)

    def finish(self, graph: Any) -> None:
        """Changes a graph that was captured, and instantiates it; nothing where `graph` gave a plain one.

        BrokenError where the graph must not run; what instantiating it raises.
        """
        if self.reason is not None:
            return
        try:
            self.replace(_driver(), graph.raw_cuda_graph())
        except BrokenError:
            raise
        except Exception as error:  # the graph is whole, and its memsets do
            self.reason = one_line(error)
        graph.instantiate()

    def replace(
        self, driver: Driver, graph: int, kernel: Callable[[Driver, int], Built] | None = None
    ) -> None:
        """Replaces what can be, one by one, by what `built` or another gives for words of so many bytes.

        After each, and whatever fails but by BrokenError, the graph does what it did.
        """
        found = {node: driver.memset(node) for node in driver.nodes(graph) if driver.kind(node) == MEMSET}
        self.sizes.update(_bytes(memset) for memset in found.values())
        whys = {node: refused(memset) for node, memset in found.items()}
        self.left.update(why for why in whys.values() if why)
        for node in (node for node, why in whys.items() if why is None):
            try:
                word = _word(found[node])
                made = (kernel or built)(driver, word)
                _exchange(driver, graph, node, made.launch(found[node].address, _bytes(found[node]) // word))
                self.replaced += 1
            except (DriverError, AbsentError) as error:
                self.reason = one_line(error)
                self.left[self.reason] += 1


def refused(memset: Memset) -> str | None:
    """Why a memset stays as it is."""
    if memset.value != 0:
        return "its value is not zero"
    if memset.height > 1:
        return "it has rows"
    size = _bytes(memset)
    return None if 0 < size <= MOST_BYTES else f"it is not of 1 to {MOST_BYTES} bytes"


def absent() -> str | None:
    """Why no memset can be replaced in this process."""
    if torch.version.cuda is None or not hasattr(torch.cuda.CUDAGraph, "instantiate"):
        return "torch gives no graph that can be changed"
    try:
        _driver()
    except (OSError, AttributeError) as error:
        return one_line(error)
    return _triton.absent()


def built(driver: Driver, word: int) -> Built:
    """The kernel for words of so many bytes on the current device, tried once before it is trusted; the same
    or the same AbsentError for every later graph."""
    key = torch.cuda.current_device(), word
    if key not in _built:
        try:
            _built[key] = _tried(driver, word, _build(driver, word))
        except Exception as error:
            _built[key] = one_line(error)
    found = _built[key]
    if isinstance(found, str):
        raise AbsentError(found)
    return found


_built: dict[tuple[int, int], Built | str] = {}


@functools.cache
def _driver() -> Driver:
    return Driver()


def _bytes(memset: Memset) -> int:
    return int(memset.width * memset.element_bytes * memset.height)


def _word(memset: Memset) -> int:
    return next(word for word in WORDS if memset.address % word == 0 and _bytes(memset) % word == 0)


def _exchange(driver: Driver, graph: int, old: int, launch: Launch) -> None:
    """Until the new node is linked it is taken out again; alone, it could clear what is written after it."""
    before, after = driver.before(old), driver.after(old)  # now: neighbours may have been exchanged
    new = driver.add(graph, before, launch)
    try:
        if after:
            driver.link(graph, new, after)
        driver.destroy(old)
    except DriverError:
        try:
            driver.destroy(new)
        except DriverError as error:
            raise BrokenError(f"a graph was left half changed: {one_line(error)}") from error
        raise


def _build(driver: Driver, word: int) -> Built:
    made = clear.built()[(1,)](_shown(WORDS[word], "cuda"), BLOCK, BLOCK=BLOCK, num_warps=WARPS)
    function, sizes = int(made.function), driver.parameters(made.function)
    if sizes[:2] != [8, 4] or any(size != 8 for size in sizes[2:]):
        raise RuntimeError(f"Triton's kernel has parameters of {sizes} bytes")
    about = made.metadata
    if getattr(about, "global_scratch_size", 0) or getattr(about, "profile_scratch_size", 0):
        raise RuntimeError("Triton's kernel needs memory of its own")
    if about.num_warps != WARPS:
        raise RuntimeError(f"Triton's kernel has {about.num_warps} warps")
    return Built(function, int(about.shared), len(sizes) - 2, made)


def _shown(dtype: torch.dtype, device: str) -> Tensor:
    """What Triton builds for: it assumes what it sees of an address, here no more alignment than a word's."""
    return torch.zeros(BLOCK + 1, dtype=dtype, device=device)[1:]


def _tried(driver: Driver, word: int, kernel: Built) -> Built:
    """The kernel, having cleared what it was to and nothing around it."""
    memory = torch.full((2 * BLOCK + 16,), 85, dtype=WORDS[word], device="cuda")
    first, count = 3, BLOCK + 5
    stream = torch.cuda.current_stream().cuda_stream
    driver.launch(kernel.launch(memory.data_ptr() + first * word, count), stream)
    expected = [85] * first + [0] * count + [85] * (memory.numel() - first - count)
    if memory.tolist() != expected:
        raise RuntimeError("the kernel that clears does not clear what it should")
    return kernel
