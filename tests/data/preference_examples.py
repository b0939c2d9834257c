"""Preferences to test with, and what is in the samples of them."""

import json
from pathlib import Path
from typing import ClassVar

import numpy as np

from jaxspeed.data import Corpus, load_tokenizer
from jaxspeed.data.model_limits import PairForm
from jaxspeed.objectives import Objective
from tests.data.chat_examples import write_lines
from tests.data.corpora import opened


class Ranks(Objective):
    """An objective that reads pairs, with the keys of those that do."""

    class Options(Objective.Options):
        pairs_per_row: int | None = None

    arrays: ClassVar = {"margins": "as tokens"}
    records: ClassVar = "preference"
    drops_long: ClassVar = True

    def loss(self, model, batch):
        raise NotImplementedError


class Labels(Ranks):
    """An objective that reads completions with a label."""

    arrays: ClassVar = {}
    records: ClassVar = "unpaired"
    drops_long: ClassVar = False


PAIRS = PairForm("preference")
LABELS = PairForm("unpaired", kl_block=4)
TEXTS = [
    {
        "prompt": f"{i}?" * (1 + i % 4),
        "chosen": "yes " * (1 + i % 3),
        "rejected": "no" * (i % 5 + 1),
    }
    for i in range(24)
]


_SINGLE = [
    {"SpecialToken": {"id": "<s>", "type_id": 0}},
    {"Sequence": {"id": "A", "type_id": 0}},
]
# A post-processor that puts <s> before a text.
BEGINS = {
    "type": "TemplateProcessing",
    "single": _SINGLE,
    "pair": [*_SINGLE, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
}


def merging_tokenizer(post_processor=None):
    """Letters as tokens, of which a and b merge."""
    vocab = {"<s>": 0, "</s>": 1, **{letter: i for i, letter in enumerate("abcd", 2)}, "ab": 6}
    model = {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]}
    special = [
        {"id": i, "content": name, "special": True, "single_word": False, "lstrip": False}
        | {"rstrip": False, "normalized": False}
        for name, i in (("<s>", 0), ("</s>", 1))
    ]
    content = {"version": "1.0", "added_tokens": special, "model": model}
    return load_tokenizer(json.dumps(content | {"post_processor": post_processor}).encode())


def start(folder: Path, records, form=PAIRS, seq_len=64, **data) -> Corpus:
    file = write_lines(folder / "a.jsonl", records)
    section = {"source": "jsonl", "path": str(file), "seq_len": seq_len, "held_out": 0.0, **data}
    return opened(section, pairs=form, seq_len=None)


def sequences_in(batch) -> list[list[tuple[bytes, list[int], list[int]]]]:
    """Of each row the tokens of each segment with its last target, targets' mask and positions."""
    rows = []
    for tokens, targets, segments, positions, mask in zip(
        *(batch[name] for name in ("tokens", "targets", "segment_ids", "positions", "mask"))
    ):
        rows.append([])
        for number in range(1, segments.max() + 1):
            at = np.flatnonzero(segments == number)
            assert (np.diff(at) == 1).all()
            predicted = at[targets[at] != -100]
            assert (tokens[predicted[1:]] == targets[predicted[:-1]]).all()
            whole = [*tokens[at], *targets[at[-1:]][targets[at[-1:]] != -100]]
            rows[-1].append((bytes(map(int, whole)), mask[predicted].tolist(), [*positions[at]]))
        padding = segments == 0
        assert not mask[padding].any() and (targets[padding] == -100).all()
    return rows


def pairs_of(corpus: Corpus):
    """Both sequences of each pair of both splits, as (tokens, mask of its targets)."""
    pairs = []
    for split in filter(None, (corpus.train, corpus.held_out)):
        for step in range(split.batches(1)):
            (row,) = sequences_in(split.slice(step, 1))
            assert len(row) % 2 == 0
            for text, _, positions in row:
                assert positions in ([*range(len(text) - 1)], [*range(len(text))])
            sides = [(text, mask) for text, mask, _ in row]
            pairs += zip(sides[::2], sides[1::2])
    return sorted(pairs)


def expected(prompt: str, completion: str) -> tuple[bytes, list[int]]:
    """The bytes of a text with its end, and a mask of what the first token predicts, and so on."""
    return f"{prompt}{completion}\0".encode(), ([0] * len(prompt) + [1] * len(completion + "\0"))[
        1:
    ]
