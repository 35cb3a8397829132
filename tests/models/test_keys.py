"""What the key rules share."""

import pytest
import torch

from clearway.models.keys import below, count, dims, has, inverse, rename, swap, to_linear


def test_small_pieces() -> None:
    assert below({"a.b": (1,), "c": (2,)}, "a.") == {"b": (1,)}
    assert has({"a.b": ()}, "a.") and not has({"a.b": ()}, "b")
    assert inverse({"a": "b"}) == {"b": "a"}
    assert swap("a.1.b.weight", {"a.1": "z", "a": "y"}, 3) == ("z", "b.weight")
    assert swap("a.2.weight", {"a": "y"}, 3) == ("y", "2.weight")
    assert swap("weight", {"weight": "z"}, 3) is None
    assert rename("in.0.weight", {"in.0": "norm"}) == "norm.weight"
    assert rename("in.01.weight", {"in.0": "norm"}) == "in.01.weight"


def test_blocks_are_counted_by_any_of_their_tensors() -> None:
    assert count({"x.0.y": (), "x.1.z": (), "x.2.y.1": (), "x.y": (), "z.3.y": ()}, "x.") == 3
    assert count({}, "x.") == 0
    assert count({"x.0.y": (), "x.01.y": (), "x.99999999999.y": (), "x.²": ()}, "x.") == 1


@pytest.mark.parametrize(("names", "gap"), [(["x.0.y", "x.1.y", "x.3.y"], "x.2"), (["x.999999.y"], "x.0")])
def test_a_block_between_others_is_missed(names: list[str], gap: str) -> None:
    with pytest.raises(KeyError, match=gap.replace(".", r"\.")):
        count(dict.fromkeys(names, ()), "x.")


def test_dims() -> None:
    shapes = {"a": (1, 2)}
    assert dims(shapes, "a", 2, 4) == (1, 2)
    with pytest.raises(IndexError, match="a"):
        dims(shapes, "a", 4)
    with pytest.raises(KeyError, match="b"):
        dims(shapes, "b", 2)


def test_what_cannot_be_turned_stays_as_it_is() -> None:
    assert to_linear(torch.ones(3, 2, 1, 1)).shape == (3, 2)
    for shape in ((), (3,), (3, 2), (3, 2, 3, 3)):
        assert to_linear(torch.ones(shape)).shape == shape
