"""Prompts that are conversations, with images too, as tokens by a chat template."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxspeed.config.run_sections import Data
from jaxspeed.data.chat_formats import Conversation, messages_of, with_images
from jaxspeed.data.chat_masks import ChatEncoder, PromptWithImages
from jaxspeed.data.chat_template import end_of_turn, find_template
from jaxspeed.errors import ConfigError
from jaxspeed.vision import ImageProcessor

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | PromptWithImages


class EndOfTurn(NamedTuple):
    """What ends the answer to a conversation."""

    tokens: Sequence[int] = ()
    texts: Sequence[str] = ()


def encoded_messages(
    prompts: Sequence[Prompt],
    tokenizer: Any,
    data: Data,
    images: ImageProcessor | None = None,
) -> tuple[list[Any], EndOfTurn]:
    """The prompts, with the tokens of those that are messages, and what ends their answers.

    Args:
      images: of a model that reads images, which messages may have.

    Raises:
      DataError: there is no chat template, or an image is none.
      ConfigError: there is no tokenizer.
    """
    if isinstance(prompts, str) or not any(map(_is_messages, prompts)):
        return prompts, EndOfTurn()  # type: ignore[return-value]
    if tokenizer is None:
        raise ConfigError("a prompt has messages, and there is no tokenizer")
    template = find_template(tokenizer, data.chat_template, data.chat_template_kwargs, today=None)

    def encoded(prompt: Any) -> Any:
        if not _is_messages(prompt):
            return prompt
        if images is not None:
            conversation = with_images(Conversation(messages_of(prompt, "a prompt", True)), {})
            return ChatEncoder(tokenizer, data, images).prompt(template, conversation)
        text = template.render([*prompt], add_generation_prompt=True).text
        return tokenizer.encode(text).tolist()

    return [*map(encoded, prompts)], EndOfTurn(*end_of_turn(template, tokenizer))


def _is_messages(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
