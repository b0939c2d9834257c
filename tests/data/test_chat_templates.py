"""Chat templates: the text and the masks that transformers gives; which template is found."""

import datetime
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspeed.config import Config
from jaxspeed.data import ByteTokenizer, read_tokenizer
from jaxspeed.data.chat_formats import Conversation, read_record
from jaxspeed.data.chat_masks import ChatEncoder, mask_of, text_and_spans
from jaxspeed.data.chat_template import (
    BUILT_IN,
    end_of_turn,
    find_template,
    special_tokens,
)
from jaxspeed.errors import DataError
from tests.data import chat_examples
from tests.data.chat_examples import chat, message

pytestmark = pytest.mark.fast
NOW = datetime.datetime(2025, 3, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_examples.tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


def encoder_of(tokenizer, **data):
    return ChatEncoder(tokenizer, Config(data=data).data)


def encoded(tokenizer, record, kind="messages", **data):
    """The ids and the mask of a record."""
    encoder = encoder_of(tokenizer, **data)
    (found,) = encoder.encode([encoder.render(read_record(record, kind), kind)])
    assert not isinstance(found, str), found
    return found.ids, found.trained


def trained_texts(tokenizer, ids, trained):
    """The text of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], trained.astype(int), [0]])))
    return [tokenizer.spell(ids[a:b]) for a, b in edges.reshape(-1, 2)]


# -- as transformers ------------------------------------------------------------------------------


def test_text_tokens_and_masks_are_those_of_transformers(references, folder):
    """Also without marks: by prefixes, where the template writes each turn once."""
    cases = [
        {"messages": messages, "template": chat_examples.template(name, marked), "marked": marked}
        | ({"tools": tools} if tools else {})
        for name in chat_examples.NAMES
        for marked in (True, False)
        for messages, tools in [
            *((each, None) for each in chat_examples.CONVERSATIONS),
            *([(chat_examples.WITH_TOOLS, chat_examples.TOOLS)] if name == "tools" else []),
        ]
    ]
    theirs = references.call("chats.rendered", folder=folder, cases=cases, now=NOW.isoformat())
    tokenizer = read_tokenizer(folder)
    masks, refused = {}, 0
    for case, wanted in zip(cases, theirs):
        source, tools = case["template"], case.get("tools")
        template = find_template(tokenizer, source, {}, NOW)
        if "error" in wanted:
            with pytest.raises(DataError) as error:
                template.render(case["messages"], tools)
            assert str(error.value).endswith(f"raises: {wanted['error']}")
            refused += 1
            continue
        assert template.render(case["messages"], tools).text == wanted["text"]
        prompt = template.render(case["messages"][:1], tools, add_generation_prompt=True)
        assert prompt.text == wanted["prompt"]
        text, spans = text_and_spans(
            template, Conversation(case["messages"], tools=tools), "assistant"
        )
        (found,) = tokenizer.encode_with_offsets([text])
        assert found.ids.tolist() == wanted["ids"]
        mask = mask_of(found.offsets, spans).astype(int).tolist()
        key = source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
        key = key, json.dumps(case["messages"])
        if case["marked"]:
            assert mask == wanted["mask"] and 0 < sum(mask) < len(mask)
            masks[key] = mask
        else:
            assert mask == masks.pop(key)
    assert not masks and refused == 4  # system messages of Gemma and of Mistral


def test_templates_of_a_folder_are_those_of_transformers(references, tmp_path):
    """`chat_template` as a string, as named ones, and as a file, which comes first."""
    named = [
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
        {"name": "tool_use", "template": "{{ tools | length }}{{ eos_token }}"},
    ]
    tools = chat_examples.TOOLS
    for number, (own, file) in enumerate(
        [
            (named[0]["template"], None),
            (named, None),
            (named[1]["template"], "file {{ pad_token }}"),
        ]
    ):
        folder = chat_examples.tokenizer_folder(tmp_path / str(number), chat_template=own)
        if file:
            (folder / "chat_template.jinja").write_text(file)
        cases = [{"messages": chat("hi"), "template": None}]
        cases += [cases[0] | {"tools": tools}]
        theirs = references.call("chats.rendered", folder=folder, cases=cases, now=NOW.isoformat())
        template = find_template(read_tokenizer(folder), None, {})
        ours = [template.render(chat("hi"), given).text for given in (None, tools)]
        assert ours == [each["text"] for each in theirs]


# -- without transformers -------------------------------------------------------------------------

TALK = chat("hi", " yes ", "so", "no", system="be")
BUILT_IN_TEXTS = {
    "chatml": (
        "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        "[ yes <|im_end|>\n]<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n[no<|im_end|>\n]"
    ),
    "qwen": (
        "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        "[ yes <|im_end|>\n]<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n[no<|im_end|>\n]"
    ),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nbe<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[yes<|eot_id|>]"
        "<|start_header_id|>user<|end_header_id|>\n\nso<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[no<|eot_id|>]"
    ),
    "gemma": (
        "<s><start_of_turn>user\nbe\n\nhi<end_of_turn>\n<start_of_turn>model\n[yes<end_of_turn>\n]"
        "<start_of_turn>user\nso<end_of_turn>\n<start_of_turn>model\n[no<end_of_turn>\n]"
    ),
    "mistral": "<s>[INST] be\n\nhi[/INST][ yes</s>][INST] so[/INST][ no</s>]",
    "alpaca": (
        "be\n\n### Instruction:\nhi\n\n### Response:\n[ yes </s>]\n\n### Instruction:\nso\n\n"
        "### Response:\n[no</s>]"
    ),
}


def test_each_built_in_template_has_its_text_and_mask(folder):
    assert BUILT_IN.keys() == BUILT_IN_TEXTS.keys()
    tokenizer = read_tokenizer(folder)
    for name, wanted in BUILT_IN_TEXTS.items():
        tags = {"[INST]": "(INST)", "[/INST]": "(/INST)"}  # here [ ] is what is trained
        for tag, other in tags.items():
            wanted = wanted.replace(tag, other)
        trained = [part.partition("]")[0] for part in wanted.split("[")[1:]]
        text = wanted.replace("[", "").replace("]", "")
        for tag, other in tags.items():
            text = text.replace(other, tag)
        ids, mask = encoded(tokenizer, {"messages": TALK}, chat_template=name)
        assert tokenizer.spell(ids) == text, name
        assert trained_texts(tokenizer, ids, mask) == trained, name
        assert (tokenizer.spell(ids).count("<s>") == 1) == text.startswith("<s>")


def test_qwen_writes_tools_and_calls_as_the_model_reads_them(folder):
    template = find_template(read_tokenizer(folder), "qwen", {})
    talk = [message("user", "hi"), message("assistant", tool_calls=[chat_examples.CALL])]
    talk += [message("tool", "a"), message("tool", "b"), message("assistant", "c")]
    text = template.render(talk, chat_examples.TOOLS, add_generation_prompt=True).text
    head, _, rest = text.partition("<|im_end|>\n")
    assert head.startswith("<|im_start|>system\n# Tools\n\nYou may call one or more functions")
    with_system = template.render([message("system", "be"), *talk], chat_examples.TOOLS).text
    assert with_system.startswith("<|im_start|>system\nbe\n\n# Tools\n\n")
    assert template.render(talk[:1]).text == "<|im_start|>user\nhi<|im_end|>\n"
    schema = json.dumps(chat_examples.TOOLS[0], ensure_ascii=False)
    assert f"<tools>\n{schema}\n</tools>" in head
    assert rest == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Zürich", "b": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("marked", [True, False])
def test_the_last_turn_alone_and_everything(folder, marked):
    tokenizer, source = read_tokenizer(folder), chat_examples.template("tools", marked)
    calls = [message("user", "one"), message("assistant", "two"), *chat_examples.WITH_TOOLS]
    for train_on, wanted in {
        "assistant": ["two<|im_end|>\n", "<tool_call>", "it is 3<|im_end|>\n"],
        "last_turn": ["<tool_call>", "it is 3<|im_end|>\n"],
    }.items():
        record = {"messages": calls, "tools": chat_examples.TOOLS}
        ids, mask = encoded(tokenizer, record, chat_template=source, train_on=train_on)
        found = trained_texts(tokenizer, ids, mask)
        assert len(found) == len(wanted)
        assert all(text.startswith(begin) for text, begin in zip(found, wanted))
    record = {"messages": TALK[1:]}
    _, mask = encoded(tokenizer, record, chat_template=source, train_on="everything")
    assert mask.all()
    given = {"prompt": TALK[1:4], "completion": TALK[4:]}  # what the prompt says is not trained on
    ids, mask = encoded(tokenizer, given, "prompt_completion", chat_template=source)
    assert trained_texts(tokenizer, ids, mask) == ["no<|im_end|>\n"]


def test_a_template_that_changes_earlier_turns_is_refused_unless_it_marks_them(folder):
    """As Qwen3's, which leaves reasoning out of all turns but the last."""
    tokenizer = read_tokenizer(folder)
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "<<{% if loop.last %}<think>{% endif %}{{ m.content }}<|im_end|>\n>>{% else %}"
        "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    plain = source.replace("<<", "").replace(">>", "")
    record = {"messages": TALK[1:]}
    with pytest.raises(DataError, match=r"otherwise once later messages follow.*last_turn"):
        encoded(tokenizer, record, chat_template=plain)
    ids, mask = encoded(tokenizer, record, chat_template=plain, train_on="last_turn")
    assert trained_texts(tokenizer, ids, mask) == ["<think>no<|im_end|>\n"]
    marked = source.replace("<<", "{% generation %}").replace(">>", "{% endgeneration %}")
    ids, mask = encoded(tokenizer, record, chat_template=marked)
    assert trained_texts(tokenizer, ids, mask) == [" yes <|im_end|>\n", "<think>no<|im_end|>\n"]


def test_a_turn_ends_with_what_the_template_writes_after_a_message(folder):
    """A special token, which no decoded text shows, or else a text; and the tokenizer's end."""
    tokenizer = read_tokenizer(folder)
    ids = {tag: int(tokenizer.encode(tag)[0]) for tag in chat_examples.TAGS}
    for name, tag in {
        "chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "mistral": "</s>",
    }.items():  # fmt: skip
        template = find_template(tokenizer, name, {})
        assert end_of_turn(template, tokenizer) == ([ids[tag], ids["</s>"]], [])
    spelled = find_template(ByteTokenizer(), "chatml", {})
    assert end_of_turn(spelled, ByteTokenizer()) == ([0], ["<|im_end|>"])
    later = "{{ messages[1].content }}\n<|im_end|>"
    assert end_of_turn(find_template(tokenizer, later, {}), tokenizer)[0][0] == ids["<|im_end|>"]


def test_reasoning_is_there_under_each_name(folder):
    template = find_template(read_tokenizer(folder), "{{ messages[0].reasoning_content }}", {})
    for name in ("reasoning_content", "thinking", "reasoning"):
        assert template.render([message("assistant", "a", **{name: "why"})]).text == "why"


def test_the_date_of_data_is_fixed_and_of_a_chat_todays(folder):
    tokenizer, source = read_tokenizer(folder), "{{ strftime_now('%Y-%m-%d') }}"
    assert find_template(tokenizer, source, {}).render(chat("a")).text == "2024-07-26"
    today = find_template(tokenizer, source, {}, today=None).render(chat("a")).text
    assert abs(datetime.date.fromisoformat(today) - datetime.date.today()).days <= 1


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ dict.__class__ }}{{ dict.mro() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ (messages | map(attribute='__class__') | first)() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(folder, source):
    template = find_template(read_tokenizer(folder), source, {})
    with pytest.raises(DataError, match=r"the chat template \(in data.chat_template\) raises: "):
        template.render(chat("a"))


@pytest.mark.parametrize(
    ("named", "match"),
    [
        (None, r"the tokenizer bytes has no default; name one of chatml, llama3"),
        ("chatlm", 'neither a template.s name .*did you mean "chatml"'),
        ("no/such.jinja", "nor the path of a file"),
        ("{% if %}", "in data.chat_template.* is no valid Jinja: line 1"),
    ],
)
def test_a_template_that_is_missing_or_no_jinja_is_one_error(named, match):
    with pytest.raises(DataError, match=match):
        find_template(ByteTokenizer(), named, {})


def test_a_file_and_a_tokenizers_own_names_are_found(folder, tmp_path):
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}{{ extra }}")
    template = find_template(ByteTokenizer(), str(tmp_path / "mine.jinja"), {"extra": 1})
    assert template.render(chat("a")).text == "a1"
    named = [{"name": name, "template": name} for name in ("default", "tool_use", "rag")]
    own = read_tokenizer(chat_examples.tokenizer_folder(tmp_path / "own", chat_template=named))
    assert find_template(own, "rag", {}).render(chat("a")).text == "rag"
    tokens = special_tokens(own)
    assert tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    assert special_tokens(ByteTokenizer()) == {"eos_token": "\0"}


# -- masks of tokens ------------------------------------------------------------------------------

TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0<>|"), min_size=1, max_size=12
)


