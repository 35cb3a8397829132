"""The fake MPS layer: what an op passes to torch.mps.compile_shader, and what comes back."""

from __future__ import annotations

import pytest
import torch

from clearway.ops import _metal_launch as launch
from metal.fake_mps import Constant, FakeMps, Tensor
from metal.sources import text_of


def test_it_stands_in_for_torch(monkeypatch: pytest.MonkeyPatch, emulator: None) -> None:
    fake = FakeMps(checked=True)
    fake.install(monkeypatch)
    library = launch.Kernels(torch.mps.compile_shader(text_of("softmax")))
    x = torch.randn(3, 80)[:, 4:76]
    out = torch.empty(3, 72)
    launch.softmax(library, x, out)
    torch.testing.assert_close(out, x.softmax(-1))
    (dispatch,) = fake.dispatches
    assert dispatch.kernel == "softmax_float_4"
    assert dispatch.arguments == (
        Tensor(torch.float32, (3, 72), (80, 1), 4),
        Tensor(torch.float32, (3, 72), (72, 1), 0),
        Constant((72, 80, 72), "int64"),
    )
    assert (dispatch.threads, dispatch.group_size) == ((96,), (32,))
    assert dispatch.report is not None and dispatch.report.faults == ()
    assert library.softmax_float_4 is library.softmax_float_4  # kept, not looked up again
    assert fake.sources == [text_of("softmax")]


def test_it_records_without_a_compiler() -> None:
    fake = FakeMps(execute=False)
    x = torch.zeros(4, 10)
    launch.geglu(fake.compile_shader(""), x, torch.zeros(4, 5))
    (dispatch,) = fake.dispatches
    assert (dispatch.kernel, dispatch.report) == ("geglu_float_1", None)
    assert (dispatch.threads, dispatch.group_size) == ((5, 4), (32, 1))


def test_it_refuses_what_torch_refuses() -> None:
    library = FakeMps(execute=False).compile_shader("")
    with pytest.raises(ValueError, match="1024"):
        library.anything(torch.zeros(4), threads=4096, group_size=2048)
    with pytest.raises(UnicodeEncodeError):
        FakeMps(execute=False).compile_shader("\N{MULTIPLICATION SIGN}")
