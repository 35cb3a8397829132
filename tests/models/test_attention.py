"""The processor against Diffusers' own: masks, images, kept keys and values, packed projections."""

import functools
import gc
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from clearway.models._attention import Processor, refuse, refuse_packed
from clearway.models._joined import unpack


def attention(context: int | None = None, **options: Any) -> Attention:
    torch.manual_seed(0)
    made = Attention(32, context, heads=4, dim_head=8, **options).eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.normal_(std=0.3)
    return made


def placed(attn: Attention, **options: Any) -> Processor:
    usual = {"kept": False, "promised": False, "packed": False}
    attn.processor = made = Processor(attn.processor, **(usual | options))
    return made


def agree(attn: Attention, *args: Any, **kwargs: Any) -> Tensor:
    """Ours and Diffusers' own give the same; gives it."""
    found = attn(*args, **kwargs)
    processor, attn.processor = attn.processor, attn.processor.stock
    expected = attn(*args, **kwargs)
    attn.processor = processor
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert found.stride() == expected.stride()
    return found


X, CONTEXT = torch.randn(2, 9, 32), torch.randn(2, 7, 24)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_self_attention(packed: bool, bias: bool) -> None:
    attn = attention(bias=bias)
    placed(attn, packed=packed)
    agree(attn, X)
    attn.to_k.weight.mul_(1.5)  # in place: the packed projection is the same memory
    agree(attn, X)
    attn.to_v.weight.data = attn.to_v.weight.data.clone() * 2  # replaced: it is packed again
    agree(attn, X)
    attn.double()
    agree(attn, X.double())
    before = [weight.clone() for weight in attn.parameters()]
    unpack([attn.to_q, attn.to_k, attn.to_v])
    assert all(torch.equal(one, other) for one, other in zip(attn.parameters(), before, strict=True))
    pointers = {weight.untyped_storage().data_ptr() for weight in attn.parameters()}
    assert len(pointers) == len(before)


def test_an_image_with_its_norm_and_residual() -> None:
    attn = attention(
        norm_num_groups=8, residual_connection=True, rescale_output_factor=2.0, bias=True, dropout=0.1
    )
    placed(attn)
    image = torch.randn(2, 32, 3, 5)
    agree(attn, image)
    torch.testing.assert_close(
        attn(image.to(memory_format=torch.channels_last)), attn(image), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("tokens", [None, 7])
def test_a_mask(tokens: int | None) -> None:
    attn = attention(24 if tokens else None)
    placed(attn, kept=True)
    mask = torch.zeros(2, 1, tokens or 9)
    mask[1, :, 4:] = -10000.0
    agree(attn, X, encoder_hidden_states=CONTEXT if tokens else None, attention_mask=mask)


def test_keys_and_values_of_a_context_are_made_once() -> None:
    attn = attention(24)
    made = placed(attn, kept=True)
    calls: list[int] = []
    forward = nn.Linear.forward

    @functools.wraps(forward)  # what is not PyTorch's is called each time
    def counted(layer: nn.Linear, x: Tensor) -> Tensor:
        calls.extend([1] if layer in (attn.to_k, attn.to_v) else [])
        return forward(layer, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "forward", counted)
        context = CONTEXT.clone()
        for _ in range(3):
            attn(X, encoder_hidden_states=context)
        assert len(calls) == 2
    agree(attn, torch.randn(2, 9, 32), encoder_hidden_states=context)
    context.mul_(2)
    agree(attn, X, encoder_hidden_states=context)
    attn.to_v.weight.mul_(2)
    agree(attn, X, encoder_hidden_states=context)
    assert made.kept is not None and len(made.kept) == 1
    del context
    gc.collect()
    assert len(made.kept) == 0


def test_under_inference_mode_it_is_made_anew_unless_promised() -> None:
    attn = attention(24)
    placed(attn, kept=True)
    with torch.inference_mode():
        context = CONTEXT.clone()
        agree(attn, X, encoder_hidden_states=context)
        context.mul_(2)
        agree(attn, X, encoder_hidden_states=context)


def test_a_context_that_learns_gets_its_gradient() -> None:
    """As in textual inversion: the network is frozen, and what was kept without a gradient has none."""
    attn = attention(24)
    placed(attn, kept=True)
    context = CONTEXT.clone().requires_grad_(True)
    with torch.no_grad():
        attn(X, encoder_hidden_states=context)
    gradients = []
    for _ in range(2):  # the second time from a graph of its own
        attn(X, encoder_hidden_states=context).square().sum().backward()
        gradients.append(context.grad.clone())
    torch.testing.assert_close(gradients[1], 2 * gradients[0])


def test_it_can_be_made_of_its_class_alone() -> None:
    """As Diffusers does where an IP-Adapter is loaded or taken away."""
    attn = attention()
    attn.processor = Processor()
    agree(attn, X)


def test_a_wrapped_projection_is_called_and_not_kept() -> None:
    class Wrapped(nn.Module):
        def __init__(self, base_layer: nn.Linear) -> None:
            super().__init__()
            self.base_layer, self.scale = base_layer, 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.base_layer(x) * self.scale

    attn = attention(24)
    made = placed(attn, kept=True, packed=True)
    agree(attn, X, encoder_hidden_states=CONTEXT)
    attn.to_k = wrapped = Wrapped(attn.to_k)
    wrapped.scale = 3.0
    agree(attn, X, encoder_hidden_states=CONTEXT)
    wrapped.base_layer.weight.data += 1  # as PEFT merges, and gives the layer back
    attn.to_k = wrapped.base_layer
    agree(attn, X, encoder_hidden_states=CONTEXT)
    alone = attention()
    placed(alone, packed=True)
    agree(alone, X)
    alone.to_q = Wrapped(alone.to_q)
    alone.to_q.scale = 2.0
    agree(alone, X)
    assert "wrapped" in str(refuse_packed(alone))
    unpack([alone.to_q, alone.to_k, alone.to_v])
    assert made.stock is not None


def test_what_it_does_not_compute_goes_to_the_stock_one() -> None:
    attn = attention(24, cross_attention_norm="layer_norm")
    placed(attn, kept=True)
    assert "norms its inputs" in str(refuse(attn))
    agree(attn, X, encoder_hidden_states=CONTEXT)
    normed = attention(qk_norm="layer_norm")
    assert "queries and keys" in str(refuse(normed))
    assert refuse_packed(attn) == "its keys come from elsewhere"
    training = attention().requires_grad_(True)
    placed(training, packed=True)
    training(X).sum().backward()
    assert training.to_q.weight.grad is not None
