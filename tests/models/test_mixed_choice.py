"""Which parts become half: by what was measured, kept for other processes, and given up at the first NaN."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from clearway import UnavailableError, home
from clearway.device import Device
from clearway.models import _mixed, _mixed_choice, vae
from clearway.models._moved import Moved
from clearway.models.accelerate import accelerate, restore
from mixed_vaes import EVERY, LATENTS, decoded, half_on_the_cpu, model, overflowing, psnr, tiny_vae

pytestmark = pytest.mark.usefixtures("half_on_the_cpu")
__all__ = ["half_on_the_cpu"]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one with every measurement."""
    seen: list[Any] = []
    inner = _mixed_choice._decided
    monkeypatch.setattr(_mixed_choice, "_decided", lambda *given: seen.append(given) or inner(*given))
    return seen


def float32(module: Any, latents: torch.Tensor = LATENTS[:1]) -> torch.Tensor:
    return vae.decode(model(module, "float32"), latents).pixels


def kept_file() -> Path:
    (file,) = home.path(_mixed_choice.FOLDER).iterdir()
    return file


def test_with_benign_weights_all_parts_are_half() -> None:
    module = tiny_vae()
    made = decoded(module)
    assert _mixed.halves(module) == EVERY and made.dtypes == ("mixed",)
    assert "all of its decoder in float16 is" in made.notes[0] and "dB PSNR from float32" in made.notes[0]
    assert made.notes[1:] == ("the VAE decoded in mixed precision: all of its decoder in float16",)
    assert psnr(made.pixels, float32(tiny_vae())) > 40
    assert module.encoder.conv_in.weight.dtype == module.quant_conv.weight.dtype == torch.float32


@pytest.mark.parametrize("block", [0, 1, 2])
@pytest.mark.parametrize("ops", [False, True])
def test_just_what_overflows_stays_in_float32(block: int, ops: bool) -> None:
    """The residual block that makes the large values, and the upsampler that takes them."""
    module = overflowing(block)
    assert not torch.isfinite(overflowing(block).half().decode(LATENTS[:1].half()).sample).all()
    if ops:
        accelerate(module)
    made = decoded(module)
    high = (f"up_blocks.{block}.resnets.1", f"up_blocks.{block}.upsamplers.0")
    assert _mixed.halves(module) == tuple(name for name in EVERY if name not in high)
    assert torch.isfinite(made.pixels).all() and made.dtypes == ("mixed",)
    assert psnr(made.pixels, float32(overflowing(block))) >= 40
    assert f"all but {', '.join(high)} in float16" in made.notes[0]
    assert f"{', '.join(high)} in float32, the rest in float16" in made.notes[1]


@pytest.mark.parametrize("factor", [1e2, 1e3, 1e4, 1e5, 1e7])
def test_no_part_is_half_that_exceeds_the_limit(factor: float) -> None:
    module = overflowing(1, factor)
    decoded(module)
    kept = json.loads(kept_file().read_text())
    assert set(kept["half"]) == {name for name in EVERY if kept["maxima"][name] <= _mixed_choice.LIMIT}
    assert _mixed.halves(module) == tuple(kept["half"])


def test_maxima_are_of_weights_inputs_and_outputs_of_all_that_is_inside() -> None:
    module = tiny_vae()
    seen: dict[str, float] = {}
    with torch.inference_mode(), _mixed_choice._listening(module) as found:
        module.decode(LATENTS[:1])
    seen = {name: float(value) for name, value in found.items()}
    assert not any(one._forward_hooks for one in module.modules())
    for where in ("norm1", "conv1", "norm2", "conv2"):  # the largest value anywhere in one part
        other = tiny_vae()
        getattr(other.decoder.up_blocks[1].resnets[0], where).weight *= 1e5
        accelerate(other)
        with torch.inference_mode(), _mixed_choice._listening(other) as found:
            other.decode(LATENTS[:1])
        assert float(found["up_blocks.1.resnets.0"]) > 100 * seen["up_blocks.1.resnets.0"]
        assert float(found["mid_block"]) == pytest.approx(seen["mid_block"], rel=1e-4)


