"""A single-file checkpoint in the original (ldm, sgm) layout -> Model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clearway.device import Device
from clearway.errors import RequestError, one_line
from clearway.models import card as cards
from clearway.models import keys_text, keys_unet, keys_vae, prediction, tokenizer
from clearway.models.build import classes, diffusers_module, fill, listed, text_module
from clearway.models.detect import CLIP_PREFIXES, UNET, VAE, identify
from clearway.models.family import SD2, SUPPORTED, Family, TextEncoder
from clearway.models.keys import Layout, Shapes, Source, below
from clearway.models.model import Model
from clearway.models.weights import Weights, open_weights
from clearway.types import Precision

HARMLESS = re.compile(  # training leftovers and markers that no network needs; counted in the notes
    r"^(model_ema\.|first_stage_model\.loss\.|betas$|alphas_cumprod|sqrt_|log_one_minus|posterior_|logvar$|"
    r"lvlb_weights|scale_factor$|global_step$|v_pred$|ztsnr$|denoiser\.|edm_)|"
    r"(^|\.)(position_ids|logit_scale|attn_mask|num_batches_tracked)$"
)


def load_file(
    path: Path, *, name: str, device: Device, precision: Precision, allow_pickle: bool = False
) -> Model:
    """The model in a checkpoint file. RequestError where it is damaged, incomplete or something else."""
    with open_weights(path, allow_pickle=allow_pickle) as weights:
        family = identify(weights.shapes)
        if isinstance(family, str):
            raise RequestError(f"{path.name} {family}; {SUPPORTED}")
        training, notes = prediction.from_checkpoint(
            path, family, weights.shapes, weights.metadata, weights.read
        )
        said = cards.file_metadata(weights.metadata, path.name)
        defaults, more = cards.apply(
            said.get("defaults", {}),
            family.defaults_for(training.prediction, training.zero_terminal_snr),
            f"{path.name}: its metadata",
        )
        parts = _Parts(path.name, family, weights, device)
        encoders = tuple(
            parts.text(number, encoder, said.get(f"text_encoder{'_2' * number}", {}), precision.text_encoder)
            for number, encoder in enumerate(family.text_encoders)
        )
        unet_said = {"sample_size": defaults.width // 8} | said.get("unet", {})
        if family is SD2 and training.prediction == "v_prediction":
            unet_said["upcast_attention"] = True  # SD 2.1's attention overflows in half precision
        unet = parts.unet(encoders, unet_said, precision.unet)
        vae = parts.vae(said.get("vae", {}), precision.vae)
        notes += (*more, *parts.notes, *parts.surplus())
    vocabulary = Path(__file__).parent / "embedded" / "tokenizer"
    return Model(
        name=name,
        title=cards.title_of(said.get("defaults", {}), name),
        path=path,
        weights_files=(path,),
        family=family,
        prediction=training.prediction,
        zero_terminal_snr=training.zero_terminal_snr,
        sigmas=training.sigmas(),
        tokenizers=tuple(
            tokenizer.load(vocabulary, 0 if encoder.pad == "zero" else None)
            for encoder in family.text_encoders
        ),
        text_encoders=encoders,
        unet=unet,
        vae=vae,
        latent_scale=float(vae.config.scaling_factor),
        latent_shift=float(vae.config.shift_factor or 0.0),
        defaults=defaults,
        device=device,
        precision=precision,
        notes=notes,
    )


class _Parts:
    """The modules of one file, and which of its tensors they took."""

    def __init__(self, name: str, family: Family, weights: Weights, device: Device) -> None:
        self.name = name
        self.family = family
        self.weights = weights
        self.device = device
        self.used: set[str] = set()
        self.left_out: set[str] = set()
        self.notes: tuple[str, ...] = ()

    def unet(self, encoders: tuple[Any, ...], said: dict[str, Any], dtype_name: str) -> Any:
        pooled = encoders[-1].config.projection_dim if self.family.text_encoders[-1].pooled else None
        layout = self._layout(
            UNET, "UNet", lambda shapes: keys_unet.layout(shapes, self.family, pooled, said)
        )
        module = diffusers_module(classes().unet, layout.config, f"{self.name}: the UNet")
        return self._fill(module, layout, UNET, "UNet", dtype_name)

    def vae(self, said: dict[str, Any], dtype_name: str) -> Any:
        layout = self._layout(
            VAE, "VAE", lambda shapes: keys_vae.layout(shapes, self.family.latent_scale, said)
        )
        module = diffusers_module(classes().vae, layout.config, f"{self.name}: the VAE")
        return self._fill(module, layout, VAE, "VAE", dtype_name, optional=("encoder.", "quant_conv."))

    def text(self, number: int, encoder: TextEncoder, said: dict[str, Any], dtype_name: str) -> Any:
        what = "text encoder" if number == 0 else "second text encoder"
        choices = CLIP_PREFIXES[self.family.name]
        if len(self.family.text_encoders) == 1:
            held = [
                prefix for prefix in choices if any(key.startswith(prefix) for key in self.weights.shapes)
            ]
            prefix = held[0] if held else choices[0]
        else:
            prefix = choices[number]
        make: Callable[[Shapes], Layout]
        if encoder.kind == "clip":
            make = lambda shapes: keys_text.clip_layout(shapes, said)  # noqa: E731
        else:
            make = lambda shapes: keys_text.open_clip_layout(  # noqa: E731
                shapes, said, projected=encoder.pooled, last_layer=self.family is not SD2
            )
            if self.family is SD2:  # neither its last layer nor its projection are read by anyone
                self.left_out |= {f"{prefix}text_projection", f"{prefix}text_projection.weight"}
        layout = self._layout(prefix, what, make)
        if self.family is SD2:
            last = f"{prefix}transformer.resblocks.{layout.config['num_hidden_layers']}."
            self.left_out |= {key for key in self.weights.shapes if key.startswith(last)}
        module = text_module(layout.config, encoder.pooled, f"{self.name}: the {what}")
        return self._fill(module, layout, prefix, what, dtype_name)

    def surplus(self) -> tuple[str, ...]:
        """Notes about the tensors that no module took."""
        rest = set(self.weights.shapes) - self.used - self.left_out
        harmless = {key for key in rest if HARMLESS.search(key)}
        notes: tuple[str, ...] = ()
        if rest - harmless:
            notes += (f"{self.name}: {listed(rest - harmless)} not used.",)
        if harmless:
            plural = "s" * (len(harmless) != 1)
            notes += (f"{self.name}: {len(harmless)} tensor{plural} left over from training ignored.",)
        return notes

    def _layout(self, prefix: str, what: str, make: Callable[[Shapes], Layout]) -> Layout:
        try:
            return make(below(self.weights.shapes, prefix))
        except KeyError as error:
            raise RequestError(
                f"{self.name}: the {what} is incomplete: {prefix}{error.args[0]} is missing"
            ) from error
        except IndexError as error:
            raise RequestError(f"{self.name}: the {what} has tensors of the wrong shape") from error
        except ValueError as error:
            raise RequestError(f"{self.name}: {one_line(error)}; {SUPPORTED}") from error

    def _fill(
        self,
        module: Any,
        layout: Layout,
        prefix: str,
        what: str,
        dtype_name: str,
        optional: tuple[str, ...] = (),
    ) -> Any:
        sources = {
            target: Source(prefix + source.key, source.turn) for target, source in layout.sources.items()
        }
        self.notes += fill(
            module,
            sources,
            self.weights,
            device=self.device,
            dtype_name=dtype_name,
            what=f"{self.name}: the {what}",
            optional=optional,
        )
        wanted = {keys_text.canonical(key) for key in module.state_dict()} | set(module.state_dict())
        self.used |= {source.key for target, source in sources.items() if target in wanted}
        return module
