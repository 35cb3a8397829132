"""A network whose blocks come to the device one at a time, each while the one before it computes.

The blocks of a UNet (its residual blocks, transformer blocks and samplers) take turns in a few buffers of the
device; what is left of it, and as many first blocks as there is room for, is on the device throughout. The
first call learns the order in which blocks run and fetches each as it begins; from the second call on the
next one is fetched meanwhile, on a stream of its own. A block that comes out of turn is fetched as it begins.
Between its turns a block's tensors are the host's, so that whoever reads them then meets an error and never
another block's numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from clearway.device import Device
from clearway.models._moved import ALIGNMENT, Moved, at

BLOCKS = ("ResnetBlock2D", "BasicTransformerBlock", "Downsample2D", "Upsample2D")
ALWAYS_IN = "time_emb_proj"  # read by one block for all of them
SMALL_BYTES = 2**16  # biases and norms, hardly any memory and each a transfer, are always in too
BUFFERS = 3  # two take turns; the third is for the last of an odd number, whose next is the first


class Lane(Protocol):
    """Where copies run beside the computation."""

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> Any:
        """Starts copying (to, from) pairs after what was asked of the device so far; a token to wait for."""

    def wait(self, token: Any) -> None:
        """What is asked of the device from now on comes after that copy."""

    def finish(self) -> None:
        """What is asked of the device from now on comes after every copy: buffers may go."""


class SideStream:
    """CUDA's: a stream of its own."""

    def __init__(self, device: str) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> Any:
        """Starts copying on the side stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            _copy(pairs, True)
        return self._stream.record_event()

    def wait(self, token: Any) -> None:
        """The current stream waits."""
        torch.cuda.current_stream(self._stream.device).wait_event(token)

    def finish(self) -> None:
        """The current stream waits for all of it."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class AtOnce:
    """Devices without streams: copies are done when they are asked for."""

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> Any:
        """Copies."""
        _copy(pairs, False)

    def wait(self, token: Any) -> None:
        """Nothing is under way."""

    def finish(self) -> None:
        """Nothing is under way."""


@torch.inference_mode()  # where tensors of inference mode can be written to as well
def _copy(pairs: list[tuple[Tensor, Tensor]], non_blocking: bool) -> None:
    for inside, host in pairs:
        inside.copy_(host, non_blocking=non_blocking)


@dataclass(slots=True, eq=False)
class _Block:
    tensors: list[Tensor]
    hosts: list[Tensor]
    buffer: int = -1
    inside: list[Tensor] = field(default_factory=list)


def blocks(network: nn.Module) -> list[nn.Module]:
    """The blocks that can take turns, by the order of the modules; none lies within another."""
    found: list[nn.Module] = []
    within: set[int] = set()
    for module in network.modules():
        if type(module).__name__ in BLOCKS and id(module) not in within:
            within |= {id(inner) for inner in module.modules()}
            found.append(module)
    return found


def block_bytes(network: nn.Module) -> list[int]:
    """The bytes that each block's turn moves."""
    return [sum(_room(tensor) for tensor in _own(block)) for block in blocks(network)]


@contextmanager
def streamed(network: nn.Module, moved: Moved, device: Device, keep_bytes: int = 0) -> Iterator[Streams]:
    """Within it `network`, which rests on the host as `moved`, runs on `device` with its blocks in turns.

    `keep_bytes` of blocks, the first ones, are on the device throughout.
    """
    streams = Streams(network, moved.hosts(), device, keep_bytes)
    try:
        yield streams
    finally:
        streams.end()


