"""The loop: what holds for every sampler, what it never does, and what it refuses."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearway.errors import Cancelled, RequestError
from clearway.sampling import (
    ImageNoise,
    brownian_noise,
    finish,
    initial_scale,
    noise_for,
    sample,
    samplers,
    schedule,
    sigmas_for,
)

LABELS = [one.label for one in samplers()]
OPTIONS = {one.label: one.options for one in samplers()}


def replayed(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return lambda sigma, sigma_next: torch.randn(shape, generator=generator, dtype=dtype)


@settings(max_examples=40, deadline=None)
@given(
    label=st.sampled_from(LABELS), power=st.integers(-2, 2), seed=st.integers(0, 99), steps=st.integers(1, 6)
)
def test_scaling_x_and_sigma_scales_the_result(label: str, power: int, seed: int, steps: int) -> None:
    shape, scale = (1, 2, 3, 3), 2.0**power
    sigmas = torch.tensor([8.0 / 3**i for i in range(steps)] + [0.0])
    x = replayed(seed, shape)(0, 0) * 8

    def denoise(x: torch.Tensor, sigma: float) -> torch.Tensor:
        return torch.tanh(x) / (1 + sigma)

    plain = sample(label, denoise, x, sigmas, noise=replayed(seed + 1, shape))
    scaled = sample(
        label,
        lambda x, sigma: denoise(x / scale, sigma / scale) * scale,
        x * scale,
        sigmas * scale,
        noise=replayed(seed + 1, shape),
    )
    torch.testing.assert_close(scaled, plain * scale, rtol=1e-5, atol=1e-5)


def test_a_perfect_denoiser_is_met_exactly(label: str, table: torch.Tensor, start: torch.Tensor) -> None:
    truth = torch.full_like(start, 0.25)
    for name, steps in itertools.product(("Karras", "Uniform", "Exponential"), (1, 2, 7)):
        sigmas = schedule(name, steps, table)
        noise = replayed(1, tuple(start.shape), torch.float32)
        out = sample(label, lambda x, sigma: truth, start * sigmas[0], sigmas, noise=noise)
        assert torch.equal(out, truth)


def test_deterministic_samplers_follow_the_straight_line(label: str, start: torch.Tensor) -> None:
    sigmas = torch.tensor([10.0, 4.0, 2.0, 0.5])
    options = {"eta": 0.0} if "eta" in OPTIONS[label] else {}
    out = sample(
        label, lambda x, sigma: 0 * x + 3, 3 + 10 * start, sigmas, noise=replayed(1, (1, 4, 8, 8)), **options
    )
    torch.testing.assert_close(out, 3 + 0.5 * start, rtol=1e-5, atol=1e-5)


def test_order_of_convergence(label: str) -> None:
    """Data N(0, 1): D = x / (1 + s²), whose ODE has x(s) proportional to sqrt(1 + s²)."""
    options = {"eta": 0.0} if "eta" in OPTIONS[label] else {}
    errors = []
    for steps in (16, 32, 64, 128):
        sigmas = torch.linspace(math.log(10), math.log(0.1), steps + 1, dtype=torch.float64).exp()
        out = sample(
            label,
            lambda x, sigma: x / (1 + sigma**2),
            torch.full((1, 1, 1, 1), math.sqrt(101.0), dtype=torch.float64),
            sigmas,
            noise=replayed(0, (1, 1, 1, 1)),
            **options,
        )
        errors.append(abs(float(out) - math.sqrt(1.01)))
    order = math.log2(errors[-2] / errors[-1])
    expected = next(one.order for one in samplers() if one.label == label)
    assert expected - 0.15 < order < expected + 0.5, (order, errors)


@pytest.mark.parametrize("label", ["Euler a", "DPM++ SDE", "DDIM"])
def test_noise_keeps_the_marginal_variance(label: str) -> None:
    """With the exact denoiser of N(0, 1) data latents keep variance 1 + sigma² whatever noise is added."""
    sigmas = torch.linspace(math.log(10), math.log(0.5), 65, dtype=torch.float64).exp()
    x = replayed(3, (4, 4, 64, 64), torch.float32)(0, 0) * math.sqrt(101)
    noise = noise_for(label, ImageNoise(range(4), (4, 64, 64)), x, sigmas)
    out = sample(label, lambda x, sigma: x / (1 + sigma**2), x, sigmas, noise=noise, eta=1.0)
    assert float(out.var()) == pytest.approx(1.25, rel=0.06)
    for row, others in ((0, 1), (2, 3)):  # images stay independent
        assert abs(float((out[row] * out[others]).mean())) < 0.05


def test_golden_values_of_k_diffusion(golden: dict, table: torch.Tensor, toy, start: torch.Tensor) -> None:
    assert len(golden["runs"]) == 5
    for run in golden["runs"]:
        sigmas = schedule(run["schedule"], run["steps"], table)
        calls = []

        def denoise(x: torch.Tensor, sigma: float, calls: list[float] = calls) -> torch.Tensor:
            calls.append(sigma)
            return toy(x, sigma)

        x = start * initial_scale(run["sampler"], sigmas)
        noise = replayed(0, (1, 4, 8, 8), torch.float32)
        if run["sampler"] == "DPM++ SDE":
            noise = brownian_noise(x, sigmas, [42])
        out = sample(run["sampler"], denoise, x, sigmas, noise=noise)
        torch.testing.assert_close(out.flatten(), torch.tensor(run["out"]), rtol=0, atol=1e-5)
        assert len(calls) == run["calls"], run["sampler"]


def test_a_batch_is_its_images_one_by_one(label: str, table: torch.Tensor, toy) -> None:
    """Bit for bit: generators and Brownian paths are per image, and the toy denoiser does not mix rows."""
    sigmas = sigmas_for(label, None, 5, table)
    options = {"eta": 0.7} if "eta" in OPTIONS[label] else {}

    def run(seeds: list[int]) -> torch.Tensor:
        images = ImageNoise(seeds, (4, 8, 8))
        x = images.initial() * initial_scale(label, sigmas)
        return sample(label, toy, x, sigmas, noise=noise_for(label, images, x, sigmas), **options)

    together = run([5, 6, 7])
    assert torch.equal(together, torch.cat([run([5]), run([6]), run([7])]))
    assert torch.equal(together, torch.cat([run([5]), run([6, 7])]))
    assert torch.equal(together, run([5, 6, 7]))
    assert not torch.equal(together[0], together[1])


def all_options(label: str) -> dict[str, float]:
    """Values for every option, so that each sampler draws all the noise it can."""
    values = {"eta": 0.5, "s_noise": 1.01, "s_churn": 4.0, "s_tmin": 0.05, "s_tmax": 12.0, "r": 0.4}
    return {name: values[name] for name in OPTIONS[label]}


def test_the_loop_reads_nothing_back(label: str, table: torch.Tensor, toy, read_backs) -> None:
    sigmas = sigmas_for(label, None, 6, table)
    images = ImageNoise([1, 2], (4, 8, 8))
    x = images.initial() * initial_scale(label, sigmas)
    noise = noise_for(label, images, x, sigmas)
    with read_backs() as found:
        before_loop: list[str] = []

        def denoise(x: torch.Tensor, sigma: float) -> torch.Tensor:
            if not before_loop:  # reading the CPU sigmas before the first call is what the loop is for
                before_loop.extend([*found, "first call"])
                found.clear()
            return toy(x, sigma)

        steps = []
        sample(
            label,
            denoise,
            x,
            sigmas,
            noise=noise,
            on_step=lambda *args: steps.append(args),
            **all_options(label),
        )
        assert found == []
    assert len(steps) == len(sigmas) - 1
    assert set(before_loop) <= {"tolist", "first call"} and len(before_loop) <= 3


def test_the_counter_counts(read_backs) -> None:
    x = torch.ones(2)
    with read_backs() as found:
        float(x[0]), x.tolist(), x.cpu(), x.numpy(), bool(x.sum() > 0), torch.cuda.synchronize()
    assert {"__float__", "tolist", "cpu", "numpy", "__bool__", "synchronize"} <= set(found)
    assert any("_local_scalar_dense" in name for name in found)


def test_the_loop_runs_where_nothing_can_be_read(label: str, table: torch.Tensor, toy) -> None:
    """On torch's "meta" device tensors have no values: any read-back would raise."""
    sigmas = sigmas_for(label, None, 4, table)
    images = ImageNoise([1, 2], (4, 8, 8), drawn_on="cpu", device="meta", dtype=torch.float16)
    x = images.initial() * initial_scale(label, sigmas)
    noise = noise_for(label, images, x, sigmas)
    out = finish(sample(label, toy, x, sigmas, noise=noise, **all_options(label)), sigmas)
    assert out.device.type == "meta" and out.shape == x.shape and out.dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_latents_keep_their_dtype_and_x_is_left_alone(
    label: str, dtype: torch.dtype, table: torch.Tensor, toy
) -> None:
    sigmas = sigmas_for(label, None, 3, table)
    images = ImageNoise([1], (4, 8, 8), dtype=dtype)
    x = images.initial() * initial_scale(label, sigmas)
    kept = x.clone()
    noise = noise_for(label, images, x, sigmas)
    out = sample(label, toy, x, sigmas, noise=noise, **all_options(label))
    assert out.dtype == dtype and torch.equal(x, kept) and bool(out.isfinite().all())


