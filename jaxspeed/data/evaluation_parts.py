"""Data to evaluate on: every sample of each file, once and in order, apart from training data."""

from dataclasses import replace

from jaxspeed.config.run_sections import Data, SourceSection
from jaxspeed.data.chat_masks import ChatEncoder
from jaxspeed.data.chats import Chats
from jaxspeed.data.choose_tokenizer import choose_tokenizer, tokenizer_of_section
from jaxspeed.data.model_limits import ModelLimits
from jaxspeed.data.open_source import by_file, encoded_in_memory, open_source, samples_of
from jaxspeed.data.pair_samples import checked
from jaxspeed.data.prompts import check_keys
from jaxspeed.data.samples import Samples
from jaxspeed.data.sources import Texts
from jaxspeed.data.tokenizer import Tokenizer
from jaxspeed.errors import DataError


def evaluation_parts(
    data: Data,
    source: SourceSection,
    limits: ModelLimits,
    tokenizer: Tokenizer | None,
    batch_size: int | None = None,
) -> dict[str, Samples | None]:
    """The samples of each file of a source, by its path; None for a file with nothing to predict.

    Args:
      data: the section of the config, for what is no source: the length of samples, document masks.
      source: what is read, all of it.
      tokenizer: that of the model's training.
      batch_size: the default of `kl_block`.

    Raises:
      DataError: a file cannot be read or does not fit the model, or there is nothing to predict.
    """
    if limits.pairs is not None:
        pairs = checked(limits.pairs, data, limits.targets, batch_size)
        limits = replace(limits, pairs=pairs)
    if limits.prompts is not None:
        check_keys(data)
    sections = by_file(source)
    opened = {name: open_source(section, limits) for name, section in sections.items()}
    if limits.sample != "images":  # for which `samples_of` refuses texts
        if tokenizer is None and any(
            isinstance(content, Texts | Chats) for content in opened.values()
        ):
            tokenizer = tokenizer_of_section(data)
            if tokenizer is None:
                raise DataError(
                    "data: text cannot be evaluated, because the model was trained on ids and has "
                    "no tokenizer; set data.tokenizer, or give files of ids"
                )
        tokenizer = choose_tokenizer(data, limits, [*opened.values()], tokenizer)
    encoder = None if tokenizer is None else ChatEncoder(tokenizer, data, limits.images)
    all_of_it = data.model_copy(update={"held_out": 1.0})
    parts: dict[str, Samples | None] = {}
    for name, content in opened.items():
        if limits.prompts is None and isinstance(content, Texts | Chats) and encoder is not None:
            content = [encoded_in_memory(content, encoder)]
        if isinstance(content, list) and not any(len(documents.tokens) for documents in content):
            parts[name] = None
            continue
        held_out = samples_of(all_of_it, sections[name], limits, content, encoder).held_out
        parts[name] = held_out if held_out is not None and len(held_out) else None
    if not any(parts.values()):
        raise DataError(f"data: {', '.join(parts)}: nothing to predict; two tokens would do")
    return parts
