"""SentencePiece's `tokenizer.model`, with byte-pair encoding, as a tokenizer.json.

The file is a protocol buffer (github.com/google/sentencepiece, sentencepiece_model.proto) of the
pieces with their scores, how it was trained, and how text is normalized. A merge is any pair of
pieces whose concatenation is a piece; the higher its score, the earlier it is done.
"""

import base64
import json
import struct
from collections.abc import Iterator
from typing import Any

from jaxspeed.errors import DataError

SPACE = "\u2581"
_BPE = 2  # of model_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # of a piece's type


def tokenizer_json(content: bytes, name: str) -> bytes:
    """The same tokenizer as a tokenizer.json.

    Raises:
      DataError: it is damaged, or of a kind that is not supported.
    """
    try:
        fields = list(_fields(content))
        pieces = [_piece(value) for number, value in fields if number == 1]
        trained = dict(_fields(next(value for number, value in fields if number == 2)))
        normal = dict(_fields(next((value for number, value in fields if number == 3), b"")))
    except (IndexError, ValueError, TypeError, struct.error, StopIteration):
        raise DataError(f"data.tokenizer: {name!r} is not a SentencePiece model") from None
    prefix = bool(normal.get(3, 1))
    user_defined = [piece for piece, _, kind in pieces if kind == _USER_DEFINED]
    problem = None
    if trained.get(3, 1) != _BPE:
        problem = "it is no byte-pair encoding"
    elif trained.get(24) or not normal.get(5, 1):
        problem = "it does not mark spaces before words"
    elif prefix and user_defined:
        problem = f"it adds a space before texts and has symbols of its own, as {user_defined[0]!r}"
    if problem:
        raise DataError(
            f"data.tokenizer: {name!r}: {problem}, which is not supported; write a tokenizer.json "
            "with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    vocab = {piece: i for i, (piece, _, _) in enumerate(pieces)}
    unknown = next((piece for piece, _, kind in pieces if kind == _UNKNOWN), None)
    return _json(
        added_tokens=[
            {
                "id": i, "content": piece, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": kind == _USER_DEFINED, "special": kind != _USER_DEFINED,
            }
            for i, (piece, _, kind) in enumerate(pieces)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ],
        normalizer={"type": "Sequence", "normalizers": _normalizers(normal, prefix)},
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
            ],
        },
        model={
            "type": "BPE", "dropout": None, "unk_token": unknown, "fuse_unk": True,
            "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "byte_fallback": bool(trained.get(35, 0)), "ignore_merges": False,
            "vocab": vocab, "merges": _merges(pieces, vocab),
        },
    )  # fmt: skip


def _normalizers(normal: dict[int, Any], prefix: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if charsmap := normal.get(2):
        found.append(
            {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}
        )
    if normal.get(4, 1):  # remove_extra_whitespaces
        found.append({"type": "Strip", "strip_left": True, "strip_right": True})
        found.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if prefix:
        found.append({"type": "Prepend", "prepend": SPACE})
    return [*found, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]


def _merges(pieces: list[tuple[str, float, int]], vocab: dict[str, int]) -> list[tuple[str, str]]:
    found = []
    normal = {piece for piece, _, kind in pieces if kind not in (_UNKNOWN, _CONTROL)}
    for piece, score, _ in pieces:
        if piece in normal:
            for i in range(1, len(piece)):
                left, right = piece[:i], piece[i:]
                if left in normal and right in normal:
                    found.append((-score, vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _json(**parts: Any) -> bytes:
    none = dict.fromkeys(("truncation", "padding", "pre_tokenizer", "post_processor"))
    return json.dumps({"version": "1.0", **none, **parts}, ensure_ascii=False).encode()


# -- protocol buffers ------------------------------------------------------------------------------


def _piece(content: bytes) -> tuple[str, float, int]:
    """(text, score, type)."""
    fields = dict(_fields(content))
    return fields.get(1, b"").decode(), fields.get(2, 0.0), fields.get(3, 1)


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field: bytes, a float, or an integer."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        kind = key & 7
        value: Any
        if kind == 0:
            value, at = _varint(content, at)
        elif kind == 2:
            length, at = _varint(content, at)
            value, at = content[at : at + length], at + length
            if len(value) < length:
                raise ValueError("truncated")
        elif kind in (1, 5):
            (value,) = struct.unpack_from("<d" if kind == 1 else "<f", content, at)
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")
        yield key >> 3, value


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
