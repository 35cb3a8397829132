"""Weights of several layers as one: the memory is shared, copies and moves part them again."""

import copy

import torch
from torch import nn

from clearway.models._joined import Joined, alike, ordinary, unpack


def layers() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(6, width) for width in (3, 5, 2)]


def test_the_parts_are_views_of_the_whole() -> None:
    made = layers()
    weights = [layer.weight for layer in made]
    before = [weight.detach().clone() for weight in weights]
    joined = Joined()
    whole = joined.get(weights)
    torch.testing.assert_close(whole, torch.cat(before))
    with torch.no_grad():
        made[1].weight.fill_(7.0)
    assert joined.get(weights) is whole and bool((whole[3:8] == 7.0).all())


def test_it_is_made_anew_where_a_part_lies_elsewhere() -> None:
    made = layers()
    weights = [layer.weight for layer in made]
    joined = Joined()
    whole = joined.get(weights)
    made[2].weight.data = torch.ones(2, 6)
    again = joined.get(weights)
    assert again is not whole and bool((again[8:] == 1.0).all())
    assert joined.get(weights[:2]) is not again
    for layer in made:
        layer.to(torch.float64)
    assert joined.get(weights).dtype == torch.float64


def test_a_copy_starts_without() -> None:
    made = layers()
    joined = Joined()
    whole = joined.get([layer.weight for layer in made])
    other, theirs = copy.deepcopy((joined, made))
    again = other.get([layer.weight for layer in theirs])
    assert again is not whole and again.data_ptr() != whole.data_ptr()
    assert made[0].weight.data_ptr() == whole.data_ptr()


def test_unpacked_parts_have_memory_of_their_own() -> None:
    made = layers()
    whole = Joined().get([layer.weight for layer in made])
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
