"""transformers' processors of images, with Pillow."""

from typing import Any

import tokenizers
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel
from transformers.image_utils import load_image


def pixel_values(kind: str, settings: dict[str, Any], files: list[str]) -> list[torch.Tensor]:
    """[channels, height, width] of each file, loaded and processed as theirs."""
    processor = getattr(transformers, f"{kind}Pil")(**settings)
    return [processor(load_image(file), return_tensors="pt")["pixel_values"][0] for file in files]


def patches(settings: dict[str, Any], files: list[str]) -> list[list[torch.Tensor]]:
    """(patches, grid) of each file, of images of any size."""
    processor = transformers.Qwen2VLImageProcessorPil(**settings)
    done = [processor(load_image(file), return_tensors="pt") for file in files]
    return [[each["pixel_values"], each["image_grid_thw"]] for each in done]


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}MARKER{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_processor(
    names: list[str],
    settings: dict[str, Any],
    fields: dict[str, Any],
    special: dict[str, str],
    folder: str,
) -> None:
    """A folder with a tokenizer of bytes and a processor.

    `names` are its class and that of the processor of images, `special` the tokens of images: the
    first is what the chat template writes.
    """
    vocab = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    ends = ["<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([*special.values(), *ends])
    template = TEMPLATE.replace("MARKER", next(iter(special.values())))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=ends[1], chat_template=template,
        extra_special_tokens=special,
    )  # fmt: skip
    processor, images = (getattr(transformers, name) for name in names)
    processor(images(**settings), fast, chat_template=template, **fields).save_pretrained(folder)
    fast.save_pretrained(folder)


def tokens(folder: str, messages: list[list[dict[str, Any]]]) -> list[list[int]]:
    """The ids of each conversation."""
    processor = transformers.AutoProcessor.from_pretrained(folder, backend="pil")
    return [
        processor.apply_chat_template(each, tokenize=True, return_dict=True)["input_ids"][0]
        for each in messages
    ]
