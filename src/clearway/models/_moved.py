"""A module that rests in host memory and is on the device only while it works.

Moving in copies; moving out drops the copy, since nobody writes to weights while they are in. The host's copy
is pinned for CUDA and lies in few large pieces, so that a move is a few long transfers that the host does not
wait for. Tensors stay the same objects with the same dtypes, strides and shared memory; only where they lie
changes. What was changed between two moves (LoRA, another layout or dtype, weights joined) is found by its
tensors and their addresses, and is taken as it then is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearway.device import Device

PIECE_BYTES = 2**26  # pinned memory is rounded up to a power of two: pieces of one waste none of it
ALIGNMENT = 512  # what the device's allocator gives, and more than any dtype or kernel asks for


@dataclass(slots=True, eq=False)
class _Lying:
    """One tensor: in which piece it begins, at which of its elements, and its copy on the host."""

    tensor: Tensor
    piece: int
    offset: int
    host: Tensor
    address: int


class Moved:
    """`module` at rest on the host from now on, until it `enter`s; it is not kept alive by this."""

    def __init__(self, module: nn.Module, device: Device) -> None:
        self._module = weakref.ref(module)
        self._device = str(device)
        self._pinned = device.kind == "cuda"
        self._pieces: list[Tensor] = []
        self._inside: list[Tensor] = []
        self._lying: list[_Lying] = []
        self._take()

    @property
    def inside(self) -> bool:
        """Whether it is on the device."""
        return bool(self._inside)

    def bytes(self) -> int:
        """What moving it in transfers and takes."""
        return sum(piece.numel() for piece in self._pieces)

    def holds(self) -> bool:
        """Whether the module has the tensors it had, and each lies where it was put."""
        now = self._tensors()
        return len(now) == len(self._lying) and all(
            tensor is lying.tensor and tensor.data_ptr() == lying.address
            for tensor, lying in zip(now, self._lying, strict=True)
        )

    @torch.inference_mode(False)
    def enter(self) -> None:
        """Copies it to the device, on the current stream; without effect where it is there."""
        if not self.holds():
            self._take()
        if self._inside:
            return
        self._inside = [torch.empty_like(piece, device=self._device) for piece in self._pieces]
        for inside, piece in zip(self._inside, self._pieces, strict=True):
            inside.copy_(piece, non_blocking=True)
        for lying in self._lying:
            _point(lying, at(self._inside[lying.piece], lying.offset, lying.host))

    @torch.inference_mode(False)
    def leave(self) -> None:
        """Gives its memory on the device back; without effect where it rests."""
        if not self.holds():
            self._take()
        elif self._inside:
            self._rest(self._lying)

    def stay(self) -> None:
        """Moves it in for good: the device's copy is the only one from now on, and this is at an end."""
        self.enter()
        self._inside, self._pieces, self._lying = [], [], []

    def hosts(self) -> dict[int, Tensor]:
        """The host's copy of each tensor, by the tensor's id; of a module at rest."""
        return {id(lying.tensor): lying.host for lying in self._lying}

    @torch.inference_mode(False)
    def _take(self) -> None:
        """Puts the tensors as they are now to rest: those that lie where they were put by the copies there
        are, the others by new ones."""
        tensors = self._tensors()
        known = {id(lying.tensor): lying for lying in self._lying if lying.tensor.data_ptr() == lying.address}
        kept = {id(tensor): known[id(tensor)] for tensor in tensors if id(tensor) in known}
        used = sorted({lying.piece for lying in kept.values()})
        self._pieces = [self._pieces[piece] for piece in used]
        for lying in kept.values():
            lying.piece = used.index(lying.piece)
        self._rest(kept.values())
        found = kept | self._copied([tensor for tensor in tensors if id(tensor) not in kept])
        self._lying = [found[id(tensor)] for tensor in tensors]

    def _rest(self, lying: Iterable[_Lying]) -> None:
        for one in lying:
            _point(one, one.host)
        self._inside = []

    def _copied(self, tensors: list[Tensor]) -> dict[int, _Lying]:
        """Host's copies of tensors in pieces of their own, to which the tensors point from now on."""
        groups: dict[int, list[Tensor]] = {}  # by memory: parts of one tensor stay parts of one
        for tensor in tensors:
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        found: dict[int, _Lying] = {}
        for batch in _batches(list(groups.values())):
            begins, size = [], 0
            for group in batch:
                begins.append(size)
                size += -(-group[0].untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
            piece = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
            for begin, group in zip(begins, batch, strict=True):
                memory = group[0].untyped_storage()
                whole = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
                piece[begin : begin + memory.nbytes()].copy_(whole)
                del memory, whole
                for tensor in group:
                    offset = int(begin // tensor.element_size() + tensor.storage_offset())
                    lying = _Lying(tensor, len(self._pieces), offset, at(piece, offset, tensor), 0)
                    found[id(tensor)] = lying
                    _point(lying, lying.host)
            self._pieces.append(piece)
        return found

    def _tensors(self) -> list[Tensor]:
        module = self._module()
        if module is None:
            return []
        return list({id(one): one for one in (*module.parameters(), *module.buffers())}.values())


def _batches(groups: list[list[Tensor]]) -> list[list[list[Tensor]]]:
    """Groups of tensors, put together up to the size of a piece; a larger one stands alone."""
    batches: list[list[list[Tensor]]] = []
    filled = PIECE_BYTES
    for group in groups:
        size = -(-group[0].untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
        if filled + size > PIECE_BYTES:
            batches.append([])
            filled = 0
        batches[-1].append(group)
        filled += size
    return batches


def at(piece: Tensor, offset: int, like: Tensor) -> Tensor:
    """A tensor in `piece`, from element `offset`, that lies there as `like` does in its own memory."""
    with torch.inference_mode(like.is_inference()):  # a tensor can only be pointed to one of its kind
        empty = torch.empty(0, dtype=like.dtype, device=piece.device)
        return empty.set_(piece.untyped_storage(), offset, like.size(), like.stride())


def _point(lying: _Lying, there: Tensor) -> None:
    lying.tensor.data = there
    lying.address = there.data_ptr()
