"""Tokens and masks of preferences as TRL's trainers have them, whose rules they are."""

import json

import numpy as np
import pytest

from jaxspeed.data.model_limits import PairForm
from tests.data import chat_examples
from tests.data.chat_examples import CALL, TOOLS, chat, message, write_lines
from tests.data.corpora import opened

pytestmark = pytest.mark.fast
LONG = "the of to and in is it you that he was for on are the of to and"
TEXTS = [
    {"prompt": "the of ", "chosen": "to and in it", "rejected": "he was for on are the the of"},
    # Tokens merge across the boundary on one side, on both, in different ways.
    {"prompt": "it is th", "chosen": "at is on", "rejected": " no"},
    {"prompt": "it is th", "chosen": "at is on", "rejected": "e of"},
    {"prompt": "it is", "chosen": " you</s>", "rejected": " he"},
    {"prompt": "", "chosen": "you", "rejected": "he"},
    {"prompt": LONG, "chosen": " in", "rejected": " is"},
    {"prompt": "it is 狐", "chosen": " \N{FOX FACE} on", "rejected": "\n no"},
]
IMPLICIT = [
    {"chosen": "the of to and", "rejected": "the of in"},
    {"chosen": "the of to", "rejected": "the of to and"},
    {"chosen": "you that he", "rejected": "he"},
    {"chosen": "it is you", "rejected": "it are you"},
    {"chosen": "it is 狐", "rejected": "it is \N{FOX FACE}"},  # the space is a token
]
UNPAIRED = [
    {"prompt": "it is th", "completion": "at is on", "label": True},
    {"prompt": "it is", "completion": " no", "label": False},
    {"prompt": LONG, "completion": " in", "label": False},
    {"prompt": "the of", "completion": f" {LONG}", "label": True},
    {"prompt": "you", "completion": " that", "label": True},
]
TALKS = [
    {"prompt": chat("hi"), "chosen": chat("", "the fox")[1:], "rejected": chat("", "no")[1:]},
    {
        "prompt": chat("hi there", " the of\n\nto ", "and <b>?"),
        "chosen": chat("", "für 狐", "and", "in")[1:],  # later turns of the user belong to it
        "rejected": chat("", "it is")[1:],
    },
    # The prompt ends with the assistant.
    {"prompt": chat("a", "b"), "chosen": chat("c", "d"), "rejected": chat("c", "e")},
    {
        "prompt": chat("hi", system="in the of"),
        "chosen": chat("", "you")[1:],
        "rejected": chat("", "that")[1:],
    },
]
IMPLICIT_TALKS = [
    {"chosen": chat("hi", "the fox", "to", "and"), "rejected": chat("hi", "the fox", "to", "in")},
    {"chosen": chat("hi", "the fox"), "rejected": chat("hi", "no")},
]
WITH_TOOLS = [
    {
        "prompt": [message("user", "how is it")],
        "chosen": [message("assistant", "", tool_calls=[CALL])],
        "rejected": [message("assistant", "it is 3")],
        "tools": json.dumps(TOOLS),
    }
]
# By itself a prompt ends with an empty thought, which a conversation lacks.
THINKING = chat_examples.template("chatml").replace(
    "{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}"
)
DATED = "{%- set date_string = '1 Mar 2025' %}"
TEMPLATES = {name: DATED + chat_examples.template(name) for name in chat_examples.NAMES}
SYSTEMLESS = ("gemma", "mistral")


@pytest.fixture(scope="module")
def folder(references, tmp_path_factory):
    """Of a tokenizer, and of a model that TRL's trainers need."""
    made = chat_examples.tokenizer_folder(tmp_path_factory.mktemp("folder"))
    fields = {
        "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 400,
        "intermediate_size": 8,
    }  # fmt: skip
    references.call("families.save", case=("Llama", "LlamaForCausalLM", fields), folder=made)
    return made


