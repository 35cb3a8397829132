"""The denoiser: Diffusers' UNet2DConditionModel, SD 1.x's structure at a hundredth of its size.

  python unet.py --work WORK --seconds 1200

eps-prediction, SD 1.x's betas, min-SNR weights of 5, a tenth of the captions name nothing. The text encoder
is frozen and the states of the whole caption pool are computed once. The first share of the time goes to
16x16 latents (128x128 pictures), which are four times cheaper and teach what belongs to which word; the
rest is a mixture of 32x32 and 16x16, one captured step for each. Writes WORK/unet.pt (the moving average,
refreshed every minute) and WORK/results/unet.json.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import pictures as pic
import text
import vae as autoencoder
from fused import fuse
from training import DEVICE, WORKING_TYPE, CapturedStep, Clock, FlatAdamW, record_of_machine, synchronize


def unet_config() -> dict:
    """The arguments of Diffusers' UNet2DConditionModel."""
    return {
        "sample_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "center_input_sample": False,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
        "block_out_channels": (64, 64, 96, 96),
        "layers_per_block": 2,
        "cross_attention_dim": 64,
        "attention_head_dim": 4,
        "norm_num_groups": 16,
    }


def build() -> torch.nn.Module:
    """A fresh denoiser on the device, float32."""
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(**unet_config()).to(DEVICE)


