"""Shared: SD's training sigmas, the golden values' toy denoiser, a counter of read-backs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from clearway.sampling import samplers

DATA = Path(__file__).parent.parent / "data" / "samplers.json"
READERS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__")


@pytest.fixture(scope="session")
def alphas_cumprod() -> torch.Tensor:
    """SD 1.x: betas whose roots are evenly spaced from sqrt(0.00085) to sqrt(0.012); float64."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    return (1 - betas).cumprod(0)


@pytest.fixture(scope="session")
def table(alphas_cumprod: torch.Tensor) -> torch.Tensor:
    return ((1 - alphas_cumprod) / alphas_cumprod).sqrt().float()


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """k-diffusion's own results: the part of the project's shared data/samplers.json for what is built here.

    Toy denoiser below, float32 on the CPU, x0 = randn(1, 4, 8, 8) of seed 42 times the first sigma; ancestral
    noise of seed 0 in the order of the calls, SDE noise from a Brownian tree with seed 42.
    """
    return json.loads(DATA.read_text())


@pytest.fixture
def toy() -> Callable[[torch.Tensor, float], torch.Tensor]:
    def denoise(x: torch.Tensor, sigma: float) -> torch.Tensor:
        assert type(sigma) is float
        return x / (1 + sigma**2) + 0.1 * torch.tanh(x / (1 + sigma))

    return denoise


@pytest.fixture
def start() -> torch.Tensor:
    return torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(42))


def no_noise(sigma: float, sigma_next: float) -> torch.Tensor:
    raise AssertionError("this sampler drew noise")


@pytest.fixture(name="no_noise")
def no_noise_fixture() -> Callable[[float, float], torch.Tensor]:
    return no_noise


@pytest.fixture(params=[one.label for one in samplers()])
def label(request: pytest.FixtureRequest) -> str:
    """Every sampler in turn."""
    return request.param


class _Counter(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        result = func(*args, **(kwargs or {}))
        if "_local_scalar_dense" in name or name.startswith(("aten.item", "aten.equal", "aten.nonzero")):
            self.found.append(name)
        elif "copy" in name and isinstance(result, torch.Tensor) and result.device.type == "cpu":
            sources = [one for one in args if isinstance(one, torch.Tensor)]
            self.found += [name for one in sources if one.device.type != "cpu"]
        return result


@pytest.fixture
def read_backs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A context manager giving the list of the host's scalar reads, copies from a device and waits."""

    @contextmanager
    def counting() -> Iterator[list[str]]:
        found: list[str] = []

        def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def read(*args: Any, **kwargs: Any) -> Any:
                found.append(name)
                return original(*args, **kwargs)

            return read

        with monkeypatch.context() as patch, _Counter(found):
            for name in READERS:
                patch.setattr(torch.Tensor, name, watched(name, getattr(torch.Tensor, name)))
            for module in (torch.cuda, torch.mps):
                patch.setattr(module, "synchronize", watched("synchronize", lambda *_: None))
            yield found

    return counting
