"""The autoencoder: Diffusers' AutoencoderKL, f=8, four levels, trained on 256x256 pictures.

  python vae.py --work WORK --seconds 165                         # from nothing
  python vae.py --work WORK --seconds 100 --decoder --rate 5e-4   # the decoder goes on, latents stay

Loss: L1, half of L2, L1 of 2-, 4- and 8-fold averages, L1 of the gradients, the object's pixels twice as
heavy; a weak KL term. Afterwards the mean and deviation of the latents are folded into quant_conv and
post_quant_conv, so that latents times 0.18215 have mean 0 and deviation 1, as every SD 1.x code path
expects. Writes WORK/vae.pt and WORK/results/vae.json (vae_decoder.pt and .json for the decoder).
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F

import pictures as pic
from fused import fuse
from training import DEVICE, WORKING_TYPE, CapturedStep, Clock, FlatAdamW, record_of_machine, synchronize


def vae_config() -> dict:
    """The arguments of Diffusers' AutoencoderKL."""
    return {
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (32, 48, 64, 64),
        "layers_per_block": 2,
        "latent_channels": 4,
        "norm_num_groups": 8,
        "sample_size": pic.SIDE_PX,
        "scaling_factor": pic.SCALING_FACTOR,
    }


def build(state: Path | None = None) -> torch.nn.Module:
    """The autoencoder on the device, float32; with the weights of ``state`` if given."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(**vae_config())
    if state is not None:
        vae.load_state_dict(
            {name: value.float() for name, value in torch.load(state, map_location="cpu").items()}
        )
    return vae.to(DEVICE)


def encode(vae: torch.nn.Module, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and log variance of the latents, float32."""
    mean, log_variance = vae.quant_conv(vae.encoder(pixels.to(vae.dtype))).float().chunk(2, 1)
    return mean, log_variance.clamp(-20, 10)


def decode(vae: torch.nn.Module, latents: torch.Tensor) -> torch.Tensor:
    """Pixels in about -1..1, float32."""
    return vae.decoder(vae.post_quant_conv(latents.to(vae.dtype))).float()


