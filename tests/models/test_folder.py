"""Diffusers folders: every part as it was saved, variants of files, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from builders import write_json
from clearway.device import Device
from clearway.errors import RequestError
from clearway.models.folder import identify_folder, load_folder, weights_files
from clearway.models.keys_text import canonical
from clearway.models.model import Model
from clearway.types import Precision

UNET = "unet/diffusion_pytorch_model.safetensors"


def load(folder: Path, **options: Any) -> Model:
    options = {"name": folder.name, "device": Device("cpu"), "precision": Precision()} | options
    return load_folder(folder, **options)


@pytest.fixture
def copy(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A tiny SD 1.x folder that may be changed."""
    return shutil.copytree(folders["sd1"], tmp_path / "tiny")


def change(path: Path, **values: Any) -> None:
    write_json(path, json.loads(path.read_text()) | values)


@pytest.mark.parametrize("family", ["sd1", "sd2", "sdxl"])
def test_every_part_is_what_was_saved(folders: dict[str, Path], family: str) -> None:
    folder = folders[family]
    model = load(folder)
    assert model.family.name == family and model.notes == () and model.title == f"tiny-{family}"
    parts = {"unet": model.unet, "vae": model.vae, "text_encoder": model.text_encoders[0]}
    if family == "sdxl":
        parts["text_encoder_2"] = model.text_encoders[1]
    for name, module in parts.items():
        saved = load_file(next((folder / name).glob("*.safetensors")))
        held = {canonical(key): value for key, value in module.state_dict().items()}
        assert set(held) == {canonical(key) for key in saved}
        assert all(torch.equal(held[canonical(key)], value) for key, value in saved.items())
        assert not module.training and not any(p.requires_grad for p in module.parameters())
    assert (model.defaults.width, model.defaults.height) == (64, 64)
    assert model.sigmas.shape == (1000,)
    assert model.latent_scale == (0.13025 if family == "sdxl" else 0.18215) and model.latent_shift == 0
    assert [t.pad for t in model.tokenizers] == {"sd1": [49407], "sd2": [0], "sdxl": [49407, 0]}[family]


def test_outputs_are_those_of_diffusers_and_transformers(folders: dict[str, Path]) -> None:
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
    from transformers.models.clip.modeling_clip import CLIPTextModelWithProjection

    folder, model = folders["sdxl"], load(folders["sdxl"])
    theirs = UNet2DConditionModel.from_pretrained(folder, subfolder="unet", low_cpu_mem_usage=False)
    x, context = torch.randn(1, 4, 8, 8), torch.randn(1, 77, 96)
    added = {"text_embeds": torch.randn(1, 48), "time_ids": torch.full((1, 6), 64.0)}
    with torch.inference_mode():
        ours, expected = (
            unet(x, 500, context, added_cond_kwargs=added).sample for unet in (model.unet, theirs)
        )
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    encoder = CLIPTextModelWithProjection.from_pretrained(folder / "text_encoder_2")
    ids = torch.tensor([[49406, 320, 736, 49407, 0, 0]])
    with torch.inference_mode():
        mine, other = (text(ids, output_hidden_states=True) for text in (model.text_encoders[1], encoder))
    torch.testing.assert_close(mine.text_embeds, other.text_embeds)
    torch.testing.assert_close(mine.hidden_states[-2], other.hidden_states[-2])


def test_dtypes_by_part(folders: dict[str, Path]) -> None:
    model = load(folders["sd1"], precision=Precision(unet="float16", text_encoder="bfloat16"))
    assert (model.unet.dtype, model.vae.dtype) == (torch.float16, torch.float32)
    assert model.text_encoders[0].dtype == torch.bfloat16


def test_half_precision_files(copy: Path) -> None:
    for path in (copy / "unet").glob("*.safetensors"):
        half = {key: value.half() for key, value in load_file(path).items()}
        save_file(half, path.with_name("diffusion_pytorch_model.fp16.safetensors"))
        path.unlink()
    model = load(copy)
    assert model.unet.dtype == torch.float32
    assert model.weights_files[0].name == "diffusion_pytorch_model.fp16.safetensors" and model.notes == ()


