"""attention_gemm's host side: what it refuses, and how many rows of scores it makes at once."""

from __future__ import annotations

import pytest
import torch

from clearway.ops import _triton, attention_gemm
from clearway.ops.attention import attention, inputs


def test_scores_are_bounded_whatever_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors: shapes only. At most SCORES_BYTES at once, and every query row once."""
    launched: list[torch.Tensor] = []
    monkeypatch.setattr(
        _triton.Kernel, "launch", lambda self, grid, scores, *rest, **options: launched.append(scores)
    )
    for tokens in (64, 4096, 16384):
        launched.clear()
        with torch.device("meta"):
            given = tuple(
                arg.half() if isinstance(arg, torch.Tensor) else arg
                for arg in inputs(1, 1, tokens, tokens, 512)
            )
        out = attention_gemm.run(*given)
        assert out.shape == given[0].shape and out.stride() == torch.empty_like(given[0]).stride()
        assert sum(scores.shape[1] for scores in launched) == tokens
        assert all(scores.dtype == torch.float32 and scores.shape[2] == tokens for scores in launched)
        assert all(scores.nbytes <= attention_gemm.SCORES_BYTES for scores in launched)


def test_it_is_preferred_where_flash_refuses_the_head() -> None:
    def preferred(size: int) -> str | None:
        args = tuple(
            arg.half() if isinstance(arg, torch.Tensor) else arg for arg in inputs(1, 1, 64, 64, size)
        )
        return attention.defaults["cuda"](*args)

    assert preferred(512) == "gemm" and preferred(256) != "gemm"
