"""Chat templates: Jinja programs that render a conversation as one text.

They come with a tokenizer (its folder's chat_template.jinja, or `chat_template` in its
tokenizer_config.json), from a file, or from BUILT_IN. They are code of others, so they run in the
sandbox that transformers gives them, with its extensions: `{% generation %}` marks the text of the
assistant.
"""

import contextlib
import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxspeed.data.files import read_text
from jaxspeed.data.tokenizer import CHAT_TEMPLATE, Tokenizer
from jaxspeed.errors import DataError
from jaxspeed.near_words import closest

Message = dict[str, Any]
Spans = list[tuple[int, int]]  # of characters: [start, end) each

DEFAULT, WITH_TOOLS = "default", "tool_use"  # of a tokenizer's several templates
# The `strftime_now` of data: with today's date, a run's tokens would change over night.
DATE = datetime.datetime(2024, 7, 26)
# Roles of which a template need not have the name, because many write any role.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_PROBE = "jaxspeed probes"
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_REASONING = ("reasoning_content", "thinking", "reasoning")


class MissingTemplateError(DataError):
    """There is no chat template, or it is no valid Jinja."""


class Arguments(dict[str, Any]):
    """The arguments of a tool call, which a record has as JSON text.

    Most templates write them as JSON, and text would be quoted again. Some write them as text.
    """

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text  # templates read a public attribute before an argument of its name


class Rendered(NamedTuple):
    """A conversation's text, and which of it the template marks as the assistant's."""

    text: str
    spans: Spans


class ChatTemplate:
    """A template with the variables that its tokenizer gives it.

    Args:
      sources: Jinja by name: DEFAULT, and perhaps WITH_TOOLS for conversations with tools.
      name: in errors.
      variables: the tokenizer's special tokens, and what the config adds.
      today: what `strftime_now` formats; the time of the call by default.

    Raises:
      MissingTemplateError: it is no valid Jinja.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        name: str,
        variables: Mapping[str, Any],
        today: datetime.datetime | None = None,
    ) -> None:
        self.name, self.source = name, sources[DEFAULT]
        self._sources, self._variables, self._today = sources, dict(variables), today
        for source in sources.values():
            _compiled(source, name)

    def marks(self, tools: Any = None) -> bool:
        """Whether `{% generation %}` is in the template."""
        return _MARK.search(self._source_for(tools)) is not None

    def names(self, role: str, tools: Any = None) -> bool:
        """Whether the template has this role by name, or need not have it."""
        return role in ROLES or role in self._source_for(tools)

    def render(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        *,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> Rendered:
        """The text of a conversation, as `apply_chat_template(tokenize=False)` of transformers.

        Raises:
          DataError: the template raises.
        """
        compiled = _compiled(self._source_for(tools), self.name)
        environment, blocks, marked = compiled.environment, [], _Marked()
        context = {"messages": [*map(_with_reasoning, messages)], "tools": tools, "documents": None}
        context |= {"add_generation_prompt": add_generation_prompt}
        environment.today, environment.marked = self._today, marked
        try:
            for block in compiled.generate({**self._variables, **variables, **context}):
                blocks.append(block)
                marked.length += len(block)
        except Exception as error:  # of Jinja, of the template, and any of Python's in its code
            if (texts := _with_text(messages)) != messages:
                how: Any = {"add_generation_prompt": add_generation_prompt, **variables}
                with contextlib.suppress(DataError):
                    return self.render(texts, tools, **how)
            reason = str(error) or type(error).__name__
            raise DataError(f"the chat template ({self.name}) raises: {reason}") from None
        return Rendered("".join(blocks), marked.spans)

    def _source_for(self, tools: Any) -> str:
        return self._sources.get(WITH_TOOLS, self.source) if tools else self.source


def _with_reasoning(message: Message) -> Message:
    """Reasoning under all the names that templates read it by."""
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _with_text(value: Any) -> Any:
    """Messages whose tool calls have the text of their arguments."""
    if isinstance(value, Arguments):
        return value._text
    if isinstance(value, Mapping):
        return {key: _with_text(element) for key, element in value.items()}
    return [*map(_with_text, value)] if isinstance(value, list | tuple) else value


class _Marked:
    """Spans that are marked while a template renders; `length` is that of the text so far."""

    def __init__(self) -> None:
        self.length = 0
        self.spans: Spans = []


@functools.lru_cache(maxsize=32)
def _compiled(source: str, name: str) -> Any:
    import jinja2

    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise MissingTemplateError(
            f"data.chat_template: the template ({name}) is no valid Jinja: line {error.lineno}: "
            f"{error.message}"
        ) from None


def _environment() -> Any:
    """The environment in which transformers compiles chat templates."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_marked")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            text: str = caller()
            environment: Any = self.environment
            marked = environment.marked
            marked.spans.append((marked.length, marked.length + len(text)))
            return text

    class Namespace(jinja2.utils.Namespace):
        """Without names that begin with an underscore, which could lead to Python's own."""

        def __init__(self, /, *args: Any, **named: Any) -> None:
            super().__init__()
            for name, value in dict(*args, **named).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace has no {name!r}")
            super().__setitem__(name, value)

    class Dict:
        """The type `dict` without its attributes."""

        def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
            return dict(*args, **named)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    def raise_exception(message: Any) -> None:
        raise jinja2.TemplateError(str(message))

    def tojson(
        x: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes for HTML.
        form = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators}
        return json.dumps(x, sort_keys=sort_keys, **form)

    def strftime_now(form: str) -> str:
        return (environment.today or datetime.datetime.now()).strftime(form)

    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "dict": Dict(),
        "namespace": Namespace,
    }
    return environment


