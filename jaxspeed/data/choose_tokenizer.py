"""Choose a corpus's tokenizer: the run's saved one, the token files' one, or the config's."""

import itertools
from collections.abc import Sequence

from jaxspeed.config.run_sections import Data
from jaxspeed.data.chats import Chats
from jaxspeed.data.model_limits import ModelLimits
from jaxspeed.data.open_source import TEXT_SOURCES, Opened
from jaxspeed.data.sources import Texts
from jaxspeed.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, read_tokenizer
from jaxspeed.errors import DataError


def choose_tokenizer(
    data: Data, limits: ModelLimits, opened: Sequence[Opened], saved: Tokenizer | None
) -> Tokenizer | None:
    """The tokenizer saved with the run, or of token files that are read, or of the config."""
    documents = [d for source in opened if isinstance(source, list) for d in source]
    if not documents and not any(isinstance(source, Texts | Chats) for source in opened):
        return None
    tokenizer = saved
    for part in documents:
        if part.tokenizer is None:
            continue
        if tokenizer and tokenizer.to_bytes() != part.tokenizer.to_bytes():
            raise DataError(
                f"data: {part.name} was tokenized with a different tokenizer "
                f"({part.tokenizer.name}) than the rest ({tokenizer.name})"
            )
        tokenizer = tokenizer or part.tokenizer
    if tokenizer is None and any(isinstance(source, Texts | Chats) for source in opened):
        tokenizer = _configured(data, limits, opened)
    if tokenizer and limits.vocab_size and tokenizer.vocab_size > limits.vocab_size:
        raise DataError(
            f"data.tokenizer: {tokenizer.name} has {tokenizer.vocab_size:,} ids, but the model's "
            f"vocabulary has {limits.vocab_size:,}; a vocab_size of {tokenizer.vocab_size:,} or "
            "more in model.config would do"
        )
    return tokenizer


def _configured(data: Data, limits: ModelLimits, opened: Sequence[Opened]) -> Tokenizer:
    if data.tokenizer != "bpe":
        return _named(data.tokenizer)
    size = data.vocab_size or limits.vocab_size
    if size is None:
        raise DataError("data.vocab_size: bpe needs it, because the model's is unknown")
    if limits.vocab_size and size > limits.vocab_size:
        raise DataError(
            f"data.vocab_size is {size:,}, but the model's vocabulary has {limits.vocab_size:,}; "
            f"{limits.vocab_size:,} or less would do"
        )
    return BPETokenizer.train(texts_of(opened), size)


def tokenizer_of_section(data: Data) -> Tokenizer | None:
    """The tokenizer of the section, as far as that is known without its data."""
    of_text = all(source.source in TEXT_SOURCES for source in data.sources)
    if data.tokenizer == "bpe" or not (of_text or "tokenizer" in data.model_fields_set):
        return None
    return _named(data.tokenizer)


def _named(name: str) -> Tokenizer:
    return ByteTokenizer() if name == "bytes" else read_tokenizer(name)


def texts_of(opened: Sequence[Opened]) -> itertools.chain[str]:
    return itertools.chain.from_iterable(
        source for source in opened if isinstance(source, Texts | Chats)
    )
