"""Noise: the same bits however images are grouped, and what makes a Brownian path one."""

from __future__ import annotations

import math
import subprocess
import sys
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch
import torchsde
from hypothesis import given, settings
from hypothesis import strategies as st

from clearway.errors import RequestError
from clearway.sampling import ImageNoise, brownian, brownian_noise, noise_for, schedule
from clearway.sampling import noise as noise_module
from clearway.sampling.noise import _aside, _moved

SIGMAS = torch.tensor([12.0, 5.0, 2.0, 0.5, 0.0])
seeds_lists = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=5)


@settings(max_examples=30, deadline=None)
@given(seeds=seeds_lists, cut=st.integers(0, 5))
def test_image_noise_does_not_depend_on_the_grouping(seeds: list[int], cut: int) -> None:
    def draws(group: list[int]) -> torch.Tensor:
        noise = ImageNoise(group, (2, 3, 4))
        return torch.stack([noise.initial(), noise(2.0, 1.0), noise(1.0, 0.5)])

    parts = [group for group in (seeds[:cut], seeds[cut:]) if group]
    assert torch.equal(draws(seeds), torch.cat([draws(group) for group in parts], dim=1))


def test_image_noise_is_one_generator_s_stream() -> None:
    noise = ImageNoise([7], (4, 8, 8))
    generator = torch.Generator().manual_seed(7)
    for draw in (noise.initial(), noise(3.0, 2.0), noise(2.0, 1.0)):
        assert torch.equal(draw[0], torch.randn(4, 8, 8, generator=generator))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_noise_is_drawn_in_float32_and_then_cast(dtype: torch.dtype) -> None:
    full, cast = ImageNoise([1, 2], (4, 8, 8)), ImageNoise([1, 2], (4, 8, 8), dtype=dtype)
    assert torch.equal(full.initial().to(dtype), cast.initial())
    x = torch.zeros(2, 4, 8, 8)
    full_path, cast_path = brownian_noise(x, SIGMAS, [1, 2]), brownian_noise(x.to(dtype), SIGMAS, [1, 2])
    assert torch.equal(full_path(5.0, 2.0).to(dtype), cast_path(5.0, 2.0))


@settings(max_examples=20, deadline=None)
@given(
    seeds=seeds_lists, cut=st.integers(0, 5), order=st.permutations([(12.0, 7.0), (12.0, 5.0), (5.0, 0.5)])
)
def test_brownian_noise_depends_on_neither_grouping_nor_order(seeds, cut, order) -> None:
    def draws(group: list[int], queries: list[tuple[float, float]]) -> torch.Tensor:
        noise = brownian_noise(torch.zeros(len(group), 2, 3, 3), SIGMAS, group)
        found = {query: noise(*query) for query in queries}
        return torch.stack([found[query] for query in sorted(found)])

    parts = [group for group in (seeds[:cut], seeds[cut:]) if group]
    grouped = torch.cat([draws(group, sorted(order)) for group in parts], dim=1)
    assert torch.equal(draws(seeds, order), grouped)


@settings(max_examples=30, deadline=None)
@given(points=st.lists(st.floats(0.5, 12.0), min_size=3, max_size=3, unique_by=lambda v: round(v, 2)))
def test_increments_of_a_path_add_up(points: list[float]) -> None:
    low, middle, high = (float(torch.tensor(value)) for value in sorted(points))
    noise = brownian_noise(torch.zeros(2, 4, 8, 8), SIGMAS, [3, 4])

    def increment(a: float, b: float) -> torch.Tensor:
        return noise(a, b) * math.sqrt(abs(a - b))

    whole = increment(high, low)
    torch.testing.assert_close(increment(high, middle) + increment(middle, low), whole, rtol=1e-4, atol=1e-4)
    assert torch.equal(noise(low, high), -noise(high, low))


