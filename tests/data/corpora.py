"""Small corpora to test with."""

import json
from pathlib import Path
from typing import Any

import numpy as np

import jaxspeed.data
from jaxspeed.config import Config
from jaxspeed.data import Corpus

WORDS = ["the", "of", "to", "and", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are"]


def sentences(documents: int, words: int = 40, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=1 + rng.integers(2 * words))) for _ in range(documents)]


def text_files(folder: Path, texts: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(texts):
        (folder / f"{i:04}.txt").write_text(text)
    return folder


def json_lines(file: Path, texts: list[str], field: str = "text") -> Path:
    file.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return file


def opened(data: dict[str, Any] | None = None, **limits: Any) -> Corpus:
    """A corpus for a language model of 512 ids and 16 positions, but for what `limits` say."""
    known = {"sample": "tokens", "seq_len": 16, "vocab_size": 512, "seed": 0}
    return jaxspeed.data.build(Config(data=data or {}).data, **known | limits)
