"""Kernels in Gluon: built without a GPU, and sentences about why a machine has none."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from clearway.ops import _gluon, _triton
from clearway.ops._described import Described
from clearway.ops._gluon import GluonKernel
from clearway.ops.geglu_linear import _product
from ops.test_triton import needs_triton


@needs_triton
def test_a_kernel_is_gluons_own_object_with_what_it_calls() -> None:
    made = _product.built()
    assert isinstance(_product, GluonKernel) and made.is_gluon() and made is _product.built()
    assert made.fn.__globals__["_gate"].is_gluon() and made.fn.__globals__["_fetch"].is_gluon()


@needs_triton
def test_described_arguments_become_descriptors() -> None:
    x = torch.zeros(4, 128, dtype=torch.float16)
    given = _product.prepared((Described(x, (2, 64)), x, 3))
    assert given[0].base is x and given[0].block_shape == [2, 64] and given[1] is x and given[2] == 3


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"interpret": True}, "does not interpret Gluon"),
        ({"triton": "triton is not installed (pip install triton)"}, "not installed"),
        ({"gluon": False}, "no Gluon"),
        ({"rocm": "6.4"}, "ROCm"),
        ({"devices": [(8, 9), (12, 0)]}, "for Hopper"),
        ({"devices": [(8, 9), (9, 0)]}, "cuda:0, where kernels are tested, has 8.9"),
        ({"devices": [(9, 0), (8, 9)]}, None),
    ],
)
def test_what_is_absent_is_a_sentence(
    found: dict[str, Any], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if "interpret" in found:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    devices = found.get("devices", [(9, 0)])
    monkeypatch.setattr(_triton, "absent", lambda: found.get("triton"))
    real = importlib.util.find_spec
    there = found.get("gluon", True)
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (object() if there else None) if "triton" in name else real(name),
    )
    monkeypatch.setattr(torch.version, "hip", found.get("rocm"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: devices[index])
    _gluon.absent.cache_clear()
    try:
        reason = _gluon.absent()
    finally:
        _gluon.absent.cache_clear()
    assert reason is None if words is None else words in str(reason)
