"""Facts per model family: what a checkpoint's keys do not say and every stage needs to know.

Sources: the published configurations of SD 1.x, SD 2.x and SDXL base, and what the WebUI does with them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from clearway.types import Defaults

Prediction = Literal["epsilon", "v_prediction"]


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """One of a family's text encoders: `kind` says whose activations, `pad` which token fills a window.

    `skip` layers are left out at the end (SDXL reads the last but one); `final_norm` says whether the final
    layer norm is applied to what is read; `pooled` whether its projected end token conditions the network
    too.
    """

    kind: Literal["clip", "open_clip"]
    pad: Literal["end", "zero"]
    skip: int = 0
    final_norm: bool = True
    pooled: bool = False

    @property
    def activation(self) -> str:
        """The activation's name in transformers."""
        return "quick_gelu" if self.kind == "clip" else "gelu"


@dataclass(frozen=True, slots=True)
class Family:
    """What all models of a family share. Exactly one of `heads` and `head_size` is given."""

    name: str
    label: str
    latent_scale: float
    text_encoders: tuple[TextEncoder, ...]
    defaults: Defaults
    prediction: Prediction = "epsilon"
    latent_shift: float = 0.0
    latent_channels: int = 4
    heads: int | None = None
    head_size: int | None = None

    def heads_for(self, channels: int) -> int:
        """How many attention heads a UNet level of `channels` has where the file does not say."""
        return self.heads or max(1, channels // (self.head_size or 64))

    def defaults_for(
        self, prediction: str, zero_terminal_snr: bool, native_px: int | None = None
    ) -> Defaults:
        """The family's defaults, fitted to one model: `native_px` is its own side where it is known.

        SD 2.x comes in two sizes, told apart by the prediction. With zero terminal SNR the largest sigma is
        4518, and a Karras schedule would spend most of its steps up there, so the model's own is taken.
        """
        found = self.defaults
        side = native_px or (512 if self.name == "sd2" and prediction == "epsilon" else found.width)
        found = replace(found, width=side, height=side)
        if zero_terminal_snr:
            found = replace(found, sampler="Euler", schedule="Automatic")
        return found


SD1 = Family(
    name="sd1",
    label="SD 1.x",
    latent_scale=0.18215,
    text_encoders=(TextEncoder("clip", "end"),),
    defaults=Defaults(512, 512, 20, 7.0, "DPM++ 2M", "Karras"),
    heads=8,
)
SD2 = Family(
    name="sd2",
    label="SD 2.x",
    latent_scale=0.18215,
    # The original reads the last layer but one; as everywhere with Diffusers, the last is not even loaded.
    text_encoders=(TextEncoder("open_clip", "zero"),),
    defaults=Defaults(768, 768, 20, 7.0, "DPM++ 2M", "Karras"),
    head_size=64,
)
SDXL = Family(
    name="sdxl",
    label="SDXL",
    latent_scale=0.13025,
    text_encoders=(
        TextEncoder("clip", "end", skip=1, final_norm=False),
        TextEncoder("open_clip", "zero", skip=1, final_norm=False, pooled=True),
    ),
    defaults=Defaults(1024, 1024, 30, 7.0, "DPM++ 2M", "Karras"),
    head_size=64,
)
FAMILIES = (SD1, SD2, SDXL)
SUPPORTED = "Clearway draws with SD 1.x, 2.x and SDXL base checkpoints"
