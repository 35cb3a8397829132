"""The frozen types that cross between rooms. No torch is imported here: tensors are named, not made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from clearway.result import Result


MIXED = "mixed"
"""The precision of a VAE whose decoder runs in half precision where that is measured to be safe and near."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes by part, as torch's own names ("float32", "float16", "bfloat16"); a VAE's may be "mixed".

    `sampling` is the dtype of the latents inside the loop; `tf32` lets CUDA matmuls and convolutions of
    float32 inputs use TF32. All of them can change a picture, so what is not plain float32 is recorded in it.
    """

    unet: str = "float32"
    text_encoder: str = "float32"
    vae: str = "float32"
    sampling: str = "float32"
    tf32: bool = False

    @property
    def vae_weights(self) -> str:
        """The dtype that a VAE's weights are read in: a mixed one's become half where that was measured."""
        return "float32" if self.vae == MIXED else self.vae


@dataclass(frozen=True, slots=True)
class Choices:
    """How a model's networks are run on this machine: the same arithmetic in another order or by other code.

    `executor` is "eager", "compiled", "cuda_graph" or, on the CPU, "flat" (recorded calls with packed
    weights); `layout` "contiguous" or "channels_last"; `rows` says whether guidance runs its halves "joined"
    as one batch or "separate". `ops` names the ops put in place of the networks' own layers; `routes` are
    (op, implementation) pairs fixed for every call; `packed_qkv` makes one projection of three.
    """

    executor: str = "eager"
    layout: str = "contiguous"
    rows: str = "joined"
    ops: tuple[str, ...] = ()
    routes: tuple[tuple[str, str], ...] = ()
    packed_qkv: bool = False


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a model's card or family says where a request is silent; sides in pixels."""

    width: int
    height: int
    steps: int
    cfg_scale: float
    sampler: str
    schedule: str = "Automatic"


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of text of one emphasis; `weight` 1.0 is plain. `is_break` marks BREAK, which ends a window."""

    text: str
    weight: float = 1.0
    is_break: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """The pieces used for denoiser calls up to and including number `until` (from 0; None: to the end)."""

    pieces: tuple[Piece, ...]
    until: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A parsed prompt: which text conditions which denoiser call."""

    positive: tuple[Span, ...]
    negative: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Embedding:
    """What the network reads: context (B, L, D); SDXL adds pooled (B, D) and size_ids (B, 6)."""

    context: Tensor
    pooled: Tensor | None = None
    size_ids: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Conditioning:
    """Embeddings over the denoiser calls of one generation: (until, embedding), the last until being None."""

    spans: tuple[tuple[int | None, Embedding], ...]

    def at(self, call: int) -> Embedding:
        """The embedding for denoiser call `call`, counted from 0."""
        for until, embedding in self.spans:
            if until is None or call <= until:
                return embedding
        return self.spans[-1][1]


class Denoiser(Protocol):
    """A network as x0 estimator: x (B, C, h, w) at noise level `sigma` -> denoised (B, C, h, w)."""

    def __call__(self, x: Tensor, sigma: float, embedding: Embedding) -> Tensor: ...


Denoise = Callable[["Tensor", float], "Tensor"]
"""(x (B, C, h, w), sigma) -> denoised (B, C, h, w): conditionings and scale already bound."""

Noise = Callable[[float, float], "Tensor"]
"""(sigma, sigma_next) -> N(0, 1) of the latents' shape."""


@dataclass(frozen=True, slots=True)
class StageDone:
    """A stage of a generation has ended; `seconds` is host time, on CUDA of issuing the stage alone."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class StepDone:
    """A sampling step has been issued: `step` of `steps`, from 1, within image group `group` of `groups`."""

    step: int
    steps: int
    sigma: float
    denoised: Tensor
    group: int = 1
    groups: int = 1


@dataclass(frozen=True, slots=True)
class PicturesDone:
    """A group of pictures is finished: `result` holds these alone, so that they can be saved at once."""

    result: Result


Event = StageDone | StepDone | PicturesDone
OnEvent = Callable[[Event], None]
"""Receives the events of a generation. Raising `errors.Cancelled` from a StepDone stops after that step."""
