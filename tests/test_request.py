"""Requests: what is refused, what is filled in."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearway import Request, RequestError
from clearway.types import Defaults

DEFAULTS = Defaults(width=256, height=320, steps=10, cfg_scale=3.0, sampler="Euler", schedule="Karras")


def test_silence_means_the_models_defaults() -> None:
    request = Request(prompt="x", seed=1).resolved(DEFAULTS)
    assert (request.width, request.height, request.steps) == (256, 320, 10)
    assert (request.cfg_scale, request.sampler, request.schedule) == (3.0, "Euler", "Karras")


def test_the_cards_schedule_belongs_to_the_cards_sampler() -> None:
    assert Request(sampler="Heun").resolved(DEFAULTS).schedule == "Automatic"
    assert Request(schedule="Exponential").resolved(DEFAULTS).sampler == "Euler"


def test_what_was_asked_for_stays() -> None:
    request = Request(width=64, height=72, steps=3, cfg_scale=1.0, sampler="Heun", schedule="Karras", seed=0)
    assert dataclasses.replace(request, batch_size=1) == request.resolved(DEFAULTS)


def test_seed_minus_one_is_drawn_once() -> None:
    request = Request().resolved(DEFAULTS)
    assert 0 <= request.seed < 4294967294
    assert request.resolved(DEFAULTS).seed == request.seed
    with pytest.raises(RequestError):
        Request().seeds()


@given(st.integers(0, 2**40), st.integers(1, 30))
def test_seeds_count_up(seed: int, count: int) -> None:
    assert Request(seed=seed, count=count).seeds() == tuple(range(seed, seed + count))


def test_exact_batch_is_a_batch_of_one() -> None:
    assert Request(count=7, exact_batch=True, batch_size=3).resolved(DEFAULTS).batch_size == 1
    assert Request(count=7).resolved(DEFAULTS).batch_size == 4
    assert Request(count=2).resolved(DEFAULTS).batch_size == 2


BAD = {
    "width": [1030, 0, -8, 2**20, 512.0, "512", True],
    "height": [1030, 0, None.__class__],
    "steps": [0, -1, 1001, 2.5, "20"],
    "count": [0, 1.5],
    "batch_size": [0],
    "clip_skip": [0, 13],
    "seed": [-2, 2**63, 1.0, "1"],
    "cfg_scale": [-1, float("nan"), float("inf"), "7"],
    "ngms": [-0.1, float("nan"), None],
    "eta": [-1, float("nan")],
    "sigma_min": [-1],
    "rho": [0],
    "rng": ["nv", "gpu", None],
    "vae_tiling": [1, 0, "yes", 64],
    "prompt": [None, 3],
    "negative_prompt": [b"x"],
    "sampler": [3],
    "schedule": [3],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_impossible_values_are_one_sentence(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        Request(**{name: value})
    assert name.split("_")[0] in str(caught.value) or str(value) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numpys_numbers_are_numbers() -> None:
    request = Request(steps=np.int64(5), seed=np.uint32(7), cfg_scale=np.float32(5))
    assert (request.steps, request.seed, request.cfg_scale) == (5, 7, 5.0)
    assert (type(request.steps), type(request.seed), type(request.cfg_scale)) == (int, int, float)


def test_no_picture_passes_the_largest_seed() -> None:
    Request(seed=2**63 - 1)
    with pytest.raises(RequestError, match="passes the largest seed"):
        Request(seed=2**63 - 1, count=2)


def test_the_sentence_about_sides_names_the_nearest() -> None:
    with pytest.raises(RequestError, match="1030 x 512: sides must be multiples of 8; nearest 1032 x 512"):
        Request(width=1030, height=512)
