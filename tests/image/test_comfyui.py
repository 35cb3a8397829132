"""ComfyUI graphs, written for these tests in the API format with the names of ComfyUI's own nodes."""

from __future__ import annotations

import copy
import time
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from clearway.image.comfyui import is_graph, summarise

BASIC: dict[str, Any] = {
    "3": {
        "class_type": "KSampler",
        "inputs": {
            "seed": 156680208700286, "steps": 20, "cfg": 8.0, "sampler_name": "dpmpp_2m",
            "scheduler": "karras", "denoise": 1.0, "model": ["10", 0], "positive": ["6", 0],
            "negative": ["7", 0],
            "latent_image": ["5", 0],
        },
    },
    "4": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "v1-5.safetensors"}},
    "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 512, "height": 768, "batch_size": 1}},
    "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "a glass bottle, 星", "clip": ["10", 1]}},
    "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "watermark", "clip": ["10", 1]}},
    "8": {"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["4", 2]}},
    "9": {"class_type": "SaveImage", "inputs": {"filename_prefix": "ComfyUI", "images": ["8", 0]}},
    "10": {
        "class_type": "LoraLoader",
        "inputs": {"lora_name": "oil.safetensors", "strength_model": 0.8, "model": ["4", 0]},
    },
}  # fmt: skip
SUMMARY = {
    "prompt": "a glass bottle, 星", "negative_prompt": "watermark", "model": "v1-5.safetensors",
    "loras": ["oil.safetensors:0.8"], "seed": 156680208700286, "steps": 20, "cfg_scale": 8.0,
    "sampler": "dpmpp_2m", "scheduler": "karras", "denoise": 1.0, "width": 512, "height": 768,
}  # fmt: skip
CUSTOM: dict[str, Any] = {
    "13": {
        "class_type": "SamplerCustomAdvanced",
        "inputs": {
            "noise": ["25", 0], "guider": ["22", 0], "sampler": ["16", 0], "sigmas": ["18", 0],
            "latent_image": ["27", 0],
        },
    },
    "16": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "euler"}},
    "17": {
        "class_type": "BasicScheduler",
        "inputs": {"scheduler": "simple", "steps": 24, "denoise": 1.0, "model": ["30", 0]},
    },
    "18": {"class_type": "SplitSigmas", "inputs": {"sigmas": ["17", 0], "step": 8}},
    "22": {"class_type": "BasicGuider", "inputs": {"model": ["30", 0], "conditioning": ["26", 0]}},
    "25": {"class_type": "RandomNoise", "inputs": {"noise_seed": ["40", 0]}},
    "26": {"class_type": "FluxGuidance", "inputs": {"guidance": 3.5, "conditioning": ["6", 0]}},
    "27": {"class_type": "EmptySD3LatentImage", "inputs": {"width": ["41", 0], "height": 1024}},
    "6": {"class_type": "CLIPTextEncode", "inputs": {"text": ["42", 0], "clip": ["11", 0]}},
    "30": {"class_type": "UNETLoader", "inputs": {"unet_name": "flux1-dev.safetensors"}},
    "40": {"class_type": "Seed (rgthree)", "inputs": {"seed": 11}},
    "41": {"class_type": "PrimitiveInt", "inputs": {"value": 896}},
    "42": {"class_type": "PrimitiveString", "inputs": {"value": "a tower"}},
}  # fmt: skip


def test_the_default_graph() -> None:
    assert is_graph(BASIC)
    assert summarise(BASIC) == SUMMARY


def test_a_second_pass_comes_after_the_first_whatever_the_order() -> None:
    graph = copy.deepcopy(BASIC)
    hires = {**BASIC["3"]["inputs"], "denoise": 0.5, "steps": 10, "latent_image": ["21", 0]}
    graph = {"20": {"class_type": "KSampler", "inputs": hires}, **graph}
    graph["21"] = {
        "class_type": "LatentUpscale",
        "inputs": {"width": 1024, "height": 1536, "samples": ["3", 0]},
    }
    found = summarise(graph)
    (second,) = found.pop("further_passes")
    assert found == SUMMARY
    assert (second["denoise"], second["steps"], second["width"], second["height"]) == (0.5, 10, 1024, 1536)


