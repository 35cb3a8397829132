"""Contact sheets: many drawings in one PNG, each with its prompt below."""

from pathlib import Path

import torch


def contact_sheet(
    shown: list[tuple[str, torch.Tensor]], path: Path, columns: int = 6, cell_px: int = 176
) -> None:
    """Write the (prompt, (3, H, W) in 0..1) pairs in rows of ``columns``."""
    from PIL import Image, ImageDraw, ImageFont

    rows = -(-len(shown) // columns)
    label_px = 26
    sheet = Image.new("RGB", (columns * cell_px, rows * (cell_px + label_px)), "white")
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(10)
    for place, (prompt, image) in enumerate(shown):
        left = place % columns * cell_px
        top = place // columns * (cell_px + label_px)
        pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
        sheet.paste(
            Image.fromarray(pixels).resize((cell_px - 4, cell_px - 4), Image.LANCZOS), (left + 2, top)
        )
        lines = [prompt[:34], prompt[34:68]]
        for number, line in enumerate(lines):
            pen.text((left + 3, top + cell_px - 4 + number * 12), line, fill="black", font=font)
    sheet.save(path)