# -- which template ------------------------------------------------------------------------------


def find_template(
    tokenizer: Tokenizer,
    named: str | None,
    variables: Mapping[str, Any],
    today: datetime.datetime | None = DATE,
) -> ChatTemplate:
    """The tokenizer's template, or the one that `data.chat_template` names.

    That is the name of one of the tokenizer's or of BUILT_IN, a path, or Jinja itself.

    Raises:
      MissingTemplateError: there is none, or it is no valid Jinja.
    """
    templates = _templates_of(tokenizer)
    template_variables = {**special_tokens(tokenizer), **variables}
    if named is None:
        if DEFAULT not in templates:
            has = f" (it has {', '.join(templates)})" if templates else ""
            raise MissingTemplateError(
                f"data.chat_template: conversations need one, and the tokenizer {tokenizer.name} "
                f"has no default{has}; name one of {', '.join(BUILT_IN)}, or a Jinja file"
            )
        return ChatTemplate(
            templates, f"of the tokenizer {tokenizer.name}", template_variables, today
        )
    source = templates.get(named) or BUILT_IN.get(named)
    if source is None and ("{{" in named or "{%" in named):
        return ChatTemplate({DEFAULT: named}, "in data.chat_template", template_variables, today)
    if source is None:
        path = Path(named).expanduser()
        if not path.is_file():
            names = [*templates, *BUILT_IN]
            near = closest(named, names)
            raise MissingTemplateError(
                f"data.chat_template: {named!r} is neither a template's name ({', '.join(names)}) "
                "nor the path of a file" + (f'; did you mean "{near}"?' if near else "")
            )
        try:
            source = read_text(path)
        except DataError as error:  # no record is at fault
            raise MissingTemplateError(f"data.chat_template: {error}") from None
    return ChatTemplate({DEFAULT: source}, named, template_variables, today)


def _templates_of(tokenizer: Tokenizer) -> dict[str, str]:
    """The templates in the files beside a tokenizer, by name."""
    if CHAT_TEMPLATE in tokenizer.beside:
        return {DEFAULT: tokenizer.beside[CHAT_TEMPLATE].decode(errors="replace")}
    for file in ("tokenizer_config.json", "chat_template.json"):
        template = _json_beside(tokenizer, file).get("chat_template")
        if isinstance(template, str):
            return {DEFAULT: template}
        if isinstance(template, list):
            named = [entry for entry in template if isinstance(entry, dict)]
            return {str(entry.get("name")): str(entry.get("template")) for entry in named}
    return {}


def special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like, as the tokenizer's folder has them."""
    known = _json_beside(tokenizer, "special_tokens_map.json")
    known |= _json_beside(tokenizer, "tokenizer_config.json")
    tokens = {} if tokenizer.end_text is None else {"eos_token": tokenizer.end_text}
    for name, token in known.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[list[int], list[str]]:
    """Tokens and texts that end a turn: what the template writes after an assistant's message."""
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
    _, separator, tail = template.render(said).text.rpartition(_PROBE)
    tokens, texts = [], []
    for text in filter(
        None, (tail if separator else "", special_tokens(tokenizer).get("eos_token"))
    ):
        ids = tokenizer.encode(text).tolist()
        special = [i for i in ids if tokenizer.spell([i]) and not tokenizer.decode([i])]
        if special:
            tokens.append(special[0])
        elif text.strip():
            texts.append(text.strip())
    return tokens, texts


def _json_beside(tokenizer: Tokenizer, file: str) -> dict[str, Any]:
    try:
        tree = json.loads(tokenizer.beside.get(file, b"{}"))
    except (ValueError, RecursionError) as error:
        raise MissingTemplateError(
            f"data.tokenizer: {file} of {tokenizer.name} is not JSON: {error}"
        ) from None
    return tree if isinstance(tree, dict) else {}


def _lines(*lines: str) -> str:
    return "".join(lines)


