"""Transformer blocks that are put in place against their classes' own, at every branch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn

from clearway.models import _transformers
from clearway.models._bound import Bound
from models.test_fused_blocks import agree


def transformer(**options: Any) -> BasicTransformerBlock:
    torch.manual_seed(0)
    return BasicTransformerBlock(16, 2, 8, **({"cross_attention_dim": 12} | options)).eval()


TOKENS, CONTEXT = torch.randn(2, 7, 16), torch.randn(2, 5, 12)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cross_attention_dim": None},
        {"only_cross_attention": True},
        {"double_self_attention": True, "cross_attention_dim": None},
        {"norm_elementwise_affine": False, "activation_fn": "gelu"},
    ],
    ids=str,
)
def test_a_transformer_block(options: dict[str, Any]) -> None:
    block = transformer(**options)
    context = CONTEXT if block.attn2 is not None and not options.get("double_self_attention") else None
    agree(block, _transformers.transformer, TOKENS, encoder_hidden_states=context)


def test_a_transformer_block_that_is_handed_over() -> None:
    chunked = transformer()
    chunked.set_chunk_feed_forward(1, 0)
    agree(chunked, _transformers.transformer, TOKENS, None, CONTEXT, fused=False)
    placed = transformer(positional_embeddings="sinusoidal", num_positional_embeddings=16)
    agree(placed, _transformers.transformer, TOKENS, None, CONTEXT, fused=False)
    adaptive = transformer(norm_type="ada_norm", num_embeds_ada_norm=4)
    assert "ada_norm" in str(_transformers.refuse_transformer(adaptive))
    agree(adaptive, _transformers.transformer, TOKENS, None, CONTEXT, None, torch.tensor(2), fused=False)


def image(**options: Any) -> Transformer2DModel:
    torch.manual_seed(0)
    usual = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 16, "num_layers": 3}
    usual |= {"norm_num_groups": 4, "cross_attention_dim": 12}
    return Transformer2DModel(**(usual | options)).eval()


IMAGE = torch.randn(2, 16, 6, 5)


def placed(part: Transformer2DModel) -> Transformer2DModel:
    for block in part.transformer_blocks:
        block.forward = Bound(_transformers.transformer, block)
    return part


@pytest.mark.parametrize("pointwise", [False, True], ids=["modules", "products"])
@pytest.mark.parametrize("options", [{}, {"use_linear_projection": True}, {"num_layers": 1}], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_transformer_of_an_image(
    options: dict[str, Any], layout: torch.memory_format, pointwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`products`: 1x1 convolutions as on CUDA."""
    monkeypatch.setattr(_transformers, "_pointwise", lambda conv: pointwise and isinstance(conv, nn.Conv2d))
    x = IMAGE.to(memory_format=layout)
    agree(placed(image(**options)), _transformers.blocks_of_image, x, CONTEXT, return_dict=False)
    with torch.no_grad():
        found = _transformers.blocks_of_image(placed(image(**options)), x, encoder_hidden_states=CONTEXT)
        expected = image(**options)(x, CONTEXT, return_dict=False)[0]
    torch.testing.assert_close(found.sample, expected, rtol=1e-5, atol=1e-5)


def test_its_additions_are_inside_norms() -> None:
    """Three blocks of three norms: all but the very first add; what is left over is added once."""
    part, sums = placed(image()), list[bool]()
    layer_norm = _transformers.layer_norm
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():

        def watched(x: Any, residual: Any, *rest: Any) -> Any:
            sums.append(residual is not None)
            return layer_norm(x, residual, *rest)

        patch.setattr(_transformers, "layer_norm", watched)
        _transformers.blocks_of_image(part, IMAGE, CONTEXT)
    assert sums == [False] + [True] * 8


@pytest.mark.parametrize("change", ["hook", "bare", "replaced"])
def test_a_block_in_it_that_is_somebody_elses_is_called(change: str) -> None:
    part = placed(image())
    block = part.transformer_blocks[1]
    if change == "hook":
        block.register_forward_hook(lambda module, args, out: out * 2)
    elif change == "bare":
        del block.forward
    else:
        block.forward = lambda x, **_: x * 3
    agree(part, _transformers.blocks_of_image, IMAGE, CONTEXT, return_dict=False)


def test_a_transformer_of_an_image_that_is_handed_over() -> None:
    part = image()
    mask = torch.tensor([[1, 1, 1, 0, 0]] * 2)
    given = {"encoder_attention_mask": mask, "return_dict": False}
    agree(part, _transformers.blocks_of_image, IMAGE, CONTEXT, fused=False, **given)
    assert _transformers.refuse_image(SimpleNamespace(is_input_continuous=False)) is not None
    x = IMAGE.clone().requires_grad_()
    out = _transformers.blocks_of_image(placed(part), x, CONTEXT, return_dict=False)[0]
    assert out.requires_grad


def test_a_mask_of_three_axes_goes_along() -> None:
    bias = torch.zeros(2, 1, 5).masked_fill(torch.tensor([[[0, 0, 0, 1, 1]]] * 2, dtype=torch.bool), -1e4)
    given = {"encoder_attention_mask": bias, "return_dict": False}
    agree(placed(image()), _transformers.blocks_of_image, IMAGE, CONTEXT, **given)
