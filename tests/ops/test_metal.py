"""The Metal side of ops without a Mac: late compilation, errors, and that what is not refused is launched.

Numerics of the kernels are in tests/metal; here nothing is executed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from clearway.ops import _metal, _metal_launch, selftest, state
from clearway.ops._implementation import same_layout
from metal.fake_mps import FakeMps
from ops.registry import OPS, in_dtype, named, outputs, refused, small, with_implementation

OPS_WITH = with_implementation("metal")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMps]:
    """torch.mps.compile_shader records; CPU tensors stand for MPS ones."""
    device = FakeMps(execute=False)
    device.install(monkeypatch)
    _metal.library.cache_clear()
    yield device
    _metal.library.cache_clear()


@pytest.mark.parametrize("name", OPS_WITH)
def test_what_is_not_refused_is_launched_once(name: str, fake: FakeMps) -> None:
    op = OPS[name]
    implementation = named(op, "metal")
    text = (_metal.HERE / f"{name}.metal").read_text(encoding="ascii")
    taken = 0
    for case, given in small(op):
        for dtype in selftest.DTYPES:
            args = in_dtype(given, dtype)
            if refused(implementation, args) is not None:
                continue
            taken += 1
            before = len(fake.dispatches)
            found, expected = outputs(implementation.run(*args)), outputs(op.reference.run(*args))
            assert len(fake.dispatches) == before + 1, case
            assert fake.dispatches[-1].kernel.split("_half")[0].split("_float")[0].split("_bfloat")[0] == name
            for mine, like in zip(found, expected, strict=True):
                assert mine.shape == like.shape and mine.dtype == like.dtype, case
                assert same_layout(mine, like), case
    assert taken >= 3
    assert fake.sources == [text], "compiled once for all calls"


@pytest.mark.parametrize("name", OPS_WITH)
def test_real_shapes_are_taken(name: str, fake: FakeMps) -> None:
    """In float16, without storage: at least one large case is for the kernel."""
    op = OPS[name]
    implementation = named(op, "metal")
    taken = 0
    for _, given in op.cases():
        if callable(given):
            with torch.device("meta"):
                args = selftest.made(op, given)
            args = tuple(arg.half() if isinstance(arg, torch.Tensor) else arg for arg in args)
            if implementation.refuse(*args) is None:
                implementation.run(*args)
                taken += 1
    assert taken


@pytest.mark.parametrize("name", OPS_WITH)
def test_source_hash_covers_the_kernel(name: str) -> None:
    files = {path.name for path in named(OPS[name], "metal").sources}
    assert {f"{name}.metal", "_metal_launch.py"} <= files


def test_kernels_are_looked_up_once(fake: FakeMps) -> None:
    library = _metal.library("softmax")
    assert library is _metal.library("softmax")
    assert library.softmax_half_4 is library.softmax_half_4
    assert isinstance(library, _metal_launch.Kernels)


@pytest.mark.parametrize(
    "error", [SyntaxError("program_source:3:1: error:\n unknown type"), RuntimeError("no device")]
)
def test_what_metal_does_not_build_is_a_build_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str) -> None:
        raise error

    monkeypatch.setattr(torch.mps, "compile_shader", refuse)
    _metal.library.cache_clear()
    with pytest.raises(
        state.BuildError, match=r"Metal could not build softmax\.metal \(.*(unknown type|no device)"
    ):
        _metal.library("softmax")


def test_a_missing_source_is_a_build_error() -> None:
    with pytest.raises(state.BuildError, match=r"nothing\.metal could not be read"):
        _metal.library("nothing")


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has MPS")
def test_absent_is_a_sentence_elsewhere() -> None:
    _metal.absent.cache_clear()
    assert "MPS" in (_metal.absent() or "")
