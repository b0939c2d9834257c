"""`jaxspeed data show`: documents with what the loss counts, and the sums of all."""

import json
import re

import pytest

from jaxspeed.cli.main import main
from tests.data import chat_examples
from tests.data.chat_examples import chat, write_lines

pytestmark = pytest.mark.fast
ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config with 21 conversations, and how it is changed."""
    monkeypatch.setenv("COLUMNS", "80")
    talks = [chat("the of", f"to {'and ' * i}") for i in range(20)]
    talks.insert(0, chat("a\x1b[31mb\u202ec", "ü\x07[bold]", "d", "e" * 100, system="be"))
    file = write_lines(tmp_path / "a.jsonl", [{"messages": talk} for talk in talks])
    folder = chat_examples.tokenizer_folder(tmp_path / "tokenizer")

    def write(**data):
        given = {"source": "jsonl", "path": str(file), "tokenizer": str(folder), "seq_len": 200}
        given |= {"chat_template": "chatml"} | data
        (tmp_path / "config.json").write_text(json.dumps({"data": given}))
        return str(tmp_path / "config.json")

    return write


PIECES = [
    ("<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\na\\x1b[31mb\\u202ec<|im_end|>\n"
     "<|im_start|>assistant\n", False),
    ("ü\\x07[bold]<|im_end|>\n", True),
    ("<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n", False),
    (f"{'e' * 100}<|im_end|>\n", True),
]  # fmt: skip


def test_a_pipe_gets_marks_and_no_control_characters(config, capsys):
    assert main(["data", "show", config(), "-n", "1"]) == 0
    shown = capsys.readouterr().out
    assert all(letter.isprintable() or letter == "\n" for letter in shown)
    assert max(map(len, shown.splitlines())) <= 80
    text = "".join(f"{{+{text}+}}" if trained else text for text, trained in PIECES)
    assert text.replace("\n", "") in shown.replace("\n", "")
    head, row = (line.split() for line in shown.splitlines() if "samples" in line or "21" in line)
    assert head == ["samples", "tokens", "trained", "longest", "truncated", "dropped"]
    assert row[-6:][0] == "21" and row[-2:] == ["0", "0"]


def test_a_terminal_gets_the_masked_part_dimmed(config, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(["data", "show", config(), "-n", "1"]) == 0
    shown = capsys.readouterr().out
    text = shown[shown.index("---\n") + 4 :]
    dimmed = "".join(re.findall(r"\x1b\[2m(.*?)\x1b\[0m", text))
    assert dimmed == "".join(text for text, trained in PIECES if not trained).replace("\n", "")
    assert "{+" not in shown
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["data", "show", config(), "-n", "1"]) == 0
    assert "{+" in ESCAPE.sub("", capsys.readouterr().out)


def test_json_has_the_text_itself_and_the_counts(config, capsys):
    path = config(seq_len=60, truncate="drop")
    assert main(["data", "show", path, "-n", "99", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"]["dropped"] == 1 and found["counts"]["samples"] == 20
    assert found["counts"]["longest"] > 61 and found["seq_len"] == 60
    first = found["samples"][0]
    assert first["pieces"][1] == {"text": "to <|im_end|>\n", "trained": True}
    assert 0 < first["trained"] < first["tokens"]
    for name in ("tokens", "trained"):
        assert found["counts"][name] == sum(sample[name] for sample in found["samples"])


def test_texts_are_shown_too_and_what_has_none_is_refused(config, capsys, tmp_path):
    (tmp_path / "a.txt").write_text("the of to")
    text = {"source": "text", "path": str(tmp_path / "a.txt"), "chat_template": None}
    assert main(["data", "show", config(**text), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "".join(piece["text"] for piece in found["samples"][0]["pieces"]) == "the of to</s>"
    assert found["counts"]["trained"] == found["counts"]["tokens"] - 1
    given = {"source": "synthetic", "path": None, "chat_template": None}
    assert main(["data", "show", config(**given)]) == 2
    assert "data show: source synthetic has no text" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["data", "show", config(), "-n", "-1"])


def test_both_sides_of_a_pair_are_shown_with_their_masks(tmp_path, capsys):
    records = [{"prompt": "a", "chosen": f"b{i}", "rejected": "c"} for i in range(2)]
    file = write_lines(tmp_path / "a.jsonl", [*records, records[0] | {"chosen": "c"}])
    config = {
        "data": {"source": "jsonl", "path": str(file), "seq_len": 20},
        "objective": {"type": "tests.data.preference_examples:Ranks"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["data", "show", str(tmp_path / "config.json")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "--- 1, chosen: 4 tokens, 3 trained --- a{+b0\\x00+} --- 1, rejected: 3 tokens, 2 trained",
        "--- 2, chosen: 4 tokens, 3 trained --- a{+b1\\x00+} --- 2, rejected",
        "2 pairs, 14 tokens, 10 trained, 1 dropped (1 with equal completions)",
        "at most 21 tokens (data.seq_len + 1)",
    ):
        assert part in shown
    assert main(["data", "show", str(tmp_path / "config.json"), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert [x["side"] for x in tree["samples"]] == ["chosen", "rejected"] * 2
    assert (tree["counts"]["pairs"], tree["counts"]["equal"]) == (2, 1)


def test_prompts_are_shown_with_their_columns(tmp_path, capsys):
    records = [{"prompt": f"a{i}", "answer": [i], "day": None} for i in range(3)]
    file = write_lines(tmp_path / "a.jsonl", [*records, {"prompt": "b" * 9}])
    config = {
        "data": {"source": "jsonl", "path": str(file), "seq_len": 8},
        "objective": {"type": "grpo", "rewards": "a:b", "max_completion_length": 4},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["data", "show", str(tmp_path / "config.json"), "-n", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    wanted = "--- 1: 2 tokens --- a0 answer: [0] day: null --- 2: 2 tokens --- a1 answer: [1]"
    assert shown.startswith(wanted) and "a2" not in shown
    assert "3 prompts, 6 tokens, 1 dropped (too long)" in shown
    assert shown.endswith("at most 8 tokens (data.seq_len)")
    assert main(["data", "show", str(tmp_path / "config.json"), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["samples"][1]["columns"] == {"answer": "[1]", "day": "null"}
    assert tree["counts"]["long"] == 1
    assert main(["data", "tokenize", str(tmp_path / "config.json"), str(tmp_path / "out")]) == 2
    assert "prompts are read with their columns" in capsys.readouterr().err
