"""Text from the model of a run, with its data's tokenizer and its training's context."""

import contextlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from jaxspeed.config.run_sections import Data
from jaxspeed.data import Corpus, Tokenizer
from jaxspeed.data.chat_formats import Conversation, messages_of, with_images
from jaxspeed.data.chat_masks import ChatEncoder, PromptWithImages
from jaxspeed.data.chat_template import (
    ChatTemplate,
    Message,
    MissingTemplateError,
    end_of_turn,
    find_template,
)
from jaxspeed.engine import Engine
from jaxspeed.errors import ConfigError, JaxspeedError, ModelError
from jaxspeed.user_models.config_model import image_processor, own_objective

log = logging.getLogger("jaxspeed")


def sample_texts(
    engine: Engine,
    tokenizer: Tokenizer | None,
    prompts: Sequence[str] | None = None,
    *,
    context: int | None = None,
    **options: Any,
) -> Iterator[tuple[int, str]]:
    """Prompts and what follows them, streamed as (number of the prompt, new text).

    The prompt is the config's unless some are given, and so are the number of tokens and the
    temperature; `context` is that of training, and `options` are those of `Engine.stream`. Its
    programs compile in the background as soon as this is called.

    Raises:
      ModelError: there is no tokenizer, so this is not a language model.
    """
    run = engine.config.run
    if has_scores(engine):
        raise ModelError("sample: the objective trains scores of texts, so the model writes none")
    if tokenizer is None:
        raise ModelError("sample: the data has no tokenizer, so the model cannot generate text")
    prompts = [run.sample_prompt] if prompts is None else prompts
    pieces = engine.stream(
        prompts,
        run.sample_tokens,
        temperature=run.sample_temperature,
        context=context,
        tokenizer=tokenizer,
        **options,
    )
    return itertools.chain(enumerate(prompts), ((piece.prompt, piece.text) for piece in pieces))


def has_scores(engine: Engine) -> bool:
    """Whether the objective has put scores in place of a language model's head."""
    objective = own_objective(engine.config)
    return objective is not None and objective.num_labels is not None


class Chat:
    """A conversation with a model: what it has been, and its next answer.

    Args:
      engine: with the model's state.
      tokenizer: that of its training.
      data: the config's section, whose chat template is used, or else the tokenizer's.
      system: the first message.
      plain: the model was trained on prompts without a template: each message is one by itself.
      options: those of `Engine.stream`, and its number of tokens and temperature.

    Raises:
      DataError: there is no chat template.
      ConfigError: a system message for plain prompts.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        data: Data,
        system: str | None = None,
        plain: bool = False,
        **options: Any,
    ) -> None:
        self._engine, self._tokenizer, self._options = engine, tokenizer, options
        self._template: ChatTemplate | None = None
        self._encoder: ChatEncoder | None = None  # of a model that reads images
        self._tokens = [] if tokenizer.end is None else [tokenizer.end]
        self._texts: list[str] = []
        self.messages: list[Message] = []
        if not plain:
            variables = data.chat_template_kwargs
            self._template = find_template(tokenizer, data.chat_template, variables, today=None)
            images = image_processor(engine.config, engine.program.source.model)
            self._encoder = None if images is None else ChatEncoder(tokenizer, data, images)
            self._tokens, self._texts = end_of_turn(self._template, tokenizer)
        elif system is not None:
            raise ConfigError(
                "--system: this run was trained on prompts without a chat template, which have no "
                "system message; begin the message with it"
            )
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def prompt(self, text: str) -> str:
        """The text of the conversation and of a user's next message, where the answer begins."""
        message = {"role": "user", "content": text}
        if self._encoder is not None:
            return self._tokenizer.spell(self._with_images(message).tokens)
        if self._template is None:
            return text
        return self._template.render([*self.messages, message], add_generation_prompt=True).text

    def _with_images(self, message: Message) -> PromptWithImages:
        """The conversation and a user's next message, up to where the answer begins."""
        assert self._encoder is not None and self._template is not None
        said = messages_of([*self.messages, message], "the chat", True)
        return self._encoder.prompt(self._template, with_images(Conversation(said), {}))

    def reply(self, text: str, images: Sequence[str] = ()) -> Iterator[str]:
        """The answer to a user's message, in pieces; both are then part of the conversation.

        `images` are paths of images that the message has. Its programs compile in the background as
        soon as this is called.

        Raises:
          ConfigError: there are images, and the model reads none.
        """
        message: Message = {"role": "user", "content": text}
        if images:
            if self._encoder is None:
                raise ConfigError("--image: the model reads no images")
            parts = [{"type": "image", "image": image} for image in images]
            message["content"] = [*parts, *[{"type": "text", "text": text}] * bool(text)]
        if self._encoder is not None:
            prompt: Any = self._with_images(message)
        else:
            prompt = self._tokenizer.encode(self.prompt(text)).tolist()
        options = dict(self._options)
        stop = [*options.pop("stop", ()), *self._texts]
        seed = (options.pop("seed", 0) + len(self.messages)) % 2**31  # other draws in each turn
        pieces = self._engine.stream(
            [prompt],
            tokenizer=self._tokenizer,
            stop=stop,
            stop_tokens=self._tokens,
            seed=seed,
            **options,
        )

        def answer() -> Iterator[str]:
            reply = ""
            for piece in pieces:
                reply += piece.text
                yield piece.text
            self.messages += [message, {"role": "assistant", "content": reply}]

        return answer()