def signal_levels() -> torch.Tensor:
    """(1000,) cumulative products of 1 - beta, SD 1.x's "scaled linear" schedule."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    return torch.cumprod(1 - betas, 0).float()


@torch.no_grad()
def encode_variants(
    work: Path, pool: text.Pool, sides: tuple[int, ...], limit: int
) -> dict[int, torch.Tensor]:
    """Scaled latents of every variant, by side, in the working type."""
    rgba = pic.load_pictures(work, limit).to(DEVICE)
    vae = autoencoder.build(work / "vae.pt").to(memory_format=torch.channels_last, dtype=WORKING_TYPE)
    vae = fuse(vae).eval()
    palette = pic.background_table(DEVICE)
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    count = len(pool.variants)
    latents = {side: torch.empty(count, 4, side, side, device=DEVICE, dtype=WORKING_TYPE) for side in sides}
    for colour in range(len(pic.OBJECT_COLOUR_NAMES)):
        chosen = (pool.variants[:, 1] == colour).nonzero()[:, 0]
        if not len(chosen):
            continue
        for part in chosen.split(128):
            picture, _, background = pool.variants[part].unbind(1)
            painted = pic.recolour(rgba[picture], pool.hue[picture], colour)
            jitter = torch.randn(len(part), 3, device=DEVICE, generator=generator) * 4
            plain = palette[background] + jitter * (background > 0)[:, None]
            pixels, _ = pic.composite(painted, plain.clamp(0, 255))
            for side in sides:
                scaled = pixels if side == 32 else F.avg_pool2d(pixels, 32 // side)
                scaled = scaled.contiguous(memory_format=torch.channels_last)
                latents[side][part] = (autoencoder.encode(vae, scaled)[0] * pic.SCALING_FACTOR).to(
                    WORKING_TYPE
                )
    return latents


@torch.no_grad()
def encode_captions(work: Path, pool: text.Pool) -> torch.Tensor:
    """(captions, 77, 64) states of the pool and of the captions that name nothing, in the working type."""
    encoder = text.load(work)
    ids = torch.cat([pool.captions, pool.empty])
    states = torch.empty(len(ids), text.LENGTH, text.WIDTH, device=DEVICE, dtype=WORKING_TYPE)
    for start in range(0, len(ids), 4096):
        states[start : start + 4096] = encoder(ids[start : start + 4096].long()).to(WORKING_TYPE)
    return states


class Trainer:
    """The denoiser, its optimiser, and one captured step a latent side."""

    def __init__(self, pool: text.Pool, latents: dict[int, torch.Tensor], states: torch.Tensor) -> None:
        self.pool = pool
        self.latents = latents
        self.states = states
        self.unet = fuse(build().to(memory_format=torch.channels_last))
        self.optimizer = FlatAdamW(self.unet, weight_decay=0.01, ema_decay=0.9995)
        # buffers and whatever is not trained follow the parameters' type
        self.unet.to(WORKING_TYPE)
        self.levels = signal_levels().to(DEVICE)
        ratio = self.levels / (1 - self.levels)
        self.weights = torch.minimum(ratio, torch.full_like(ratio, 5.0)) / ratio
        self.totals = {side: torch.zeros(2, device=DEVICE) for side in latents}

    def loss(self, side: int, batch: int) -> torch.Tensor:
        """The weighted error of one random batch; the plain one is added to ``totals``."""
        variant, caption, _ = self.pool.draw(batch, 0.1)
        clean = self.latents[side][variant].float()
        # one timestep in each of ``batch`` equal parts of the range: less noise in the gradient
        chance = (torch.arange(batch, device=DEVICE) + torch.rand(batch, device=DEVICE)) / batch
        timestep = (chance * 1000).long().clamp(max=999)
        noise = torch.randn_like(clean)
        level = self.levels[timestep][:, None, None, None]
        noisy = (level.sqrt() * clean + (1 - level).sqrt() * noise).to(WORKING_TYPE)
        noisy = noisy.contiguous(memory_format=torch.channels_last)
        guess = self.unet(noisy, timestep, self.states[caption], return_dict=False)[0].float()
        error = (guess - noise).pow(2).mean((1, 2, 3))
        self.totals[side].add_(torch.stack([error.detach().mean(), torch.ones((), device=DEVICE)]))
        return (error * self.weights[timestep]).mean()

    def captured(self, side: int, batch: int, capture: bool) -> CapturedStep:
        """A callable that takes one step on latents of ``side``."""
        return CapturedStep(lambda: self.optimizer.step(self.loss(side, batch)), capture)

    def save(self, path: Path) -> None:
        """Write the moving average in half precision, by way of a temporary file."""
        state = {name: value.half().cpu() for name, value in self.optimizer.averaged_state().items()}
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)


def prepare(work: Path, sides: tuple[int, ...], limit: int = 0) -> Trainer:
    """Everything that a training run needs, on the device."""
    begun = time.time()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    pool = text.Pool(work)
    states = encode_captions(work, pool)
    synchronize()
    print(f"captions {len(states)} in {time.time() - begun:.0f} s", flush=True)
    latents = encode_variants(work, pool, sides, limit)
    synchronize()
    spread = {side: round(value.float().std().item(), 3) for side, value in latents.items()}
    print(f"latents {len(pool.variants)}, deviation {spread}, {time.time() - begun:.0f} s", flush=True)
    return Trainer(pool, latents, states)


def train(work: Path, arguments: argparse.Namespace) -> None:
    """Train for the given seconds and write the weights and the course."""
    torch.manual_seed(2)
    rng = random.Random(2)
    trainer = prepare(work, (16, 32), arguments.limit)
    torch.backends.cudnn.benchmark = True
    batches = {16: arguments.batch_16, 32: arguments.batch_32}
    steps = {side: trainer.captured(side, size, DEVICE == "cuda") for side, size in batches.items()}
    for total in trainer.totals.values():
        total.zero_()
    synchronize()
    print("steps captured", flush=True)
    clock = Clock(arguments.seconds)
    taken = {16: 0, 32: 0}
    saved = 0.0
    curve = []
    rate = trainer.optimizer.learning_rate
    while clock.share() < 1:
        early = clock.share() < arguments.first_share
        side = 16 if early or rng.random() < arguments.small_share else 32
        rate.fill_(clock.learning_rate(arguments.rate))
        steps[side]()
        taken[side] += 1
        if sum(taken.values()) % 20 == 0 or DEVICE == "cpu":
            synchronize()
            if clock.due(arguments.report_seconds):
                entry = {"seconds": round(clock.elapsed(), 1), "learning_rate": round(rate.item(), 6)}
                entry["gradient_norm"] = round(trainer.optimizer.gradient_norm.item(), 4)
                for key, total in trainer.totals.items():
                    entry[f"steps_{key}"] = taken[key]
                    if total[1] > 0:
                        entry[f"loss_{key}"] = round((total[0] / total[1]).item(), 5)
                    total.zero_()
                curve.append(entry)
                print("unet", json.dumps(entry), flush=True)
            if clock.elapsed() - saved > 60:
                saved = clock.elapsed()
                trainer.save(work / "unet.pt")
    synchronize()
    used = clock.elapsed()
    trainer.save(work / "unet.pt")
    record = {
        **record_of_machine(),
        "stage": "denoiser",
        "seconds": round(used, 1),
        "batch_16": batches[16],
        "batch_32": batches[32],
        "steps_16": taken[16],
        "steps_32": taken[32],
        "latents_16_seen": taken[16] * batches[16],
        "latents_32_seen": taken[32] * batches[32],
        "peak_learning_rate": arguments.rate,
        "parameters": sum(trainer.optimizer.sizes),
        "variants": len(trainer.pool.variants),
        "captions": len(trainer.pool.captions),
        "curve": curve,
    }
    (work / "results").mkdir(exist_ok=True)
    (work / "results" / "unet.json").write_text(json.dumps(record, indent=1))
    print("unet done", used, taken, flush=True)


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--batch-16", type=int, default=512)
    parser.add_argument("--batch-32", type=int, default=256)
    parser.add_argument("--rate", type=float, default=1.2e-3, help="the highest learning rate")
    parser.add_argument("--first-share", type=float, default=0.18, help="share of the time for 16x16 alone")
    parser.add_argument("--small-share", type=float, default=0.12, help="share of 16x16 steps after that")
    parser.add_argument("--report-seconds", type=float, default=20)
    parser.add_argument("--limit", type=int, default=0, help="only the first so many pictures")
    train(parser.parse_args().work, parser.parse_args())


if __name__ == "__main__":
    main()
