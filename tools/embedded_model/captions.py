"""Captions for every variant of every picture, tokenised into one pool.

  python captions.py --work WORK

Writes WORK/pool.npz: the variants (picture, object colour, background), their captions as token ids,
captions that name nothing, and test captions made of wordings that training never sees.
"""

import argparse
import collections
import json
import random
import re
from pathlib import Path

import numpy as np
import torch

import pictures as pic
import wording

START, END, LENGTH = 49406, 49407, 77
PIECES = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d|[a-z]+|[0-9]|[^\sa-z0-9]+")
RECOLOURED_GROUPS = {"animals-nature", "food-drink", "objects", "travel-places", "activities"}
ARTICLE_FREE = {"the", "two", "three", "people", "men", "women"}


class Tokens:
    """Text to 77 CLIP ids, with every piece looked up once."""

    def __init__(self, work: Path) -> None:
        from transformers import CLIPTokenizer

        self.tokenizer = CLIPTokenizer.from_pretrained(str(work / "tokenizer"))
        self.known: dict[str, list[int]] = {}
        for probe in ("a cat's face, x-ray on a red background.", "masterpiece, 4k: 1st place medal!"):
            expected = self.tokenizer(probe).input_ids
            if self.ids(probe)[: len(expected)] != expected:
                raise ValueError(f"the tokenizer and its shortcut differ on {probe!r}")

    def ids(self, text: str) -> list[int]:
        """Start, the pieces, then end ids up to 77."""
        found: list[int] = []
        for piece in PIECES.findall(text.lower()):
            if piece not in self.known:
                self.known[piece] = self.tokenizer(piece, add_special_tokens=False).input_ids
            found += self.known[piece]
        return ([START] + found[: LENGTH - 2] + [END] * LENGTH)[:LENGTH]


def article(noun: str) -> str:
    """The noun phrase with "a", "an" or nothing."""
    if noun.split()[0] in ARTICLE_FREE:
        return noun
    if noun.endswith("s") and not noun.endswith("ss"):
        return noun
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def determine(noun: str, rng: random.Random) -> str:
    """The noun phrase with one of the usual determiners."""
    share = rng.random()
    if share < 0.72:
        return article(noun)
    if share < 0.80:
        return "the " + noun
    if share < 0.86:
        return "one " + noun
    if share < 0.90:
        return "a single " + noun
    return rng.choice(["this ", "my ", "some ", "a certain ", "another ", "your "]) + noun


