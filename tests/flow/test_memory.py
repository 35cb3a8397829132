"""Tiles from the request to the parameters of the picture and back; what self-tests are left meanwhile."""

import numpy as np
import pytest

import clearway
from clearway import infotext
from clearway.device import Device
from clearway.models import load, placement
from clearway.ops import _allowance
from clearway.request import Request

ASKED = Request(prompt="a red apple", seed=1, steps=1, width=520, height=512, cfg_scale=1)


@pytest.fixture(scope="module")
def model():
    return load("embedded", device=Device("cpu"))


def test_a_tiled_picture_says_so_and_is_repeated_so(model) -> None:
    whole = clearway.generate(ASKED, model)
    assert "VAE tiling" not in whole.infotexts[0] and whole.notes == ()
    tiled = clearway.generate(Request(**ASKED.as_dict() | {"vae_tiling": True}), model)
    assert infotext.parse(tiled.infotexts[0]).values["VAE tiling"] == "64/16"
    assert any("by tiles (64/16), as was asked" in note for note in tiled.notes)
    assert (tiled.images != whole.images).any()
    off = np.abs(tiled.images.astype(int) - whole.images.astype(int)).mean()
    assert off < 8
    again = Request.from_infotext(tiled.infotexts[0])
    assert again.vae_tiling is True and infotext.unread(tiled.infotexts[0]) == ()
    assert (clearway.generate(again, model).images == tiled.images).all()


def test_tiles_come_by_themselves_where_memory_is_short(model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.machine, "room", lambda device: 2**28)
    result = clearway.generate(ASKED, model)
    assert "VAE tiling: 64/16" in result.infotexts[0]
    assert any("decoding it whole needs about" in note for note in result.notes)
    never = clearway.generate(Request(**ASKED.as_dict() | {"vae_tiling": False}), model)
    assert "VAE tiling" not in never.infotexts[0] and never.notes == ()


@pytest.mark.parametrize("spare", [None, 2**30])
def test_self_tests_take_what_the_plan_leaves_for_as_long_as_it_holds(
    model, monkeypatch: pytest.MonkeyPatch, spare: int | None
) -> None:
    heard = []
    monkeypatch.setattr(placement.Placement, "spare_bytes", property(lambda self: spare))
    clearway.generate(ASKED, model, lambda event: heard.append(_allowance._spare.get()))
    assert set(heard) == {spare} and len(heard) > 3 and _allowance._spare.get() is None
