"""Plan + text encoders -> Conditioning.

SD 1.x and 2.x: one encoder, its last (or, with clip skip N, N-th last) hidden state through the final norm.
SDXL: two encoders, the second last hidden state of each without norm, side by side; pooled from the second,
of the first window only; an empty negative prompt is all zeros. Windows of 77 are encoded one by one and laid
end to end. Source: the WebUI 1.10 and, for SDXL, Podell et al. 2023, section 2.2 (size conditioning).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from clearway.conditioning.emphasis import original
from clearway.errors import RequestError
from clearway.execution import Eager
from clearway.models.model import Model
from clearway.prompt import Window, windows
from clearway.types import Conditioning, Embedding, Piece, Plan, Span


@torch.inference_mode()
def encode(
    plan: Plan,
    model: Model,
    *,
    width: int,
    height: int,
    clip_skip: int = 1,
    routes: Counter[str] | None = None,
) -> tuple[Conditioning, Conditioning]:
    """The (positive, negative) conditioning of a plan: contexts (1, 77·windows, D) on the model's device.

    `width` and `height` in pixels are what SDXL is told the size is; `clip_skip` counts from 1 (SD 1.x only).
    Raises RequestError for a clip_skip beyond the encoder's layers.
    """
    counted = Counter[str]() if routes is None else routes
    encoders = [
        Eager(module, f"text_encoder_{index + 1}" if index else "text_encoder", counted)
        for index, module in enumerate(model.text_encoders)
    ]

    def side(spans: tuple[Span, ...], negative: bool) -> Conditioning:
        return Conditioning(
            tuple((span.until, embed(span.pieces, negative)) for span in spans),
        )

    def embed(pieces: tuple[Piece, ...], negative: bool) -> Embedding:
        dtype = model.unet.dtype
        contexts = []
        pooled = None
        for encoder, tokenizer in zip(encoders, model.tokenizers, strict=True):
            context, pooled = _encode(encoder, tokenizer, pieces, model, clip_skip)
            contexts.append(context)
        longest = max(context.shape[1] for context in contexts)
        context = torch.cat([_padded(context, longest) for context in contexts], dim=-1).to(dtype)
        if model.family.name != "sdxl":
            return Embedding(context)
        assert pooled is not None
        pooled = pooled.to(dtype)
        if negative and all(not piece.text for piece in pieces):
            context, pooled = torch.zeros_like(context), torch.zeros_like(pooled)
        sizes = [height, width, 0, 0, height, width]
        return Embedding(context, pooled, torch.tensor([sizes], dtype=dtype, device=str(model.device)))

    return side(plan.positive, False), side(plan.negative, True)


def _encode(
    encoder: Eager, tokenizer: Any, pieces: tuple[Piece, ...], model: Model, clip_skip: int
) -> tuple[Tensor, Tensor | None]:
    """One encoder's context (1, 77·windows, D), and pooled (1, P) where it has a projection."""
    contexts = []
    pooled = None
    for window in windows(pieces, tokenizer.encode, tokenizer.comma):
        ids, weights = _with_ends(window, tokenizer)
        output = encoder(torch.tensor([ids], device=str(model.device)), output_hidden_states=True)
        hidden = _hidden(output, encoder.module, model.family.name, clip_skip)
        if any(weight != 1.0 for weight in window.weights):
            hidden = original(hidden, torch.tensor([weights], device=hidden.device))
        contexts.append(hidden)
        if pooled is None:
            pooled = getattr(output, "text_embeds", None)
    return torch.cat(contexts, dim=1), pooled


def _with_ends(window: Window, tokenizer: Any) -> tuple[list[int], list[float]]:
    """77 ids with their weights: begin, the window, end, padding."""
    padding = 75 - len(window.tokens)
    ids = [tokenizer.bos, *window.tokens, tokenizer.eos, *([tokenizer.pad] * padding)]
    return ids, [1.0, *window.weights, *([1.0] * (1 + padding))]


def _hidden(output: Any, encoder: Any, family: str, clip_skip: int) -> Tensor:
    hidden: Tensor
    if family == "sdxl":
        hidden = output.hidden_states[-2]
    elif family == "sd1" and clip_skip > 1:
        layers = len(output.hidden_states) - 1
        if clip_skip > layers:
            raise RequestError(
                f"clip_skip {clip_skip} is out of range; this text encoder has {layers} layers"
            )
        chosen = output.hidden_states[-clip_skip]
        hidden = getattr(encoder, "text_model", encoder).final_layer_norm(chosen)
    else:
        hidden = output.last_hidden_state
    return hidden


def _padded(context: Tensor, length: int) -> Tensor:
    """Repeats the last vector up to `length`; SDXL's two vocabularies are one, so this is a formality."""
    missing = length - context.shape[1]
    return torch.cat([context, context[:, -1:].expand(-1, missing, -1)], dim=1) if missing else context
