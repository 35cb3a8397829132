"""Schedules: shape, ends and order for any table, then k-diffusion's values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearway.errors import RequestError
from clearway.sampling import resolve, schedule, schedules, sigmas_for

ENDING_IN_ZERO = ["Automatic", "Uniform", "Karras", "Exponential", "DDIM"]
EXACT_STEPS = ["Automatic", "Uniform", "Karras", "Exponential"]

tables = st.lists(st.floats(-6.0, 5.0), min_size=2, max_size=60, unique_by=lambda v: round(v, 2)).map(
    lambda logs: torch.tensor(sorted(logs)).exp()
)


@settings(max_examples=200, deadline=None)
@given(table=tables, steps=st.integers(1, 60), name=st.sampled_from([one.label for one in schedules()]))
def test_every_schedule_falls_from_the_table_s_top(table: torch.Tensor, steps: int, name: str) -> None:
    if name == "Timesteps" and steps > len(table):
        with pytest.raises(RequestError, match="out of range"):
            schedule(name, steps, table)
        return
    sigmas = schedule(name, steps, table)
    assert sigmas.dtype == torch.float32 and sigmas.device.type == "cpu" and sigmas.ndim == 1
    assert bool((sigmas.diff() <= 0).all()) and bool(sigmas.isfinite().all())
    assert len(sigmas) >= 2 and sigmas[-2] > 0
    assert (sigmas[-1] == 0) == (name in ENDING_IN_ZERO)
    if name in EXACT_STEPS:
        assert len(sigmas) == steps + 1
        assert float(sigmas[0]) == pytest.approx(float(table[-1]), rel=1e-5)
        assert steps == 1 or float(sigmas[-2]) == pytest.approx(float(table[0]), rel=1e-5)
        assert bool((sigmas.diff() < 0).all())
    elif name == "Timesteps":
        assert set(sigmas.tolist()) <= set(table.tolist())


def test_k_diffusion_s_values(table: torch.Tensor, golden: dict) -> None:
    for name, by_steps in golden["schedules"].items():
        for steps, expected in by_steps.items():
            torch.testing.assert_close(
                schedule(name, int(steps), table), torch.tensor(expected), rtol=2e-7, atol=0
            )
    assert schedule("Karras", 5, table)[0] == torch.tensor(14.614643096923828)


def test_automatic_is_uniform_and_names_have_any_case(table: torch.Tensor) -> None:
    assert torch.equal(schedule("automatic", 7, table), schedule("UNIFORM", 7, table))


@pytest.mark.parametrize("rho", [1.0, 3.0, 7.0, 15.0])
def test_karras_is_even_in_the_rho_th_root(table: torch.Tensor, rho: float) -> None:
    sigmas = schedule("Karras", 9, table, rho=rho, sigma_min=0.1, sigma_max=10.0)[:-1].double()
    gaps = sigmas.pow(1 / rho).diff()
    assert sigmas[[0, -1]].tolist() == pytest.approx([10.0, 0.1], rel=1e-5)
    torch.testing.assert_close(gaps, gaps.mean().expand_as(gaps), rtol=1e-4, atol=1e-6)


def test_exponential_has_one_ratio(table: torch.Tensor) -> None:
    sigmas = schedule("Exponential", 9, table, sigma_min=0.1, sigma_max=10.0)[:-1].double()
    ratios = sigmas[1:] / sigmas[:-1]
    torch.testing.assert_close(ratios, ratios.mean().expand_as(ratios), rtol=1e-5, atol=0)
    assert sigmas[[0, -1]].tolist() == pytest.approx([10.0, 0.1], rel=1e-5)


def test_uniform_with_every_timestep_is_the_table(table: torch.Tensor) -> None:
    torch.testing.assert_close(schedule("Uniform", 1000, table)[:-1], table.flip(0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", EXACT_STEPS)
def test_one_step_goes_from_the_top_to_zero(table: torch.Tensor, name: str) -> None:
    sigmas = schedule(name, 1, table).tolist()
    assert sigmas == [pytest.approx(float(table[-1]), rel=1e-6), 0.0]


@pytest.mark.parametrize(
    ("steps", "calls"),
    [
        (1, 1),
        (2, 1),
        (3, 3),
        (10, 9),
        (20, 19),
        (28, 28),
        (30, 30),
        (50, 49),
        (60, 62),
        (501, 999),
        (1000, 999),
    ],
)
def test_the_timestep_rule_counts_as_in_a1111(table: torch.Tensor, steps: int, calls: int) -> None:
    sigmas = sigmas_for("DDIM", None, steps, table)
    assert torch.equal(sigmas, schedule("Timesteps", steps, table))
    assert len(sigmas) - 1 == calls
    assert sigmas[-1] == table[1]  # never 0: the last call ends at timestep 1
    if steps > 1:
        indices = [min(index + 1, 999) for index in range(0, 1000, 1000 // steps)]
        assert sigmas.flip(0).tolist() == [float(table[index]) for index in indices]


@pytest.mark.parametrize("steps", [1, 7, 20, 27, 28, 30, 60, 1000, 1500])
def test_the_ddim_scheduler_ends_in_zero(table: torch.Tensor, steps: int) -> None:
    stride = max(1000 // steps, 1)
    expected = [*(float(table[index]) for index in reversed(range(1, 1000, stride))), 0.0]
    assert schedule("DDIM", steps, table).tolist() == expected
    assert torch.equal(sigmas_for("DDIM", "DDIM", steps, table), schedule("DDIM", steps, table))


def test_ddim_s_two_rules_differ_only_in_the_zero(table: torch.Tensor) -> None:
    for steps in (10, 20, 28, 30, 60):  # strides that divide 999 also differ in a last, clipped timestep
        assert torch.equal(schedule("DDIM", steps, table)[:-1], schedule("Timesteps", steps, table))


def test_sigmas_for_follows_the_sampler_s_default(table: torch.Tensor) -> None:
    for automatic in (None, "Automatic"):
        assert torch.equal(sigmas_for("DPM++ 2M", automatic, 6, table), schedule("Karras", 6, table))
        assert torch.equal(sigmas_for("Euler", automatic, 6, table), schedule("Uniform", 6, table))
    assert torch.equal(sigmas_for("DDIM", "Karras", 6, table), schedule("Karras", 6, table))
    sampler, label = resolve("dpm++ 2m exponential", None)
    assert torch.equal(sigmas_for(sampler, label, 6, table), schedule("Exponential", 6, table))
    assert torch.equal(sigmas_for("Euler", "Karras", 6, table, rho=5), schedule("Karras", 6, table, rho=5))


def test_discarding_the_next_to_last_sigma_keeps_the_number_of_steps(table: torch.Tensor) -> None:
    discarding = replace(resolve("Euler")[0], discard_next_to_last=True)
    whole = schedule("Karras", 9, table).tolist()
    assert sigmas_for(discarding, "Karras", 8, table).tolist() == whole[:-2] + whole[-1:]


def test_options_that_do_not_belong_are_refused(table: torch.Tensor) -> None:
    with pytest.raises(
        RequestError, match=r"schedule 'Exponential' takes no rho; it takes sigma_min, sigma_max"
    ):
        schedule("Exponential", 5, table, rho=7)
    with pytest.raises(RequestError, match=r"schedule 'Uniform' takes no sigma_min; it takes no options"):
        schedule("Uniform", 5, table, sigma_min=0.1)
    with pytest.raises(RequestError, match=r"takes no sigma_max"):
        sigmas_for("DDIM", None, 5, table, sigma_max=10.0)
    assert torch.equal(schedule("Uniform", 5, table, sigma_min=None), schedule("Uniform", 5, table))


@pytest.mark.parametrize("steps", [0, -1, 2.5, "5", True])
def test_wrong_steps(table: torch.Tensor, steps: object) -> None:
    with pytest.raises(RequestError, match="steps must be a whole number from 1"):
        schedule("Karras", steps, table)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"sigma_min": 0.0},
        {"sigma_min": 20.0},
        {"sigma_max": 0.01},
        {"rho": 0.0},
        {"rho": 1e-3},
        {"sigma_max": math.inf},
    ],
)
def test_options_without_sigmas(table: torch.Tensor, options: dict[str, float]) -> None:
    with pytest.raises(RequestError):
        schedule("Karras", 5, table, **options)


@pytest.mark.parametrize(
    "bad",
    [
        torch.tensor([3.0, 2.0, 1.0]),
        torch.tensor([1.0, 1.0, 2.0]),
        torch.tensor([0.0, 1.0, 2.0]),
        torch.tensor([1.0, math.inf]),
        torch.tensor([1.0, math.nan]),
        torch.tensor([1.0]),
        torch.ones(2, 2),
    ],
)
def test_tables_that_are_none(bad: torch.Tensor) -> None:
    with pytest.raises(RequestError, match="training sigmas"):
        schedule("Karras", 5, bad)