_PROMPT = "{% if add_generation_prompt %}"
_TURN = "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
# In the formats that the models of these names were trained with. Without `{% generation %}`, which
# not every program that reads an exported template knows: their masks are found by prefixes.
BUILT_IN = {
    "chatml": _lines(
        "{% for message in messages %}",
        _TURN,
        "{% endfor %}",
        _PROMPT + "{{ '<|im_start|>assistant\\n' }}{% endif %}",
    ),
    "llama3": _lines(
        "{{ bos_token }}",
        "{% for message in messages %}",
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}",
        "{{ message['content'] | trim + '<|eot_id|>' }}",
        "{% endfor %}",
        _PROMPT + "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    ),
    "qwen": _lines(
        "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}",
        "{% if tools or system %}{{ '<|im_start|>system\\n' + system }}",
        "{% if tools %}{{ '\\n\\n' if system }}",
        "{{ '# Tools\\n\\nYou may call one or more functions to assist with the user query.",
        "\\n\\nYou are provided with function signatures within <tools></tools> XML tags:",
        "\\n<tools>' }}",
        "{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}",
        "{{ '\\n</tools>\\n\\nFor each function call, return a json object with function name and ",
        "arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n",
        '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>',
        "' }}",
        "{% endif %}",
        "{{ '<|im_end|>\\n' }}{% endif %}",
        "{% for message in messages %}",
        "{% if message['role'] == 'system' and loop.first %}",
        "{% elif message['role'] == 'tool' %}",
        "{% if loop.first or loop.previtem['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}",
        "{{ '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}",
        "{% if loop.last or loop.nextitem['role'] != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}",
        "{% elif message['tool_calls'] %}",
        "{{ '<|im_start|>' + message['role'] }}",
        "{% if message['content'] %}{{ '\\n' + message['content'] }}{% endif %}",
        "{% for call in message['tool_calls'] %}",
        "{% set function = call['function'] or call %}",
        "{{ '\\n<tool_call>\\n{\"name\": \"' + function['name'] + '\", \"arguments\": ' }}",
        "{{ function['arguments'] | tojson + '}\\n</tool_call>' }}",
        "{% endfor %}",
        "{{ '<|im_end|>\\n' }}",
        "{% else %}",
        _TURN,
        "{% endif %}",
        "{% endfor %}",
        _PROMPT + "{{ '<|im_start|>assistant\\n' }}{% endif %}",
    ),
    "gemma": _lines(
        "{{ bos_token }}",
        "{% set system = messages[0]['role'] == 'system' %}",
        "{% for message in messages %}",
        "{% if not (system and loop.first) %}",
        "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}",
        "{% if role not in ('user', 'model') %}",
        "{{ raise_exception('the roles are system (first), user and assistant') }}",
        "{% endif %}",
        "{{ '<start_of_turn>' + role + '\\n' }}",
        "{% if system and loop.index0 == 1 %}{{ messages[0]['content'] + '\\n\\n' }}{% endif %}",
        "{{ message['content'] | trim + '<end_of_turn>\\n' }}",
        "{% endif %}",
        "{% endfor %}",
        _PROMPT + "{{ '<start_of_turn>model\\n' }}{% endif %}",
    ),
    "mistral": _lines(
        "{{ bos_token }}",
        "{% set system = messages[0]['role'] == 'system' %}",
        "{% for message in messages %}",
        "{% if message['role'] == 'user' %}",
        "{% if loop.previtem is defined and loop.previtem['role'] == 'user' %}",
        "{{ raise_exception('user and assistant must alternate') }}{% endif %}",
        "{{ '[INST] ' }}",
        "{% if system and loop.index0 == 1 %}{{ messages[0]['content'] + '\\n\\n' }}{% endif %}",
        "{{ message['content'] + '[/INST]' }}",
        "{% elif message['role'] == 'assistant' %}",
        "{{ ' ' + message['content'] | trim }}{{ eos_token }}",
        "{% elif not (system and loop.first) %}",
        "{{ raise_exception('the roles are system (first), user and assistant') }}",
        "{% endif %}",
        "{% endfor %}",
    ),
    "alpaca": _lines(
        "{% for message in messages %}",
        "{% if message['role'] == 'system' %}",
        "{{ message['content'] + '\\n\\n' }}",
        "{% elif message['role'] == 'user' %}",
        "{% if loop.first %}",
        "{{ 'Below is an instruction that describes a task' }}",
        "{{ ', paired with an input that provides further context' if message['input'] }}",
        "{{ '. Write a response that appropriately completes the request.\\n\\n' }}",
        "{% endif %}",
        "{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}",
        "{% if message['input'] %}{{ '### Input:\\n' + message['input'] + '\\n\\n' }}{% endif %}",
        "{% elif message['role'] == 'assistant' %}",
        "{{ '### Response:\\n' + message['content'] }}{{ eos_token }}",
        "{% if not loop.last %}{{ '\\n\\n' }}{% endif %}",
        "{% else %}",
        "{{ raise_exception('the roles are system, user and assistant') }}",
        "{% endif %}",
        "{% endfor %}",
        _PROMPT + "{{ '### Response:\\n' }}{% endif %}",
    ),
}
