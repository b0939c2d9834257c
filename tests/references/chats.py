"""Chat templates by transformers."""

import datetime
from typing import Any

from transformers import AutoTokenizer
from transformers.utils import chat_template_utils


def rendered(folder: str, cases: list[dict[str, Any]], now: str) -> list[dict[str, Any]]:
    """Of each case, with `messages`, `template` and perhaps `tools`: text, ids and mask."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromisoformat(now)

    chat_template_utils.datetime = Clock
    return [_rendered(tokenizer, **case) for case in cases]


def _rendered(
    tokenizer: Any, messages: list[Any], template: str | None, marked: bool = False, **given: Any
) -> dict[str, Any]:
    form = {"chat_template": template, **given}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **form)
    except Exception as error:
        return {"error": str(error)}
    found = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=marked, **form
    )
    prompt = tokenizer.apply_chat_template(
        messages[:1], tokenize=False, add_generation_prompt=True, **form
    )
    mask = found["assistant_masks"] if marked else None
    return {"text": text, "ids": list(found["input_ids"]), "mask": mask, "prompt": prompt}