@pytest.mark.parametrize("variant", ["bf16", "non_ema"])
def test_a_variant_that_is_the_only_one(copy: Path, variant: str) -> None:
    for folder in ("unet", "text_encoder"):
        path = next((copy / folder).glob("*.safetensors"))
        path.rename(path.with_suffix(f".{variant}.safetensors"))
    model = load(copy)
    assert model.notes == (
        f"tiny: unet, text_encoder: only the variant {variant} is there, and it was taken.",
    )
    path = copy / "unet" / f"diffusion_pytorch_model.{variant}.safetensors"
    assert model.weights_files == (path,)
    shutil.copy(path, path.with_name("diffusion_pytorch_model.ema.safetensors"))
    with pytest.raises(RequestError, match=rf"tiny/unet holds the variants .*{variant}.* and no plain"):
        load(copy)
    shutil.copy(path, half := path.with_name("diffusion_pytorch_model.fp16.safetensors"))
    assert weights_files(copy, "unet") == [half]


def test_shards_of_a_variant(copy: Path) -> None:
    whole = load_file(copy / UNET)
    file = "diffusion_pytorch_model.bf16-00001-of-00001.safetensors"
    (copy / UNET).rename(copy / "unet" / file)
    index = copy / "unet" / "diffusion_pytorch_model.safetensors.index.bf16.json"
    write_json(index, {"weight_map": dict.fromkeys(whole, file)})
    model = load(copy)
    assert model.weights_files == (copy / "unet" / file,) and "the variant bf16" in model.notes[0]


def test_sharded_files(copy: Path) -> None:
    whole = load_file(copy / UNET)
    names = sorted(whole)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"diffusion_pytorch_model-0000{number + 1}-of-00002.safetensors"
        save_file({name: whole[name] for name in part}, copy / "unet" / file)
        weight_map |= dict.fromkeys(part, file)
    (copy / UNET).unlink()
    write_json(copy / f"{UNET}.index.json", {"weight_map": weight_map})
    model = load(copy)
    assert all(torch.equal(value, whole[key]) for key, value in model.unet.state_dict().items())
    assert len(model.weights_files) == 2 and len(model.hash) == 10


def test_pickles_are_refused_unless_allowed(copy: Path) -> None:
    for name, file in (("unet", "diffusion_pytorch_model.bin"), ("text_encoder", "pytorch_model.bin")):
        path = next((copy / name).glob("*.safetensors"))
        torch.save(load_file(path), copy / name / file)
        path.unlink()
    with pytest.raises(RequestError, match=r"holds only diffusion_pytorch_model\.bin, a pickle"):
        load(copy)
    assert load(copy, allow_pickle=True).weights_files[0].suffix == ".bin"


@pytest.mark.parametrize("allowed", [False, True])
def test_pickles_in_several_files_are_named_as_such(copy: Path, allowed: bool) -> None:
    (copy / UNET).unlink()
    for name in ("-00001-of-00002.bin", "-00002-of-00002.bin", ".bin.index.json"):
        (copy / "unet" / f"diffusion_pytorch_model{name}").write_text("{}")
    with pytest.raises(RequestError, match="holds its weights as pickles in several files") as error:
        load(copy, allow_pickle=allowed)
    assert "--allow-pickle" not in str(error.value)


def test_old_attention_names_of_vaes(copy: Path) -> None:
    path = copy / "vae" / "diffusion_pytorch_model.safetensors"
    saved = load_file(path)
    old = {}
    for key, value in saved.items():
        for new, name in (
            ("to_q", "query"),
            ("to_k", "key"),
            ("to_v", "value"),
            ("to_out.0", "proj_attn"),
        ):
            key = key.replace(f".{new}.", f".{name}.")
        old[key] = value
    assert set(old) != set(saved)
    save_file(old, path)
    model = load(copy)
    assert model.notes == ()
    assert all(torch.equal(value, saved[key]) for key, value in model.vae.state_dict().items())


def test_surplus_is_noted_and_missing_is_an_error(copy: Path) -> None:
    saved = load_file(copy / UNET)
    save_file(saved | {"surplus.weight": torch.ones(1), "a.position_ids": torch.ones(1)}, copy / UNET)
    assert load(copy).notes == ("tiny: unet: 1 tensor (surplus.weight) not used.",)
    save_file(saved | {"down_blocks.0.resnets.2.norm1.bias": torch.ones(1)}, copy / UNET)
    with pytest.raises(
        RequestError, match=r"down_blocks\.0\.resnets\.2\.norm1\.bias\) found no place in the"
    ):
        load(copy)
    del saved["conv_in.weight"]
    save_file(saved, copy / UNET)
    with pytest.raises(RequestError, match=r"tiny: unet is incomplete: 1 tensor \(conv_in\.weight\)"):
        load(copy)


