"""A single-file checkpoint in the original (ldm, sgm) layout -> Model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clearway.device import Device
from clearway.errors import RequestError, one_line
from clearway.models import card as cards
from clearway.models import keys_text, keys_unet, keys_vae, prediction, settings, tokenizer
from clearway.models.assemble import assemble
from clearway.models.build import classes, diffusers_module, fill, listed, text_module
from clearway.models.detect import CLIP_PREFIXES, UNET, VAE, identify
from clearway.models.escape import shown
from clearway.models.family import SD2, SUPPORTED, Family, TextEncoder
from clearway.models.keys import Layout, Shapes, Source, below
from clearway.models.model import Model
from clearway.models.weights import Weights, open_weights
from clearway.types import Precision

HARMLESS = re.compile(  # training leftovers that no network needs; counted in the notes
    r"^(model_ema\.|first_stage_model\.loss\.|betas$|alphas_cumprod|sqrt_|log_one_minus|posterior_|logvar$|"
    r"lvlb_weights|scale_factor$|global_step$|denoiser\.|edm_)|"
    r"(^|\.)(position_ids|logit_scale|attn_mask|num_batches_tracked)$"
)
NUMBERED = re.compile(  # names within a module that lie in one of its numbered blocks
    r"^(input_blocks|middle_block|output_blocks|encoder\.down|decoder\.up|(text_model\.)?encoder\.layers|"
    r"transformer\.resblocks)\.[0-9]"
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
        sigmas = training.sound_sigmas(path.name)
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
        vae = parts.vae(said.get("vae", {}), precision.vae_weights)
        notes += (*more, *parts.notes, *parts.surplus())
    vocabulary = Path(__file__).parent / "embedded" / "tokenizer"
    return assemble(
        name=name,
        path=path,
        weights_files=(path,),
        family=family,
        training=training,
        sigmas=sigmas,
        tokenizers=tuple(
            tokenizer.load(vocabulary, 0 if encoder.pad == "zero" else None)
            for encoder in family.text_encoders
        ),
        text_encoders=encoders,
        unet=unet,
        vae=vae,
        card=said.get("defaults", {}),
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
        self.left_out: set[str] = set(prediction.MARKERS)
        self.prefixes: set[str] = set()
        self.notes: tuple[str, ...] = ()

    def unet(self, encoders: tuple[Any, ...], said: dict[str, Any], dtype_name: str) -> Any:
        pooled = encoders[-1].config.projection_dim if self.family.text_encoders[-1].pooled else None
        layout = self._layout(
            UNET, "UNet", lambda shapes: keys_unet.layout(shapes, self.family, pooled, said)
        )
        self._bounded(layout, "UNet")
        module = diffusers_module(classes().unet, layout.config, f"{self.name}: the UNet")
        return self._fill(module, layout, UNET, "UNet", dtype_name)

    def vae(self, said: dict[str, Any], dtype_name: str) -> Any:
        layout = self._layout(
            VAE, "VAE", lambda shapes: keys_vae.layout(shapes, self.family.latent_scale, said)
        )
        self._bounded(layout, "VAE")
        module = diffusers_module(classes().vae, layout.config, f"{self.name}: the VAE")
        optional = keys_vae.optional(layout.sources)
        return self._fill(module, layout, VAE, "VAE", dtype_name, optional)

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
        self._bounded(layout, what)
        module = text_module(layout.config, encoder.pooled, f"{self.name}: the {what}")
        return self._fill(module, layout, prefix, what, dtype_name)

    def surplus(self) -> tuple[str, ...]:
        """Notes about the tensors that no module took.

        RequestError where they are of a module's numbered blocks: then the network that was built is not the
        one that the file holds.
        """
        rest = set(self.weights.shapes) - self.used - self.left_out
        harmless = {key for key in rest if HARMLESS.search(key)}
        blocks = {
            key
            for prefix in self.prefixes
            for key in rest - harmless
            if key.startswith(prefix) and NUMBERED.match(key[len(prefix) :])
        }
        if blocks:
            raise RequestError(
                f"{self.name}: {listed(blocks)} found no place in the network that the others make up; "
                "the file is incomplete or of another kind"
            )
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
                f"{self.name}: the {what} is incomplete: {shown(prefix + error.args[0])} is missing"
            ) from error
        except IndexError as error:
            raise RequestError(
                f"{self.name}: {shown(prefix + error.args[0])} has the wrong shape (in the {what})"
            ) from error
        except ValueError as error:
            raise RequestError(f"{self.name}: {one_line(error)}; {SUPPORTED}") from error

    def _bounded(self, layout: Layout, what: str) -> None:
        settings.check_blocks(layout.config, len(layout.sources), f"{self.name}: the {what}")

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
            original=lambda target: prefix + layout.original(target),
        )
        self.prefixes.add(prefix)
        wanted = {keys_text.canonical(key) for key in module.state_dict()} | set(module.state_dict())
        self.used |= {source.key for target, source in sources.items() if target in wanted}
        return module
