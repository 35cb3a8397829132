"""What the key rules share."""

import torch

from clearway.models.keys import below, count, rename, swap, to_linear


def test_small_pieces() -> None:
    assert below({"a.b": (1,), "c": (2,)}, "a.") == {"b": (1,)}
    assert count({"x.0.y": (), "x.1.y": (), "x.3.y": ()}, "x.{}.y") == 2
    assert swap("a.1.b.weight", {"a.1": "z", "a": "y"}, 3) == ("z", "b.weight")
    assert swap("a.2.weight", {"a": "y"}, 3) == ("y", "2.weight")
    assert swap("weight", {"weight": "z"}, 3) is None
    assert rename("in.0.weight", {"in.0": "norm"}) == "norm.weight"
    assert rename("in.01.weight", {"in.0": "norm"}) == "in.01.weight"
    assert to_linear(torch.ones(3, 2, 1, 1)).shape == (3, 2)
