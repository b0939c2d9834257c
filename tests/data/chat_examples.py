"""Chat templates of the usual structures, conversations, and a tokenizer that knows their tags."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from tests.data.corpora import sentences

# The text of the assistant is between << and >>, for a form with {% generation %} and one without.
_TEMPLATES = {
    "chatml": """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        <<{{- message['content'] + '<|im_end|>\\n' }}>>
    {%- else %}
        {{- message['content'] + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "llama3": """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now('%d %b %Y') %}
    {%- else %}
        {%- set date_string = '26 Jul 2024' %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date_string + '\\n\\n' }}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' -%}
        <<{{ message['content'] | trim }}{{ '<|eot_id|>' }}>>
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "qwen": """
{%- macro turn(role, content) %}{{ '<|im_start|>' + role + '\\n' + content + '<|im_end|>' }}
{% endmacro %}
{% set ns = namespace(users=0) %}
{% if messages[0].role != 'system' %}
{{ turn('system', 'You are a helpful assistant.') }}
{%- endif %}
{% for message in messages %}
    {% if message.role == 'assistant' %}
{{ '<|im_start|>assistant\\n' }}
        {%- set said = message.content.split('</think>')[-1].lstrip('\\n') -%}
        <<{{ said }}{{ '<|im_end|>\\n' }}>>
    {%- else %}
        {% set ns.users = ns.users + 1 %}
{{ turn(message.role, message.content) }}
    {%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
""",
    "gemma": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}{% if message['role'] == 'assistant' %}{{ '<start_of_turn>model\\n' }}
{%- if 1 -%}<<{{ message['content'] | trim + '<end_of_turn>\\n' }}>>{%- endif -%}{% else %}
{{ '<start_of_turn>' + message['role'] + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    "mistral": """{{ bos_token }}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{{ '[INST] ' + message['content'] + '[/INST]' }}
{%- elif message['role'] == 'assistant' -%}<<{{ ' ' + message['content'] + eos_token }}>>
{%- else -%}{{ raise_exception('Only user and assistant roles are supported!') }}
{%- endif -%}
{%- endfor -%}
""",
    "tools": """
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' and not message.content %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        <<{{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' }}{{ dict(name=call.function.name) | tojson(indent=1) }}
            {{- call.function.arguments | tojson(sort_keys=True) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}>>
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
}


def template(name: str, marked: bool = False) -> str:
    mark = (
        {"<<": "{% generation %}", ">>": "{% endgeneration %}"} if marked else {"<<": "", ">>": ""}
    )
    text = _TEMPLATES[name]
    for tag, jinja in mark.items():
        text = text.replace(tag, jinja)
    return text


NAMES = tuple(_TEMPLATES)
BASE = tuple(name for name in NAMES if name != "tools")


def message(role: str, content: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": role, **({} if content is None else {"content": content}), **more}


def chat(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """Turns of the user and the assistant, one after the other."""
    roles = ("user", "assistant")
    turns = [message(roles[i % 2], content) for i, content in enumerate(contents)]
    return turns if system is None else [message("system", system), *turns]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The weather <now> & "here"',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich", "b": 1}},
}
CONVERSATIONS = [
    chat("hi", "the fox"),
    chat("hi there", " the of\n\nto ", "and <b>?", "für 狐 \N{FOX FACE}"),
    chat("a", "b", "c", "d", "e"),
    chat("hi", "it is", "you", "that", system="in the of"),
]
WITH_TOOLS = [
    message("user", "how is it"),
    message("assistant", tool_calls=[CALL, CALL]),
    message("tool", '{"t": 3}', name="weather"),
    message("tool", ""),
    message("assistant", "it is 3"),
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": None, "pad_token": "<pad>"}
TAGS = (
    *("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"),
)


def tokenizer_folder(folder: Path, *, chat_template: Any = None, size: int = 400) -> Path:
    """Byte-level BPE with TAGS, as a folder that transformers reads too."""
    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(TAGS),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(sentences(20), trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, **SPECIAL}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_lines(file: Path, records: list[Any]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file
