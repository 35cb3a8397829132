"""Files in the original layout: the model of the folder they were written from, as Diffusers loads it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import save_original
from clearway.device import Device
from clearway.errors import RequestError
from clearway.models import build, load, single_file
from clearway.models.model import Model
from clearway.models.single_file import HARMLESS, load_file
from clearway.models.weights import Weights
from clearway.types import Precision


def read(path: Path, **options: Any) -> Model:
    options = {"name": path.stem, "device": Device("cpu"), "precision": Precision()} | options
    return load_file(path, **options)


def same(ours: Any, theirs: Any) -> None:
    first, second = ours.state_dict(), theirs.state_dict()
    assert set(first) == set(second)
    assert all(torch.equal(value, second[key]) for key, value in first.items())


@pytest.mark.parametrize("family", ["sd1", "sdxl"])
def test_it_is_the_model_of_the_folder(folders: dict[str, Path], files: dict[str, Path], family: str) -> None:
    ours, theirs = read(files[family]), load(folders[family], device="cpu")
    assert ours.family is theirs.family
    for name in ("unet", "vae"):
        same(getattr(ours, name), getattr(theirs, name))
    for mine, other in zip(ours.text_encoders, theirs.text_encoders, strict=True):
        same(mine, other)
        assert mine.config.hidden_act == other.config.hidden_act
    assert (ours.latent_scale, ours.prediction) == (theirs.latent_scale, theirs.prediction)
    assert torch.equal(ours.sigmas, theirs.sigmas)
    assert [t.pad for t in ours.tokenizers] == [t.pad for t in theirs.tokenizers]
    width = {"sd1": 512, "sdxl": 1024}[family]
    assert (ours.defaults.width, ours.defaults.height) == (width, width)
    x, time = torch.randn(1, 4, 8, 8), torch.tensor([300.5])
    context = torch.randn(1, 77, ours.unet.config.cross_attention_dim)
    added = {"text_embeds": torch.randn(1, 48), "time_ids": torch.full((1, 6), 64.0)}
    with torch.inference_mode():
        mine, other = (
            model.unet(x, time, context, added_cond_kwargs=added).sample for model in (ours, theirs)
        )
        assert torch.equal(mine, other)  # so the head counts, which no key tells, are right
        assert torch.equal(ours.vae.decode(x).sample, theirs.vae.decode(x).sample)
    ids = torch.tensor([[49406, 320, 736, 3055, 49407]])
    for mine, other in zip(ours.text_encoders, theirs.text_encoders, strict=True):
        with torch.inference_mode():
            pair = [encoder(ids, output_hidden_states=True) for encoder in (mine, other)]
        states = zip(pair[0].hidden_states, pair[1].hidden_states, strict=True)
        assert all(torch.equal(a, b) for a, b in states)
        assert torch.equal(pair[0][0], pair[1][0])


@pytest.mark.parametrize("family", ["sd1", "sdxl"])
def test_it_is_what_diffusers_loads_from_the_file(
    folders: dict[str, Path], files: dict[str, Path], family: str
) -> None:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    ours = read(files[family])
    for cls, module, part in ((UNet2DConditionModel, ours.unet, "unet"), (AutoencoderKL, ours.vae, "vae")):
        theirs = cls.from_single_file(
            str(files[family]), config=str(folders[family]), subfolder=part, local_files_only=True
        )
        same(module, theirs)
    x, context = torch.randn(2, 4, 8, 8), torch.randn(2, 77, ours.unet.config.cross_attention_dim)
    theirs = UNet2DConditionModel.from_single_file(
        str(files[family]), config=str(folders[family]), subfolder="unet", local_files_only=True
    ).eval()
    added = {"text_embeds": torch.randn(2, 48), "time_ids": torch.full((2, 6), 64.0)}
    with torch.inference_mode():
        mine, other = (unet(x, 7, context, added_cond_kwargs=added).sample for unet in (ours.unet, theirs))
    torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)  # theirs lies unaligned in the mapped file


def test_sd2_leaves_out_the_layer_that_is_not_read(folders: dict[str, Path], files: dict[str, Path]) -> None:
    ours, theirs = read(files["sd2"]), load(folders["sd2"], device="cpu")
    same(ours.unet, theirs.unet)
    assert ours.family.name == "sd2" and ours.tokenizers[0].pad == 0
    assert ours.text_encoders[0].config.num_hidden_layers == 2
    assert ours.notes == ("sd2.safetensors: 1 tensor left over from training ignored.",)  # logit_scale
    ids = torch.tensor([[49406, 320, 49407, 0]])
    with torch.inference_mode():
        whole = theirs.text_encoders[0](ids, output_hidden_states=True).hidden_states[-2]
        norm = getattr(theirs.text_encoders[0], "text_model", theirs.text_encoders[0]).final_layer_norm
        assert torch.equal(ours.text_encoders[0](ids).last_hidden_state, norm(whole))


def test_the_sgm_layout_of_sd2(tensors: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    moved = {
        key.replace("cond_stage_model.model.", "conditioner.embedders.0.model."): value
        for key, value in tensors["sd2"].items()
    }
    assert read(save_original(moved, tmp_path / "x.safetensors")).family.name == "sd2"


def test_markers(tensors: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    marked = tensors["sdxl"] | {"v_pred": torch.tensor([]), "ztsnr": torch.tensor([])}
    model = read(save_original(marked, tmp_path / "x.safetensors"))
    assert model.prediction == "v_prediction" and model.zero_terminal_snr
    assert model.sigmas[-1] > 4000
    assert model.notes == read(save_original(tensors["sdxl"], tmp_path / "x.safetensors")).notes


def test_a_yaml_beside_it(files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").symlink_to(files["sd1"])
    (tmp_path / "x.yaml").write_text("model:\n  params:\n    parameterization: v\n")
    assert read(tmp_path / "x.safetensors").prediction == "v_prediction"


def test_metadata_says_what_keys_cannot(tensors: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    said = {
        "unet": {"attention_head_dim": 4, "norm_num_groups": 16},
        "vae": {"norm_num_groups": 8},
        "text_encoder": {"num_attention_heads": 4},
        "defaults": {"width": 256, "height": 256, "steps": 10, "title": "My own"},
    }
    path = save_original(tensors["sd1"], tmp_path / "x.safetensors", {"clearway": json.dumps(said)})
    model = read(path)
    assert (model.unet.config.attention_head_dim, model.unet.config.norm_num_groups) == (4, 16)
    assert model.vae.config.norm_num_groups == 8
    assert model.text_encoders[0].config.num_attention_heads == 4
    assert (model.defaults.width, model.defaults.steps, model.title) == (256, 10, "My own")


def test_dtypes_and_half_files(tensors: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    half = {key: value.half() for key, value in tensors["sd1"].items()}
    path = save_original(half, tmp_path / "x.safetensors")
    assert read(path).unet.dtype == torch.float32
    assert read(path, precision=Precision(unet="bfloat16")).unet.dtype == torch.bfloat16


def test_old_clip_names(tensors: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    old = {
        key.replace("transformer.text_model.", "transformer."): value for key, value in tensors["sd1"].items()
    }
    old["cond_stage_model.transformer.embeddings.position_ids"] = torch.arange(77)[None]
    model = read(save_original(old, tmp_path / "x.safetensors"))
    assert model.notes == ("x.safetensors: 1 tensor left over from training ignored.",)


def test_surplus_is_noted(tensors: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    one = torch.ones(1)
    more = {"model_ema.decay": one, "betas": one, "first_stage_model.loss.logvar": one}
    more |= {"extra.a": one, "model.diffusion_model.extra.bias": one}
    model = read(save_original(tensors["sd1"] | more, tmp_path / "x.safetensors"))
    assert model.notes == (
        "x.safetensors: 2 tensors (extra.a, model.diffusion_model.extra.bias) not used.",
        "x.safetensors: 3 tensors left over from training ignored.",
    )


@pytest.mark.parametrize(
    "key",
    [
        "model.diffusion_model.input_blocks.1.0.extra.weight",
        "model.diffusion_model.output_blocks.2.1.transformer_blocks.7.norm1.weight",
        "first_stage_model.encoder.down.0.block.7.conv1.weight",
        "first_stage_model.decoder.up.0.attn.0.q.weight",
        "cond_stage_model.transformer.text_model.encoder.layers.0.extra.weight",
        "cond_stage_model.transformer.text_model.encoder.layers.007.layer_norm1.weight",
    ],
)
def test_surplus_in_a_block_means_another_network(
    tensors: dict[str, dict[str, Any]], tmp_path: Path, key: str
) -> None:
    path = save_original(tensors["sd1"] | {key: torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(
        RequestError, match=r"x\.safetensors: 1 tensor .* found no place in the network"
    ) as error:
        read(path)
    assert key in str(error.value)


def test_names_and_titles_are_escaped(tensors: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    said = {"defaults": {"title": "red\x1b[31m\ud800", "a\x1bb": 1}}
    path = tmp_path / "x.safetensors"
    save_original(tensors["sd1"] | {"b\x1b[31m\n": torch.ones(1)}, path, {"clearway": json.dumps(said)})
    model = read(path)
    assert model.title == r"red\x1b[31m\ud800" and all(note.isprintable() for note in model.notes)
    assert r"b\x1b[31m\n" in str(model.notes[1])


@pytest.mark.parametrize(
    "key",
    ["cond_stage_model.logit_scale", "model_ema.diffusion_modelx", "alphas_cumprod_prev", "a.position_ids"],
)
def test_harmless(key: str) -> None:
    assert HARMLESS.search(key)
    assert not HARMLESS.search(f"model.diffusion_model.{key.replace('_', '')}.weight")


@pytest.mark.parametrize(
    ("gone", "sentence"),
    [
        (
            "model.diffusion_model.out.0.weight",
            r"incomplete: 1 tensor \(model\.diffusion_model\.out\.0\.weight",
        ),
        ("model.diffusion_model.out.2.weight", r"the UNet is incomplete: model\.diffusion_model\.out\.2"),
        ("model.diffusion_model.time_embed.0.weight", "the UNet is incomplete"),
        ("model.diffusion_model.output_blocks.0.0.in_layers.0.weight", "the UNet is incomplete"),
        ("first_stage_model.decoder.conv_out.weight", "the VAE is incomplete"),
        ("first_stage_model.decoder.up.0.block.0.norm1.bias", "the VAE is incomplete"),
        (
            "cond_stage_model.transformer.text_model.final_layer_norm.bias",
            "the text encoder is incomplete",
        ),
        (
            "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight",
            "the text encoder is incomplete",
        ),
    ],
)
def test_missing_tensors(
    tensors: dict[str, dict[str, Any]], tmp_path: Path, gone: str, sentence: str
) -> None:
    held = {key: value for key, value in tensors["sd1"].items() if key != gone}
    with pytest.raises(RequestError, match=sentence) as error:
        read(save_original(held, tmp_path / "x.safetensors"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("model.diffusion_model.out.2.weight", (4, 16, 3, 3)),
        ("model.diffusion_model.time_embed.0.weight", (128,)),
        ("model.diffusion_model.middle_block.1.proj_in.weight", ()),
        ("model.diffusion_model.middle_block.1.transformer_blocks.0.attn2.to_k.weight", (64,)),
        ("first_stage_model.decoder.conv_out.weight", ()),
        ("first_stage_model.encoder.mid.attn_1.q.weight", (64, 63, 1, 1)),
        ("first_stage_model.decoder.mid.attn_1.q.weight", ()),
        ("model.diffusion_model.input_blocks.1.0.in_layers.2.weight", ()),
        ("cond_stage_model.transformer.text_model.embeddings.token_embedding.weight", (49408,)),
    ],
)
def test_tensors_of_other_shapes(
    tensors: dict[str, dict[str, Any]], tmp_path: Path, key: str, shape: tuple[int, ...]
) -> None:
    held = tensors["sd1"] | {key: torch.zeros(shape)}
    with pytest.raises(RequestError) as error:
        read(save_original(held, tmp_path / "x.safetensors"))
    assert "x.safetensors" in str(error.value) and "\n" not in str(error.value)
    assert key in str(error.value) or "would fit" in str(error.value)


@pytest.mark.parametrize("shape", [(), (2, 64), (3, 3, 3)])
@pytest.mark.parametrize("rest", ["transformer.resblocks.0.attn.in_proj_weight", "text_projection"])
def test_tensors_that_cannot_be_turned(
    tensors: dict[str, dict[str, Any]], tmp_path: Path, rest: str, shape: tuple[int, ...]
) -> None:
    key = f"conditioner.embedders.1.model.{rest}"
    with pytest.raises(RequestError) as error:
        read(save_original(tensors["sdxl"] | {key: torch.zeros(shape)}, tmp_path / "x.safetensors"))
    assert key in str(error.value) and "\n" not in str(error.value)


def test_noise_levels_that_cannot_be_used(files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").symlink_to(files["sd1"])
    (tmp_path / "x.yaml").write_text("model: {params: {linear_start: 0.9, linear_end: 0.1}}")
    with pytest.raises(RequestError, match=r"x\.safetensors: its betas \(scaled_linear from 0\.9 to 0\.1 in"):
        read(tmp_path / "x.safetensors")


def test_parts_that_do_not_fit_each_other(tensors: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    text = "cond_stage_model.transformer."
    wide = {
        key: torch.zeros([48 if side == 32 else side for side in value.shape])
        for key, value in tensors["sd1"].items()
        if key.startswith(text)
    }
    with pytest.raises(
        RequestError, match="x: its text encoder gives 48 values a token, and its UNet reads 32"
    ):
        read(save_original(tensors["sd1"] | wide, tmp_path / "x.safetensors"))


def test_another_kind_of_file_is_named(tmp_path: Path) -> None:
    path = save_original({"lora_unet_a.lora_up.weight": torch.ones(1)}, tmp_path / "style.safetensors")
    with pytest.raises(RequestError, match=r"style\.safetensors is a LoRA; Clearway draws with SD 1\.x, 2"):
        read(path)


def test_pickle_checkpoints(tensors: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "old.ckpt"
    torch.save({"state_dict": tensors["sd1"], "epoch": 3}, path)
    with pytest.raises(RequestError, match="is a pickle checkpoint"):
        read(path)
    same(read(path, allow_pickle=True).unet, read(path, allow_pickle=True).unet)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any], set[str]], Model]:
    """Loads tensors but for some names, fast enough for a thousand times: names only, modules built once."""
    built: dict[str, Any] = {}

    def once(make: Callable[..., Any]) -> Callable[..., Any]:
        def found(*arguments: Any) -> Any:
            key = repr(arguments[:-1])  # the last says how it is called in errors
            if key not in built:
                built[key] = make(*arguments)
            return built[key]

        return found

    def names_alone(
        module: Any,
        sources: Any,
        weights: Weights,
        *,
        what: str,
        optional: Any = (),
        original: Any = str,
        **_: Any,
    ) -> tuple[str, ...]:
        missing = build._matched(module, sources, what, optional, original)[2]
        return tuple(f"{what} lacks {original(name)}" for name in missing)

    monkeypatch.setattr(single_file, "diffusers_module", once(build.diffusers_module))
    monkeypatch.setattr(single_file, "text_module", once(build.text_module))
    monkeypatch.setattr(single_file, "fill", names_alone)

    def load_without(tensors: dict[str, Any], gone: set[str]) -> Model:
        held = {key: tuple(value.shape) for key, value in tensors.items() if key not in gone}
        weights = Weights(held, lambda name: tensors[name])
        monkeypatch.setattr(single_file, "open_weights", lambda *_, **__: weights)
        return read(Path("x.safetensors"))

    return load_without


@pytest.mark.parametrize("family", ["sd1", "sdxl"])
def test_every_tensor_that_is_missing_is_named(
    tensors: dict[str, dict[str, Any]], without: Callable[..., Model], family: str
) -> None:
    whole = tensors[family]
    without(whole, {"conditioner.embedders.1.model.logit_scale"})  # the one that nothing needs
    for key in whole:
        if not key.endswith("logit_scale"):
            with pytest.raises(RequestError) as error:
                without(whole, {key})
            assert key in str(error.value), (key, str(error.value))


@pytest.mark.parametrize("family", ["sd1", "sdxl"])
def test_every_block_that_is_missing_is_found_out(
    tensors: dict[str, dict[str, Any]], without: Callable[..., Model], family: str
) -> None:
    whole = tensors[family]
    blocks = {
        key[: found.end()]
        for key in whole
        if key.startswith(("model.", "first_stage_model."))
        for found in re.finditer(r"\.[0-9]+\.", key)
    }
    assert len(blocks) > 100
    for block in blocks:
        with pytest.raises(RequestError):
            without(whole, {key for key in whole if key.startswith(block)})


def test_only_the_whole_encoder_may_be_left_out(
    tensors: dict[str, dict[str, Any]], without: Callable[..., Model]
) -> None:
    whole = tensors["sd1"]
    encoder = {key for key in whole if key.startswith("first_stage_model.encoder.")}
    quant = {key for key in whole if key.startswith("first_stage_model.quant_conv.")}
    for gone in (encoder, encoder | quant):
        noted = {note.rpartition(" ")[2] for note in without(whole, gone).notes}
        assert noted == gone
    for gone in (quant, {key for key in whole if "post_quant_conv" in key}, encoder - {max(encoder)}):
        with pytest.raises(RequestError, match="the VAE is incomplete"):
            without(whole, gone)