@given(st.lists(TEXTS, min_size=2, max_size=7), st.booleans(), st.sampled_from(["bytes", "folder"]))
def test_the_mask_is_exactly_what_the_assistant_says_and_its_end(folder, texts, has_system, kind):
    tokenizer = ByteTokenizer() if kind == "bytes" else read_tokenizer(folder)
    talk = chat(*texts, system="of the" if has_system else None)
    ids, mask = encoded(tokenizer, {"messages": talk}, chat_template="chatml")
    said = [each["content"] for each in talk if each["role"] == "assistant"]
    assert trained_texts(tokenizer, ids, mask) == [f"{text}<|im_end|>\n" for text in said]
    start = len(tokenizer.encode(f"<|im_start|>{talk[0]['role']}\n"))
    assert not mask[:start].any()


@given(st.text(max_size=20), st.data())
def test_a_token_counts_if_it_has_a_character_of_a_span(text, data):
    """Against the definition, for tokens of each byte."""
    edges = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    spans = list(zip(edges[::2], edges[1::2]))
    (found,) = ByteTokenizer().encode_with_offsets([text])
    inside = {i for start, end in spans for i in range(start, end)}
    wanted = [i in inside for i, letter in enumerate(text) for _ in _bytes(letter)]
    assert mask_of(found.offsets, spans).tolist() == wanted


def _bytes(letter):
    return letter.encode("utf-8", errors="surrogatepass")


def test_offsets_of_a_trained_bpe_are_those_of_its_parts(monkeypatch):
    """A long text is encoded in parts, whose offsets are those in all of it."""
    from jaxspeed.data import BPETokenizer, tokenizer
    from tests.data.corpora import sentences

    made = BPETokenizer.train(sentences(20), 300)
    monkeypatch.setattr(tokenizer, "PART", 20)
    text = "the of für und the  is\nit 狐 that"
    (found,) = made.encode_with_offsets([text])
    assert found.ids.tolist() == made.encode(text).tolist()
    covered = [text[a:b] for a, b in found.offsets]
    assert [made.spell([i]) for i, part in zip(found.ids, covered) if part.isascii()] == [
        part for part in covered if part.isascii()
    ]
    (empty,) = made.encode_with_offsets([""])
    assert empty.ids.shape == (0,) and empty.offsets.shape == (0, 2)