class Streams:
    """The buffers, and the hooks that see to it that each block is in one when it runs.

    `fetched` counts the copies of blocks, `early` those that were under way before their block began.
    """

    @torch.inference_mode(False)
    def __init__(
        self, network: nn.Module, hosts: dict[int, Tensor], device: Device, keep_bytes: int = 0
    ) -> None:
        self.fetched = self.early = 0
        self._lane: Lane = SideStream(str(device)) if device.kind == "cuda" else AtOnce()
        self._blocks: dict[int, _Block] = {}
        self._order: list[_Block] = []
        self._learning = True
        self._hooks: list[Any] = []
        self._back: list[tuple[Tensor, Tensor]] = []
        turns: set[int] = set()
        for module in blocks(network):
            own = _own(module)
            size = sum(map(_room, own))
            if size <= keep_bytes:
                keep_bytes -= size
                continue
            keep_bytes = 0
            block = _Block(own, [hosts[id(tensor)] for tensor in own])
            turns |= {id(tensor) for tensor in own}
            self._blocks[id(module)] = block
            self._hooks.append(module.register_forward_pre_hook(self._arrive))
            self._hooks.append(module.register_forward_hook(self._depart))
        every = {id(one): one for one in (*network.parameters(), *network.buffers())}
        for key, tensor in every.items():
            self._back.append((tensor, hosts[key]))
            if key not in turns:
                tensor.data = _copied(hosts[key], device)
        largest = max((sum(map(_room, block.tensors)) for block in self._blocks.values()), default=0)
        self._buffers = [
            torch.empty(largest, dtype=torch.uint8, device=str(device))
            for _ in range(min(BUFFERS, len(self._blocks)))
        ]
        self._held: list[tuple[_Block, Any] | None] = [None] * len(self._buffers)

    @torch.inference_mode(False)
    def end(self) -> None:
        """Takes the hooks away and points every tensor to the host again."""
        for hook in self._hooks:
            hook.remove()
        self._lane.finish()  # the next call's first block may be on its way
        for tensor, host in self._back:
            tensor.data = host
        self._buffers, self._held, self._blocks, self._order = [], [], {}, []

    @torch.inference_mode(False)
    def _arrive(self, module: nn.Module, args: Any) -> None:
        block = self._blocks[id(module)]
        if self._learning and block in self._order:  # the second call has begun
            self._learning = False
            self._held = [None] * len(self._buffers)
            for place, one in enumerate(self._order):
                last = place == len(self._order) - 1 and place % 2 == 0 and place > 0
                self._settle(one, 2 if last else place % 2)
        if self._learning:
            self._settle(block, len(self._order) % 2 if len(self._buffers) > 1 else 0)
            self._order.append(block)
        elif block.buffer < 0:  # one that the first call left out
            self._settle(block, 0)
        held = self._held[block.buffer]
        if held is None or held[0] is not block:
            held = self._fetch(block)
        else:
            self.early += 1
        self._lane.wait(held[1])
        for tensor, inside in zip(block.tensors, block.inside, strict=True):
            tensor.data = inside
        if not self._learning and block in self._order and len(self._order) > 1:
            following = self._order[(self._order.index(block) + 1) % len(self._order)]
            there = self._held[following.buffer]
            if following.buffer != block.buffer and (there is None or there[0] is not following):
                self._fetch(following)

    @torch.inference_mode(False)
    def _depart(self, module: nn.Module, args: Any, output: Any) -> None:
        block = self._blocks[id(module)]
        for tensor, host in zip(block.tensors, block.hosts, strict=True):
            tensor.data = host

    def _settle(self, block: _Block, buffer: int) -> None:
        """Gives a block its buffer, where it lies at each of its turns."""
        if block.buffer == buffer:
            return
        block.buffer, block.inside, begin = buffer, [], 0
        for tensor in block.hosts:
            block.inside.append(at(self._buffers[buffer], begin // tensor.element_size(), tensor))
            begin += _room(tensor)

    def _fetch(self, block: _Block) -> tuple[_Block, Any]:
        token = self._lane.copy(list(zip(block.inside, block.hosts, strict=True)))
        self._held[block.buffer] = block, token
        self.fetched += 1
        return block, token


def _own(module: nn.Module) -> list[Tensor]:
    """A block's tensors, but for those that are always in."""
    named: Iterable[tuple[str, Tensor]] = (*module.named_parameters(), *module.named_buffers())
    return [tensor for name, tensor in named if ALWAYS_IN not in name and tensor.nbytes >= SMALL_BYTES]


def _copied(host: Tensor, device: Device) -> Tensor:
    with torch.inference_mode(host.is_inference()):
        inside = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=str(device))
        return inside.copy_(host, non_blocking=True)


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
