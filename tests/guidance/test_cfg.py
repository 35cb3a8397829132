"""Guidance over a denoiser that is a formula: denoised = x * mean(context row)."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from clearway.guidance import Guided, below
from clearway.types import Conditioning, Embedding


@dataclass
class Network:
    rows: list[int] = field(default_factory=list)

    def __call__(self, x: Tensor, sigma: float, embedding: Embedding) -> Tensor:
        self.rows.append(x.shape[0])
        assert embedding.context.shape[0] == x.shape[0]
        if embedding.pooled is not None:
            assert embedding.pooled.shape[0] == x.shape[0]
        return x * embedding.context.mean(dim=(1, 2))[:, None, None, None]


def conditioning(value: float, windows: int = 1, pooled: bool = False) -> Conditioning:
    extra = torch.ones(1, 3) if pooled else None
    return Conditioning(((None, Embedding(torch.full((1, 77 * windows, 4), value), extra, extra)),))


X = torch.randn(3, 4, 2, 2, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rows", ["joined", "separate"])
@pytest.mark.parametrize("windows", [1, 2])
@pytest.mark.parametrize("pooled", [False, True])
def test_the_formula_whether_batched_or_not(windows: int, pooled: bool, rows: str) -> None:
    network = Network()
    cond, uncond = conditioning(2.0, windows, pooled), conditioning(0.5, 1, pooled)
    guided = Guided(network, cond, uncond, 3.0, rows=rows)
    torch.testing.assert_close(guided(X, 1.0), X * (0.5 + 3.0 * (2.0 - 0.5)))
    assert network.rows == ([6] if windows == 1 and rows == "joined" else [3, 3])


def test_scale_one_needs_no_uncond() -> None:
    network = Network()
    guided = Guided(network, conditioning(2.0), conditioning(0.5), 1.0)
    torch.testing.assert_close(guided(X, 1.0), X * 2.0)
    assert network.rows == [3]
    assert guided.skipped == 0  # the arithmetic is the same: nothing was left out


def test_skipped_rows_are_not_computed() -> None:
    network = Network()
    guided = Guided(network, conditioning(2.0), conditioning(0.5), 3.0, below(1.0))
    outputs = [guided(X, sigma) for sigma in (5.0, 5.0, 0.5, 0.5)]
    assert network.rows == [6, 6, 6, 3]
    assert (guided.calls, guided.skipped) == (4, 1)
    torch.testing.assert_close(outputs[-1], X * 2.0)


def test_conditionings_are_timed_by_calls() -> None:
    timed = Conditioning(((0, conditioning(1.0).at(0)), (None, conditioning(4.0).at(0))))
    guided = Guided(Network(), timed, conditioning(0.0), 1.0)
    torch.testing.assert_close(guided(X, 1.0), X)
    torch.testing.assert_close(guided(X, 1.0), X * 4.0)


def test_batches_of_embeddings_are_made_once() -> None:
    seen: list[int] = []

    def network(x: Tensor, sigma: float, embedding: Embedding) -> Tensor:
        seen.append(embedding.context.data_ptr())
        return x

    guided = Guided(network, conditioning(2.0), conditioning(0.5), 3.0)
    guided(X, 1.0)
    guided(X, 0.5)
    assert seen[0] == seen[1]
