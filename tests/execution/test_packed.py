"""Packed layers against plain ones, at shapes of SD 1.5 and the embedded model, with what follows them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearway.device import Memory
from clearway.execution import packed
from clearway.execution.packed import Packs, able, gathered, lowered
from clearway.execution.rewrite import simplified
from recorded_programs import Holding, names, ran, recorded

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16, torch.float16) if able(dtype)]
needs_packing = pytest.mark.skipif(not DTYPES, reason="this PyTorch has no oneDNN")
EPS = {torch.float32: 2e-5, torch.bfloat16: 0.012, torch.float16: 0.002}
"""Relative error, root mean square over the output, that an order of sums leaves: oneDNN sums 9 C products in
one accumulator."""


def near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and found.shape == expected.shape
    assert (found.double() - expected).norm() <= EPS[dtype] * expected.norm()


def packed_output(module: nn.Module, *inputs: Tensor) -> tuple[Tensor, list[str]]:
    program = lowered(simplified(recorded(module, *inputs)), Packs())
    return ran(program, *inputs), names(program)


def exact(module: nn.Module, *inputs: Tensor) -> Tensor:
    """In float64, from the same rounded weights and inputs."""
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with torch.no_grad():
        expected: Tensor = module.double()(*(one.double() for one in inputs))
    module.to(inputs[0].dtype).load_state_dict(before)
    return expected


def scaled(module: Any, dtype: torch.dtype) -> Any:
    """Weights that keep the spread of what passes through, as in a trained network."""
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() > 1:
                weight.normal_(0, weight[0].numel() ** -0.5)
    return module.to(dtype).requires_grad_(False)


CONVOLUTIONS = [
    # in, out, side, kernel, stride
    (4, 64, 32, 3, 1),
    (64, 64, 32, 3, 1),
    (96, 96, 4, 3, 1),
    (64, 64, 32, 3, 2),
    (64, 4, 32, 3, 1),
    (320, 320, 32, 1, 1),
    (640, 320, 16, 3, 1),
    (1280, 1280, 8, 3, 1),
    (1280, 1280, 8, 3, 2),
    (2560, 1280, 4, 3, 1),
]


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "kernels", "side", "kernel", "stride"), CONVOLUTIONS)
def test_convolutions(
    channels: int, kernels: int, side: int, kernel: int, stride: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(channels)
    conv = scaled(nn.Conv2d(channels, kernels, kernel, stride, kernel // 2), dtype)
    x = torch.randn(2, channels, side, side).to(dtype)
    for laid_out in (x, x.contiguous(memory_format=torch.channels_last)):
        found, ran_by = packed_output(conv, laid_out)
        assert "conv2d" not in ran_by
        near(found, exact(conv, x), dtype)
    many = channels >= packed.MIN_GATHERED_CHANNELS and kernel == 3 and stride == 1
    few = 2 * side * side <= packed.MAX_GATHERED[dtype]
    assert ("gathered" in ran_by) == (
        many and few and (dtype != torch.float32 or torch.backends.mkl.is_available())
    )


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("rows", "width", "out"), [(2048, 64, 512), (512, 640, 640), (2, 1280, 320), (1, 5, 3)]
)
def test_linear_layers(rows: int, width: int, out: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    layer = scaled(nn.Linear(width, out, bias), dtype)
    x = torch.randn(2, rows, width).to(dtype)
    for given in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
        found, ran_by = packed_output(layer, given)
        assert "linear" not in ran_by
        near(found, exact(layer, x), dtype)


class After(nn.Module):
    """A layer and what follows it."""

    def __init__(self, layer: Any, what: str) -> None:
        super().__init__()
        self.layer, self.what = layer, what

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        y = self.layer(x)
        if self.what == "add":
            return other + y
        if self.what == "mul":
            return y * other
        if self.what == "add, read twice":
            return (y + other) * y
        if self.what == "add itself":
            return y + y
        if self.what == "add a row":
            return y + other[:1]
        return {"silu": nn.functional.silu, "gelu": nn.functional.gelu}[self.what](y)


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", ["add", "mul", "silu", "gelu", "add, read twice", "add itself", "add a row"])
@pytest.mark.parametrize("kind", ["conv", "small linear", "large linear", "gathered"])
def test_what_follows_a_layer(kind: str, what: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    if kind == "conv":
        layer, x, other = nn.Conv2d(16, 24, 3, padding=1), torch.randn(2, 16, 8, 8), torch.randn(2, 24, 8, 8)
    elif kind == "gathered":
        layer, x = nn.Conv2d(1024, 16, 3, padding=1), torch.randn(2, 1024, 4, 4)
        other = torch.randn(2, 16, 4, 4)
    else:
        width = 64 if kind == "small linear" else 1024
        layer, x, other = nn.Linear(width, width), torch.randn(2, 7, width), torch.randn(2, 7, width)
    module = After(scaled(layer, dtype), what)
    x, other = x.to(dtype), other.to(dtype)
    found, ran_by = packed_output(module, x, other)
    assert "linear" not in ran_by and "conv2d" not in ran_by
    near(found, exact(module, x, other), dtype)
    if what == "add" and kind in ("conv", "small linear"):
        assert not {"add", "add_"} & set(ran_by)


@needs_packing
def test_two_layers_whose_outputs_are_added() -> None:
    class Shortcut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(8, 16, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(x) + self.one(torch.sin(x))

    module, x = Shortcut().requires_grad_(False), torch.randn(2, 8, 6, 6)
    found, ran_by = packed_output(module, x)
    assert sorted(ran_by) == ["_convolution_pointwise", "_convolution_pointwise", "sin"]
    near(found, exact(module, x), torch.float32)


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(4, 8, 3, padding=2, dilation=2, groups=2, bias=False),
        nn.Conv2d(4, 4, (1, 3), stride=(2, 1)),
    ],
)
def test_unusual_convolutions_give_what_they_give(module: nn.Module) -> None:
    x = torch.randn(2, 4, 9, 7)
    found, _ = packed_output(module.requires_grad_(False), x)
    near(found, exact(module, x), torch.float32)


def test_gathered_pixels_times_a_kernel_are_the_convolution() -> None:
    x, weight = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(6, 3, 3, 3, dtype=torch.float64)
    flat = weight.permute(0, 2, 3, 1).reshape(6, -1)
    found = (gathered(x) @ flat.t()).view(2, 4, 5, 6).permute(0, 3, 1, 2)
    torch.testing.assert_close(found, nn.functional.conv2d(x, weight, padding=1))


@needs_packing
def test_without_memory_layers_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    module = After(scaled(nn.Linear(64, 64), torch.float32), "gelu")
    x, other = torch.randn(3, 64), torch.randn(3, 64)
    packs = Packs()
    monkeypatch.setattr(packed.machine, "memory", lambda device: Memory(1000, 250))
    program = lowered(simplified(recorded(module, x, other)), packs)
    assert names(program) == ["linear", "gelu"] and packs.short == 1
    near(ran(program, x, other), exact(module, x, other), torch.float32)


@needs_packing
def test_packed_weights_are_shared_while_they_are_used() -> None:
    layer, packs = nn.Linear(64, 64).requires_grad_(False), Packs()
    first = lowered(simplified(recorded(layer, torch.randn(2, 3, 64))), packs)
    again = lowered(simplified(recorded(layer, torch.randn(3, 2, 64))), packs)
    assert len(packs.held) == 1
    other = lowered(simplified(recorded(layer, torch.randn(5, 64))), packs)
    assert len(packs.held) == 2
    del first, again
    assert len(packs.held) == 1
    del other
    assert len(packs.held) == 0


def test_what_has_no_constant_weight_or_another_dtype_stays() -> None:
    module = Holding(lambda m, x, w: nn.functional.linear(x, w))
    assert packed_output(module, torch.randn(2, 3), torch.randn(4, 3))[1] == ["linear"]
    assert packed_output(nn.Linear(3, 3).double().requires_grad_(False), torch.randn(2, 3).double())[1] == [
        "linear"
    ]
