"""Records of conversations: TRL's, ShareGPT's and Alpaca's fields as messages with roles."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxspeed.config.run_sections import ChatFormat
from jaxspeed.config.verdicts import shown
from jaxspeed.data.chat_template import Arguments, Message
from jaxspeed.errors import DataError

# The fields by which a record is recognized; of several formats, the first.
FIELDS: dict[ChatFormat, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "caption": ("file_name", "text"),
}
IMAGES = ("images", "image", "file_name")  # fields with the images of a record, or with one
OPTIONAL = ("input", "system", "tools", "chat_template_kwargs", *IMAGES)
NAMES = tuple(dict.fromkeys([name for names in FIELDS.values() for name in names]))
IMAGE = {"type": "image"}  # a part of a message, as templates read it
PLACE = "<image>"  # of an image in a text, as LLaVA's records have it
IMAGE_TYPES = ("image", "image_url", "input_image")
IMAGE_KEYS = ("image", "image_url", "url", "path", "bytes")
SHARE_GPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template; the first `given` are a prompt, which is not trained on.

    `images` are those of the parts {"type": "image"} of all messages, in their order.
    """

    messages: list[Message]
    given: int = 0
    tools: list[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    images: Sequence[Any] = ()


@dataclass(frozen=True)
class Completion:
    """A text and what follows it, without a template."""

    prompt: str
    completion: str


def format_of(names: Iterable[str]) -> ChatFormat | None:
    """The format of a record with fields of these names."""
    there = set(names)
    return next((kind for kind, fields in FIELDS.items() if there.issuperset(fields)), None)


def read_record(record: Any, kind: ChatFormat, sees: bool = False) -> Conversation | Completion:
    """The conversation in a record of this format, with its images if the model `sees` them.

    Raises:
      DataError: it is of another format, or its messages are none.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"a {type(record).__name__}, not an object with fields")
    there = {name: value for name, value in record.items() if value is not None}
    if missing := [name for name in FIELDS[kind] if name not in there]:
        other = format_of(there)
        has = ", ".join(map(str, there)) or "none"
        raise DataError(
            f"the fields of {other}, but this file is read as {kind}"
            if other
            else f"no field {' or '.join(map(shown, missing))}; its fields: {has}"
        )
    more = template_inputs(there)
    if kind == "alpaca":
        instruction, output = (_text(there[name], name) for name in FIELDS[kind])
        entered = there.get("input") or ""
        user = {"role": "user", "content": instruction}
        user |= {"input": _text(entered, "input")} if entered else {}
        return Conversation([user, {"role": "assistant", "content": output}])
    if kind == "caption":
        shown_first = {"role": "user", "content": [IMAGE]}
        said = {"role": "assistant", "content": _text(there["text"], "text")}
        return Conversation([shown_first, said], images=[there["file_name"]])
    if kind == "prompt_completion":
        prompt, completion = (there[name] for name in FIELDS[kind])
        if isinstance(prompt, str) and isinstance(completion, str):
            return Completion(prompt, _text(completion, "completion"))
        if isinstance(prompt, str) or isinstance(completion, str):
            raise DataError("prompt and completion must both be texts, or both lists of messages")
        before = messages_of(prompt, "prompt", sees)
        all_messages = [*before, *messages_of(completion, "completion", sees)]
        conversation = Conversation(all_messages, len(before), **more)
        return with_images(conversation, there) if sees else conversation
    messages = messages_of(there[kind], kind, sees)
    if kind == "conversations" and there.get("system") and messages[0]["role"] != "system":
        system = _text(there["system"], "system")
        messages = [{"role": "system", "content": system}, *messages]
    conversation = Conversation(messages, **more)
    return with_images(conversation, there) if sees else conversation


def with_images(conversation: Conversation, record: Mapping[str, Any]) -> Conversation:
    """The conversation with the images of its messages' parts, or of the record's fields.

    Of the latter, a part {"type": "image"} or the text "<image>" says where each is; without
    either they begin the first message of the user.

    Raises:
      DataError: there are images without a place, or places without an image.
    """
    name = next((name for name in IMAGES if record.get(name) is not None), None)
    if name is None and not any(map(has_parts, conversation.messages)):
        return conversation
    beside = [] if name is None else record[name]
    beside = [*beside] if isinstance(beside, list | tuple) else [beside]
    messages = [*map(_with_places, conversation.messages)] if beside else conversation.messages
    places = sum(part["type"] == "image" for m in messages for part in parts_of(m))
    if beside and not places:
        at = next((i for i, m in enumerate(messages) if m["role"] == "user"), 0)
        first = {"content": [*[IMAGE] * len(beside), *parts_of(messages[at])]}
        messages = [*messages[:at], messages[at] | first, *messages[at + 1 :]]
        places = len(beside)
    inside = [p.get("image") for m in messages for p in parts_of(m) if p["type"] == "image"]
    empty = sum(image is None for image in inside)
    if empty != len(beside):
        what = "a place without an image" if empty > len(beside) else "an image without a place"
        raise DataError(f"{what}: {places} places of images, {places - empty + len(beside)} images")
    rest = iter(beside)
    images = [next(rest) if image is None else image for image in inside]
    bare = [
        {**m, "content": [IMAGE if part["type"] == "image" else part for part in m["content"]]}
        if has_parts(m)
        else m
        for m in messages
    ]
    return replace(conversation, messages=bare, images=images)


def has_parts(message: Message) -> bool:
    """Whether a message's content is a list of parts, as where it has images."""
    return isinstance(message.get("content"), list)


def parts_of(message: Message) -> list[dict[str, Any]]:
    """The parts of a message's content."""
    content = message.get("content") or []
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _with_places(message: Message) -> Message:
    """A message whose text says where images are, with parts in place of it."""
    if PLACE not in str(message.get("content") or "") or has_parts(message):
        return message
    first, *others = message["content"].split(PLACE)
    parts = [*_text_part(first)]
    for text in others:
        parts += [IMAGE, *_text_part(text.removeprefix("\n"))]
    return {**message, "content": parts}


def _text_part(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}] * bool(text)


