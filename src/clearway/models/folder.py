"""A Diffusers folder (model_index.json beside unet, vae, text_encoder, tokenizer, scheduler) -> Model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clearway.device import Device
from clearway.errors import RequestError
from clearway.models import card as cards
from clearway.models import keys_vae, prediction, settings, tokenizer
from clearway.models.assemble import assemble
from clearway.models.build import classes, diffusers_module, fill, listed, text_module
from clearway.models.escape import shown
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
CLASSES = {  # what a part must be; the first is named where it is something else
    "unet": ("UNet2DConditionModel",),
    "vae": ("AutoencoderKL",),
    "text_encoder": ("CLIPTextModel", "CLIPTextModelWithProjection"),
    "text_encoder_2": ("CLIPTextModelWithProjection",),
}
SHARD = re.compile(r"-[0-9]+-of-[0-9]+\.")
NUMBERED = re.compile(r"^((en|de)coder\.)?(down_blocks|mid_block|up_blocks)\.")
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
    sigmas = training.sound_sigmas(name)
    folders = ("text_encoder", "text_encoder_2")[: len(family.text_encoders)]
    files = {folder: weights_files(path, folder, allow_pickle) for folder in ("unet", "vae", *folders)}
    notes = _variants(files, name)

    def part(folder: str, dtype_name: str) -> Any:
        config, what = _config(path, folder), f"{name}: {folder}"
        settings.check(folder, config, what)
        with _open(files[folder], allow_pickle) as weights:
            settings.check_blocks(config, len(weights.shapes), what)
            return _part(folder, config, weights, family, what, device, dtype_name, notes)

    unet = part("unet", precision.unet)
    vae = part("vae", precision.vae_weights)
    encoders = tuple(part(folder, precision.text_encoder) for folder in folders)
    tokenizers = tuple(
        tokenizer.load(path / folder.replace("text_encoder", "tokenizer")) for folder in folders
    )
    defaults = family.defaults_for(training.prediction, training.zero_terminal_snr)
    native = settings.side_px(unet.config.sample_size)
    if native:
        defaults = replace(defaults, width=native[0], height=native[1])
    defaults, more = cards.apply(card, defaults, f"{name}: {cards.FILE}")
    return assemble(
        name=name,
        path=path,
        weights_files=tuple(files["unet"]),
        family=family,
        training=training,
        sigmas=sigmas,
        tokenizers=tokenizers,
        text_encoders=encoders,
        unet=unet,
        vae=vae,
        card=card,
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
    for folder, expected in CLASSES.items():
        kind = _class(index, folder)
        if kind not in expected and (kind is not None or folder in ("unet", "vae")):
            return f"has a {folder} of the class {shown(kind or 'none')} and not {expected[0]}"
    unet = _config(path, "unet")
    channels = unet.get("in_channels", 4)
    if channels != 4:
        return f"has a UNet with {channels!r:.40} input channels (inpainting or another task)"
    beyond = [key for key in BEYOND if unet.get(key) is not None]
    if beyond:
        return f"has a UNet with {beyond[0]} {unet[beyond[0]]!r:.60}"
    extra = unet.get("addition_embed_type")
    if PIPELINES[pipeline] == "sdxl":
        if not _class(index, "text_encoder") or not _class(index, "text_encoder_2"):
            return "is an SDXL refiner, or lacks one of SDXL's two text encoders"
        return (
            SDXL
            if extra == "text_time"
            else f"has a UNet with the added embedding {extra!r:.60} and not SDXL's"
        )
    if extra is not None:
        return f"has a UNet with the added embedding {extra!r:.60}"
    if not _class(index, "text_encoder"):
        return "lacks a text encoder"
    return SD2 if _config(path, "text_encoder").get("hidden_act") == "gelu" else SD1


def weights_files(path: Path, folder: str, allow_pickle: bool = False) -> list[Path]:
    """The weights of one part of a folder.

    Plain before half precision ("fp16") before any other variant, which must be the only one; safetensors
    before pickle.
    """
    stem, place = STEMS.get(folder, "model"), path / folder
    try:
        names = sorted(entry.name for entry in os.scandir(place) if entry.is_file())
    except OSError:
        names = []
    found = _by_variant(names, stem, "safetensors")
    if found:
        variant = next((name for name in ("", "fp16") if name in found), None)
        if variant is None and len(found) > 1:
            held = ", ".join(map(shown, sorted(found)))
            raise RequestError(
                f"{path.name}/{folder} holds the variants {held} and no plain {stem}.safetensors; keep one"
            )
        file = place / found[next(iter(found)) if variant is None else variant]
        return shards(file) if file.suffix == ".json" else [file]
    pickles = [name for name in names if ".bin" in name]
    if not pickles:
        raise RequestError(f"{path.name}/{folder} holds no {stem}.safetensors")
    old = "pytorch_model" if stem == "model" else stem
    whole = {
        variant: name for variant, name in _by_variant(names, old, "bin").items() if name.endswith("bin")
    }
    if not whole and any(name.endswith(".json") or SHARD.search(name) for name in pickles):
        raise RequestError(
            f"{path.name}/{folder} holds its weights as pickles in several files ({shown(pickles[0])}, …), "
            "which are not read; take a folder with .safetensors files"
        )
    if not allow_pickle:
        raise RequestError(
            f"{path.name}/{folder} holds only {shown(pickles[0])}, a pickle, which can run code when it is "
            "opened; take a folder with .safetensors files, or allow it with --allow-pickle (only "
            "tensors are read then)"
        )
    for variant in ("", "fp16"):
        if variant in whole:
            return [place / whole[variant]]
    raise RequestError(f"{path.name}/{folder} holds {shown(pickles[0])}, and {old}.bin was looked for")


def _by_variant(names: list[str], stem: str, suffix: str) -> dict[str, str]:
    """The file of each variant ("" is the plain one): its weights, or the index of their shards."""
    found: dict[str, str] = {}
    for name in names:
        whole = re.fullmatch(rf"{stem}(?:\.([\w-]+))?\.{suffix}", name)
        index = re.fullmatch(rf"{stem}\.{suffix}\.index(?:\.([\w-]+))?\.json", name)
        if whole and not SHARD.search(name):
            found[whole[1] or ""] = name
        elif index:
            found.setdefault(index[1] or "", name)
    return found


def _variants(files: Mapping[str, list[Path]], name: str) -> list[str]:
    """A note where weights of a variant other than "fp16" were taken, because there are no others."""
    found: dict[str, list[str]] = {}
    for folder, paths in files.items():
        variant = re.match(r"[^.]+\.([\w-]+?)(-[0-9]+-of-[0-9]+)?\.safetensors$", paths[0].name)
        if variant and variant[1] != "fp16":
            found.setdefault(variant[1], []).append(folder)
    return [
        f"{name}: {', '.join(folders)}: only the variant {shown(variant)} is there, and it was taken."
        for variant, folders in found.items()
    ]


def _part(
    folder: str,
    config: Mapping[str, Any],
    weights: Weights,
    family: Family,
    what: str,
    device: Device,
    dtype_name: str,
    notes: list[str],
) -> Any:
    """One module of the folder, with its weights."""
    known = classes()
    rename: Callable[[str], tuple[str, Source]]
    optional: tuple[str, ...] = ()
    if folder == "unet":
        module, rename = diffusers_module(known.unet, config, what), _as_it_is
    elif folder == "vae":
        module, rename = diffusers_module(known.vae, config, what), folder_source
        optional = keys_vae.optional(weights.shapes)
    else:
        pooled = family.text_encoders[int(folder.endswith("_2"))].pooled
        module, rename = text_module(config, pooled, what), _text
    sources = dict(rename(name) for name in weights.shapes)
    notes += fill(
        module, sources, weights, device=device, dtype_name=dtype_name, what=what, optional=optional
    )
    notes += _surplus(module, sources, what, folder)
    return module


def _open(files: list[Path], allow_pickle: bool) -> Weights:
    return (
        open_weights(files[0], allow_pickle=allow_pickle)
        if files[0].suffix == ".bin"
        else open_safetensors(files)
    )


def _surplus(module: Any, sources: Mapping[str, Source], what: str, folder: str) -> list[str]:
    """A note about tensors that have no place; RequestError where they are of the UNet's or VAE's blocks.

    Text encoders may be shorter than their weights: leaving out the last layers in config.json is how Clip
    skip is made permanent.
    """
    wanted = {canonical(name) for name in module.state_dict()} | set(module.state_dict())
    surplus = [name for name in sources if name not in wanted and not HARMLESS.search(name)]
    blocks = [name for name in surplus if NUMBERED.match(name)] if folder in ("unet", "vae") else []
    if blocks:
        raise RequestError(
            f"{what}: {listed(blocks)} found no place in the network that config.json describes"
        )
    return [f"{what}: {listed(surplus)} not used."] if surplus else []


def _as_it_is(name: str) -> tuple[str, Source]:
    return name, Source(name)


def _text(name: str) -> tuple[str, Source]:
    return canonical(name), Source(name)


def _config(path: Path, folder: str) -> dict[str, Any]:
    return cards.read_object(
        path / folder / ("scheduler_config.json" if folder == "scheduler" else "config.json")
    )


def _class(index: Mapping[str, Any], folder: str) -> str | None:
    """The class that model_index.json names for a part; None where there is no such part."""
    entry = index.get(folder)
    kind = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
    return kind if isinstance(kind, str) else None