def sequences(batch, whole=False):
    """Each pair's tokens, and unless they are read whole, its mask but for the first token's.

    Nothing predicts that token, so that whether it is of a completion is not to be seen.
    """
    found = []
    for row in range(len(batch["tokens"])):
        segments = batch["segment_ids"][row]
        sides = []
        for number in range(1, segments.max() + 1):
            at = np.flatnonzero(segments == number)
            assert batch["positions"][row][at].tolist() == [*range(len(at))]
            tokens, targets = batch["tokens"][row][at], batch["targets"][row][at]
            mask = batch["mask"][row][at]
            assert tokens[1:].tolist() == targets[: len(tokens) - 1].tolist()
            rest = tokens[1:] if whole else np.append(targets, mask)
            sides.append((int(tokens[0]), *rest.tolist()))
        found += [*zip(sides[::2], sides[1::2], strict=True)]
    return sorted(found)


def ours(folder, records, tmp_path, form, max_length=1024, template=None, **data):
    file = write_lines(tmp_path / "records.jsonl", records)
    section = {"source": "jsonl", "path": str(file), "tokenizer": str(folder), "held_out": 0.0}
    section |= {"chat_template": template} if template else {}
    corpus = opened(section | data, pairs=form, seq_len=max_length - 1, vocab_size=400)
    (batch,) = corpus.train.once(len(corpus.train))
    return batch


def theirs(references, folder, trainer, records, template=None, **options):
    """Of each pair that is left what `sequences` has of it."""
    pairs = references.call(
        "preferences.prepared",
        trainer=trainer,
        folder=folder,
        records=records,
        template=template,
        options=options,
    )
    return sorted(
        tuple(
            (*tokens, *(mask[1:] if trainer != "reward" else ())) for tokens, mask in pair["sides"]
        )
        for pair in pairs
    )


CASES = {
    "texts": (TEXTS, None, {}),
    "texts, truncated": (TEXTS, None, {"max_length": 12}),
    "texts, truncated at their start": (TEXTS, None, {"max_length": 6, "truncate": "start"}),
    "implicit prompts": (IMPLICIT, None, {}),
    "an empty thought": (TALKS, THINKING, {}),
    "tools": (WITH_TOOLS, TEMPLATES["tools"], {}),
    **{
        f"{name}{kind}": (records, template, options)
        for name, template in TEMPLATES.items()
        for kind, records, options in (
            ("", TALKS[: 3 if name in SYSTEMLESS else 4], {}),
            (", truncated", TALKS[:3], {"max_length": 60}),
            (", implicit prompts", IMPLICIT_TALKS, {}),
        )
    },
}


def test_pairs_are_theirs(references, folder, tmp_path):
    form = PairForm("preference")
    for name, (records, template, options) in CASES.items():
        found = sequences(ours(folder, records, tmp_path, form, template=template, **options))
        if options.pop("truncate", None):
            options["truncation_mode"] = "keep_end"
        expected = theirs(references, folder, "dpo", records, template, **options)
        assert expected, name
        assert found == expected, name


@pytest.mark.sampled
def test_completions_with_a_label_are_theirs(references, folder, tmp_path):
    """With the mismatched completions, also of pairs that are divided."""
    for records in (UNPAIRED, TEXTS):
        for max_length in (1024, 12):
            form = PairForm("unpaired", kl_block=len(records) * (1 + ("chosen" in records[0])))
            batch = ours(folder, records, tmp_path, form, max_length)
            expected = theirs(references, folder, "kto", records, max_length=max_length)
            assert sequences(batch) == expected


@pytest.mark.sampled
@pytest.mark.parametrize("max_length", [1024, 40, 12])
def test_sequences_of_reward_models_are_theirs(references, folder, tmp_path, max_length):
    """Those that are too long are left out."""
    form = PairForm("preference", reads_ends=True)
    cases = [(TEXTS, None), (IMPLICIT, None), (TALKS, TEMPLATES["chatml"])]
    for records, template in cases[: 3 if max_length > 12 else 2]:
        expected = theirs(references, folder, "reward", records, template, max_length=max_length)
        assert expected
        batch = ours(folder, records, tmp_path, form, max_length, template)
        assert sequences(batch, whole=True) == expected