class Draw:
    """Random pictures on random backgrounds, some warped, half of them mirrored."""

    def __init__(self, rgba: torch.Tensor, hue: torch.Tensor | None = None) -> None:
        self.rgba = rgba
        self.palette = pic.background_table(DEVICE)

    def background(self, batch: int) -> torch.Tensor:
        """(B, 3), 55 % white, 25 % near a named colour, the rest anything."""
        share = torch.rand(batch, 1, device=DEVICE)
        named = self.palette[torch.randint(len(self.palette), (batch,), device=DEVICE)]
        named = named + torch.randn(batch, 3, device=DEVICE) * 6
        anything = torch.rand(batch, 3, device=DEVICE) * 255
        white = torch.full((batch, 3), 255.0, device=DEVICE)
        return torch.where(share < 0.55, white, torch.where(share < 0.8, named, anything)).clamp(0, 255)

    def __call__(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pixels and alpha of ``batch`` pictures; one in six is turned, scaled and shifted."""
        rgba = self.rgba[torch.randint(len(self.rgba), (batch,), device=DEVICE)].float()
        flip = torch.rand(batch, 1, 1, 1, device=DEVICE) < 0.5
        rgba = torch.where(flip, rgba.flip(3), rgba)
        warped = max(1, batch // 6)
        part = rgba[:warped]
        angle = (torch.rand(warped, device=DEVICE) - 0.5) * 1.2
        scale = torch.rand(warped, device=DEVICE) + 0.7
        shift = torch.rand(warped, 2, device=DEVICE) * 0.6 - 0.3
        cosine = angle.cos() * scale
        sine = angle.sin() * scale
        first = torch.stack([cosine, -sine, shift[:, 0]], 1)
        second = torch.stack([sine, cosine, shift[:, 1]], 1)
        grid = F.affine_grid(torch.stack([first, second], 1), list(part.shape), align_corners=False)
        premultiplied = torch.cat([part[:, :3] * part[:, 3:] / 255, part[:, 3:]], 1)
        moved = F.grid_sample(premultiplied, grid, align_corners=False)
        background = self.background(batch)
        pixels, alpha = pic.composite(rgba, background)
        moved_alpha = moved[:, 3:] / 255
        moved_pixels = moved[:, :3] + background[:warped, :, None, None] * (1 - moved_alpha)
        pixels = torch.cat([moved_pixels / 127.5 - 1, pixels[warped:]])
        alpha = torch.cat([moved_alpha, alpha[warped:]])
        return pixels.contiguous(memory_format=torch.channels_last), alpha


def picture_loss(made: torch.Tensor, wanted: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """The distance between pictures that both stages minimise."""
    off = (made - wanted) * (1 + alpha)
    half = F.avg_pool2d(off, 2)
    quarter = F.avg_pool2d(half, 2)
    eighth = F.avg_pool2d(quarter, 2)
    edges = (off[..., 1:] - off[..., :-1]).abs().mean() + (off[..., 1:, :] - off[..., :-1, :]).abs().mean()
    coarse = half.abs().mean() + quarter.abs().mean() + eighth.abs().mean()
    return off.abs().mean() + 0.5 * off.pow(2).mean() + 0.5 * coarse + edges


def train(work: Path, seconds: float, batch: int, only_decoder: bool, rate: float, limit: int = 0) -> None:
    """Train for ``seconds`` and write the weights and scores."""
    torch.manual_seed(1)
    rgba = pic.load_pictures(work, limit).to(DEVICE)
    vae = build(work / "vae.pt" if only_decoder else None)
    before = psnr(vae, rgba)
    if only_decoder:
        vae.encoder.requires_grad_(False)
        vae.quant_conv.requires_grad_(False)
    vae = fuse(vae.to(memory_format=torch.channels_last, dtype=WORKING_TYPE))
    optimizer = FlatAdamW(vae, weight_decay=1e-3, ema_decay=0.998)
    draw = Draw(rgba)
    totals = torch.zeros(2, device=DEVICE)

    def step() -> None:
        pixels, alpha = draw(batch)
        if only_decoder:
            with torch.no_grad():
                latents, _ = encode(vae, pixels)
            # what a denoiser hands over is never exact: a little noise keeps the decoder calm about it
            spread = torch.rand(batch, 1, 1, 1, device=DEVICE) * 0.12 / pic.SCALING_FACTOR
            latents = latents + torch.randn_like(latents) * spread
            loss = picture_loss(decode(vae, latents), pixels, alpha)
        else:
            mean, log_variance = encode(vae, pixels)
            latents = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
            divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean()
            loss = picture_loss(decode(vae, latents), pixels, alpha) + 1e-3 * divergence
        optimizer.step(loss)
        totals.add_(torch.stack([loss.detach(), torch.ones((), device=DEVICE)]))

    run = CapturedStep(step)
    clock = Clock(seconds)
    steps = 0
    curve = []
    while clock.share() < 1:
        optimizer.learning_rate.fill_(clock.learning_rate(rate))
        run()
        steps += 1
        if steps % 10 == 0 or DEVICE == "cpu":
            synchronize()
            if clock.due(max(1.0, seconds / 8)):
                curve.append([round(clock.elapsed(), 1), steps, round((totals[0] / totals[1]).item(), 4)])
                totals.zero_()
                print("vae", curve[-1], flush=True)
    used = clock.elapsed()
    name = "vae_decoder" if only_decoder else "vae"
    plain = build(work / "vae.pt" if only_decoder else None)
    missing, _ = plain.load_state_dict(optimizer.averaged_state(), strict=False)
    if not only_decoder:
        if missing:
            raise ValueError(f"weights that were not trained: {missing}")
        fold_statistics(plain, rgba)
    after = psnr(plain, rgba)
    torch.save(
        {key: value.half().cpu().contiguous() for key, value in plain.state_dict().items()},
        work / f"{name}.pt",
    )
    record = {
        **record_of_machine(),
        "stage": name,
        "seconds": round(used, 1),
        "steps": steps,
        "batch": batch,
        "curve_seconds_steps_loss": curve,
        "psnr_db_before": before if only_decoder else None,
        "psnr_db": after,
    }
    (work / "results").mkdir(exist_ok=True)
    (work / "results" / f"{name}.json").write_text(json.dumps(record, indent=1))
    print(json.dumps(record), flush=True)


@torch.no_grad()
def psnr(vae: torch.nn.Module, rgba: torch.Tensor) -> dict[str, float]:
    """Mean and lowest PSNR in dB of all pictures on white, and the mean with noisy latents."""
    clean = []
    noisy = []
    generator = torch.Generator().manual_seed(0)
    for part in rgba.split(48):
        pixels, _ = pic.composite(part, torch.full((len(part), 3), 255.0, device=part.device))
        latents, _ = encode(vae, pixels)
        noise = torch.randn(latents.shape, generator=generator).to(latents) * 0.1 / pic.SCALING_FACTOR
        for found, given in ((clean, latents), (noisy, latents + noise)):
            error = (decode(vae, given).clamp(-1, 1) - pixels).pow(2).mean((1, 2, 3)) / 4
            found.append(-10 * torch.log10(error.clamp(min=1e-9)))
    first = torch.cat(clean)
    return {
        "mean": round(first.mean().item(), 3),
        "lowest": round(first.min().item(), 3),
        "mean_with_latent_noise_0.1": round(torch.cat(noisy).mean().item(), 3),
    }


@torch.no_grad()
def fold_statistics(vae: torch.nn.Module, rgba: torch.Tensor) -> None:
    """Fold the latents' mean and deviation into the two 1x1 convolutions."""
    palette = pic.background_table(rgba.device)
    found = []
    for part in rgba.split(48):
        white = torch.full((len(part), 3), 255.0, device=part.device)
        found.append(encode(vae, pic.composite(part, white)[0])[0])
        coloured = palette[torch.randint(len(palette), (len(part),), device=part.device)]
        found.append(encode(vae, pic.composite(part, coloured)[0])[0][: max(1, len(part) // 3)])
    latents = torch.cat(found)
    mean = latents.mean((0, 2, 3))
    spread = latents.std((0, 2, 3)) * pic.SCALING_FACTOR
    after, before = vae.quant_conv, vae.post_quant_conv
    before.bias.add_(before.weight[:, :, 0, 0] @ mean)
    before.weight.mul_(spread[None, :, None, None])
    after.weight[:4].div_(spread[:, None, None, None])
    after.bias[:4].sub_(mean).div_(spread)
    after.bias[4:].sub_(2 * spread.log())


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=165)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--decoder", action="store_true", help="train only the decoder, from WORK/vae.pt")
    parser.add_argument("--limit", type=int, default=0, help="only the first so many pictures")
    arguments = parser.parse_args()
    train(
        arguments.work, arguments.seconds, arguments.batch, arguments.decoder, arguments.rate, arguments.limit
    )


if __name__ == "__main__":
    main()
