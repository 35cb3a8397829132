"""Philox against its published answers, and noise as NVIDIA's GPUs make it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clearway.sampling import philox
from clearway.sampling.noise import ImageNoise, brownian_noise

# Random123's known answers for philox4x32, 10 rounds: counter, key, result
KNOWN = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)

# The first of torch.manual_seed(0); torch.randn(3, 4, device="cuda"), as the WebUI's documentation gives them
CUDA_SEED_0 = (
    (-0.92466259, -0.42534415, -2.6438457, 0.14518388),
    (-0.12086647, -0.57972564, -0.62285122, -0.32838709),
    (-1.07454231, -0.36314407, -1.67105067, 2.26550497),
)


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter: str, key: str, result: str) -> None:
    given = np.array(words(counter), np.uint32).reshape(4, 1)
    assert philox.philox(given, words(key)).ravel().tolist() == words(result)


def test_gives_what_an_nvidia_gpu_gives() -> None:
    torch.testing.assert_close(
        philox.Generator(0).normal((3, 4)), torch.tensor(CUDA_SEED_0), rtol=0, atol=1e-6
    )


@pytest.mark.cuda
@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5])
def test_gives_what_this_gpu_gives(seed: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    shape = (4, 64, 64)
    generator = torch.Generator("cuda").manual_seed(seed)
    emulated = philox.Generator(seed)
    for _ in range(3):
        drawn = torch.randn(shape, generator=generator, device="cuda").cpu()
        torch.testing.assert_close(emulated.normal(shape), drawn, rtol=0, atol=2e-5)


def test_is_normal_and_each_draw_is_new() -> None:
    generator = philox.Generator(7)
    first, second = generator.normal((100_000,)), generator.normal((100_000,))
    for one in (first, second):
        assert abs(float(one.mean())) < 0.02 and abs(float(one.std()) - 1) < 0.01
        assert abs(float(one.pow(4).mean()) - 3) < 0.15
    assert abs(float((first * second).mean())) < 0.02
    assert torch.equal(philox.Generator(7).normal((100_000,)), first)
    assert not torch.equal(philox.Generator(7 + 2**32).normal((100_000,)), first)


def test_pictures_draw_alike_alone_and_together() -> None:
    together = ImageNoise([3, 4], (4, 5, 6), drawn_on="philox")
    alone = ImageNoise([4], (4, 5, 6), drawn_on="philox")
    for _ in range(2):
        assert torch.equal(together(1.0, 0.5)[1:], alone(1.0, 0.5))


def test_brownian_paths_draw_from_it_too_and_only_theirs() -> None:
    x, sigmas = torch.zeros(2, 4, 3, 5), torch.tensor([10.0, 3.0, 1.0, 0.0])
    plain = brownian_noise(x, sigmas, [1, 2])(10.0, 3.0)
    emulated = brownian_noise(x, sigmas, [1, 2], device="philox")
    between = brownian_noise(x, sigmas, [1, 2])
    first = emulated(10.0, 3.0)
    assert torch.equal(between(10.0, 3.0), plain)  # one beside it keeps torch's own generator
    assert not torch.allclose(first, plain)
    assert torch.equal(brownian_noise(x, sigmas, [1, 2], device="philox")(10.0, 3.0), first)
    assert abs(float(first.std()) - 1) < 0.35