class FinalSample:
    """The sample of text that a run shows at its end, prepared while it waits for other things."""

    def __init__(self, engine: Engine, corpus: Corpus) -> None:
        self._engine, self._corpus = engine, corpus
        is_text = corpus.tokenizer is not None and not has_scores(engine)
        self._is_wanted = is_text and bool(engine.config.run.sample_tokens)
        self._pieces: Iterable[tuple[int, str]] | None = None  # once it is started

    def compile(self) -> None:
        """Compile its programs in the background, while the first step compiles.

        Not on several processes, which would have to agree that their steps take long to compile.
        """
        if jax.process_count() == 1 and self._engine.program.on_one_mesh:
            self.start()
            self._pieces = None  # of the first state

    def start(self) -> None:
        """Trace it, and compile what is not, while the devices compute the last steps."""
        if self._is_wanted:
            with contextlib.suppress(Exception):  # `text` warns of it
                self._pieces = self._texts()

    def draw(self) -> None:
        """Draw it if it is started, while the last checkpoint is written."""
        try:
            self._pieces = self._pieces and [*self._pieces]
        except JaxspeedError:  # `text` warns of it
            self._pieces = None

    def text(self) -> str | None:
        """The text; None, with a warning, if the model's signature is another one."""
        if not self._is_wanted:
            return None
        try:
            pieces = self._pieces or self._texts()
            return "".join(text for _, text in pieces)
        except JaxspeedError as error:
            log.warning("no sample of text: %s", str(error).splitlines()[0])
            return None

    def _texts(self) -> Iterator[tuple[int, str]]:
        corpus, context = self._corpus, self._corpus.context
        run, data = self._engine.config.run, self._engine.config.data
        if corpus.conversations is not None and corpus.tokenizer is not None:
            options: dict[str, Any] = {
                "tokens": run.sample_tokens,
                "temperature": run.sample_temperature,
            }
            with contextlib.suppress(MissingTemplateError):  # a folder of tokens may need none
                options |= {"context": context, "plain": corpus.plain_prompts}
                chat = Chat(self._engine, corpus.tokenizer, data, **options)
                prompt = chat.prompt(run.sample_prompt)
                answer = ((0, text) for text in chat.reply(run.sample_prompt))
                return itertools.chain([(0, prompt)], answer)
        return sample_texts(self._engine, corpus.tokenizer, context=context)
