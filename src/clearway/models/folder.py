"""A Diffusers folder (model_index.json beside unet, vae, text_encoder, tokenizer, scheduler) -> Model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clearway.device import Device
from clearway.errors import RequestError
from clearway.models import card as cards
from clearway.models import prediction, tokenizer
from clearway.models.build import classes, diffusers_module, fill, listed, text_module
from clearway.models.family import SD1, SD2, SDXL, SUPPORTED, Family
from clearway.models.keys import Source
from clearway.models.keys_text import canonical
from clearway.models.keys_vae import folder_source
from clearway.models.model import Model
from clearway.models.single_file import HARMLESS
from clearway.models.weights import Weights, open_safetensors, open_weights, shards
from clearway.types import Precision

INDEX = "model_index.json"
STEMS = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model"}
PIPELINES = {
    "StableDiffusionPipeline": "sd",
    "StableDiffusionImg2ImgPipeline": "sd",
    "StableDiffusionXLPipeline": "sdxl",
    "StableDiffusionXLImg2ImgPipeline": "sdxl",
}
BEYOND = (  # UNet settings of networks that read more than a prompt
    "class_embed_type",
    "num_class_embeds",
    "encoder_hid_dim_type",
    "time_cond_proj_dim",
)


def load_folder(
    path: Path, *, name: str, device: Device, precision: Precision, allow_pickle: bool = False
) -> Model:
    """The model in a Diffusers folder. RequestError where it is incomplete, damaged or of another family."""
    family = identify_folder(path)
    if isinstance(family, str):
        raise RequestError(f"{name} {family}; {SUPPORTED}")
    card = cards.read_card(path)
    training = prediction.from_scheduler(_config(path, "scheduler"), name)
    notes: list[str] = []

    def part(folder: str, dtype_name: str) -> Any:
        return _part(path, folder, family, f"{name}: {folder}", device, dtype_name, allow_pickle, notes)

    unet = part("unet", precision.unet)
    vae = part("vae", precision.vae)
    folders = ("text_encoder", "text_encoder_2")[: len(family.text_encoders)]
    encoders = tuple(part(folder, precision.text_encoder) for folder in folders)
    tokenizers = tuple(
        tokenizer.load(path / folder.replace("text_encoder", "tokenizer")) for folder in folders
    )
    native = unet.config.sample_size
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    defaults = family.defaults_for(
        training.prediction,
        training.zero_terminal_snr,
        native * factor if isinstance(native, int) and native > 0 else None,
    )
    defaults, more = cards.apply(card, defaults, f"{name}: {cards.FILE}")
    return Model(
        name=name,
        title=cards.title_of(card, name),
        path=path,
        weights_files=tuple(weights_files(path, "unet", allow_pickle)),
        family=family,
        prediction=training.prediction,
        zero_terminal_snr=training.zero_terminal_snr,
        sigmas=training.sigmas(),
        tokenizers=tokenizers,
        text_encoders=encoders,
        unet=unet,
        vae=vae,
        latent_scale=float(vae.config.scaling_factor),
        latent_shift=float(vae.config.shift_factor or 0.0),
        defaults=defaults,
        device=device,
        precision=precision,
        notes=(*notes, *more),
    )


def identify_folder(path: Path) -> Family | str:
    """The family of a Diffusers folder by its configs, or what it is instead; reads no weights."""
    index = cards.read_object(path / INDEX)
    pipeline = str(index.get("_class_name", ""))
    if pipeline not in PIPELINES:
        return f"is a folder for {pipeline[:60] or 'an unnamed pipeline'}"
    for folder, expected in (("unet", "UNet2DConditionModel"), ("vae", "AutoencoderKL")):
        entry = index.get(folder)
        kind = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
        if kind != expected:
            return f"has a {folder} of the class {kind or 'none'} and not {expected}"
    unet = _config(path, "unet")
    channels = unet.get("in_channels", 4)
    if channels != 4:
        return f"has a UNet with {channels} input channels (inpainting or another task)"
    beyond = [key for key in BEYOND if unet.get(key) is not None]
    if beyond:
        return f"has a UNet with {beyond[0]} {unet[beyond[0]]!r}"
    extra = unet.get("addition_embed_type")
    if PIPELINES[pipeline] == "sdxl":
        if not _has(index, "text_encoder") or not _has(index, "text_encoder_2"):
            return "is an SDXL refiner, or lacks one of SDXL's two text encoders"
        return (
            SDXL if extra == "text_time" else f"has a UNet with the added embedding {extra!r} and not SDXL's"
        )
    if extra is not None:
        return f"has a UNet with the added embedding {extra!r}"
    if not _has(index, "text_encoder"):
        return "lacks a text encoder"
    return SD2 if _config(path, "text_encoder").get("hidden_act") == "gelu" else SD1


def weights_files(path: Path, folder: str, allow_pickle: bool = False) -> list[Path]:
    """The weights of one part of a folder: plain before half precision, safetensors before pickle."""
    stem, place = STEMS.get(folder, "model"), path / folder
    for variant in ("", ".fp16"):
        single = place / f"{stem}{variant}.safetensors"
        index = place / f"{stem}.safetensors.index{variant}.json"
        if single.is_file():
            return [single]
        if index.is_file():
            return shards(index)
    pickles = sorted(place.glob("*.bin"))
    if not pickles:
        raise RequestError(f"{path.name}/{folder} holds no {stem}.safetensors")
    if not allow_pickle:
        raise RequestError(
            f"{path.name}/{folder} holds only {pickles[0].name}, a pickle, which can run code when it is "
            "opened; take a folder with .safetensors files, or allow it with --allow-pickle (only "
            "tensors are read then)"
        )
    old = "pytorch_model" if stem == "model" else stem
    for variant in ("", ".fp16"):
        if (place / f"{old}{variant}.bin").is_file():
            return [place / f"{old}{variant}.bin"]
    raise RequestError(f"{path.name}/{folder} holds {pickles[0].name}, and {old}.bin was looked for")


def _part(
    path: Path,
    folder: str,
    family: Family,
    what: str,
    device: Device,
    dtype_name: str,
    allow_pickle: bool,
    notes: list[str],
) -> Any:
    """One module of the folder, with its weights."""
    config = _config(path, folder)
    known = classes()
    files = weights_files(path, folder, allow_pickle)
    rename: Callable[[str], tuple[str, Source]]
    optional: tuple[str, ...] = ()
    if folder == "unet":
        module = diffusers_module(known.unet, config, what)
        rename = _as_it_is
    elif folder == "vae":
        module, optional = diffusers_module(known.vae, config, what), ("encoder.", "quant_conv.")
        rename = folder_source
    else:
        pooled = family.text_encoders[int(folder.endswith("_2"))].pooled
        module = text_module(config, pooled, what)
        rename = _text
    with _open(files, allow_pickle) as weights:
        sources = dict(rename(name) for name in weights.shapes)
        notes += fill(
            module,
            sources,
            weights,
            device=device,
            dtype_name=dtype_name,
            what=what,
            optional=optional,
        )
        notes += _surplus(module, sources, what)
    return module


def _open(files: list[Path], allow_pickle: bool) -> Weights:
    return (
        open_weights(files[0], allow_pickle=allow_pickle)
        if files[0].suffix == ".bin"
        else open_safetensors(files)
    )


def _surplus(module: Any, sources: Mapping[str, Source], what: str) -> list[str]:
    wanted = {canonical(name) for name in module.state_dict()} | set(module.state_dict())
    surplus = [name for name in sources if name not in wanted and not HARMLESS.search(name)]
    return [f"{what}: {listed(surplus)} not used."] if surplus else []


def _as_it_is(name: str) -> tuple[str, Source]:
    return name, Source(name)


def _text(name: str) -> tuple[str, Source]:
    return canonical(name), Source(name)


def _config(path: Path, folder: str) -> dict[str, Any]:
    return cards.read_object(
        path / folder / ("scheduler_config.json" if folder == "scheduler" else "config.json")
    )


def _has(index: Mapping[str, Any], folder: str) -> bool:
    entry = index.get(folder)
    return isinstance(entry, list) and len(entry) == 2 and entry[1] is not None
