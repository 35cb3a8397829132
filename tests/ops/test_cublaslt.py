"""cuBLASLt's binding: what it asks of the library, which is emulated here, and how it is found."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import evidence
from clearway.ops import _cublaslt
from clearway.ops._cublaslt import Choice, CublasLt, Failed, Library, Shape
from clearway.ops.linear import inputs
from ops.emulated_cublaslt import INVALID, NOT_SUPPORTED, Emulated


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Emulated:
    made = Emulated()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    return made


@pytest.fixture
def cublas(emulated: Emulated) -> CublasLt:
    return CublasLt(Library("emulated"))


def product(rows: int, outputs: int, width: int, bias: bool, dtype: torch.dtype) -> tuple[Shape, Any]:
    args = tuple(None if arg is None else arg.to(dtype) for arg in inputs(width, outputs, rows, bias=bias))
    return Shape(0, dtype, rows, outputs, width, bias), args


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_the_linear_layer(
    emulated: Emulated, cublas: CublasLt, dtype: torch.dtype, bias: bool
) -> None:
    shape, args = product(5, 24, 16, bias, dtype)
    for choice in cublas.choices(shape, 8):
        out = cublas.run(shape, choice, *args)
        exact = F.linear(*(None if arg is None else arg.double() for arg in args))
        torch.testing.assert_close(out, exact.to(dtype))
        assert out.shape == (5, 24) and out.is_contiguous()
    assert [one["algorithm"] for one in emulated.ran] == [1, 2]
    (none, nothing), (somewhere, some) = (one["workspace"] for one in emulated.ran)
    assert (none, nothing) == (None, 0) and somewhere and some == 64
    assert {(one["stream"], one["compute"], one["scale"]) for one in emulated.ran} == {(7, 68, 0)}
    evidence.note("linear", "cublaslt", "emulated", "CPU")


def test_the_bias_is_that_of_the_call(cublas: CublasLt) -> None:
    shape, (x, weight, bias) = product(3, 8, 8, True, torch.float16)
    choice = cublas.choices(shape, 1)[0]
    first, second = cublas.run(shape, choice, x, weight, bias), cublas.run(shape, choice, x, weight, -bias)
    torch.testing.assert_close(first - second, (2 * bias).expand(3, 8), atol=4e-3, rtol=0)


def test_choices_are_asked_for_by_what_holds_for_every_address(emulated: Emulated, cublas: CublasLt) -> None:
    shape, _ = product(5, 24, 16, True, torch.float16)
    emulated.found = ((1, 0, 0), (2, 64, INVALID), (3, 0, 0))
    found = cublas.choices(shape, 12)
    assert [(one.number, one.algorithm[0], one.workspace) for one in found] == [(0, 1, 0), (2, 3, 0)]
    assert all(len(one.algorithm) == 64 for one in found) and found[0].waves == 0.5
    assert [one.number for one in cublas.choices(shape, 1)] == [0]
    asked = emulated.asked[0]
    assert asked[1] == _cublaslt.WORKSPACE_BYTES and asked[3] == 2  # sums in float32 alone
    assert [asked[attribute] for attribute in (5, 6, 7, 8)] == [16] * 4 and asked["bias"] == 16
    assert all(one["destroyed"] for one in emulated.made if 5 in one)
    emulated.found = ()
    assert cublas.choices(shape, 12) == []
    emulated.status = NOT_SUPPORTED
    assert cublas.choices(shape, 12) == []


def test_a_shape_is_described_once(emulated: Emulated, cublas: CublasLt) -> None:
    shape, args = product(4, 8, 16, False, torch.float16)
    choice = cublas.choices(shape, 1)[0]
    cublas.run(shape, choice, *args)
    made = len(emulated.made)
    cublas.run(shape, choice, *args)
    assert len(emulated.made) == made


def test_another_device_is_entered(
    emulated: Emulated, cublas: CublasLt, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = [0]

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append(index)
        yield
        entered.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: entered[-1])
    shape, args = product(4, 8, 16, False, torch.float16)
    there = shape._replace(device=1)
    choice = cublas.choices(there, 1)[0]
    cublas.run(there, choice, *args)
    assert entered == [0] and cublas._handles.keys() == {1}


def test_an_error_says_which_and_where(emulated: Emulated, cublas: CublasLt) -> None:
    shape, args = product(4, 8, 16, False, torch.float16)
    emulated.status = INVALID
    with pytest.raises(Failed, match=r"cublasLtMatmul gave CUBLAS_STATUS_INVALID_VALUE \(7\)"):
        cublas.run(shape, Choice(0, bytes(64), 0), *args)
    with pytest.raises(Failed, match="AlgoGetHeuristic"):
        cublas.choices(shape, 2)


def test_structures_are_of_the_header_s_sizes() -> None:
    """cublasLtMatmulHeuristicResult_t: 64 bytes of algorithm, a size, a status, a float, four numbers."""
    assert ctypes.sizeof(_cublaslt._Found) == 96
    fields = {name: getattr(_cublaslt._Found, name).offset for name, _ in _cublaslt._Found._fields_}
    assert fields == {"algorithm": 0, "workspace": 64, "status": 72, "waves": 76, "reserved": 80}


def found_anew() -> Any:
    return _cublaslt._library.__wrapped__()


def test_why_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert found_anew() == "this PyTorch is built without CUDA"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "ROCm" in found_anew()
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    monkeypatch.setattr(_cublaslt, "_folders", lambda: iter(()))
    assert "libcublasLt.so.99 cannot be used: " in found_anew()
    (tmp_path / "libcublasLt.so.99").write_bytes(b"no library")
    monkeypatch.setattr(_cublaslt, "_places", lambda name: iter([str(tmp_path / name)]))
    reason = found_anew()
    assert reason.startswith("libcublasLt.so.99 cannot be used: ") and "\n" not in reason
    monkeypatch.setattr(_cublaslt, "_library", lambda: reason)
    assert _cublaslt.absent() == reason
    monkeypatch.setattr(_cublaslt, "_library", lambda: Emulated())
    for nothing in ("no CUDA device or driver answers", None):
        monkeypatch.setattr(_cublaslt.device, "absent", lambda kind, why=nothing: why)
        assert _cublaslt.absent() == nothing
    monkeypatch.setattr(_cublaslt, "_library", lambda: reason)
    with pytest.raises(Failed, match="cannot be used"):
        _cublaslt.binding.__wrapped__()


def test_it_is_found_beside_pytorch(
    emulated: Emulated, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libcublasLt.so.13"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(_cublaslt.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert str(library) in list(_cublaslt._places("libcublasLt.so.13"))
    assert isinstance(found_anew(), Library) and found_anew().version() == 130100


@pytest.mark.cuda
@pytest.mark.parametrize("bias", [True, False])
def test_every_choice_on_a_device(bias: bool) -> None:
    """Each is within rounding of PyTorch's own, alone and in a captured graph, at aligned and odd rows."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if _cublaslt.absent():
        pytest.skip(str(_cublaslt.absent()))
    cublas = _cublaslt.binding()
    for rows, outputs, width in ((5, 8, 16), (154, 320, 768), (2048, 1280, 1280)):
        shape, args = product(rows, outputs, width, bias, torch.float16)
        x, weight, given = (None if arg is None else arg.cuda() for arg in args)
        expected = F.linear(x, weight, given)
        choices = cublas.choices(shape, 16)
        assert choices
        for choice in choices:
            out = cublas.run(shape, choice, x, weight, given)
            apart = float((out - expected).abs().max() / expected.abs().max())
            assert apart <= 2 * torch.finfo(torch.float16).eps, choice.number
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = cublas.run(shape, choice, x, weight, given)
            captured.zero_()
            graph.replay()
            assert torch.equal(captured, out), choice.number