def test_a_vae_without_its_encoder_still_decodes(copy: Path) -> None:
    path = copy / "vae" / "diffusion_pytorch_model.safetensors"
    kept = {key: value for key, value in load_file(path).items() if not key.startswith("encoder.")}
    save_file(kept, path)
    model = load(copy)
    assert len(model.notes) == 1 and "pictures cannot be encoded" in model.notes[0]
    with torch.inference_mode():
        assert model.vae.decode(torch.randn(1, 4, 2, 2)).sample.abs().sum() > 0


def test_the_card_decides(copy: Path) -> None:
    said = {"width": 128, "height": 96, "steps": 5, "cfg_scale": 3.5, "sampler": "Euler", "title": "Tiny one"}
    write_json(copy / "clearway.json", said)
    model = load(copy)
    assert (model.defaults.width, model.defaults.height, model.defaults.steps) == (128, 96, 5)
    assert (model.defaults.cfg_scale, model.defaults.sampler, model.title) == (3.5, "Euler", "Tiny one")


def test_v_prediction_and_zero_terminal_snr(copy: Path) -> None:
    change(
        copy / "scheduler" / "scheduler_config.json",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
    )
    model = load(copy)
    assert model.prediction == "v_prediction" and model.zero_terminal_snr
    assert model.sigmas[-1] > 4000 and model.defaults.sampler == "Euler"


@pytest.mark.parametrize(
    ("file", "values", "what"),
    [
        ("model_index.json", {"_class_name": "FluxPipeline"}, "is a folder for FluxPipeline"),
        ("model_index.json", {"_class_name": 3}, "is a folder for 3"),
        ("model_index.json", {"vae": ["diffusers", "AutoencoderTiny"]}, "vae of the class AutoencoderTiny"),
        ("model_index.json", {"unet": [None, None]}, "unet of the class none"),
        ("model_index.json", {"text_encoder": [None, None]}, "lacks a text encoder"),
        ("model_index.json", {"text_encoder": ["transformers", "T5EncoderModel"]}, "class T5EncoderModel"),
        ("unet/config.json", {"in_channels": "4"}, "'4' input channels"),
        ("model_index.json", {"_class_name": "StableDiffusionXLPipeline"}, "refiner, or lacks one"),
        ("unet/config.json", {"in_channels": 9}, "9 input channels"),
        ("unet/config.json", {"time_cond_proj_dim": 256}, "time_cond_proj_dim 256"),
        ("unet/config.json", {"class_embed_type": "projection"}, "class_embed_type"),
        ("unet/config.json", {"addition_embed_type": "image"}, "added embedding 'image'"),
    ],
)
def test_other_folders_are_named(copy: Path, file: str, values: dict[str, Any], what: str) -> None:
    change(copy / file, **values)
    found = identify_folder(copy)
    assert isinstance(found, str) and what in found
    with pytest.raises(RequestError, match=r"tiny .*; Clearway draws with SD 1\.x, 2\.x and SDXL base"):
        load(copy)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda d: (d / UNET).unlink(), r"tiny/unet holds no diffusion_pytorch_model\.safetensors"),
        (lambda d: (d / UNET).write_bytes(b"<html>"), "is a web page"),
        (lambda d: (d / UNET).write_bytes((d / UNET).read_bytes()[:-9]), "was not downloaded whole"),
        (lambda d: (d / "unet/config.json").unlink(), r"unet/config\.json is missing"),
        (lambda d: (d / "unet/config.json").write_text("{"), r"unet/config\.json cannot be read"),
        (lambda d: (d / "model_index.json").write_text("[]"), "is not a JSON object"),
        (lambda d: (d / "scheduler/scheduler_config.json").unlink(), "scheduler_config.json is missing"),
        (lambda d: (d / "tokenizer/merges.txt").unlink(), "tiny/tokenizer holds neither"),
        (lambda d: change(d / "unet/config.json", block_out_channels=[32, 7]), "cannot be built"),
        (lambda d: change(d / "unet/config.json", cross_attention_dim=48), "would fit"),
        (lambda d: change(d / "text_encoder/config.json", hidden_size=64), "would fit"),
        (lambda d: change(d / "text_encoder/config.json", hidden_act="nonsense"), "cannot be built"),
        (
            lambda d: change(d / "text_encoder/config.json", num_attention_heads=7),
            "cannot be built from its description: .*7",
        ),
        (
            lambda d: change(d / "text_encoder/config.json", num_hidden_layers=10**9),
            "describes 1000000000 blocks",
        ),
        (
            lambda d: change(d / "text_encoder/config.json", num_hidden_layers=0),
            "gives num_hidden_layers as 0",
        ),
        (lambda d: change(d / "unet/config.json", layers_per_block=10**6), "describes 3000000 blocks"),
        (lambda d: change(d / "unet/config.json", transformer_layers_per_block=10**9), "blocks, which its"),
        (lambda d: change(d / "unet/config.json", attention_head_dim=-8), "gives attention_head_dim as -8"),
        (lambda d: change(d / "unet/config.json", sample_size=10**9), "gives sample_size as 1000000000"),
        (lambda d: change(d / "unet/config.json", layers_per_block=1), "would fit"),
        (lambda d: change(d / "vae/config.json", scaling_factor="abc"), "gives scaling_factor as 'abc'"),
        (lambda d: change(d / "vae/config.json", scaling_factor=float("nan")), "gives scaling_factor as nan"),
        (lambda d: change(d / "vae/config.json", shift_factor="x"), "gives shift_factor as 'x'"),
        (lambda d: change(d / "scheduler/scheduler_config.json", trained_betas=[]), "no usable betas"),
        (lambda d: change(d / "scheduler/scheduler_config.json", trained_betas=[0.5] * 5000), "noise levels"),
        (lambda d: _only_index(d, {}), "does not list the files"),
        (lambda d: _only_index(d, {"a": "a" * 5000}), "which is not beside it"),
    ],
)
def test_damaged_folders_are_one_sentence(copy: Path, spoil: Any, sentence: str) -> None:
    spoil(copy)
    with pytest.raises(RequestError, match=sentence) as error:
        load(copy)
    assert "\n" not in str(error.value)


