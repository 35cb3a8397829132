"""Weights of several layers as one: the memory is shared, copies and moves part them again."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from clearway.models._joined import alike, joined, ordinary, unpack


def layers() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(6, width) for width in (3, 5, 2)]


def test_the_parts_are_views_of_the_whole() -> None:
    made = layers()
    weights = [layer.weight for layer in made]
    before = [weight.detach().clone() for weight in weights]
    whole = joined(weights)
    torch.testing.assert_close(whole, torch.cat(before))
    with torch.no_grad():
        made[1].weight.fill_(7.0)
    again = joined(weights)
    assert again.data_ptr() == whole.data_ptr() and bool((again[3:8] == 7.0).all())
    biases = joined([layer.bias for layer in made])
    torch.testing.assert_close(biases, torch.cat([layer.bias for layer in made]))


def test_it_is_made_anew_where_a_part_lies_elsewhere() -> None:
    made = layers()
    weights = [layer.weight for layer in made]
    whole = joined(weights)
    made[2].weight.data = torch.ones(2, 6)
    again = joined(weights)
    assert again.data_ptr() != whole.data_ptr() and bool((again[8:] == 1.0).all())
    assert len(joined(weights[:2])) == 8
    for layer in made:
        layer.to(torch.float64)
    assert joined(weights).dtype == torch.float64


def test_nothing_holds_it_but_its_parts() -> None:
    """So that weights that are moved away free their memory."""
    made = layers()
    gone = weakref.ref(joined([layer.weight for layer in made]).untyped_storage())
    for layer in made:
        layer.weight.data = layer.weight.data.clone()
    gc.collect()
    assert gone() is None


def test_a_copy_is_parted() -> None:
    made = layers()
    whole = joined([layer.weight for layer in made])
    theirs = copy.deepcopy(made)
    again = joined([layer.weight for layer in theirs])
    assert again.data_ptr() != whole.data_ptr()
    assert made[0].weight.data_ptr() == whole.data_ptr()


def test_unpacked_parts_have_memory_of_their_own() -> None:
    made = layers()
    whole = joined([layer.weight for layer in made])
    unpack(made)
    assert all(layer.weight.untyped_storage().nbytes() == layer.weight.nbytes for layer in made)
    torch.testing.assert_close(torch.cat([layer.weight.detach() for layer in made]), whole)


def test_what_goes_together() -> None:
    made = layers()
    assert all(map(ordinary, made)) and alike(made)
    assert not alike([*made, nn.Linear(7, 2)]) and not alike([*made, nn.Linear(6, 2, bias=False)])
    assert not alike([*made, nn.Linear(6, 2).double()])
    made[0].register_forward_hook(lambda module, args, out: out)
    assert not ordinary(made[0])


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_weights_made_under_inference_mode_stay_of_that_kind(mode: Any) -> None:
    """With other memory a convolution or linear layer of theirs may not run any more."""
    with torch.inference_mode():
        made = layers()
    assert alike(made) and not alike([*made, nn.Linear(6, 2)])
    with mode():
        whole = joined([layer.weight for layer in made])
        assert whole.is_inference()
        torch.testing.assert_close(made[1](torch.ones(6)), whole[3:8].sum(1) + made[1].bias)
        unpack(made)
        made[1](torch.ones(6))
    assert all(layer.weight.is_inference() for layer in made)
