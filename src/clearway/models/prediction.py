"""What a network predicts and at which noise levels it was trained: prediction type and betas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearway.errors import RequestError, one_line
from clearway.models.family import SD2, Family, Prediction

if TYPE_CHECKING:
    from torch import Tensor

MARKERS = ("v_pred", "ztsnr")  # empty tensors whose presence says something
SD2_MARK = "model.diffusion_model.output_blocks.11.1.transformer_blocks.0.norm1.bias"
MAX_YAML_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Training:
    """How a network was trained; betas are those of `timesteps` diffusion steps."""

    prediction: Prediction = "epsilon"
    zero_terminal_snr: bool = False
    beta_start: float = 0.00085
    beta_end: float = 0.012
    beta_schedule: str = "scaled_linear"
    timesteps: int = 1000
    trained_betas: tuple[float, ...] | None = None

    def sigmas(self) -> Tensor:
        """The training noise levels, ascending, float32 on the CPU; see noise_levels."""
        from clearway.models import noise_levels

        if self.trained_betas is not None:
            return noise_levels.from_betas(self.trained_betas, zero_terminal_snr=self.zero_terminal_snr)
        make = noise_levels.linear if self.beta_schedule == "linear" else noise_levels.scaled_linear
        return make(self.beta_start, self.beta_end, self.timesteps, zero_terminal_snr=self.zero_terminal_snr)

    def sound_sigmas(self, where: str) -> Tensor:
        """As sigmas; RequestError where they are no ascending, finite numbers above 0, at least two."""
        found = self.sigmas()
        values = found.double()
        if found.numel() < 2 or not (
            bool(values.isfinite().all()) and bool((values.diff() > 0).all()) and float(values[0]) > 0
        ):
            raise RequestError(
                f"{where}: its betas ({self._betas()}) give no noise levels that are finite, ascend and lie "
                "above 0"
            )
        return found

    def _betas(self) -> str:
        if self.trained_betas is not None:
            return f"{len(self.trained_betas)} trained_betas"
        return f"{self.beta_schedule} from {self.beta_start:g} to {self.beta_end:g} in {self.timesteps} steps"


def from_checkpoint(
    path: Path,
    family: Family,
    shapes: Mapping[str, tuple[int, ...]],
    metadata: Mapping[str, str],
    read: Callable[[str], Tensor],
) -> tuple[Training, tuple[str, ...]]:
    """How the checkpoint file was trained, with notes.

    The first of these that speaks decides: a `.yaml` of the same stem beside it, the marker keys `v_pred` and
    `ztsnr`, the file's own metadata (modelspec.prediction_type), for SD 2.x the spread of one bias (ComfyUI's
    criterion), the family.
    """
    notes: list[str] = []
    prediction: Prediction = family.prediction
    said = metadata.get("modelspec.prediction_type", "").lower()
    if "v_pred" in shapes or said in ("v", "v_prediction", "v-prediction"):
        prediction = "v_prediction"
    elif not said and family is SD2 and SD2_MARK in shapes:
        spread = float(read(SD2_MARK).double().std(unbiased=False))
        prediction = "v_prediction" if spread > 0.09 else "epsilon"
    found = Training(prediction, zero_terminal_snr="ztsnr" in shapes)
    sidecar = path.with_suffix(".yaml")
    if sidecar.is_file():
        try:
            found = replace(found, **_sidecar(sidecar))
        except (OSError, ValueError) as error:
            notes.append(f"{sidecar.name} beside the model was not understood ({one_line(error)}).")
    return found, tuple(notes)


def _sidecar(path: Path) -> dict[str, Any]:
    """The fields of Training that an original configuration (ldm or sgm) speaks of."""
    import yaml  # type: ignore[import-untyped, unused-ignore]

    if path.stat().st_size > MAX_YAML_BYTES:
        raise ValueError("it is larger than 1 MB")
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(one_line(error)) from error
    params = _below(found, "model", "params")
    if not isinstance(params, dict):
        raise ValueError("it has no model.params")
    fields: dict[str, Any] = {}
    scaling = _below(params, "denoiser_config", "params", "scaling_config", "target")
    parameterization = params.get("parameterization")
    if parameterization == "v" or (isinstance(scaling, str) and ".VScaling" in scaling):
        fields["prediction"] = "v_prediction"
    elif parameterization == "eps" or (isinstance(scaling, str) and ".EpsScaling" in scaling):
        fields["prediction"] = "epsilon"
    elif parameterization is not None:
        raise ValueError(f"parameterization {parameterization!r:.60} is neither 'eps' nor 'v'")
    for key, name in (("linear_start", "beta_start"), ("linear_end", "beta_end")):
        value = params.get(key)
        if value is None:
            continue
        if not isinstance(value, float) or not 0 < value < 1:
            raise ValueError(f"{key} {value!r:.40} is no number between 0 and 1")
        fields[name] = value
    return fields


def _below(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def from_scheduler(config: Mapping[str, Any], where: str) -> Training:
    """How a Diffusers folder's network was trained, from its scheduler_config.json."""
    name = str(config.get("_class_name", ""))
    if name.startswith(("EDM", "FlowMatch")):
        raise RequestError(f"{where} is trained for {name[:60]}, which Clearway does not draw with")
    prediction = config.get("prediction_type", "epsilon")
    if prediction not in ("epsilon", "v_prediction"):
        raise RequestError(
            f"{where} predicts {prediction!r:.60}; Clearway draws with 'epsilon' and 'v_prediction'"
        )
    schedule, betas = config.get("beta_schedule", "linear"), config.get("trained_betas")
    if schedule not in ("linear", "scaled_linear"):
        raise RequestError(
            f"{where} has the beta schedule {schedule!r:.60}; Clearway knows 'linear' and 'scaled_linear'"
        )
    try:
        found = Training(
            prediction,
            bool(config.get("rescale_betas_zero_snr", False)),
            float(config.get("beta_start", 0.0001)),
            float(config.get("beta_end", 0.02)),
            schedule,
            int(config.get("num_train_timesteps", 1000)),
            None if betas is None else tuple(float(beta) for beta in betas),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(
            f"{where}: scheduler_config.json holds no usable betas ({one_line(error)})"
        ) from error
    sound = 0 < found.beta_start < 1 and 0 < found.beta_end < 1 and 2 <= found.timesteps <= 100_000
    trained = (0.5, 0.5) if found.trained_betas is None else found.trained_betas
    if not sound or not 2 <= len(trained) <= 100_000 or not all(0 < beta < 1 for beta in trained):
        raise RequestError(f"{where}: scheduler_config.json holds no usable betas ({found._betas()})")
    return found
