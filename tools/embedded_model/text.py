"""The text encoder: CLIP's text model, 64 wide, 4 layers, trained to name the picture a caption asks for.

  python text.py --work WORK --seconds 80

Linear heads on the end token and on a random padding position name the picture, the background and the
object's colour; they are thrown away afterwards. The token table is a frozen vector from a sentence encoder
(token_table.py) plus a learned change. The change is left out for 30 % of the captions and noise is added,
so the layers above also read the frozen vectors, and with them words that no caption holds. Writes
WORK/text.pt and WORK/results/text.json.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import pictures as pic
from captions import END, LENGTH, Tokens
from training import DEVICE, CapturedStep, Clock, FlatAdamW, record_of_machine, synchronize

VOCABULARY, WIDTH, LAYERS, HEADS = 49408, 64, 4, 4


def text_config() -> dict:
    """The arguments of transformers' CLIPTextConfig."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": LENGTH,
        "hidden_act": "quick_gelu",
        "projection_dim": WIDTH,
        "bos_token_id": 49406,
        "eos_token_id": END,
        "pad_token_id": END,
    }


class Layer(nn.Module):
    """One pre-norm layer with causal attention; names as in CLIPTextModel."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(WIDTH)
        self.self_attn = nn.ModuleDict(
            {name: nn.Linear(WIDTH, WIDTH) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
        )
        self.layer_norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(WIDTH, 4 * WIDTH), "fc2": nn.Linear(4 * WIDTH, WIDTH)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(B, L, D) to (B, L, D)."""
        batch, length, _ = hidden.shape
        normed = self.layer_norm1(hidden)
        shape = (batch, length, HEADS, WIDTH // HEADS)
        query, key, value = (
            self.self_attn[name](normed).view(shape).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.self_attn["out_proj"](mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        inner = self.mlp["fc1"](self.layer_norm2(hidden))
        return hidden + self.mlp["fc2"](inner * torch.sigmoid(1.702 * inner))


class TextEncoder(nn.Module):
    """CLIP's text model; its published state is that of CLIPTextModel without the prefix ``text_model.``."""

    def __init__(self, table: torch.Tensor | None = None) -> None:
        super().__init__()
        weight = torch.zeros(VOCABULARY, WIDTH) if table is None else table
        self.register_buffer("base", weight)
        self.change = nn.Parameter(torch.zeros(VOCABULARY, WIDTH))
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.3)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.final_layer_norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(B, L) ids to (B, L, D) hidden states after the last norm."""
        base = self.base[ids]
        change = self.change.index_select(0, ids.reshape(-1)).view(base.shape)
        if self.training:
            base = base + torch.randn_like(base) * 0.25
            change = change * (torch.rand(len(ids), 1, 1, device=ids.device) > 0.3)
        hidden = base + change + self.position[: ids.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden)
        return self.final_layer_norm(hidden)

    def published_state(self) -> dict[str, torch.Tensor]:
        """float32 tensors under CLIPTextModel's names without the prefix."""
        state = {f"encoder.{name}": value for name, value in self.layers.state_dict(prefix="layers.").items()}
        state["embeddings.token_embedding.weight"] = self.base + self.change
        state["embeddings.position_embedding.weight"] = self.position
        state["final_layer_norm.weight"] = self.final_layer_norm.weight
        state["final_layer_norm.bias"] = self.final_layer_norm.bias
        return {name: value.detach().float().cpu().contiguous() for name, value in state.items()}

    def load_published(self, state: dict[str, torch.Tensor]) -> None:
        """The inverse of ``published_state``."""
        with torch.no_grad():
            self.base.copy_(state["embeddings.token_embedding.weight"])
            self.change.zero_()
            self.position.copy_(state["embeddings.position_embedding.weight"])
            self.final_layer_norm.weight.copy_(state["final_layer_norm.weight"])
            self.final_layer_norm.bias.copy_(state["final_layer_norm.bias"])
        inner = {
            name.removeprefix("encoder."): value
            for name, value in state.items()
            if name.startswith("encoder.")
        }
        self.layers.load_state_dict({name.removeprefix("layers."): value for name, value in inner.items()})


class NamedEncoder(nn.Module):
    """The encoder with its three heads."""

    def __init__(self, encoder: TextEncoder, pictures: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.picture = nn.Linear(WIDTH, pictures + 1)
        self.background = nn.Linear(WIDTH, len(pic.BACKGROUND_NAMES))
        self.colour = nn.Linear(WIDTH, len(pic.OBJECT_COLOUR_NAMES))

    def forward(
        self, ids: torch.Tensor, place: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits at ``place`` (B,) for each head."""
        return self.heads(self.encoder(ids), place)

    def heads(
        self, hidden: torch.Tensor, place: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits of hidden states (B, L, D) at ``place``."""
        picked = hidden[torch.arange(len(hidden), device=hidden.device), place]
        return self.picture(picked), self.background(picked), self.colour(picked)


def first_end(ids: torch.Tensor) -> torch.Tensor:
    """The position of each caption's first end token."""
    return (ids == END).int().argmax(1)


class Pool:
    """WORK/pool.npz on the device, with a captureable draw of (variant, caption)."""

    def __init__(self, work: Path) -> None:
        with np.load(work / "pool.npz") as stored:
            arrays = {name: stored[name] for name in stored.files}
        self.variants = torch.from_numpy(arrays["variants"].astype(np.int64)).to(DEVICE)
        self.weights = torch.from_numpy(arrays["weights"]).double().to(DEVICE)
        self.cumulative = (self.weights.cumsum(0) / self.weights.sum()).contiguous()
        self.starts = torch.from_numpy(arrays["starts"].astype(np.int64)).to(DEVICE)
        self.counts = torch.from_numpy(arrays["counts"].astype(np.int64)).to(DEVICE)
        self.captions = torch.from_numpy(arrays["captions"].astype(np.int32)).to(DEVICE)
        self.empty = torch.from_numpy(arrays["empty"].astype(np.int32)).to(DEVICE)
        self.hue = torch.from_numpy(arrays["hue"]).to(DEVICE)
        self.test_picture = torch.from_numpy(arrays["test_picture"].astype(np.int64)).to(DEVICE)
        self.test_background = torch.from_numpy(arrays["test_background"].astype(np.int64)).to(DEVICE)
        self.test_captions = torch.from_numpy(arrays["test_captions"].astype(np.int64)).to(DEVICE)

    def draw(self, batch: int, empty_share: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Variant numbers, caption numbers (nameless ones follow the others), and which are nameless."""
        chance = torch.rand(batch, device=DEVICE, dtype=torch.float64)
        variant = torch.searchsorted(self.cumulative, chance).clamp(max=len(self.weights) - 1)
        within = (torch.rand(batch, device=DEVICE, dtype=torch.float64) * self.counts[variant]).long()
        caption = self.starts[variant] + within
        nothing = torch.rand(batch, device=DEVICE) < empty_share
        blank = len(self.captions) + torch.randint(len(self.empty), (batch,), device=DEVICE)
        return variant, torch.where(nothing, blank, caption), nothing


def train(work: Path, seconds: float, batch: int) -> None:
    """Train for ``seconds`` and write the weights and scores."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    rows = pic.load_rows(work)
    pool = Pool(work)
    pictures = len(rows)
    table = torch.from_numpy(np.load(work / "token_table.npy")).float()
    table[END - 1 :] = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
    model = NamedEncoder(TextEncoder(table), pictures).to(DEVICE).train()
    optimizer = FlatAdamW(
        model,
        weight_decay=0.02,
        betas=(0.9, 0.98),
        ema_decay=0.999,
        rates={"encoder.change": 2.0},
        working_type=torch.float32,
    )
    captions = torch.cat([pool.captions, pool.empty])
    losses = torch.zeros(4, device=DEVICE)

    def step() -> None:
        variant, caption, nothing = pool.draw(batch, 0.06)
        target = pool.variants[variant] * (~nothing)[:, None]
        picture = torch.where(nothing, pictures, pool.variants[variant, 0])
        ids = captions[caption].long()
        end = first_end(ids)
        padding = torch.maximum(end, torch.randint(LENGTH, (batch,), device=DEVICE))
        hidden = model.encoder(ids)
        total = torch.zeros((), device=DEVICE)
        parts = []
        for place in (end, padding):
            names, backgrounds, colours = model.heads(hidden, place)
            first = F.cross_entropy(names, picture, label_smoothing=0.05)
            second = F.cross_entropy(backgrounds, target[:, 2])
            third = F.cross_entropy(colours, target[:, 1])
            total = total + 0.5 * (first + 0.5 * second + 0.5 * third)
            parts = [first, second, third]
        optimizer.step(total)
        losses.add_(torch.stack([*(value.detach() for value in parts), torch.ones((), device=DEVICE)]))

    run = CapturedStep(step)
    clock = Clock(seconds)
    steps = 0
    curve = []
    while clock.share() < 1:
        optimizer.learning_rate.fill_(clock.learning_rate(2e-3))
        run()
        steps += 1
        if steps % 20 == 0 or DEVICE == "cpu":
            synchronize()
            if clock.due(max(1.0, seconds / 12)):
                values = (losses[:3] / losses[3]).tolist()
                losses.zero_()
                curve.append([round(clock.elapsed(), 1), steps, *(round(value, 4) for value in values)])
                print("text", curve[-1], flush=True)
    used = clock.elapsed()
    optimizer.load_average()
    model.eval()
    heads = {
        name: value.cpu() for name, value in model.state_dict().items() if not name.startswith("encoder.")
    }
    published = {name: value.half() for name, value in model.encoder.published_state().items()}
    torch.save({"text": published, "heads": heads}, work / "text.pt")
    scores = measure(model, pool, rows, work)
    record = {
        **record_of_machine(),
        "stage": "text encoder",
        "seconds": round(used, 1),
        "steps": steps,
        "batch": batch,
        "captions_in_pool": len(pool.captions),
        "curve_seconds_steps_picture_background_colour_loss": curve,
        **scores,
    }
    (work / "results").mkdir(exist_ok=True)
    (work / "results" / "text.json").write_text(json.dumps(record, indent=1))
    print(json.dumps(scores), flush=True)


@torch.no_grad()
def name_captions(model: NamedEncoder, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Five likeliest pictures, the background and the object colour, read at the end token."""
    found = []
    for part in ids.split(1024):
        names, backgrounds, colours = model(part, first_end(part))
        found.append((names.topk(5).indices, backgrounds.argmax(1), colours.argmax(1)))
    return tuple(torch.cat(values) for values in zip(*found, strict=True))


def measure(model: NamedEncoder, pool: Pool, rows: list[dict], work: Path) -> dict:
    """Accuracy on wordings, and on (picture, background) pairs, that training never saw."""
    top, background, _ = name_captions(model, pool.test_captions)
    right = top == pool.test_picture[:, None]
    coloured = pool.test_background > 0
    tokens = Tokens(work)
    texts = []
    answers = []
    for index, row in enumerate(rows):
        for number in range(1, 11):
            if pic.held_out(row["id"], number):
                texts.append(
                    tokens.ids(f"a {row['names'][0]} on a {pic.BACKGROUND_NAMES[number]} background")
                )
                answers.append((index, number))
    answer = torch.tensor(answers, device=DEVICE)
    pair_top, pair_background, _ = name_captions(model, torch.tensor(texts, device=DEVICE))
    pair_name = pair_top[:, 0] == answer[:, 0]
    pair_colour = pair_background == answer[:, 1]
    share = lambda values: round(values.float().mean().item(), 4)  # noqa: E731
    return {
        "new_wordings": len(pool.test_captions),
        "new_wordings_top1": share(right[:, 0]),
        "new_wordings_top5": share(right.any(1)),
        "new_wordings_background": share((background == pool.test_background)[coloured]),
        "held_out_pairs": len(answers),
        "held_out_pairs_name": share(pair_name),
        "held_out_pairs_background": share(pair_colour),
        "held_out_pairs_both": share(pair_name & pair_colour),
    }


def load(work: Path) -> TextEncoder:
    """The trained encoder, in evaluation mode on the device."""
    encoder = TextEncoder()
    encoder.load_published(torch.load(work / "text.pt", map_location="cpu")["text"])
    return encoder.to(DEVICE).eval()


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--batch", type=int, default=1024)
    arguments = parser.parse_args()
    train(arguments.work, arguments.seconds, arguments.batch)


if __name__ == "__main__":
    main()
