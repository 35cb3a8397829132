"""Models of the real architectures with random weights: what speed and memory are measured with.

No download, the same work as a trained checkpoint of the family. Every tensor is drawn by a generator of its
own, seeded with its name, on the device it lives on; matrices and kernels with the spread that PyTorch's own
layers begin with, so that activations stay finite in half precision. The pictures show nothing, but they
depend on every layer, so a wrong path is seen in them.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearway.device import Device
from clearway.errors import RequestError, nearest
from clearway.models import FAMILIES, Model, library, tokenizer
from clearway.models.assemble import assemble
from clearway.models.build import classes, diffusers_module, fill, text_module
from clearway.models.keys import Source
from clearway.models.prediction import Training
from clearway.models.weights import Weights
from clearway.types import Precision

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = "-random"
OUTPUT_GAIN = (
    3.0  # of the UNet's last convolution: its noise estimate then has a spread near 1, as a trained one's
)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A family's parts as the configurations of the published checkpoints give them."""

    family: str
    unet: dict[str, Any]
    vae: dict[str, Any]
    texts: tuple[dict[str, Any], ...]
    pads: tuple[int | None, ...] = field(default=(None,))


def _text(
    width: int, layers: int, heads: int, activation: str, projection: int | None = None
) -> dict[str, Any]:
    return {
        "vocab_size": 49408,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 77,
        "hidden_act": activation,
        "projection_dim": projection or width,
        "bos_token_id": 49406,
        "eos_token_id": 49407,
        "pad_token_id": 49407,
    }


def _vae(widths: tuple[int, ...], layers: int, scale: float) -> dict[str, Any]:
    return {
        "block_out_channels": widths,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": layers,
        "latent_channels": 4,
        "scaling_factor": scale,
        "force_upcast": False,
    }


_SD15_BLOCKS = {
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    "layers_per_block": 2,
}
_SDXL_BLOCKS = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 2,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
}
_PLANS = {
    "sd15": _Plan(
        "sd1",
        {
            **_SD15_BLOCKS,
            "sample_size": 64,
            "block_out_channels": (320, 640, 1280, 1280),
            "attention_head_dim": 8,
            "cross_attention_dim": 768,
        },
        _vae((128, 256, 512, 512), 2, 0.18215),
        (_text(768, 12, 12, "quick_gelu"),),
    ),
    "sdxl": _Plan(
        "sdxl",
        {
            **_SDXL_BLOCKS,
            "sample_size": 128,
            "block_out_channels": (320, 640, 1280),
            "transformer_layers_per_block": (1, 2, 10),
            "attention_head_dim": (5, 10, 20),
            "cross_attention_dim": 2048,
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 6 * 256 + 1280,
        },
        _vae((128, 256, 512, 512), 2, 0.13025),
        (_text(768, 12, 12, "quick_gelu"), _text(1280, 32, 20, "gelu", 1280)),
        (None, 0),
    ),
    "tiny-sd15": _Plan(
        "sd1",
        {
            **_SD15_BLOCKS,
            "sample_size": 8,
            "block_out_channels": (32, 32, 64, 64),
            "attention_head_dim": 4,
            "cross_attention_dim": 32,
        },
        _vae((32, 32, 32, 64), 1, 0.18215),
        (_text(32, 2, 2, "quick_gelu"),),
    ),
    "tiny-sdxl": _Plan(
        "sdxl",
        {
            **_SDXL_BLOCKS,
            "sample_size": 16,
            "block_out_channels": (32, 64, 64),
            "transformer_layers_per_block": (1, 1, 2),
            "attention_head_dim": (1, 2, 2),
            "cross_attention_dim": 64,
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 6 * 8 + 32,
        },
        _vae((32, 32, 32, 64), 1, 0.13025),
        (_text(32, 2, 2, "quick_gelu"), _text(32, 3, 2, "gelu", 32)),
        (None, 0),
    ),
}
NAMES = tuple(f"{name}{SUFFIX}" for name in _PLANS)


def random_model(family: str, device: Device, precision: Precision, seed: int = 0) -> Model:
    """A model of `family` ("sd15", "sdxl"; "tiny-sd15", "tiny-sdxl" for tests), weights drawn from `seed`.

    The same seed gives the same weights on the same kind of device in every dtype, up to that dtype's
    rounding. Raises RequestError for another family and UnavailableError where memory does not suffice.
    """
    if family not in _PLANS:
        raise RequestError(f"random model {family!r} is not known; nearest: {nearest(family, _PLANS)}")
    plan = _PLANS[family]
    known = next(one for one in FAMILIES if one.name == plan.family)
    made, name = classes(), f"{family}{SUFFIX}"

    def part(module: Any, what: str, dtype_name: str) -> Any:
        _fill(module, f"{name}: {what}", device, dtype_name, seed)
        return module

    unet = part(diffusers_module(made.unet, plan.unet, name), "unet", precision.unet)
    vae = part(diffusers_module(made.vae, plan.vae, name), "vae", precision.vae_weights)
    texts = tuple(
        part(text_module(config, kind.pooled, name), f"text_encoder_{number}", precision.text_encoder)
        for number, (config, kind) in enumerate(zip(plan.texts, known.text_encoders, strict=True), 1)
    )
    words = library.embedded_folder() / "tokenizer"
    training = Training()
    return assemble(
        name=name,
        path=Path(name),
        weights_files=(),
        family=known,
        training=training,
        sigmas=training.sigmas(),
        tokenizers=tuple(tokenizer.load(words, pad) for pad in plan.pads),
        text_encoders=texts,
        unet=unet,
        vae=vae,
        card={},
        defaults=known.defaults,
        device=device,
        precision=precision,
        notes=("its weights are random: its pictures show nothing.",),
    )


def _fill(module: Any, what: str, device: Device, dtype_name: str, seed: int) -> None:
    """Gives an empty (meta) module its random tensors."""
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}

    def read(name: str) -> Tensor:
        return _drawn(name, shapes[name], device, seed ^ zlib.crc32(f"{what}: {name}".encode()))

    weights = Weights(shapes, read)
    fill(
        module,
        {name: Source(name) for name in shapes},
        weights,
        device=device,
        dtype_name=dtype_name,
        what=what,
    )


def _drawn(name: str, shape: tuple[int, ...], device: Device, seed: int) -> Tensor:
    """One tensor, float32 on the device: norms' scales near 1, biases near 0, the rest by its fan-in."""
    import torch

    place = "cpu" if device.kind == "mps" else str(device)
    generator = torch.Generator(place).manual_seed(seed)
    value: Tensor = torch.randn(shape, generator=generator, device=place, dtype=torch.float32)
    if name.endswith("bias"):
        return value * 0.02
    if len(shape) == 1:
        return 1 + value * 0.02
    spread = (3 * math.prod(shape[1:])) ** -0.5
    scaled: Tensor = value * (spread * OUTPUT_GAIN if name == "conv_out.weight" else spread)
    return scaled