def test_brownian_noise_is_standard_normal_and_independent_over_steps() -> None:
    noise = brownian_noise(torch.zeros(2, 4, 64, 64), SIGMAS, [3, 4])
    first, second = noise(12.0, 5.0), noise(5.0, 2.0)
    for one in (first, second):
        assert float(one.mean()) == pytest.approx(0, abs=0.02)
        assert float(one.std()) == pytest.approx(1, abs=0.02)
        assert abs(float((one[0] * one[1]).mean())) < 0.03
    assert abs(float((first * second).mean())) < 0.03


def test_brownian_noise_is_k_diffusion_s_formula() -> None:
    """(W(next) - W(sigma)) / sqrt(|next - sigma|) of one torchsde tree an image over the sigmas above 0."""
    noise = brownian_noise(torch.zeros(2, 4, 8, 8), SIGMAS, [42, 43])
    for row, seed in enumerate((42, 43)):
        tree = torchsde.BrownianTree(0.5, torch.zeros(4, 8, 8), 12.0, entropy=seed)
        torch.testing.assert_close(noise(5.0, 2.0)[row], -tree(2.0, 5.0) / math.sqrt(3.0))


def test_sigmas_outside_the_path_count_as_its_ends_without_a_warning() -> None:
    noise = brownian_noise(torch.zeros(1, 4, 8, 8), SIGMAS, [1])
    inside = noise(12.0, 0.5) * math.sqrt(11.5)
    torch.testing.assert_close(noise(13.0, 0.25) * math.sqrt(12.75), inside)
    assert not noise(3.0, 3.0).any() and not noise(14.0, 13.0).any() and not noise(3.0, 3.0 + 1e-8).any()


def test_a_single_sigma_is_a_path_without_length(table: torch.Tensor) -> None:
    noise = brownian_noise(torch.zeros(1, 4, 8, 8), schedule("Karras", 1, table), [1])
    assert noise(14.0, 1.0).shape == (1, 4, 8, 8)


def test_noise_for_picks_by_sampler() -> None:
    images, x = ImageNoise([1, 2], (4, 8, 8)), torch.zeros(2, 4, 8, 8)
    assert noise_for("Euler a", images, x, SIGMAS) is images
    path = noise_for("DPM++ SDE", images, x, SIGMAS)
    assert torch.equal(path(5.0, 2.0), brownian_noise(x, SIGMAS, [1, 2])(5.0, 2.0))


def test_noise_made_on_the_cpu_is_kept_until_another_device_has_it() -> None:
    """Freed earlier, an asynchronous copy to MPS reads other data (pytorch#189690)."""
    in_flight: list[torch.Tensor] = []
    drawn = torch.ones(3)
    assert (
        _moved(drawn, torch.device("cpu"), torch.float16, in_flight).dtype == torch.float16 and not in_flight
    )
    assert _moved(drawn, torch.device("meta"), torch.float32, in_flight).device.type == "meta"
    assert in_flight[0] is drawn


class FakeStream:
    """What is asked of a stream, noted in `asked`."""

    asked: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.name = f"{'beside' if priority else 'current'} {device}"

    def wait_stream(self, other: FakeStream) -> None:
        self.asked.append((self.name, other.name))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """CUDA's streams without CUDA; gives (who waits, for whom)."""
    monkeypatch.setattr(FakeStream, "asked", [])
    monkeypatch.setattr(noise_module, "_streams", {})
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return FakeStream.asked


class FakeTensor:
    """A tensor on a CUDA device, as far as it is handed over."""

    is_cuda = True

    def __init__(self, device: str) -> None:
        self.device, self.recorded = torch.device(device), ""

    def record_stream(self, stream: FakeStream) -> None:
        self.recorded = stream.name


