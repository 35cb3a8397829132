"""Plan + text encoders -> Conditioning.

SD 1.x and 2.x: one encoder, its last (or, with clip skip N, N-th last) hidden state through the final norm.
SDXL: two encoders, the second last hidden state of each without norm, side by side; pooled from the second,
of the first window only; an empty negative prompt is all zeros. Windows of 77 are encoded one by one, all
prompts by one captured graph and each to the same bits whatever is encoded with it, and laid end to end.
Source: the WebUI 1.10 and, for SDXL, Podell et al. 2023, section 2.2 (size conditioning).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from clearway.conditioning.emphasis import original
from clearway.device import to_device
from clearway.errors import RequestError
from clearway.execution import Eager
from clearway.models.model import Model
from clearway.ops.attention_torch import WithoutCudnn
from clearway.prompt import Window, windows
from clearway.types import Conditioning, Embedding, Piece, Plan, Span

Runner = Callable[[Callable[..., Any], str], Callable[..., Any]]
"""(callable, part) -> an executor around it; see `execution.executor`."""


@torch.inference_mode()
def encode(
    plan: Plan,
    model: Model,
    *,
    width: int,
    height: int,
    clip_skip: int = 1,
    run: Runner = Eager,
) -> tuple[Conditioning, Conditioning]:
    """The (positive, negative) conditioning of a plan: contexts (1, 77·windows, D) on the model's device.

    `width` and `height` in pixels are what SDXL is told the size is; `clip_skip` counts from 1 (SD 1.x only).
    `run` makes the executors of "text_encoder" and "text_encoder_2". Nothing here waits for the device.
    Raises RequestError for a clip_skip beyond the encoder's layers.
    """
    encoders = [
        _Encoder(
            run(MethodType(read, module), f"text_encoder_{index + 1}" if index else "text_encoder"),
            tokenizer,
            _layer(module, model.family.name, clip_skip),
            model,
        )
        for index, (module, tokenizer) in enumerate(zip(model.text_encoders, model.tokenizers, strict=True))
    ]

    def side(spans: tuple[Span, ...], negative: bool) -> Conditioning:
        return Conditioning(
            tuple((span.until, embed(span.pieces, negative)) for span in spans),
        )

    def embed(pieces: tuple[Piece, ...], negative: bool) -> Embedding:
        dtype = model.dtype
        contexts = []
        pooled = None
        for encoder in encoders:
            context, pooled = encoder(pieces)
            contexts.append(context)
        longest = max(context.shape[1] for context in contexts)
        context = torch.cat([_padded(context, longest) for context in contexts], dim=-1).to(dtype)
        if model.family.name != "sdxl":
            return Embedding(context)
        assert pooled is not None
        pooled = pooled.to(dtype)
        if negative and all(not piece.text for piece in pieces):
            context, pooled = torch.zeros_like(context), torch.zeros_like(pooled)
        sizes = torch.tensor([[height, width, 0, 0, height, width]], dtype=dtype)
        return Embedding(context, pooled, to_device(sizes, model.device))

    return side(plan.positive, False), side(plan.negative, True)


@dataclass(frozen=True, slots=True)
class _Encoder:
    """One text encoder by its executor, with its tokenizer and the hidden state that its family reads."""

    run: Callable[..., Any]
    tokenizer: Any
    layer: dict[str, Any]
    model: Model

    def __call__(self, pieces: tuple[Piece, ...]) -> tuple[Tensor, Tensor | None]:
        """The context (1, 77·windows, D), and pooled (1, P) of the first window where it has a projection."""
        contexts = []
        pooled = None
        for window in windows(pieces, self.tokenizer.encode, self.tokenizer.comma):
            ids, weights = _with_ends(window, self.tokenizer)
            hidden, embedded = self.run(to_device(torch.tensor([ids]), self.model.device), **self.layer)
            if any(weight != 1.0 for weight in window.weights):
                hidden = original(hidden, to_device(torch.tensor([weights]), self.model.device))
            contexts.append(hidden)
            pooled = embedded if pooled is None else pooled
        return torch.cat(contexts, dim=1), pooled


def _with_ends(window: Window, tokenizer: Any) -> tuple[list[int], list[float]]:
    """77 ids with their weights: begin, the window, end, padding."""
    padding = 75 - len(window.tokens)
    ids = [tokenizer.bos, *window.tokens, tokenizer.eos, *([tokenizer.pad] * padding)]
    return ids, [1.0, *window.weights, *([1.0] * (1 + padding))]


def _layer(encoder: Any, family: str, clip_skip: int) -> dict[str, Any]:
    """Which hidden state a family reads, as `read`'s arguments."""
    if family == "sdxl":
        return {"last": 2, "normed": False}
    if family != "sd1":
        return {"last": 1, "normed": True}
    layers = encoder.config.num_hidden_layers
    if clip_skip > layers:
        raise RequestError(f"clip_skip {clip_skip} is out of range; this text encoder has {layers} layers")
    return {"last": clip_skip, "normed": True}


def read(encoder: Any, ids: Tensor, *, last: int, normed: bool) -> tuple[Tensor, Tensor | None]:
    """What is wanted of a text encoder's outputs, so that a captured graph keeps no more: hidden state number
    `last` from the end (1, L, D), through the final norm or not, and the projection (1, P) if it has one."""
    ends = last == 1 and normed
    with WithoutCudnn() if ids.is_cuda else nullcontext():
        output = encoder(ids) if ends else encoder(ids, output_hidden_states=True)
    if ends:
        return output.last_hidden_state, getattr(output, "text_embeds", None)
    hidden = output.hidden_states[-last]
    if normed:
        hidden = getattr(encoder, "text_model", encoder).final_layer_norm(hidden)
    return hidden, getattr(output, "text_embeds", None)


def _padded(context: Tensor, length: int) -> Tensor:
    """Repeats the last vector up to `length`; SDXL's two vocabularies are one, so this is a formality."""
    missing = length - context.shape[1]
    return torch.cat([context, context[:, -1:].expand(-1, missing, -1)], dim=1) if missing else context