class Captioner:
    """Draws captions for pictures from their names and tags."""

    def __init__(self, rows: list[dict], vocabulary: dict[str, int]) -> None:
        self.rows = rows
        owner = {row["names"][0]: index for index, row in enumerate(rows)}
        labels = set(owner)
        for index, row in enumerate(rows):
            for name in wording.EVERYDAY.get(row["names"][0], []):
                owner.setdefault(name, index)
        for index, row in enumerate(rows):
            for name in row["names"][1:]:
                owner.setdefault(name, index)
        self.names = []
        for index, row in enumerate(rows):
            everyday = wording.EVERYDAY.get(row["names"][0], [])
            candidates = [*row["names"], *everyday, *everyday]
            self.names.append([name for name in candidates if owner[name] == index])
        frequency = collections.Counter(tag for row in rows for tag in set(row["tags"]))
        self.synonyms = []
        self.tags = []
        for row in rows:
            tags = [tag for tag in row["tags"] if not pic.COLOUR_PATTERN.search(tag)]
            self.tags.append(tags)
            rare = [tag for tag in tags if frequency[tag] <= 6 and tag not in owner]
            self.synonyms.append((rare, [1 / frequency[tag] for tag in rare]))
        self.distractors = sorted(name for name in labels if len(name.split()) == 1)
        self.strangers = self._strangers(vocabulary)

    def _strangers(self, vocabulary: dict[str, int]) -> list[str]:
        used = set(wording.ADJECTIVES) | pic.COLOUR_WORDS
        for names, tags in zip(self.names, self.tags, strict=True):
            for phrase in [*names, *tags]:
                used.update(phrase.split())
        for phrase in [*wording.FRAMES, *wording.QUALITY, *wording.BACKGROUND_FRAMES]:
            used.update(phrase.split())
        words = [token[:-4] for token in vocabulary if token.endswith("</w>")]
        words = [word for word in words if re.fullmatch("[a-z]{3,10}", word) and word not in used]
        return sorted(words, key=lambda word: vocabulary[word + "</w>"])[:12000]

    def noun(self, picture: int, recoloured: bool, rng: random.Random) -> str:
        """The label, another name, or now and then a rare tag; no colour word for a recoloured object."""
        names = self.names[picture]
        if recoloured:
            return rng.choice([name for name in names if not pic.COLOUR_PATTERN.search(name)])
        rare, weights = self.synonyms[picture]
        share = rng.random()
        if rare and share < 0.15:
            return rng.choices(rare, weights)[0]
        return names[0] if share < 0.62 else rng.choice(names)

    def caption(
        self, picture: int, colour: int, background: int, rng: random.Random, test: bool = False
    ) -> str:
        """One caption; with ``test``, its frame and filler words are ones that training never uses."""
        noun = rng.choice(self.names[picture]) if test else self.noun(picture, colour > 0, rng)
        bare = noun
        if colour:
            frame = rng.choice(wording.OBJECT_COLOUR_FRAMES)
            noun = frame.format(k=pic.OBJECT_COLOUR_NAMES[colour], n=noun)
        elif rng.random() < 0.03 and len(noun.split()) == 1 and not noun.endswith("s"):
            noun += "s"
        adjectives = wording.ADJECTIVES_HELD_OUT if test else wording.ADJECTIVES
        share = rng.random()
        if share < 0.38:
            count = 1 if share < 0.28 else 2
            noun = " ".join(rng.sample(adjectives, count)) + " " + noun
        frame = rng.choice(wording.FRAMES_HELD_OUT if test else wording.FRAMES)
        text = frame.format(a=determine(noun, rng), n=noun)
        if not test:
            text = self._disturb(text, picture, bare, rng)
        text = self._surround(text, background, rng, test)
        return text

    def _disturb(self, text: str, picture: int, noun: str, rng: random.Random) -> str:
        if self.distractors and rng.random() < 0.05:
            other = rng.choice(self.distractors)
            if other not in noun:
                text += " " + rng.choice(wording.DISTRACTORS).format(o=other)
        if self.tags[picture] and rng.random() < 0.10:
            count = min(len(self.tags[picture]), rng.randint(1, 3))
            text += ", " + ", ".join(rng.sample(self.tags[picture], count))
        if rng.random() < 0.12:
            words = text.split()
            for _ in range(rng.randint(1, 2)):
                words.insert(rng.randint(0, len(words)), rng.choice(self.strangers))
            text = " ".join(words)
        if rng.random() < 0.05:
            words = text.split()
            protected = set(noun.split()) if len(noun.split()) < 3 else set()
            loose = [place for place, word in enumerate(words) if word not in protected]
            if loose and len(words) > 1:
                del words[rng.choice(loose)]
                text = " ".join(words)
        return text

    def _surround(self, text: str, background: int, rng: random.Random, test: bool) -> str:
        name = pic.BACKGROUND_NAMES[background]
        if name == "gray" and rng.random() < 0.5:
            name = "grey"
        quality = wording.QUALITY_HELD_OUT if test else wording.QUALITY
        late = rng.random() < 0.5
        frames = wording.BACKGROUND_FRAMES_HELD_OUT if test else wording.BACKGROUND_FRAMES
        coloured = background or rng.random() < 0.06
        if coloured and not late:
            text = rng.choice(frames).format(c=text, k=name)
        share = rng.random()
        if share < 0.10:
            text = ", ".join(rng.sample(quality, rng.randint(1, 3))) + ", " + text
        elif share < 0.30:
            text += ", " + ", ".join(rng.sample(quality, rng.randint(1, 4)))
        elif share < 0.34:
            text += ", " + ", ".join(rng.sample(quality, min(len(quality), rng.randint(5, 16))))
        if coloured and late:
            text = rng.choice(frames).format(c=text, k=name)
        share = rng.random()
        if share < 0.15:
            text += "."
        elif share < 0.17:
            text += "!"
        return text


def nameless(rng: random.Random) -> str:
    """A caption that names nothing."""
    words = wording.NEGATIVE if rng.random() < 0.75 else wording.NEGATIVE + wording.QUALITY
    return ", ".join(rng.sample(words, rng.randint(1, 12)))


