"""Conditioning over denoiser calls."""

import torch

from clearway.types import Conditioning, Embedding


def embedding(value: float) -> Embedding:
    return Embedding(torch.full((1, 77, 4), value))


def test_an_entry_holds_up_to_and_including_its_call() -> None:
    first, second = embedding(1), embedding(2)
    conditioning = Conditioning(((5, first), (None, second)))
    assert [conditioning.at(call) is first for call in (0, 5, 6, 100)] == [True, True, False, False]


def test_the_last_entry_holds_beyond_its_call() -> None:
    only = embedding(1)
    assert Conditioning(((3, only),)).at(9) is only
