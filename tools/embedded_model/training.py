"""What every stage shares: flat parameters, AdamW over them, a step captured in a CUDA graph, a clock.

A network this small is bound by the launching of kernels, not by arithmetic. So the whole step (drawing the
batch, noise, forward, backward, clipping, AdamW, EMA) is captured once in a CUDA graph and replayed. On a
CPU the same function is called as it is.
"""

import math
import time
from collections.abc import Callable

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORKING_TYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """A one-dimensional tensor of the values; convolution weights go in the order of channels_last."""
    if tensor.dim() == 4:
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor.reshape(-1)


def unflatten(flat: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A view of ``flat`` with ``shape``; the inverse of ``flatten``."""
    if len(shape) == 4:
        outputs, inputs, height, width = shape
        return flat.view(outputs, height, width, inputs).permute(0, 3, 1, 2)
    return flat.view(shape)


class FlatAdamW:
    """AdamW over one flat float32 master copy; the module keeps views of a copy in the working type.

    Every operation runs on the device without a synchronisation, so ``step`` can be captured in a CUDA graph.
    ``learning_rate`` is a tensor on the device that the caller fills. ``average`` is the exponential moving
    average of the weights. ``rates`` maps a parameter's name to a factor on its learning rate.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.99),
        ema_decay: float = 0.9995,
        rates: dict[str, float] | None = None,
        working_type: torch.dtype = WORKING_TYPE,
    ) -> None:
        named = [(name, value) for name, value in module.named_parameters() if value.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters = [value for _, value in named]
        self.shapes = [value.shape for value in self.parameters]
        self.sizes = [value.numel() for value in self.parameters]
        self.master = torch.cat([flatten(value.detach()).float() for value in self.parameters])
        self.working = self.master.to(working_type, copy=True)
        for value, part, shape in zip(
            self.parameters, self.working.split(self.sizes), self.shapes, strict=True
        ):
            value.data = unflatten(part, shape)
        self.average = self.master.clone()
        self.mean = torch.zeros_like(self.master)
        self.square = torch.zeros_like(self.master)
        device = self.master.device
        self.count = torch.zeros((), device=device)
        self.learning_rate = torch.zeros((), device=device)
        self.gradient_norm = torch.zeros((), device=device)
        self.betas = betas
        self.ema_decay = ema_decay
        decay = [weight_decay if value.dim() > 1 else 0.0 for value in self.parameters]
        self.decay = self._spread(decay, device)
        factors = [(rates or {}).get(name, 1.0) for name in self.names]
        self.factor = self._spread(factors, device) if rates else torch.ones((), device=device)

    def _spread(self, values: list[float], device: torch.device) -> torch.Tensor:
        repeats = torch.tensor(self.sizes, device=device)
        return torch.tensor(values, device=device).repeat_interleave(repeats)

    @torch.no_grad()
    def step(self, loss: torch.Tensor) -> None:
        """Take one step along the gradient of ``loss``, its norm clipped at 1."""
        gradients = torch.autograd.grad(loss, self.parameters)
        gradient = torch.cat([flatten(value) for value in gradients]).float()
        gradient = torch.nan_to_num(gradient, 0.0, 0.0, 0.0)
        norm = gradient.norm()
        self.gradient_norm.copy_(norm)
        gradient.mul_((1 / (norm + 1e-6)).clamp(max=1.0))
        first, second = self.betas
        self.count.add_(1)
        self.mean.lerp_(gradient, 1 - first)
        self.square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        rate = self.learning_rate * self.factor
        self.master.mul_(1 - rate * self.decay)
        scale = torch.sqrt(1 - second**self.count) / (1 - first**self.count)
        self.master.sub_(rate * scale * self.mean / (self.square.sqrt() + 1e-8))
        self.working.copy_(self.master)
        decay = torch.minimum(
            (1 + self.count) / (10 + self.count), torch.full_like(self.count, self.ema_decay)
        )
        self.average.lerp_(self.master, 1 - decay)

    def averaged_state(self) -> dict[str, torch.Tensor]:
        """Name to float32 tensor of the moving average."""
        parts = self.average.split(self.sizes)
        pairs = zip(self.names, parts, self.shapes, strict=True)
        return {name: unflatten(part, shape).contiguous() for name, part, shape in pairs}

    def load_average(self) -> None:
        """Put the moving average into the module."""
        self.working.copy_(self.average)

    def load_master(self) -> None:
        """Put the latest weights back into the module."""
        self.working.copy_(self.master)


class CapturedStep:
    """Calls ``function``: on CUDA by replaying a graph captured from it after three warm-up calls."""

    def __init__(self, function: Callable[[], None], capture: bool = DEVICE == "cuda") -> None:
        self.function = function
        self.graph = None
        if not capture:
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                function()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            function()

    def __call__(self) -> None:
        if self.graph is None:
            self.function()
        else:
            self.graph.replay()


class Clock:
    """The share of a time budget that is used, and a cosine learning rate that follows it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.begun = time.time()
        self.reported = 0.0

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.time() - self.begun

    def share(self) -> float:
        """0 at the start, 1 when the budget is used."""
        return min(1.0, self.elapsed() / self.seconds)

    def learning_rate(self, peak: float, warm: float = 0.02, floor: float = 0.01) -> float:
        """A linear rise over the share ``warm``, then half a cosine down to ``floor`` times ``peak``."""
        share = self.share()
        if share < warm:
            return peak * max(share / warm, 0.02)
        rest = (share - warm) / (1 - warm)
        return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * rest)))

    def due(self, every: float) -> bool:
        """True once in ``every`` seconds."""
        if self.elapsed() - self.reported < every:
            return False
        self.reported = self.elapsed()
        return True


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def record_of_machine() -> dict[str, object]:
    """Device and versions, for the results."""
    import diffusers
    import transformers

    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": name,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
    }