def variants(rows: list[dict], fits: list[bool]) -> list[tuple[int, int, int, float, int]]:
    """(picture, object colour, background, weight, number of captions) of everything that is trained on.

    Of the samples 64 % have a white background, 23 % a coloured one, 13 % a recoloured object (of these a
    half on white, the others on two coloured backgrounds that differ from colour to colour).
    """
    found = []
    total = sum(row["w"] for row in rows)
    recoloured = [index for index, fit in enumerate(fits) if fit]
    recoloured_total = sum(rows[index]["w"] for index in recoloured)
    for index, row in enumerate(rows):
        share = row["w"] / total
        found.append((index, 0, 0, 0.64 * share, 200))
        allowed = [number for number in range(1, 11) if not pic.held_out(row["id"], number)]
        for number in allowed:
            found.append((index, 0, number, 0.23 * share / len(allowed), 20))
        if not fits[index]:
            continue
        share = row["w"] / recoloured_total / len(pic.OBJECT_COLOURS)
        for colour in range(1, len(pic.OBJECT_COLOUR_NAMES)):
            found.append((index, colour, 0, 0.065 * share, 16))
            turned = [allowed[(colour * 3 + step * 5) % len(allowed)] for step in range(2)]
            for number in turned:
                found.append((index, colour, number, 0.0325 * share, 8))
    return found


def build(work: Path, limit: int = 0) -> None:
    """Write WORK/pool.npz."""
    rows = pic.load_rows(work)[: limit or None]
    rgba = pic.load_pictures(work, limit)
    parts = [pic.main_hue(rgba[start : start + 64]) for start in range(0, len(rgba), 64)]
    hue = torch.cat([part[0] for part in parts])
    fits = torch.cat([part[1] for part in parts]).tolist()
    for index, row in enumerate(rows):
        label = row["names"][0]
        heart = row["group"] == "smileys-emotion" and "heart" in label and "face" not in label
        right_group = row["group"] in RECOLOURED_GROUPS or heart or label in ("alien", "ghost", "robot")
        # a name that already says a colour would contradict the new one; the plain heart and apple are wanted
        plain = label in ("red heart", "red apple") or not pic.COLOUR_PATTERN.search(label)
        fits[index] = fits[index] and right_group and plain
    vocabulary = json.loads((work / "tokenizer" / "vocab.json").read_text())
    captioner = Captioner(rows, vocabulary)
    tokens = Tokens(work)
    rng = random.Random(0)
    table = variants(rows, fits)
    captions: list[list[int]] = []
    starts = []
    counts = []
    for picture, colour, background, _, count in table:
        starts.append(len(captions))
        counts.append(count)
        for _ in range(count):
            captions.append(tokens.ids(captioner.caption(picture, colour, background, rng)))
    empty = [tokens.ids("")] * 800 + [tokens.ids(nameless(rng)) for _ in range(400)]
    test = []
    for _ in range(4):
        for picture in range(len(rows)):
            background = rng.randint(1, 10) if rng.random() < 0.3 else 0
            text = captioner.caption(picture, 0, background, rng, test=True)
            test.append((picture, background, tokens.ids(text)))
    seen = {tuple(ids) for ids in captions}
    test = [entry for entry in test if tuple(entry[2]) not in seen]
    np.savez_compressed(
        work / "pool.npz",
        variants=np.array([entry[:3] for entry in table], np.int16),
        weights=np.array([entry[3] for entry in table], np.float32),
        starts=np.array(starts, np.int32),
        counts=np.array(counts, np.int32),
        captions=np.array(captions, np.uint16),
        empty=np.array(empty, np.uint16),
        hue=hue.numpy(),
        test_picture=np.array([entry[0] for entry in test], np.int32),
        test_background=np.array([entry[1] for entry in test], np.int32),
        test_captions=np.array([entry[2] for entry in test], np.uint16),
    )
    print(f"{len(rows)} pictures, {sum(fits)} recoloured, {len(table)} variants")
    print(f"{len(captions)} captions, {len(seen)} different, {len(test)} test captions")


def main() -> None:
    """Read the arguments and build the pool."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=0, help="only the first so many pictures")
    arguments = parser.parse_args()
    build(arguments.work, arguments.limit)


if __name__ == "__main__":
    main()