def _only_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / UNET).unlink()
    write_json(folder / f"{UNET}.index.json", {"weight_map": weight_map})


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize(
    "file",
    ["unet/config.json", UNET, "model_index.json", "tokenizer/vocab.json", "scheduler/scheduler_config.json"],
)
def test_pipes_are_not_waited_for(copy: Path, file: str) -> None:
    (copy / file).unlink()
    os.mkfifo(copy / file)
    with pytest.raises(RequestError):
        load(copy)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_what_is_not_needed_may_be_a_pipe(copy: Path) -> None:
    (copy / "tokenizer" / "tokenizer_config.json").unlink()
    os.mkfifo(copy / "tokenizer" / "tokenizer_config.json")
    assert load(copy).tokenizers[0].pad == 49407


def test_a_text_encoder_may_be_shorter_than_its_weights(copy: Path) -> None:
    change(copy / "text_encoder" / "config.json", num_hidden_layers=2)
    model = load(copy)
    assert model.text_encoders[0].config.num_hidden_layers == 2 and "not used" in model.notes[0]


def test_strange_settings_of_a_text_encoder_are_not_passed_on(copy: Path) -> None:
    change(copy / "text_encoder" / "config.json", num_labels=10**9, return_dict=False)
    ids = torch.tensor([[49406, 320, 49407]])
    assert load(copy).text_encoders[0](ids).last_hidden_state.shape == (1, 3, 32)


def test_a_size_by_its_sides(copy: Path) -> None:
    change(copy / "unet" / "config.json", sample_size=[16, 24])
    assert (load(copy).defaults.width, load(copy).defaults.height) == (192, 128)


def test_plain_files_come_before_half_ones(copy: Path) -> None:
    shutil.copy(copy / UNET, copy / "unet" / "diffusion_pytorch_model.fp16.safetensors")
    assert weights_files(copy, "unet") == [copy / UNET]
