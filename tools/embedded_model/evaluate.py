"""Measure an exported model: names, unseen (name, background) pairs, object colours, unseen wordings.

  python evaluate.py --model MODEL --work WORK --out OUT

Every picture is drawn with Diffusers' DPMSolverMultistepScheduler (Karras sigmas) and classifier-free
guidance from noise seeded by the picture's own number. A drawing counts for the training picture that is
nearest to it (mean square of 48x48 RGB), among all of them on the background that the prompt names. Writes
OUT/scores_<side>px.json and contact sheets.
"""

import argparse
import json
import platform
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import pictures as pic
from sheets import contact_sheet
from training import record_of_machine
from wording_tests import SHOWN, UNSEEN_WORDINGS

OBJECT_GROUPS = (
    "animals-nature",
    "food-drink",
    "objects",
    "travel-places",
    "activities",
    "smileys-emotion",
)


class Drawer:
    """An exported model, ready to draw batches of prompts."""

    def __init__(self, model: Path, device: str, steps: int, cfg_scale: float, side_px: int) -> None:
        from diffusers import AutoencoderKL, DPMSolverMultistepScheduler, UNet2DConditionModel
        from transformers import CLIPTextModel, CLIPTokenizer

        self.device = device
        self.steps = steps
        self.cfg_scale = cfg_scale
        self.side_px = side_px
        load = {"torch_dtype": torch.float32}
        self.unet = UNet2DConditionModel.from_pretrained(model, subfolder="unet", **load).to(device).eval()
        self.vae = AutoencoderKL.from_pretrained(model, subfolder="vae", **load).to(device).eval()
        self.text = CLIPTextModel.from_pretrained(str(model / "text_encoder"), dtype=torch.float32)
        self.text = self.text.to(device).eval()
        self.tokenizer = CLIPTokenizer.from_pretrained(str(model / "tokenizer"))
        config = DPMSolverMultistepScheduler.load_config(model, subfolder="scheduler")
        self.scheduler = DPMSolverMultistepScheduler.from_config(config, use_karras_sigmas=True)

    def states(self, prompts: list[str]) -> torch.Tensor:
        """(B, 77, 64) of the text encoder."""
        ids = self.tokenizer(
            prompts, padding="max_length", max_length=77, truncation=True, return_tensors="pt"
        )
        return self.text(ids.input_ids.to(self.device)).last_hidden_state

    @torch.no_grad()
    def draw(self, prompts: list[str], seeds: list[int], batch: int = 100) -> torch.Tensor:
        """(B, 3, H, W) in 0..1 on the CPU."""
        if len(prompts) > batch:
            parts = range(0, len(prompts), batch)
            return torch.cat([self.draw(prompts[n : n + batch], seeds[n : n + batch], batch) for n in parts])
        shape = (1, 4, self.side_px // 8, self.side_px // 8)
        noise = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        latents = torch.cat(noise).to(self.device)
        states = self.states(prompts)
        if self.cfg_scale != 1:
            states = torch.cat([self.states([""] * len(prompts)), states])
        self.scheduler.set_timesteps(self.steps, device=self.device)
        latents = latents * self.scheduler.init_noise_sigma
        for timestep in self.scheduler.timesteps:
            scaled = self.scheduler.scale_model_input(latents, timestep)
            if self.cfg_scale == 1:
                guess = self.unet(scaled, timestep, states, return_dict=False)[0]
            else:
                both = self.unet(torch.cat([scaled, scaled]), timestep, states, return_dict=False)[0]
                uncond, cond = both.chunk(2)
                guess = uncond + self.cfg_scale * (cond - uncond)
            latents = self.scheduler.step(guess, timestep, latents, return_dict=False)[0]
        parts = [self.vae.decode(part / pic.SCALING_FACTOR).sample for part in latents.split(20)]
        return ((torch.cat(parts) + 1) / 2).clamp(0, 1).float().cpu()


class Reference:
    """The training pictures at 48x48, on any background, recoloured or not."""

    def __init__(self, work: Path) -> None:
        self.rows = pic.load_rows(work)
        self.rgba = pic.load_pictures(work)
        with np.load(work / "pool.npz") as pool:
            self.hue = torch.from_numpy(pool["hue"])
            variants = pool["variants"]
        self.recoloured = sorted({int(picture) for picture, colour, _ in variants if colour})
        self.cache: dict[tuple[int, int], torch.Tensor] = {}

    def small(self, background: int, colour: int = 0, chosen: list[int] | None = None) -> torch.Tensor:
        """(B, 6912) of all or the chosen pictures."""
        key = (background, colour)
        if chosen is None and key in self.cache:
            return self.cache[key]
        numbers = torch.tensor(range(len(self.rows)) if chosen is None else chosen)
        plain = pic.background_table()[background]
        parts = []
        for part in numbers.split(64):
            painted = pic.recolour(self.rgba[part], self.hue[part], colour)
            pixels, _ = pic.composite(painted, plain.expand(len(part), 3))
            parts.append(F.interpolate(pixels, (48, 48), mode="area").flatten(1))
        found = torch.cat(parts)
        if chosen is None:
            self.cache[key] = found
        return found

    def nearest(self, drawn: torch.Tensor, background: int = 0, count: int = 5) -> list[list[int]]:
        """The nearest pictures of each drawing ((B, 3, H, W) in 0..1)."""
        query = F.interpolate(drawn * 2 - 1, (48, 48), mode="area").flatten(1)
        distance = torch.cdist(query, self.small(background))
        return distance.topk(count, largest=False).indices.tolist()


def border_colour(drawn: torch.Tensor) -> list[int]:
    """The named background that is nearest to the median of each drawing's outermost 6 %."""
    edge = max(1, drawn.shape[-1] // 16)
    mask = torch.ones(drawn.shape[-2:], dtype=torch.bool)
    mask[edge:-edge, edge:-edge] = False
    middle = drawn[:, :, mask].median(2).values * 255
    return torch.cdist(middle, pic.background_table()).argmin(1).tolist()


def score_names(drawer: Drawer, reference: Reference, count: int) -> tuple[dict, list]:
    """How often the label alone recalls its picture."""
    rows = reference.rows
    pool = [index for index, row in enumerate(rows) if row["group"] in OBJECT_GROUPS]
    chosen = random.Random(3).sample(pool, count)
    drawn = drawer.draw([rows[index]["names"][0] for index in chosen], chosen)
    found = reference.nearest(drawn)
    first = [top[0] == index for index, top in zip(chosen, found, strict=True)]
    five = [index in top for index, top in zip(chosen, found, strict=True)]
    missed = [
        [rows[index]["names"][0], rows[top[0]]["names"][0]]
        for index, top in zip(chosen, found, strict=True)
        if top[0] != index
    ]
    result = {
        "count": count,
        "nearest": sum(first) / count,
        "in_nearest_five": sum(five) / count,
        "missed": missed,
    }
    return result, [
        (rows[index]["names"][0], image) for index, image in zip(chosen[:40], drawn, strict=False)
    ]


def score_pairs(drawer: Drawer, reference: Reference, count: int) -> tuple[dict, list]:
    """Names on backgrounds that were never trained together."""
    rows = reference.rows
    pairs = []
    for index, row in enumerate(rows):
        if row["group"] in OBJECT_GROUPS:
            pairs += [(index, number) for number in range(1, 11) if pic.held_out(row["id"], number)]
    chosen = random.Random(4).sample(pairs, count)
    frames = ("a {n} on a {k} background", "{n}, {k} background")
    prompts = [
        frames[place % 2].format(n=rows[index]["names"][0], k=pic.BACKGROUND_NAMES[number])
        for place, (index, number) in enumerate(chosen)
    ]
    drawn = drawer.draw(prompts, [index for index, _ in chosen])
    colours = [seen == number for seen, (_, number) in zip(border_colour(drawn), chosen, strict=True)]
    names = []
    missed = []
    for place, (index, number) in enumerate(chosen):
        top = reference.nearest(drawn[place : place + 1], number)[0]
        names.append(top[0] == index)
        if not names[-1] or not colours[place]:
            missed.append([prompts[place], rows[top[0]]["names"][0], colours[place]])
    both = [name and colour for name, colour in zip(names, colours, strict=True)]
    result = {
        "count": count,
        "name": sum(names) / count,
        "background": sum(colours) / count,
        "both": sum(both) / count,
        "missed": missed,
    }
    return result, list(zip(prompts[:40], drawn, strict=False))


def score_object_colours(drawer: Drawer, reference: Reference, count: int) -> tuple[dict, list]:
    """Recoloured objects: the colour among the picture's ten, and the name among all in that colour."""
    rows = reference.rows
    rng = random.Random(5)
    chosen = [(rng.choice(reference.recoloured), rng.randint(1, 9)) for _ in range(count)]
    prompts = []
    for index, colour in chosen:
        names = [name for name in rows[index]["names"] if not pic.COLOUR_PATTERN.search(name)]
        name = names[0] if names else rows[index]["names"][0].split()[-1]
        prompts.append(f"a {pic.OBJECT_COLOUR_NAMES[colour]} {name}")
    drawn = drawer.draw(prompts, [index for index, _ in chosen])
    small = F.interpolate(drawn * 2 - 1, (48, 48), mode="area").flatten(1)
    colours = []
    names = []
    for place, (index, colour) in enumerate(chosen):
        own = torch.cat([reference.small(0, number, [index]) for number in range(10)])
        distance = (own - small[place]).pow(2).mean(1)
        colours.append(int(distance[1:].argmin()) + 1 == colour)
        others = reference.small(0, colour)
        names.append(int((others - small[place]).pow(2).mean(1).argmin()) == index)
    both = [name and right for name, right in zip(names, colours, strict=True)]
    result = {
        "count": count,
        "name": sum(names) / count,
        "colour": sum(colours) / count,
        "both": sum(both) / count,
    }
    return result, list(zip(prompts[:40], drawn, strict=False))


def score_wordings(drawer: Drawer, reference: Reference) -> tuple[dict, list]:
    """Prompts as people write them; each lists the labels that are right."""
    rows = reference.rows
    prompts = [prompt for prompt, _, _ in UNSEEN_WORDINGS]
    drawn = drawer.draw(prompts, list(range(len(prompts))))
    right = 0
    missed = []
    for place, (prompt, labels, background) in enumerate(UNSEEN_WORDINGS):
        number = pic.BACKGROUND_NAMES.index(background)
        top = reference.nearest(drawn[place : place + 1], number)[0]
        label = rows[top[0]]["names"][0]
        if label in labels:
            right += 1
        else:
            missed.append([prompt, label])
    result = {"count": len(prompts), "nearest_is_right": right, "missed": missed}
    return result, list(zip(prompts, drawn, strict=True))


def main() -> None:
    """Read the arguments, measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--cfg", type=float, default=3.0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--only", default="names,pairs,colours,wordings,shown")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    drawer = Drawer(arguments.model, device, arguments.steps, arguments.cfg, arguments.side)
    reference = Reference(arguments.work)
    arguments.out.mkdir(parents=True, exist_ok=True)
    only = arguments.only.split(",")
    label = f"{arguments.side}px"
    begun = time.time()
    record: dict[str, object] = {
        **record_of_machine(),
        "processor": platform.machine(),
        "side_px": arguments.side,
        "steps": arguments.steps,
        "cfg_scale": arguments.cfg,
        "sampler": "DPM++ 2M Karras",
    }
    tests = {
        "names": lambda: score_names(drawer, reference, arguments.count),
        "pairs": lambda: score_pairs(drawer, reference, arguments.count),
        "colours": lambda: score_object_colours(drawer, reference, arguments.count // 2),
        "wordings": lambda: score_wordings(drawer, reference),
    }
    for name, test in tests.items():
        if name in only:
            record[name], shown = test()
            contact_sheet(shown, arguments.out / f"{name}_{label}.png", columns=8)
            print(name, json.dumps(record[name]), flush=True)
    if "shown" in only:
        drawn = drawer.draw(SHOWN, list(range(len(SHOWN))))
        contact_sheet(list(zip(SHOWN, drawn, strict=True)), arguments.out / f"shown_{label}.png", columns=6)
    record["seconds"] = round(time.time() - begun, 1)
    (arguments.out / f"scores_{label}.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
