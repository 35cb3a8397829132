"""What a network predicts: markers, metadata, files beside it, SD 2.x's bias, scheduler configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from clearway.errors import RequestError
from clearway.models.family import SD1, SD2, SDXL
from clearway.models.noise_levels import from_betas, linear, scaled_linear
from clearway.models.prediction import SD2_MARK, Training, from_checkpoint, from_scheduler

V, EPS = "v_prediction", "epsilon"
LDM = "model:\n  params:\n    linear_start: 0.00085\n    linear_end: 0.0120\n    parameterization: '{}'\n"
SGM = (
    "model:\n  params:\n    denoiser_config:\n      params:\n        scaling_config:\n          target: {}\n"
)


def find(
    tmp_path: Path, family=SDXL, keys=(), metadata=None, yaml: str | None = None, bias: Any = None
) -> tuple[Training, tuple[str, ...]]:
    if yaml is not None:
        (tmp_path / "model.yaml").write_text(yaml)
    shapes = dict.fromkeys(keys, ())
    path = tmp_path / "model.safetensors"
    return from_checkpoint(path, family, shapes, metadata or {}, lambda name: bias)


def test_the_family_decides_where_nothing_is_said(tmp_path: Path) -> None:
    assert find(tmp_path) == (Training(), ())


@pytest.mark.parametrize(
    ("said", "prediction", "zero"),
    [
        ({"keys": ["v_pred"]}, V, False),
        ({"keys": ["v_pred", "ztsnr"]}, V, True),
        ({"keys": ["ztsnr"]}, EPS, True),
        ({"metadata": {"modelspec.prediction_type": "v"}}, V, False),
        ({"metadata": {"modelspec.prediction_type": "epsilon"}}, EPS, False),
        ({"yaml": LDM.format("v")}, V, False),
        ({"yaml": LDM.format("eps"), "keys": ["v_pred", "ztsnr"]}, EPS, True),
        ({"yaml": SGM.format("sgm.modules.diffusionmodules.denoiser_scaling.VScaling")}, V, False),
        ({"yaml": SGM.format("sgm.x.EpsScaling"), "keys": ["v_pred"]}, EPS, False),
        ({"yaml": "model:\n  params: {}\n", "keys": ["v_pred"]}, V, False),
        ({"family": SD1, "yaml": LDM.format("v")}, V, False),
    ],
)
def test_who_says_what(tmp_path: Path, said: dict, prediction: str, zero: bool) -> None:
    found, notes = find(tmp_path, **said)
    assert (found.prediction, found.zero_terminal_snr, notes) == (prediction, zero, ())


@pytest.mark.parametrize(("spread", "prediction"), [(0.05, EPS), (0.2, V)])
def test_sd2_is_told_by_a_bias(tmp_path: Path, spread: float, prediction: str) -> None:
    bias = torch.tensor([-spread, spread], dtype=torch.float16)
    assert find(tmp_path, SD2, [SD2_MARK], bias=bias)[0].prediction == prediction


@pytest.mark.parametrize(
    "text",
    [
        "a: [", "just text", "model: 3", LDM.format("x0"), "!!python/object/apply:os.system ['touch owned']",
        "model: " + "[" * 3000, "x" * 1_000_001,
    ],
    ids=["broken", "text", "number", "x0", "code", "nested", "large"],
)  # fmt: skip
def test_a_yaml_that_is_not_understood_is_noted_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found, notes = find(tmp_path, yaml=text)
    assert found == Training()
    assert len(notes) == 1 and "model.yaml" in notes[0] and "\n" not in notes[0]
    assert not (tmp_path / "owned").exists()


def test_other_betas_of_a_yaml_are_taken(tmp_path: Path) -> None:
    found, _ = find(tmp_path, yaml=LDM.format("eps").replace("0.0120", "0.02"))
    assert torch.equal(found.sigmas(), scaled_linear(0.00085, 0.02))


@pytest.mark.parametrize("value", ["1.5", "abc", "[1]", "0.0"])
def test_betas_of_a_yaml_that_are_none_are_noted(tmp_path: Path, value: str) -> None:
    found, notes = find(tmp_path, yaml=LDM.format("v").replace("0.0120", value))
    assert found == Training() and "linear_end" in notes[0]


@pytest.mark.parametrize(
    "training",
    [
        Training(beta_start=0.9, beta_end=0.1),  # the product of alphas vanishes: infinite
        Training(trained_betas=(0.5,) * 5000),
        Training(trained_betas=()),
        Training(trained_betas=(0.5,)),
        Training(trained_betas=(1e-300, 1e-300)),  # noise levels of 0
        Training(timesteps=1),
        Training(trained_betas=(float("nan"), 0.5)),
    ],
)
def test_noise_levels_must_ascend_and_be_finite(training: Training) -> None:
    with pytest.raises(RequestError, match=r"m: its betas .* give no noise levels that are finite") as error:
        training.sound_sigmas("m")
    assert len(str(error.value)) < 200
    assert torch.equal(Training().sound_sigmas("m"), Training().sigmas())


def test_a_scheduler_config() -> None:
    config = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    assert from_scheduler(config, "m") == Training()
    assert torch.equal(from_scheduler(config, "m").sigmas(), scaled_linear())
    zero = from_scheduler(config | {"prediction_type": V, "rescale_betas_zero_snr": True}, "m")
    assert zero.prediction == V and torch.equal(zero.sigmas(), scaled_linear(zero_terminal_snr=True))
    assert torch.equal(
        from_scheduler({"num_train_timesteps": 10}, "m").sigmas(), linear(0.0001, 0.02, 10)
    )  # Diffusers' own defaults
    assert torch.equal(from_scheduler({"trained_betas": [0.1, 0.2]}, "m").sigmas(), from_betas([0.1, 0.2]))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"prediction_type": "sample"}, "m predicts 'sample'"),
        ({"beta_schedule": "squaredcos_cap_v2"}, "beta schedule 'squaredcos_cap_v2'"),
        ({"_class_name": "EDMEulerScheduler"}, "EDMEulerScheduler"),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler"}, "FlowMatch"),
        ({"beta_start": "x"}, "no usable betas"),
        ({"beta_end": 1.5}, "no usable betas"),
        ({"num_train_timesteps": 10**9}, "no usable betas"),
        ({"trained_betas": [0.1, 2.0]}, "no usable betas"),
        ({"trained_betas": 3}, "no usable betas"),
        ({"trained_betas": []}, "no usable betas"),
        ({"trained_betas": [0.1]}, "no usable betas"),
        ({"num_train_timesteps": float("inf")}, "no usable betas"),
    ],
)
def test_a_scheduler_config_that_cannot_be_used(config: dict, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence) as error:
        from_scheduler(config, "m")
    assert "\n" not in str(error.value)