def test_on_step_hears_of_every_step(label: str, table: torch.Tensor, toy, start: torch.Tensor) -> None:
    sigmas = sigmas_for(label, None, 5, table)
    heard = []
    out = sample(
        label,
        toy,
        start * sigmas[0],
        sigmas,
        noise=replayed(0, (1, 4, 8, 8), torch.float32),
        on_step=lambda step, steps, x, sigma, denoised: heard.append((step, steps, x, sigma, denoised)),
    )
    count = len(sigmas) - 1
    assert [(one[0], one[1]) for one in heard] == [(step, count) for step in range(1, count + 1)]
    assert [one[3] for one in heard] == sigmas.tolist()[:-1]
    assert heard[-1][2] is out
    torch.testing.assert_close(heard[0][4], toy(start * sigmas[0], float(sigmas[0])))
    assert all(one[2].shape == one[4].shape == start.shape for one in heard)


def test_cancelling_in_a_step_stops_after_it(
    label: str, table: torch.Tensor, toy, start: torch.Tensor
) -> None:
    sigmas = sigmas_for(label, None, 5, table)
    calls = []

    def stop(step: int, *rest: object) -> None:
        if step == 2:
            raise Cancelled("stopped")

    def denoise(x: torch.Tensor, sigma: float) -> torch.Tensor:
        calls.append(sigma)
        return toy(x, sigma)

    with pytest.raises(Cancelled):
        sample(label, denoise, start, sigmas, noise=replayed(0, (1, 4, 8, 8), torch.float32), on_step=stop)
    assert 2 <= len(calls) <= 4