def template_inputs(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a record gives a template beside messages: `tools` and `variables`."""
    variables = record.get("chat_template_kwargs") or {}
    if not isinstance(variables, Mapping):
        raise DataError("chat_template_kwargs is no object")
    return {"tools": _tools(record.get("tools")), "variables": variables}


def _tools(tools: Any) -> list[Any] | None:
    """Schemas of tools: a list, or the JSON of one."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError):
            raise DataError("tools is neither a list nor the JSON of one") from None
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"tools is a {type(tools).__name__}, not a list")
    return tools or None


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{name} is a {type(value).__name__}, not text")
    if not value:
        raise DataError(f"{name} is empty")
    return value


def messages_of(raw: Any, name: str, sees: bool = False) -> list[Message]:
    """A list of messages with `role` and `content`, of parts where it has images.

    Raises:
      DataError: it is none, or a message of it is none.
    """
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        raise DataError(f"{name} is a {type(raw).__name__}, not a list of messages")
    read = [_message(message, f"message {i}", sees) for i, message in enumerate(raw, 1)]
    # An empty system message is none.
    messages = [x for x in read if x["role"] != "system" or x.get("content")]
    if not messages:
        raise DataError(f"{name} has no messages")
    return messages


def _message(raw: Any, name: str, sees: bool) -> Message:
    """A message with `role` and `content`, from these keys or from ShareGPT's."""
    if not isinstance(raw, Mapping):
        raise DataError(f"{name} is a {type(raw).__name__}, not an object")
    message = {key: value for key, value in raw.items() if value is not None}
    role = message.get("role")
    if "role" not in message and "from" in message:
        sender, value = message.pop("from"), message.pop("value", None)
        role = SHARE_GPT.get(sender) if isinstance(sender, str) else None
        if role is None:
            known = ", ".join(SHARE_GPT)
            raise DataError(f"{name} is from {shown(sender)}; the names are {known}")
        message |= {"role": role} if value is None else {"role": role, "content": value}
    if not isinstance(role, str) or not role:
        raise DataError(f"{name} has no role")
    calls = message.get("tool_calls")
    if calls:
        if "content" in raw:  # templates ask whether it is none
            message.setdefault("content", None)
        message["tool_calls"] = [_with_arguments(call, name) for call in _list(calls, name)]
    if message.get("content") is not None:
        message["content"] = _content(message["content"], f"{name} ({role})", sees)
    may_be_empty = calls or role in ("system", "tool")
    if not may_be_empty and not message.get("content"):
        raise DataError(f"{name} ({role}) is empty")
    return message


def _list(calls: Any, name: str) -> list[Any]:
    if not isinstance(calls, list):
        raise DataError(f"{name}: tool_calls is a {type(calls).__name__}, not a list")
    return calls


def _with_arguments(call: Any, name: str) -> Any:
    """A tool call whose arguments are an object: templates write them as JSON."""
    if not isinstance(call, Mapping):
        raise DataError(f"{name}: a tool call is a {type(call).__name__}, not an object")
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"], name)}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except (ValueError, RecursionError):
            return call
        return {**call, "arguments": Arguments(read, arguments)} if isinstance(read, dict) else call
    return call


def _content(content: Any, name: str, sees: bool) -> str | list[dict[str, Any]]:
    """A text, or the texts of a list of parts one after the other; with images the parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{name} has a {type(content).__name__} as content, not text")
    texts = []
    parts: list[dict[str, Any]] = []
    for part in content:
        if sees and isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES:
            there = [part[key] for key in IMAGE_KEYS if part.get(key) is not None]
            parts.append(IMAGE | ({"image": there[0]} if there else {}))
            continue
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            reads = "text and images" if sees else "text"
            raise DataError(f"{name} has content of type {shown(kind)}; this model reads {reads}")
        texts.append(text)
        parts += _text_part(text)
    return parts if IMAGE["type"] in {part["type"] for part in parts} else "".join(texts)
