"""What is done in fewer passes gives what the passes gave, up to rounding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from clearway.execution import fusions
from clearway.execution.fusions import fused, interleaved, phases
from clearway.execution.generated import lasting_values
from clearway.execution.rewrite import simplified
from recorded_programs import Holding, names, ran, recorded


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 4),
    st.booleans(),
)
def test_phases_are_nearest_upsampling_and_a_3x3_convolution(
    batch: int, channels: int, height: int, width: int, kernels: int, has_bias: bool
) -> None:
    drawn = torch.Generator().manual_seed(height)
    x = torch.randn(batch, channels, height, width, generator=drawn, dtype=torch.float64)
    weight = torch.randn(kernels, channels, 3, 3, generator=drawn, dtype=torch.float64)
    bias = torch.randn(kernels, generator=drawn, dtype=torch.float64) if has_bias else None
    four, biases = phases(weight, bias)
    found = interleaved(F.conv2d(x, four, biases, padding=1))
    expected = F.conv2d(F.interpolate(x, scale_factor=2.0, mode="nearest"), weight, bias, padding=1)
    torch.testing.assert_close(found, expected)


def test_an_upsampler_becomes_one_convolution_at_the_small_size() -> None:
    module = nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(4, 6, 3, padding=1))
    x = torch.randn(2, 4, 5, 7)
    program = fused(simplified(recorded(module, x)))
    assert names(program) == ["conv2d", "interleaved"]
    with torch.no_grad():
        close(ran(program, x), module(x))


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Upsample(scale_factor=3.0), nn.Conv2d(4, 6, 3, padding=1)),
        nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(4, 6, 3)),
        nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(4, 6, 3, padding=1, stride=2)),
        nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(4, 4, 3, padding=1, groups=2)),
        nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(4, 6, 1)),
    ],
)
def test_other_upsamplers_stay(module: nn.Module) -> None:
    program = fused(simplified(recorded(module, torch.randn(1, 4, 4, 4))))
    assert "interleaved" not in names(program)


class Projections(nn.Module):
    def __init__(self, *biases: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, size + 2, bias) for size, bias in enumerate(biases))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


@pytest.mark.parametrize("biases", [(False, False, False), (True, False, True), (True, True)])
def test_layers_of_one_input_become_one(biases: tuple[bool, ...]) -> None:
    module, x = Projections(*biases), torch.randn(2, 5, 6)
    program = fused(simplified(recorded(module, x)))
    assert names(program) == ["linear", "split_with_sizes"]
    with torch.no_grad():
        for found, expected in zip(ran(program, x), module(x), strict=True):
            close(found, expected)


def test_layers_stay_apart_where_their_input_lasts_or_they_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    program = simplified(recorded(Projections(True, True), torch.randn(2, 6)))
    assert names(fused(program, lasting_values(program, [0]))) == ["linear", "linear"]
    monkeypatch.setattr(fusions, "JOINED", 10)
    assert names(fused(program)) == ["linear", "linear"]


class Gated(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 16, bias)

    def forward(self, x: Tensor) -> Tensor:
        plain, gate = self.proj(x).chunk(2, dim=-1)
        return plain * F.gelu(gate)


@pytest.mark.parametrize("bias", [True, False])
def test_a_gated_gelu_becomes_two_layers(bias: bool) -> None:
    module, x = Gated(bias), torch.randn(2, 5, 6)
    program = fused(simplified(recorded(module, x)))
    assert names(program) == ["linear", "gelu", "linear", "mul"]
    with torch.no_grad():
        close(ran(program, x), module(x))


def test_halves_that_are_read_elsewhere_stay() -> None:
    layer = nn.Linear(6, 16)

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            plain, gate = self.layer(x).chunk(2, dim=-1)
            return plain * F.gelu(gate) + gate

    x = torch.randn(3, 6)
    program = fused(simplified(recorded(Other(), x)))
    assert "chunk" in names(program)
    with torch.no_grad():
        close(ran(program, x), Other()(x))


def test_a_weight_that_is_no_constant_is_left_alone() -> None:
    module = Holding(lambda m, x, w: (F.linear(x, w), F.linear(x, w * 2)))
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    program = fused(simplified(recorded(module, x, w)))
    assert names(program).count("linear") == 2