def test_gradients_are_off(label: str, table: torch.Tensor, start: torch.Tensor) -> None:
    weight = torch.ones(1, requires_grad=True)
    sigmas = sigmas_for(label, None, 3, table)
    noise = replayed(0, (1, 4, 8, 8), torch.float32)
    assert not sample(label, lambda x, sigma: x * weight / 2, start, sigmas, noise=noise).requires_grad


def test_equal_sigmas_in_a_row_change_nothing(label: str, toy, start: torch.Tensor) -> None:
    """A1111's timestep rule repeats the last timestep for some step counts."""
    noise = replayed(0, (1, 4, 8, 8), torch.float32)
    out = sample(label, toy, start * 5, torch.tensor([5.0, 5.0, 5.0]), noise=noise)
    torch.testing.assert_close(out, start * 5)
    once = torch.tensor([5.0, 5.0, 2.0, 0.0])
    assert bool(sample(label, toy, start * 5, once, noise=noise).isfinite().all())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("rng", ["device", "cpu"])
def test_on_a_gpu_the_host_never_waits(label: str, device: str, rng: str, table: torch.Tensor, toy) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    sigmas = sigmas_for(label, None, 4, table)
    outs = []
    for mode in ("default", "error"):
        images = ImageNoise([1, 2], (4, 8, 8), drawn_on="cpu" if rng == "cpu" else device, device=device)
        x = images.initial() * initial_scale(label, sigmas)
        noise = noise_for(label, images, x, sigmas)
        torch.cuda.set_sync_debug_mode(mode)
        try:
            outs.append(sample(label, toy, x, sigmas, noise=noise, **all_options(label)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(*outs)
    if rng == "cpu":
        images = ImageNoise([1, 2], (4, 8, 8))
        x = images.initial() * initial_scale(label, sigmas)
        noise = noise_for(label, images, x, sigmas)
        expected = sample(label, toy, x, sigmas, noise=noise, **all_options(label))
        torch.testing.assert_close(outs[0].cpu(), expected, rtol=1e-4, atol=1e-4)


def test_untaken_options_and_unknown_samplers_are_refused(start: torch.Tensor, no_noise) -> None:
    sigmas = torch.tensor([1.0, 0.0])
    with pytest.raises(RequestError, match=r"sampler 'DPM\+\+ 2M' takes no eta; it takes no options"):
        sample("DPM++ 2M", lambda x, sigma: x, start, sigmas, noise=no_noise, eta=1.0)
    with pytest.raises(RequestError, match=r"sampler 'Euler a' takes no s_churn; it takes eta, s_noise"):
        sample("k_euler_a", lambda x, sigma: x, start, sigmas, noise=no_noise, s_churn=1.0)
    with pytest.raises(RequestError, match=r"r 0 is out of range"):
        sample("DPM++ SDE", lambda x, sigma: x, start, sigmas, noise=no_noise, r=0.0)
    with pytest.raises(RequestError, match="is not known"):
        sample("DPM++ 4M", lambda x, sigma: x, start, sigmas, noise=no_noise)
    out = sample("DPM++ 2M", lambda x, sigma: x, start, sigmas, noise=no_noise, eta=None)
    assert torch.equal(out, start)


@pytest.mark.parametrize(
    "bad",
    [
        torch.tensor([1.0]),
        torch.tensor([1.0, 2.0]),
        torch.tensor([2.0, 0.0, 0.0]),
        torch.tensor([2.0, -1.0]),
        torch.tensor([math.inf, 1.0]),
        torch.tensor([math.nan, 1.0]),
        torch.ones(2, 2),
        torch.tensor([2.0, 1.0], device="meta"),
    ],
)
def test_sigmas_that_are_none(bad: torch.Tensor, start: torch.Tensor, no_noise) -> None:
    with pytest.raises(RequestError, match="sigmas must be"):
        sample("Euler", lambda x, sigma: x, start, bad, noise=no_noise)


def test_initial_scale_and_finish() -> None:
    ending, open_end = torch.tensor([3.0, 0.0]), torch.tensor([3.0, 0.75])
    x = torch.ones(1, 4, 2, 2)
    assert initial_scale("Euler", ending) == 3.0
    assert initial_scale("DDIM", ending) == pytest.approx(math.sqrt(10))
    assert finish(x, ending) is x
    torch.testing.assert_close(finish(x, open_end), x / 1.25)
