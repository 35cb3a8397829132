"""Facts per family."""

import pytest

from clearway.models.family import FAMILIES, SD1, SD2, SDXL


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_exactly_one_head_rule(family) -> None:
    assert (family.heads is None) != (family.head_size is None)


def test_heads() -> None:
    assert [SD1.heads_for(channels) for channels in (320, 640, 1280)] == [8, 8, 8]
    assert [SDXL.heads_for(channels) for channels in (320, 640, 1280)] == [5, 10, 20]
    assert SD2.heads_for(32) == 1


def test_defaults_fit_the_model() -> None:
    assert SD1.defaults_for("epsilon", False).width == 512
    assert SD2.defaults_for("epsilon", False).height == 512
    assert SD2.defaults_for("v_prediction", False).height == 768
    assert SDXL.defaults_for("epsilon", False).steps == 30
    assert SD1.defaults_for("epsilon", False, 256).width == 256
    found = SDXL.defaults_for("v_prediction", True)
    assert (found.sampler, found.schedule, found.width) == ("Euler", "Automatic", 1024)


def test_text_encoders() -> None:
    assert [encoder.activation for encoder in SDXL.text_encoders] == ["quick_gelu", "gelu"]
    assert [encoder.pad for encoder in SDXL.text_encoders] == ["end", "zero"]
    assert [encoder.pooled for encoder in SDXL.text_encoders] == [False, True]
