"""Distances between pictures and tensors, against direct formulas."""

import math

import numpy as np
import pytest
import torch

from clearway.errors import RequestError
from clearway.measure.quality import compare_pictures, compare_tensors, difference_map, ssim


def pictures(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def direct_ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Equation 13 of Wang et al. (2004), window by window, with sums written out."""
    at = np.arange(11) - 5
    window = np.exp(-(at[:, None] ** 2 + at[None, :] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    values = []
    for channel in range(3):
        for top in range(a.shape[0] - 10):
            for left in range(a.shape[1] - 10):
                x = a[top : top + 11, left : left + 11, channel].astype(float)
                y = b[top : top + 11, left : left + 11, channel].astype(float)
                mx, my = (window * x).sum(), (window * y).sum()
                vx, vy = (window * (x - mx) ** 2).sum(), (window * (y - my) ** 2).sum()
                cov = (window * (x - mx) * (y - my)).sum()
                values.append((2 * mx * my + c1) * (2 * cov + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2)))
    return sum(values) / len(values)


@pytest.mark.parametrize("noise", [3, 40, 255])
def test_ssim_is_the_direct_formula(noise: int) -> None:
    a = pictures(0, 16, 19, 3)
    away = np.random.default_rng(1).integers(-noise, noise + 1, a.shape)
    b = np.clip(a.astype(int) + away, 0, 255).astype(np.uint8)
    assert ssim(a, b) == pytest.approx(direct_ssim(a, b), abs=1e-10)
    assert ssim(a, b) == ssim(b, a)


def test_ssim_of_constant_pictures_is_its_luminance_term() -> None:
    a, b = np.full((12, 12, 3), 100, np.uint8), np.full((12, 12, 3), 120, np.uint8)
    c1 = (0.01 * 255) ** 2
    assert ssim(a, b) == pytest.approx((2 * 100 * 120 + c1) / (100**2 + 120**2 + c1), abs=1e-9)


def test_identical_pictures() -> None:
    a = pictures(0, 2, 16, 16, 3)
    assert compare_pictures(a, a.copy()) == {
        "max_error": 0,
        "mean_error": 0.0,
        "psnr_db": None,
        "ssim": pytest.approx(1.0, abs=1e-12),
        "identical": True,
    }


def test_the_worst_picture_speaks_for_all() -> None:
    a = np.full((2, 16, 16, 3), 100, np.uint8)
    b = a.copy()
    b[1] = 110
    found = compare_pictures(a, b)
    assert (found["max_error"], found["mean_error"], found["identical"]) == (10, 5.0, False)
    assert found["psnr_db"] == pytest.approx(20 * math.log10(255 / 10))
    assert found["ssim"] == ssim(a[1], b[1])


def test_differences_do_not_wrap_around() -> None:
    a, b = np.zeros((1, 11, 11, 3), np.uint8), np.full((1, 11, 11, 3), 255, np.uint8)
    for found in (compare_pictures(a, b), compare_pictures(b, a)):
        assert (found["max_error"], found["mean_error"], found["psnr_db"]) == (255, 255.0, 0.0)
    assert difference_map(a, b).min() == 255


def test_small_pictures_have_no_ssim() -> None:
    a = pictures(0, 1, 8, 64, 3)
    assert compare_pictures(a, 255 - a)["ssim"] is None


def test_the_difference_map_is_amplified_and_clipped() -> None:
    a = np.array([10, 10, 200], np.uint8).reshape(1, 1, 1, 3)
    b = np.array([12, 9, 100], np.uint8).reshape(1, 1, 1, 3)
    assert difference_map(a, b).tolist() == [[[[32, 16, 255]]]]
    assert difference_map(a, b, gain=1).tolist() == [[[[2, 1, 100]]]]


def test_tensors_against_a_reference() -> None:
    reference = torch.tensor([[3.0, -4.0], [0.0, 0.0]])
    found = compare_tensors(reference + torch.tensor([[0.0, 0.0], [0.5, 0.0]]), reference)
    assert found == {
        "max_abs": 0.5,
        "max_rel": 0.125,
        "rel_l2": 0.1,
        "psnr_db": pytest.approx(10 * math.log10(7**2 / (0.25 / 4))),
        "identical": False,
        "not_finite": 0,
    }


def test_half_precision_is_compared_in_full() -> None:
    a = torch.full((4,), 60000.0, dtype=torch.float16)
    assert compare_tensors(a, -a.float())["max_abs"] == 120000


def test_identical_tensors_and_a_reference_of_zeros() -> None:
    zero = torch.zeros(3)
    same = compare_tensors(zero, zero)
    assert (same["max_rel"], same["rel_l2"], same["psnr_db"], same["identical"]) == (0, 0, None, True)
    far = compare_tensors(zero + 1, zero)
    assert (far["max_rel"], far["rel_l2"], far["psnr_db"]) == (math.inf, math.inf, -math.inf)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_as_far_as_can_be(bad: float) -> None:
    a, b = torch.tensor([1.0, bad, 2.0]), torch.tensor([1.0, 2.0, 2.0])
    for found in (compare_tensors(a, b), compare_tensors(b, a), compare_tensors(a, a)):
        assert (found["not_finite"], found["identical"]) == (1, False)
        assert found["max_abs"] == found["rel_l2"] == math.inf and found["psnr_db"] == -math.inf


def test_pictures_of_another_scale_are_no_pictures() -> None:
    a = pictures(0, 1, 16, 16, 3)
    with pytest.raises(ValueError, match="pictures are uint8, not uint8 and float64"):
        compare_pictures(a, a / 255)


@pytest.mark.parametrize("compare", [compare_pictures, compare_tensors, difference_map])
def test_other_shapes_are_refused(compare) -> None:
    make = torch.zeros if compare is compare_tensors else lambda shape: np.zeros(shape, np.uint8)
    with pytest.raises(
        RequestError, match=r"shapes \(1, 16, 16, 3\) and \(1, 16, 24, 3\) cannot be compared"
    ):
        compare(make((1, 16, 16, 3)), make((1, 16, 24, 3)))
    with pytest.raises(RequestError, match="not empty"):
        compare(make((0, 16, 16, 3)), make((0, 16, 16, 3)))
