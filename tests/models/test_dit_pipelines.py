"""Whole pipelines of Flux and SD 3 from tiny parts of the real classes: prompt in, picture out, as before."""

import numpy as np
import pytest

from clearway.models.accelerate import accelerate, restore
from clearway.ops import contract
from models.dit_pipelines import PIPELINES, draw


@pytest.mark.parametrize("name", PIPELINES)
def test_the_same_pictures(name: str) -> None:
    pipe = PIPELINES[name]()
    plain = draw(pipe)
    report, routes = accelerate(pipe), dict[str, int]()
    assert {"adaln_modulate", "attention", "group_norm_silu"} <= set(report.placed)
    assert "in transformer" in str(report) and "in vae" in str(report)
    with contract.recording(routes):
        found = draw(pipe)
    assert np.abs(found - plain).max() < 1e-3 < plain.std()
    assert {"rms_norm/reference", "rope/reference"} <= set(routes) or name != "flux"
    assert routes["adaln_modulate/reference"] >= 3 * 10
    restore(pipe)
    assert (draw(pipe) == plain).all()


def test_skipped_layers_of_sd35() -> None:
    pipe = PIPELINES["sd35"]()
    skipping = {
        "skip_guidance_layers": [1],
        "skip_layer_guidance_start": 0.0,
        "skip_layer_guidance_stop": 1.0,
    }
    plain, usual = draw(pipe, **skipping), draw(pipe)
    accelerate(pipe)
    assert np.abs(draw(pipe, **skipping) - plain).max() < 1e-3 < np.abs(usual - plain).max()
