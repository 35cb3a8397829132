"""A mixed VAE from the words to the picture's parameters and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import clearway
from builders import tiny_sd1
from clearway import Request, infotext
from clearway.models import _mixed_choice
from clearway.types import Precision


def test_a_mixed_vae_says_in_the_picture_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's float16 stands for a GPU's; without it the picture is float32 and says so."""
    monkeypatch.setenv("CLEARWAY_HOME", str(tmp_path / "home"))
    mixed = Precision(vae="mixed")
    model = clearway.load(str(tiny_sd1(tmp_path / "sd1")), device="cpu", precision=mixed)
    asked = Request(
        prompt="a red apple", width=32, height=32, steps=1, sampler="Euler a", seed=7, cfg_scale=4.0
    )
    on_cpu = clearway.generate(asked, model)
    assert "VAE dtype" not in on_cpu.infotexts[0] and "half precision in parts is for GPUs" in on_cpu.notes[0]
    monkeypatch.setitem(_mixed_choice.HALF, "cpu", "float16")
    first, again = clearway.generate(asked, model), clearway.generate(asked, model)
    assert "VAE dtype: mixed" in first.infotexts[0] and first.infotexts == again.infotexts
    assert any(note.startswith("the VAE was measured on this picture") for note in first.notes)
    assert again.notes[0].startswith("the VAE decoded in mixed precision: ")
    assert np.array_equal(first.images, again.images)
    assert np.abs(first.images.astype(int) - on_cpu.images).max() <= 4
    found = Precision(**infotext.precision_fields(first.infotexts[0]))
    repeated = clearway.load(str(tmp_path / "sd1"), device="cpu", precision=found)
    same = clearway.generate(Request.from_infotext(first.infotexts[0]), repeated)
    assert np.array_equal(same.images, first.images) and same.infotexts == first.infotexts
