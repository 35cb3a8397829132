"""Blocks of the way up that are put in place against their classes' own."""

from typing import Any

import pytest
import torch
from diffusers.models.unets.unet_2d_blocks import CrossAttnUpBlock2D, UpBlock2D

from clearway.models import _up_blocks
from models.test_fused_blocks import agree

X, TEMB, CONTEXT = torch.randn(2, 16, 6, 4), torch.randn(2, 12), torch.randn(2, 5, 12)
SKIPS = (torch.randn(2, 3, 6, 4), torch.randn(2, 8, 6, 4), torch.randn(2, 16, 6, 4))
"""One more than the blocks take: the last ones are theirs."""
SIZES = {"in_channels": 8, "prev_output_channel": 16, "out_channels": 16, "temb_channels": 12}
SIZES |= {"num_layers": 2, "resnet_groups": 4}


def plain(**options: Any) -> UpBlock2D:
    torch.manual_seed(0)
    return UpBlock2D(**(SIZES | options)).eval()


def with_attention(**options: Any) -> CrossAttnUpBlock2D:
    torch.manual_seed(0)
    usual = SIZES | {"num_attention_heads": 2, "cross_attention_dim": 12}
    return CrossAttnUpBlock2D(**(usual | options)).eval()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [None, (13, 9)])
def test_they_give_the_same(layout: torch.memory_format, size: tuple[int, int] | None) -> None:
    x, skips = X.to(memory_format=layout), tuple(skip.to(memory_format=layout) for skip in SKIPS)
    agree(plain(), _up_blocks.plain_up, x, skips, TEMB, size)
    agree(plain(add_upsample=False), _up_blocks.plain_up, x, skips, TEMB)
    agree(with_attention(), _up_blocks.attention_up, x, skips, TEMB, CONTEXT, upsample_size=size)
    agree(with_attention(add_upsample=False), _up_blocks.attention_up, x, skips, TEMB, CONTEXT, {})


def test_a_mask_goes_along() -> None:
    bias = torch.zeros(2, 1, 5).masked_fill(torch.tensor([[[0, 0, 1, 1, 1]]] * 2, dtype=torch.bool), -1e4)
    given = {"encoder_hidden_states": CONTEXT, "encoder_attention_mask": bias}
    agree(with_attention(), _up_blocks.attention_up, X, SKIPS, TEMB, **given)


def test_free_u_and_gradients_are_handed_over() -> None:
    for block, run, more in (
        (plain(resolution_idx=0), _up_blocks.plain_up, {}),
        (with_attention(resolution_idx=0), _up_blocks.attention_up, {"encoder_hidden_states": CONTEXT}),
    ):
        x = X.clone().requires_grad_()
        assert run(block, x, SKIPS, TEMB, **more).requires_grad
        block.s1, block.s2, block.b1, block.b2 = 0.9, 0.2, 1.2, 1.4
        with torch.no_grad():  # it writes into its input
            expected, found = (
                block(X.clone(), SKIPS, TEMB, **more),
                run(block, X.clone(), SKIPS, TEMB, **more),
            )
        assert torch.equal(found, expected)