def test_what_adds_most_to_the_error_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the limit all along: rounding and not overflow."""
    module, tries = tiny_vae(), list[tuple[str, ...]]()
    inner, bad = _mixed_choice._apart, {"mid_block", "up_blocks.2.resnets.1"}

    def apart(pixels: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
        tries.append(_mixed.halves(module))
        found = inner(pixels, reference)
        return (20.0 - len(bad & {*tries[-1]}), 9.0) if bad & {*tries[-1]} else found

    monkeypatch.setattr(_mixed_choice, "_apart", apart)
    made = decoded(module)
    assert _mixed.halves(module) == tuple(name for name in EVERY if name not in bad)
    assert "all but mid_block, up_blocks.2.resnets.1 in float16" in made.notes[0]
    assert len(tries) <= 2 + len(EVERY) + len(EVERY).bit_length()


def test_where_nothing_is_near_all_of_it_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_mixed_choice, "_apart", lambda *_: (float("-inf"), float("inf")))
    module = tiny_vae()
    made = decoded(module)
    assert made.dtypes == ("float32",) and torch.equal(made.pixels, float32(tiny_vae()))
    assert "no part of its decoder is safe and near enough" in made.notes[0] and len(made.notes) == 1
    assert decoded(module).notes == ()


def test_one_measurement_serves_later_pictures_copies_and_processes(measured: list[Any]) -> None:
    module = overflowing(1)
    first, half = decoded(module), _mixed.halves(module)
    again = decoded(module)
    assert torch.equal(again.pixels, first.pixels) and len(again.notes) == 1
    assert _mixed.halves(decoded_copy := copy.deepcopy(module)) == half
    assert torch.equal(decoded(decoded_copy).pixels, first.pixels)
    _mixed_choice.forget()  # as another process is
    other = overflowing(1)
    made = decoded(other)
    assert len(measured) == 1 and _mixed.halves(other) == half
    assert torch.equal(made.pixels, first.pixels) and len(made.notes) == 1


def test_a_vae_that_comes_and_goes_and_ops_in_it_change_nothing(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = overflowing(1)
    moved, keys = Moved(module, Device("cpu")), list[Any]()
    inner = _mixed_choice._key
    monkeypatch.setattr(_mixed_choice, "_key", lambda *given: keys.append(given) or inner(*given))
    for change in (lambda _: None, accelerate, restore):
        moved.enter()
        change(module)
        assert decoded(module).dtypes == ("mixed",)
        moved.leave()
    assert len(measured) == len(keys) == 1


def test_other_weights_are_measured_anew(measured: list[Any]) -> None:
    module = overflowing(1)
    decoded(module)
    decoded(tiny_vae(seed=1))
    assert len(measured) == 2
    module.load_state_dict(tiny_vae().state_dict())
    made = decoded(module)
    assert len(measured) == 3 and _mixed.halves(module) == EVERY
    assert psnr(made.pixels, float32(tiny_vae())) > 40
    module.load_state_dict(overflowing(2).state_dict(), assign=True)
    decoded(module)
    assert len(measured) == 4 and "up_blocks.2.upsamplers.0" not in _mixed.halves(module)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 0},
        {"half": [*EVERY]},  # some were measured to be too large
        {"half": ["up_blocks.9"]},
        {"half": 3},
        {"psnr_db": 20.0},
        {"psnr_db": "far"},
        {"maxima": {}},
        {"key": {}},
    ],
)
def test_a_damaged_or_foreign_file_is_measured_anew(measured: list[Any], change: dict[str, Any]) -> None:
    decoded(overflowing(1))
    file = kept_file()
    right = json.loads(file.read_text())
    file.write_text(json.dumps(right | change))
    _mixed_choice.forget()
    module = overflowing(1)
    decoded(module)
    assert len(measured) == 2 and json.loads(file.read_text()) == right
    file.write_text("{")
    _mixed_choice.forget()
    decoded(overflowing(1))
    assert len(measured) == 3


def test_without_a_state_folder_the_process_remembers(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home, "write_json", lambda *_: False)
    decoded(tiny_vae())
    decoded(tiny_vae())
    assert len(measured) == 1


def test_nan_in_a_later_picture_makes_it_float32_whole_where_it_stays() -> None:
    module = tiny_vae()
    decoded(module)
    large = torch.cat([LATENTS[:1], LATENTS[1:] * 1e6])  # far from what was measured
    made = decoded(module, large)
    assert made.dtypes == ("mixed", "float32")
    assert made.notes == (
        "the VAE decoded in mixed precision: all of its decoder in float16",
        "the VAE returned NaN in mixed precision in 1 of 2 pictures: that one ran again in float32, "
        "where it stays",
    )
    exact = float32(tiny_vae(), large)
    assert torch.equal(made.pixels[1], exact[1]) and psnr(made.pixels[0], exact[0]) > 40
    again = decoded(module, large)
    assert again.dtypes == ("float32",) * 2 and again.notes == ()
    assert torch.equal(again.pixels, exact)


def test_what_did_not_hold_is_forgotten_by_all(measured: list[Any]) -> None:
    module = tiny_vae()
    decoded(module)
    decoded(module, LATENTS * 1e6)
    _mixed_choice.forget()
    decoded(tiny_vae())
    assert len(measured) == 2


def test_nothing_is_decided_by_latents_that_are_not_finite() -> None:
    module = tiny_vae()
    with pytest.raises(UnavailableError, match="sampling ended in NaN"):
        decoded(module, LATENTS * float("nan"))
    assert not home.path(_mixed_choice.FOLDER).exists() and _mixed.precision_of(module) == "float32"
    decoded(module)
    assert _mixed.halves(module) == EVERY


def test_a_measurement_that_fails_leaves_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_mixed_choice, "_apart", lambda *_: pytest.fail("no memory"))
    module = tiny_vae()
    with pytest.raises(pytest.fail.Exception):
        decoded(module)
    assert _mixed.precision_of(module) == "float32" and torch.equal(float32(module), float32(tiny_vae()))


def test_by_tiles_it_is_measured_by_tiles() -> None:
    module, sizes = tiny_vae(), list[tuple[int, ...]]()
    module.decoder.register_forward_pre_hook(lambda _, given: sizes.append(given[0].shape[2:]))
    latents = torch.randn(1, 4, 2, 100, generator=torch.Generator().manual_seed(0))
    made = decoded(module, latents, tiled=lambda size: size == 4)
    assert made.tiles == (vae.LABEL,) and made.dtypes == ("mixed",) and set(sizes) == {(2, 64)}


def test_a_picture_is_the_same_whatever_decoded_it() -> None:
    """The one that was measured, and the same later."""
    module = overflowing(2)
    assert torch.equal(decoded(module).pixels, decoded(module).pixels)


def test_on_the_cpu_a_mixed_vae_is_float32_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(_mixed_choice.HALF, "cpu")
    made = decoded(tiny_vae())
    assert made.dtypes == ("float32",)
    assert made.notes == ("a mixed VAE is float32 on this device (cpu); half precision in parts is for GPUs",)


def test_what_cannot_be_mixed_is_decoded_as_it_was_loaded() -> None:
    module = tiny_vae()
    module.decoder.up_blocks[0].forward = type(module.decoder.up_blocks[0]).forward.__get__(
        module.decoder.up_blocks[0]
    )
    assert decoded(module).dtypes == ("mixed",)  # the class's own, as Accelerate leaves it
    other = tiny_vae()
    inner = other.decoder.forward
    other.decoder.forward = lambda *given: inner(*given)
    made = decoded(other)
    assert made.dtypes == ("float32",) and "the VAE cannot be mixed" in made.notes[0]
