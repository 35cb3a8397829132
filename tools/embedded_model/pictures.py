"""The training pictures: loading, backgrounds, recolouring, and which pairs are held out."""

import hashlib
import io
import json
import re
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

SCALING_FACTOR = 0.18215
SIDE_PX = 256

# background 0 is white; the others carry their name in the caption
BACKGROUNDS = {
    "white": (255, 255, 255),
    "red": (214, 48, 49),
    "orange": (245, 146, 50),
    "yellow": (250, 219, 84),
    "green": (76, 175, 80),
    "blue": (66, 133, 244),
    "purple": (142, 84, 200),
    "pink": (248, 165, 194),
    "black": (18, 18, 20),
    "gray": (150, 152, 156),
    "brown": (121, 85, 61),
}
BACKGROUND_NAMES = list(BACKGROUNDS)

# object colour 0 is the picture's own; the others are hue (turns), saturation and value of the main colour
OBJECT_COLOURS = {
    "red": (0.99, 0.80, 0.86),
    "orange": (0.075, 0.84, 0.96),
    "yellow": (0.135, 0.74, 0.97),
    "green": (0.35, 0.62, 0.68),
    "blue": (0.59, 0.74, 0.92),
    "purple": (0.755, 0.60, 0.74),
    "pink": (0.93, 0.42, 0.98),
    "black": (0.65, 0.10, 0.22),
    "white": (0.65, 0.03, 0.95),
}
OBJECT_COLOUR_NAMES = ["", *OBJECT_COLOURS]

COLOUR_WORDS = set(BACKGROUNDS) | {"grey", "violet", "golden", "gold", "silver", "rainbow", "dark", "light"}
COLOUR_PATTERN = re.compile(r"\b(" + "|".join(sorted(COLOUR_WORDS)) + r")\b")


def held_out(picture_id: str, background: int) -> bool:
    """True for one in six (picture, coloured background) pairs: no stage after the autoencoder sees them."""
    if background == 0:
        return False
    digest = hashlib.sha256(f"{picture_id}:{BACKGROUND_NAMES[background]}".encode()).digest()
    return digest[0] % 6 == 0


def load_rows(work: Path) -> list[dict]:
    """The captions' raw material, one dict a picture: id, emoji, group, names, tags, weight."""
    with zipfile.ZipFile(work / "pictures.zip") as archive:
        return json.loads(archive.read("captions.json"))


def load_pictures(work: Path, limit: int = 0) -> torch.Tensor:
    """(B, 4, 256, 256) uint8 RGBA of every picture, or of the first ``limit``."""
    from PIL import Image

    rows = load_rows(work)[: limit or None]
    with zipfile.ZipFile(work / "pictures.zip") as archive:
        blobs = [archive.read(row["id"] + ".webp") for row in rows]

    def decode(blob: bytes) -> np.ndarray:
        return np.asarray(Image.open(io.BytesIO(blob)).convert("RGBA"))

    with ThreadPoolExecutor(8) as pool:
        stacked = np.stack(list(pool.map(decode, blobs)))
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous()


def background_table(device: str = "cpu") -> torch.Tensor:
    """(11, 3) float, 0 to 255."""
    return torch.tensor(list(BACKGROUNDS.values()), device=device).float()


def composite(rgba: torch.Tensor, background: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels in -1..1 over a plain ``background`` ((B, 3), 0 to 255), and the alpha in 0..1."""
    values = rgba.float()
    alpha = values[:, 3:] / 255
    pixels = values[:, :3] * alpha + background[:, :, None, None] * (1 - alpha)
    return pixels / 127.5 - 1, alpha


def rgb_to_hsv(rgb: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hue in turns, saturation and value of (B, 3, H, W) in 0..1."""
    value, which = rgb.max(1)
    spread = value - rgb.min(1).values
    safe = spread.clamp(min=1e-6)
    red, green, blue = rgb.unbind(1)
    by_red = ((green - blue) / safe) % 6
    by_green = (blue - red) / safe + 2
    by_blue = (red - green) / safe + 4
    hue = torch.where(which == 0, by_red, torch.where(which == 1, by_green, by_blue)) / 6
    return torch.where(spread > 1e-6, hue, torch.zeros_like(hue)), spread / value.clamp(min=1e-6), value


def hsv_to_rgb(hue: torch.Tensor, saturation: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The inverse of ``rgb_to_hsv``."""
    channels = []
    for shift in (5, 3, 1):
        k = (shift + hue * 6) % 6
        ramp = torch.minimum(k, 4 - k).clamp(0, 1)
        channels.append(value - value * saturation * ramp)
    return torch.stack(channels, 1)


def main_hue(rgba: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The commonest hue of each picture (turns), and whether most of what is saturated has it.

    A picture qualifies when 60 % of its saturated pixels lie within 0.09 turns of that hue, and they cover
    30 % of the object.
    """
    values = rgba.float() / 255
    hue, saturation, value = rgb_to_hsv(values[:, :3])
    opaque = values[:, 3] > 0.5
    coloured = opaque & (saturation > 0.28) & (value > 0.18)
    hues = []
    fits = []
    for index in range(len(rgba)):
        here = hue[index][coloured[index]]
        if len(here) < 200:
            hues.append(0.0)
            fits.append(False)
            continue
        counts = torch.histc(here, 36, 0, 1)
        smooth = counts + counts.roll(1) + counts.roll(-1)
        centre = (smooth.argmax().item() + 0.5) / 36
        off = (here - centre + 0.5) % 1 - 0.5
        near = off.abs() < 0.09
        centre = (centre + off[near].mean().item()) % 1
        hues.append(centre)
        share = near.float().mean().item()
        cover = near.sum().item() / max(1, opaque[index].sum().item())
        fits.append(share > 0.6 and cover > 0.3)
    return torch.tensor(hues), torch.tensor(fits)


def recolour(rgba: torch.Tensor, hue: torch.Tensor, colour: int) -> torch.Tensor:
    """uint8 RGBA whose pixels near the main ``hue`` take object colour number ``colour``; shading is kept.

    Saturation and value are scaled so that their means meet the colour's own.
    """
    if colour == 0:
        return rgba
    target_hue, target_saturation, target_value = OBJECT_COLOURS[OBJECT_COLOUR_NAMES[colour]]
    values = rgba.float() / 255
    own_hue, saturation, value = rgb_to_hsv(values[:, :3])
    off = (own_hue - hue.to(rgba.device)[:, None, None] + 0.5) % 1 - 0.5
    near = ((0.14 - off.abs()) / 0.04).clamp(0, 1) * ((saturation - 0.08) / 0.12).clamp(0, 1)
    near = near * (values[:, 3] > 0.02)
    weight = near.sum((1, 2)).clamp(min=1)
    mean_saturation = (near * saturation).sum((1, 2)) / weight
    mean_value = (near * value).sum((1, 2)) / weight
    gain = (target_value / mean_value.clamp(min=0.05))[:, None, None]
    stronger = (saturation * (target_saturation / mean_saturation.clamp(min=0.05))[:, None, None]).clamp(0, 1)
    # brighter parts are compressed towards 1 instead of clipped
    lit = value * gain
    lit = torch.where(lit > 0.85, 0.85 + 0.15 * torch.tanh((lit - 0.85) / 0.3), lit)
    painted = hsv_to_rgb((target_hue + off * 0.5) % 1, stronger, lit.clamp(0, 1))
    mixed = values[:, :3] * (1 - near[:, None]) + painted * near[:, None]
    return torch.cat([(mixed * 255).round().clamp(0, 255).byte(), rgba[:, 3:]], 1)
