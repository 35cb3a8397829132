"""Text encoders of the original layouts: real configs, tensors against Diffusers' own converter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from builders import open_clip
from clearway.models.keys import Layout, below
from clearway.models.keys_text import _third, _transposed, canonical, clip_layout, open_clip_layout


def under(tensors: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def shapes(tensors: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in tensors.items()}


def turned(layout: Layout, tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        target: source.turn(tensors[source.key]) if source.turn else tensors[source.key]
        for target, source in layout.sources.items()
    }


def test_canonical() -> None:
    assert canonical("embeddings.x") == canonical("text_model.embeddings.x") == "text_model.embeddings.x"
    assert canonical("text_projection.weight") == "text_projection.weight"


def test_clip(tensors: dict[str, dict[str, Any]]) -> None:
    from diffusers.loaders.single_file_utils import convert_ldm_clip_checkpoint

    held = under(tensors["sd1"], "cond_stage_model.transformer.")
    found = clip_layout(shapes(held), {})
    assert found.config["hidden_size"] == 32 and found.config["num_hidden_layers"] == 3
    assert found.config["hidden_act"] == "quick_gelu" and found.config["num_attention_heads"] == 1
    assert all(found.original(target) == source.key for target, source in found.sources.items())
    theirs = convert_ldm_clip_checkpoint(dict(tensors["sd1"]))
    ours = turned(found, held)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_old_clip_names_and_position_ids(tensors: dict[str, dict[str, Any]]) -> None:
    new = shapes(under(tensors["sd1"], "cond_stage_model.transformer."))
    old = below(new, "text_model.") | {"embeddings.position_ids": (1, 77)}
    found = clip_layout(old, {})
    assert found.config == clip_layout(new, {}).config
    assert set(found.sources) == set(clip_layout(new, {}).sources)
    assert all(found.original(target) == source.key for target, source in found.sources.items())


def test_open_clip(tensors: dict[str, dict[str, Any]]) -> None:
    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

    prefix = "conditioner.embedders.1.model."
    held = under(tensors["sdxl"], prefix)
    found = open_clip_layout(shapes(held), {}, projected=True, last_layer=True)
    assert found.config["hidden_act"] == "gelu" and found.config["projection_dim"] == 48
    assert all(found.original(target) == source.key for target, source in found.sources.items())
    ours = turned(found, held)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
    theirs = convert_open_clip_checkpoint(model, dict(tensors["sdxl"]), prefix=prefix)
    theirs.pop("text_model.embeddings.position_ids", None)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_the_last_layer_can_be_left_out_and_the_projection(tensors: dict[str, dict[str, Any]]) -> None:
    held = shapes(under(tensors["sd2"], "cond_stage_model.model.")) | {"text_projection": (32, 32)}
    found = open_clip_layout(held, {}, projected=False, last_layer=False)
    assert found.config["num_hidden_layers"] == 2
    assert not any("layers.2." in key or "projection" in key for key in found.sources)


def test_a_projection_that_is_stored_upright(tensors: dict[str, dict[str, Any]]) -> None:
    held = under(tensors["sdxl"], "conditioner.embedders.1.model.")
    held["text_projection.weight"] = held.pop("text_projection").t()
    found = open_clip_layout(shapes(held), {}, projected=True, last_layer=True)
    assert found.config["projection_dim"] == 48
    assert found.sources["text_projection.weight"].turn is None


def test_the_real_open_clip() -> None:
    from transformers.models.clip.configuration_clip import CLIPTextConfig
    from transformers.models.clip.modeling_clip import CLIPTextModelWithProjection

    published = {  # text_encoder_2/config.json of SDXL base 1.0
        "vocab_size": 49408, "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32,
        "num_attention_heads": 20, "hidden_act": "gelu", "projection_dim": 1280,
        "max_position_embeddings": 77,
    }  # fmt: skip
    with torch.device("meta"):
        real = CLIPTextModelWithProjection(CLIPTextConfig(**published)).state_dict()
    found = open_clip_layout(shapes(open_clip(real, 1280)), {}, projected=True, last_layer=True)
    assert {key: found.config[key] for key in published} == published
    assert {canonical(key) for key in real} == set(found.sources)


def test_overrides_and_what_is_missing(tensors: dict[str, dict[str, Any]]) -> None:
    held = shapes(under(tensors["sd1"], "cond_stage_model.transformer."))
    assert clip_layout(held, {"num_attention_heads": 4}).config["num_attention_heads"] == 4
    with pytest.raises(KeyError, match="token_embedding"):
        clip_layout({}, {})
    with pytest.raises(KeyError, match="text_projection"):
        open_clip_layout(
            shapes(under(tensors["sd2"], "cond_stage_model.model.")), {}, projected=True, last_layer=True
        )


@pytest.mark.parametrize("gone", ["transformer.resblocks.2.ln_1.weight", "transformer.resblocks.1.attn."])
def test_a_layer_that_lacks_a_tensor_is_still_a_layer(tensors: dict[str, dict[str, Any]], gone: str) -> None:
    held = shapes(under(tensors["sdxl"], "conditioner.embedders.1.model."))
    held = {key: shape for key, shape in held.items() if not key.startswith(gone)}
    found = open_clip_layout(held, {}, projected=True, last_layer=True)
    assert found.config["num_hidden_layers"] == 3


def test_what_is_missing_is_named_as_the_file_would_name_it(tensors: dict[str, dict[str, Any]]) -> None:
    held = shapes(under(tensors["sdxl"], "conditioner.embedders.1.model."))
    for name in ("positional_embedding", "token_embedding.weight", "transformer.resblocks.0.mlp.c_fc.weight"):
        with pytest.raises(KeyError) as error:
            open_clip_layout(
                {k: s for k, s in held.items() if k != name}, {}, projected=True, last_layer=True
            )
        assert error.value.args == (name,)
        with pytest.raises(IndexError) as misshapen:
            open_clip_layout(held | {name: ()}, {}, projected=True, last_layer=True)
        assert misshapen.value.args == (name,)


@pytest.mark.parametrize("shape", [(), (2, 4), (0,), (6, 4)])
def test_thirds_of_any_shape(shape: tuple[int, ...]) -> None:
    held = torch.zeros(shape)
    thirds = [_third(number)(held) for number in range(3)]
    whole = shape and shape[0] % 3 == 0
    assert all(third.shape == ((shape[0] // 3, *shape[1:]) if whole else shape) for third in thirds)
    assert _transposed(torch.zeros(2, 3, 4)).shape == (2, 3, 4)
