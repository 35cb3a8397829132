"""_metal_launch: threads, group sizes and constants by shape, and what each kernel cannot take."""

from __future__ import annotations

import pytest
import torch

from clearway.ops import _metal_launch as launch
from metal.fake_mps import Constant, Dispatch, FakeMps

HALF = torch.float16


def recorded(function: str, *arguments: object, **keywords: object) -> list[Dispatch]:
    """The dispatches of one launch, without executing them."""
    fake = FakeMps(execute=False)
    getattr(launch, function)(fake.compile_shader(""), *arguments, **keywords)
    return fake.dispatches


def zeros(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_attention() -> None:
    q, k = zeros(2, 4096, 8, 40).transpose(1, 2), zeros(2, 77, 8, 40).transpose(1, 2)
    (dispatch,) = recorded("attention", q, k, k, q, 0.5)
    assert dispatch.kernel == "attention_half_40"
    assert (dispatch.threads, dispatch.group_size) == ((128 * 128, 8, 2), (128, 1, 1))
    long, short = (4096 * 320, 40, 320, 1), (77 * 320, 40, 320, 1)
    assert dispatch.arguments[4:] == (
        Constant((4096, 77, *long, *short, *short, *long, 1), "int64"),
        Constant((0.5,), "float32"),
    )


def test_group_norm_silu() -> None:
    x, weight = zeros(2, 320, 64, 64), zeros(320, dtype=torch.float32)
    (dispatch,) = recorded("group_norm_silu", x, weight, None, 32, 1e-5, x)
    assert dispatch.kernel == "group_norm_silu_half_float_4"
    assert (dispatch.threads, dispatch.group_size) == ((2 * 32 * 256,), (256,))
    planes = (320 * 4096, 4096, 1)
    assert dispatch.arguments[4] == Constant((32, 10, 4096, *planes, *planes, 0, 1), "int64")
    last = x.to(memory_format=torch.channels_last)
    (dispatch,) = recorded("group_norm_silu", last, weight, None, 32, 1e-5, last)
    planes = (320 * 4096, 1, 320)
    assert dispatch.kernel == "group_norm_silu_half_float_1"  # 10 channels a group are no multiple of 4
    assert dispatch.arguments[4] == Constant((32, 10, 4096, *planes, *planes, 1, 1), "int64")


def test_rows() -> None:
    x, out = zeros(2, 4096, 2560), zeros(2, 4096, 1280)
    (dispatch,) = recorded("geglu", x, out)
    assert (dispatch.threads, dispatch.group_size) == ((320, 8192), (256, 1))
    (dispatch,) = recorded("layer_norm", out, None, None, 1e-5, out)
    assert dispatch.kernel == "layer_norm_half_half_4"
    assert (dispatch.threads, dispatch.group_size) == ((8192 * 32,), (256,))
    (dispatch,) = recorded("softmax", out, out)
    assert (dispatch.threads, dispatch.group_size) == ((8192 * 256,), (256,))
    (dispatch,) = recorded("linear_row", zeros(1, 320), zeros(1280, 320), None, zeros(1, 1280))
    assert (dispatch.threads, dispatch.group_size) == ((1280 * 32, 1), (256, 1))
    (dispatch,) = recorded("constant_pad", zeros(1, 4, 8, 8), (0, 1, 0, 1), 0.0, zeros(1, 4, 9, 9))
    assert (dispatch.threads, dispatch.group_size) == ((9, 9, 4), (32, 1, 1))


def test_vectors_need_every_offset_and_stride() -> None:
    store = zeros(4 * 64 + 2)
    for by, width in ((0, 4), (2, 1)):
        (dispatch,) = recorded("softmax", store[by : by + 256].view(4, 64), zeros(4, 64))
        assert dispatch.kernel == f"softmax_half_{width}"
    (dispatch,) = recorded("softmax", store[:258].view(3, 86)[:, :64], zeros(3, 64))
    assert dispatch.kernel == "softmax_half_1"


def test_nothing_to_do_is_no_dispatch() -> None:
    for function, arguments in {
        "softmax": (zeros(0, 5), zeros(0, 5)),
        "geglu": (zeros(3, 0), zeros(3, 0)),
        "layer_norm": (zeros(0, 4), None, None, 1e-5, zeros(0, 4)),
        "group_norm_silu": (zeros(0, 4, 2), None, None, 2, 1e-5, zeros(0, 4, 2)),
        "linear_row": (zeros(0, 4), zeros(3, 4), None, zeros(0, 3)),
        "constant_pad": (zeros(2, 3), (-3, 0), 0.0, zeros(2, 0)),
        "attention": (zeros(1, 1, 0, 40), *(zeros(1, 1, 3, 40),) * 2, zeros(1, 1, 0, 40), 1.0),
    }.items():
        assert recorded(function, *arguments) == []


@pytest.mark.parametrize(
    "function, arguments, message",
    [
        ("attention", (*(zeros(1, 1, 4, 48),) * 4, 1.0), "heads of 48"),
        ("attention", (*(zeros(1, 1, 4, 40),) * 2, *(zeros(1, 1, 4, 64),) * 2, 1.0), "heads of 40 and 64"),
        ("attention", (zeros(1, 1, 4, 40), *(zeros(1, 1, 0, 40),) * 2, zeros(1, 1, 4, 40), 1.0), "no keys"),
        ("attention", (*(zeros(1, 1, 4, 40, dtype=torch.float64),) * 4, 1.0), "float64"),
        ("group_norm_silu", (zeros(1, 5, 4), None, None, 2, 1e-5, zeros(1, 5, 4)), "2 groups"),
        ("group_norm_silu", (zeros(1, 4, 4, 4)[..., :3], None, None, 2, 1e-5, zeros(1, 4, 4, 3)), "planes"),
        (
            "group_norm_silu",
            (zeros(1, 4, 4), zeros(4).bfloat16(), None, 2, 1e-5, zeros(1, 4, 4)),
            "weight is",
        ),
        (
            "group_norm_silu",
            (zeros(1, 4, 4), zeros(4), zeros(4).float(), 2, 1e-5, zeros(1, 4, 4)),
            "inputs are",
        ),
        ("layer_norm", (zeros(4, 8)[:, ::2], None, None, 1e-5, zeros(4, 4)), "contiguous rows"),
        ("softmax", (zeros(2, 3, 4).transpose(0, 1), zeros(3, 2, 4)), "contiguous rows"),
        ("softmax", (zeros(2, 1).expand(2, 4), zeros(2, 4)), "contiguous rows"),
        ("linear_row", (zeros(1, 4), zeros(4, 3).T, None, zeros(1, 3)), "contiguous rows"),
    ],
)
def test_refusals(function: str, arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recorded(function, *arguments)


def test_offsets_that_do_not_fit() -> None:
    far = torch.empty(0, dtype=HALF).as_strided(
        (0,), (1,)
    )  # metadata only: nothing of this size is allocated
    k = torch.empty(1, 1, 2, 40, dtype=HALF, device="meta").as_strided((1, 1, 2, 40), (0, 0, 2**28, 1))
    assert far.numel() == 0
    with pytest.raises(ValueError, match=r"2\*\*32"):
        recorded("attention", k, k, k, k, 1.0)
