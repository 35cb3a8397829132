"""The reference, and what an arm may be off it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from clearway.device import Device
from clearway.measure import verify
from clearway.measure.contenders import Probe, find
from clearway.measure.random_model import random_model
from clearway.measure.scenario import Scenario
from clearway.measure.verify import FLOOR, Reference, changed, reference
from clearway.types import Precision

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
CPU = Device("cpu")
TINY = Scenario(name="tiny", width=64, height=64, steps=2, cfg_scale=3.0)
PICTURE = np.full((1, 16, 16, 3), 128, np.uint8)


def made(budget: float | None) -> Reference:
    probe = Probe(PICTURE, torch.ones(1, 4, 2, 2), 2)
    return Reference("exact", probe, probe, "stock", budget)


def test_small_models_have_a_float32_reference_on_the_cpu() -> None:
    model = random_model(
        "tiny-sd15", CPU, Precision(unet="bfloat16", text_encoder="bfloat16", vae="bfloat16")
    )
    found = reference(TINY, model)
    assert found.label == "Diffusers eager, float32, on the CPU"
    assert found.stock_label == "Diffusers eager, bfloat16"
    assert found.budget is not None and 1e-4 < found.budget < 0.5
    ours = find("clearway-eager").prepare(TINY, model).probe(0)
    ledger = found.judge(ours)
    assert ledger["latents"]["rel_l2"] <= found.tolerance and ledger["verified"] is True
    assert ledger["budget_rel_l2"] == found.budget and found.doubt(ours, ledger) is None
    assert {"max_error", "psnr_db", "ssim", "stock"} <= set(ledger)


def test_what_diffusers_cannot_do_is_checked_against_our_own_eager_path() -> None:
    model = random_model("tiny-sd15", CPU, Precision())
    found = reference(replace(TINY, ngms=4.0), model)
    assert found.label.startswith("Clearway eager, float32") and found.budget == 0.0
    mixed = random_model("tiny-sd15", CPU, Precision(unet="bfloat16", text_encoder="bfloat16"))
    assert (
        reference(replace(TINY, ngms=4.0), mixed).stock_label == "Clearway eager, bfloat16 with a float32 VAE"
    )


def test_of_a_large_batch_the_first_pictures_are_checked() -> None:
    model = random_model("tiny-sd15", CPU, Precision())
    batch = replace(TINY, count=3, batch_size=3)
    found = reference(batch, model, 1)
    assert found.label.endswith("on the CPU, the first 1 of 3 pictures") and len(found.probe.images) == 1
    ours = find("clearway-eager").prepare(batch, model).probe(0)
    assert ours.images is not None and len(ours.images) == 3
    ledger = found.judge(ours)
    assert ledger["verified"] is True and found.doubt(ours, ledger) is None
    second = replace(ours, images=ours.images[1:], latents=ours.latents[1:])  # type: ignore[index]
    assert found.judge(second)["verified"] is False


@pytest.mark.parametrize("what", ["unet", "vae", "text"])
def test_networks_have_references_too(what: str) -> None:
    model = random_model("tiny-sd15", CPU, Precision(vae="bfloat16"))
    found = reference(replace(TINY, what=what), model)
    assert found.probe.images is None and found.label == "eager, float32, on the CPU"
    ledger = found.judge(find("clearway").prepare(replace(TINY, what=what), model).probe(0))
    assert ledger["verified"] is True and ledger["max_error"] == ledger["latents"]["max_abs"]


def test_a_wrong_picture_is_not_verified_and_says_by_how_much() -> None:
    wrong = Probe(PICTURE, torch.ones(1, 4, 2, 2) * 1.1, 2)
    ledger = made(0.01).judge(wrong)
    assert ledger["verified"] is False and ledger["latents"]["rel_l2"] == pytest.approx(0.1)
    assert made(0.01).doubt(wrong, ledger) == "its latents are 0.1 from the reference, and 0.02 was allowed"
    assert made(0.06).judge(wrong)["verified"] is True  # eager itself is that far off
    assert made(None).tolerance == made(0.0).tolerance == FLOOR
    broken = Probe(PICTURE, torch.full((1, 4, 2, 2), float("nan")), 2)
    assert made(0.0).judge(broken)["verified"] is False


def test_other_work_and_nothing_to_compare() -> None:
    fewer = Probe(PICTURE, torch.ones(1, 4, 2, 2), 1)
    assert "called the UNet 1 times" in (made(0.0).doubt(fewer, made(0.0).judge(fewer)) or "")
    unknown = Probe(PICTURE, None, None)
    ledger = made(0.0).judge(unknown)
    assert ledger["verified"] == "not checked" and ledger["identical"]
    assert made(0.0).doubt(unknown, ledger) is None


def test_a_result_that_changes_during_the_run_is_said() -> None:
    before = Probe(PICTURE, torch.ones(1, 4, 2, 2))
    assert changed(before, PICTURE, 0.0) is None and changed(before, PICTURE + 1, 0.0) is None
    assert "changed during the run" in (changed(before, PICTURE + 40, 0.0) or "")
    output = Probe(None, torch.ones(1, 4))
    assert changed(output, torch.ones(1, 4), 0.0) is None
    assert "changed during the run" in (changed(output, torch.ones(1, 4) * 2, 0.1) or "")


def test_tf32_is_off_for_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    inner = verify.machine.tf32

    def tf32(device: Any, allowed: bool) -> Any:
        asked.append(allowed)
        return inner(device, allowed)

    monkeypatch.setattr(verify.machine, "tf32", tf32)
    reference(replace(TINY, what="vae"), random_model("tiny-sd15", CPU, Precision()))
    assert asked[0] is False