def test_the_advanced_sampler_has_its_own_seed_name() -> None:
    graph = copy.deepcopy(BASIC)
    graph["3"]["class_type"] = "KSamplerAdvanced"
    graph["3"]["inputs"]["noise_seed"] = graph["3"]["inputs"].pop("seed")
    assert summarise(graph)["seed"] == SUMMARY["seed"]


def test_the_custom_sampler_keeps_its_settings_elsewhere() -> None:
    assert summarise(CUSTOM) == {
        "prompt": "a tower", "model": "flux1-dev.safetensors", "seed": 11, "steps": 24, "sampler": "euler",
        "scheduler": "simple", "denoise": 1.0, "width": 896, "height": 1024,
    }  # fmt: skip


def test_texts_are_followed_through_control_and_combination() -> None:
    graph = copy.deepcopy(BASIC)
    graph["3"]["inputs"].update(positive=["30", 0], negative=["30", 1])
    graph["30"] = {
        "class_type": "ControlNetApplyAdvanced",
        "inputs": {"positive": ["31", 0], "negative": ["7", 0], "strength": 1.0},
    }
    graph["31"] = {
        "class_type": "ConditioningCombine",
        "inputs": {"conditioning_1": ["6", 0], "conditioning_2": ["32", 0]},
    }
    graph["32"] = {"class_type": "CLIPTextEncodeSDXL", "inputs": {"text_g": "a lamp", "text_l": "a lamp"}}
    found = summarise(graph)
    assert found["prompt"] == "a glass bottle, 星 AND a lamp"
    assert found["negative_prompt"] == "watermark"


def test_a_zeroed_negative_has_no_text() -> None:
    graph = copy.deepcopy(BASIC)
    graph["3"]["inputs"]["negative"] = ["33", 0]
    graph["33"] = {"class_type": "ConditioningZeroOut", "inputs": {"conditioning": ["6", 0]}}
    assert "negative_prompt" not in summarise(graph)


def test_what_is_no_graph_is_empty() -> None:
    for value in (None, 1, "text", [], {}, {"1": 2}, {"1": {"class_type": 3}}, {"a": {"inputs": {}}}):
        assert not is_graph(value)
        assert summarise(value) == {}


ids = st.sampled_from("1234")
leaves = st.none() | st.integers() | st.text(max_size=3) | st.tuples(ids, st.integers(0, 2)).map(list)
inputs = st.dictionaries(
    st.sampled_from(
        [
            "positive",
            "negative",
            "model",
            "latent_image",
            "seed",
            "text",
            "conditioning",
            "sigmas",
            "guider",
            "width",
        ]
    ),
    leaves,
)
kinds = st.sampled_from(["KSampler", "SamplerCustom", "CLIPTextEncode", "ConditioningCombine", "LoraLoader"])
nodes = st.fixed_dictionaries({"class_type": kinds, "inputs": inputs})


@settings(deadline=None)
@given(st.dictionaries(ids, nodes))
def test_circles_and_loose_ends_end(graph: dict[str, Any]) -> None:
    assert isinstance(summarise(graph), dict)


@settings(deadline=None)
@given(
    st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner)
    )
)
def test_any_json_ends(value: object) -> None:
    summarise(value)
    summarise({"1": {"class_type": "KSampler", "inputs": value}})


def test_a_large_hostile_graph_ends_soon() -> None:
    size = 20000
    graph: dict[str, Any] = {
        str(index): {
            "class_type": "KSampler",
            "inputs": {name: [str(index + 1), 0] for name in ("positive", "model", "latent_image", "seed")},
        }
        for index in range(size)
    }
    start = time.perf_counter()
    summarise(graph)
    assert time.perf_counter() - start < 5