def test_what_is_drawn_beside_belongs_to_the_stream_where_it_is_read(streams: list[tuple[str, str]]) -> None:
    """On its own device, on another, or on the CPU, where a plain copy waited for it and knows no streams."""
    for where in ("cuda:0", "cuda:1"):
        made = FakeTensor(where)
        with _aside(torch.device("cuda:0")) as handed:
            assert handed(made) is made  # type: ignore[arg-type,comparison-overlap]
        assert made.recorded == f"current {where}"
    assert streams == [("current cuda:0", "beside cuda:0"), ("current cuda:1", "beside cuda:0")]
    on_cpu = torch.zeros(2)
    with _aside(torch.device("cuda:0")) as handed:
        assert handed(on_cpu) is on_cpu
    assert len(streams) == 2 and list(noise_module._streams) == [torch.device("cuda:0")]


def test_a_path_stays_on_the_device_that_was_current(
    streams: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn_on: list[torch.device] = []

    class Tree:
        def __init__(self, *args: object, device: torch.device, **given: object) -> None:
            drawn_on.append(device)

        def increment(self, before: float, after: float) -> torch.Tensor:
            return torch.ones(1, 2, 3, 3)

    monkeypatch.setattr(brownian, "BrownianTree", Tree)
    noise = brownian_noise(torch.zeros(1, 2, 3, 3), SIGMAS, [1], device="cuda")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert noise(5.0, 2.0).device.type == "cpu"
    assert drawn_on == [torch.device("cuda:1")] == list(noise_module._streams)


@pytest.mark.mps
def test_noise_arrives_on_mps() -> None:
    if not torch.backends.mps.is_available():
        pytest.skip("no MPS device")
    here, there = ImageNoise([1, 2], (4, 64, 64)), ImageNoise([1, 2], (4, 64, 64), device="mps")
    draws = [(here(1.0, 0.5), there(1.0, 0.5)) for _ in range(20)]
    assert all(torch.equal(one, other.cpu()) for one, other in draws)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, True, None])
def test_seeds_that_are_none(seed: object) -> None:
    with pytest.raises(RequestError, match="cannot be used"):
        ImageNoise([seed], (4, 8, 8))  # type: ignore[list-item]
    with pytest.raises(RequestError, match="cannot be used"):
        brownian_noise(torch.zeros(1, 4, 8, 8), SIGMAS, [seed])  # type: ignore[list-item]


def test_brownian_noise_wants_a_seed_an_image_and_a_sigma() -> None:
    with pytest.raises(RequestError, match="found 2 for 1 images"):
        brownian_noise(torch.zeros(1, 4, 8, 8), SIGMAS, [1, 2])
    with pytest.raises(RequestError, match="a sigma above 0"):
        brownian_noise(torch.zeros(1, 4, 8, 8), torch.zeros(2), [1])


def test_brownian_noise_needs_no_torchsde() -> None:
    code = (
        "import sys, torch; from clearway.sampling import brownian_noise\n"
        "brownian_noise(torch.zeros(1, 1, 2, 2), torch.tensor([1.0, 0.5]), [1])(1.0, 0.5)\n"
        "print('torchsde' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False"]


@pytest.mark.cuda
@pytest.mark.parametrize("busy", [False, True])
def test_a_path_drawn_beside_other_work_has_the_same_bits_and_is_never_read_too_early(
    monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    sigmas = torch.linspace(14, 0.1, 40)
    queries = list(zip(sigmas[:-1].tolist(), sigmas[1:].tolist(), strict=True))
    x, weight = torch.zeros(2, 4, 64, 64, device="cuda"), torch.randn(4096, 4096, device="cuda")

    def total(seed: int) -> torch.Tensor:
        """A sum that the current stream makes of noise whose memory is given back at once."""
        noise, found = brownian_noise(x, sigmas, [seed, seed + 1]), torch.zeros_like(x)
        for query in queries:
            if busy:
                _ = weight @ weight
            found = found * 0.9 + noise(*query)
            _ = torch.full_like(x, torch.nan)  # in whatever memory was freed
        return found

    found = [total(seed) for seed in range(5)]
    with monkeypatch.context() as patch:
        patch.setattr("clearway.sampling.noise._aside", lambda _: nullcontext(lambda made: made))
        expected = [total(seed) for seed in range(5)]
    assert all(map(torch.equal, found, expected))
