"""A run on conversations: what its loss counts, and a chat with its model."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.cli.main import main
from jaxspeed.errors import ConfigError
from jaxspeed.generation import Request
from jaxspeed.run import open_run, source_of
from jaxspeed.run.sampling import Chat, FinalSample
from tests.data.chat_examples import chat, write_lines

TALKS = [chat(f"{i} the of to", f"{'and in ' * (1 + i % 5)}{i}") for i in range(40)]
MODEL = {
    "family": "llama",
    "config": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 256,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The config of a run, its first batch, that batch's loss by plain logits, and its trainer.

    The loss is that of each conversation on its own, unpacked and unpadded.
    """
    folder = tmp_path_factory.mktemp("chats")
    file = write_lines(folder / "a.jsonl", [{"messages": talk} for talk in TALKS])
    config = {
        "model": MODEL,
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "data": {
            "source": "jsonl", "path": str(file), "chat_template": "chatml", "held_out": 0.2,
        },
        "run": {"steps": 6, "sample_tokens": 8, "output": str(folder / "run")},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    trainer = open_run(source_of(folder / "config.json"))
    module, batch = trainer.engine.module, trainer.corpus.train.batch(0, 8)
    total, weight = 0.0, 0
    for tokens, segments, mask in zip(batch["tokens"], batch["segment_ids"], batch["mask"]):
        for number in range(1, segments.max() + 1):
            at = segments == number
            ids, counts = jnp.asarray(tokens[at])[None], mask[at]
            logp = jax.nn.log_softmax(module(ids[:, :-1]))[0]
            losses = -jnp.take_along_axis(logp, ids[0, 1:, None], 1)[:, 0]
            total += float(losses @ counts[1:])
            weight += int(counts[1:].sum())
    trainer.run()
    yield folder / "config.json", (total / weight, weight), trainer
    trainer.close()


@pytest.mark.sampled
def test_the_loss_counts_the_trained_tokens_of_each_conversation_alone(run):
    config, (loss, weight), _ = run
    folder = config.parent / "run"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    steps = [record for record in records if "loss" in record]
    assert steps[0]["weight"] == weight
    np.testing.assert_allclose(steps[0]["loss"], loss, rtol=2e-5)
    assert steps[-1]["loss"] < steps[0]["loss"]
    evaluated = [record["eval_loss"] for record in records if "eval_loss" in record]
    assert evaluated and np.isfinite(evaluated).all()
    # The template is saved with the tokenizer, in the run and in its checkpoints.
    saved = [*folder.rglob("chat_template.jinja")]
    assert len(saved) >= 2 and all("im_start" in file.read_text() for file in saved)


@pytest.mark.sampled
def test_a_chat_is_the_text_that_follows_the_rendered_conversation(run):
    _, _, trainer = run
    engine, tokenizer = trainer.engine, trainer.corpus.tokenizer
    talk = Chat(engine, tokenizer, engine.config.data, "be", tokens=6, temperature=0.0)
    text = "<|im_start|>system\nbe<|im_end|>\n"
    for said in ("hi", "and"):
        text += f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
        options = {"temperature": 0.0, "tokenizer": tokenizer, "stop": ["<|im_end|>"]}
        (wanted,) = engine.generate([text], 6, **options)
        assert "".join(talk.reply(said)) == wanted.text
        text += f"{wanted.text}<|im_end|>\n"
    assert [each["role"] for each in talk.messages] == ["system", *["user", "assistant"] * 2]
    shown = FinalSample(engine, trainer.corpus).text()
    assert shown.startswith("<|im_start|>user\ndef <|im_end|>\n<|im_start|>assistant\n")

    (free,) = engine.generate([text], 6, **options)
    assert len(free.tokens) >= 3
    last = free.tokens[2]
    before = free.tokens[: free.tokens.index(last)]
    (ended,) = engine.generate([text], 6, stop_tokens=[last], **options)
    assert (ended.tokens, ended.ended_by) == (before, "end")
    with pytest.raises(ConfigError, match="stop_tokens"):
        Request(["a"], stop_tokens=["a"])


@pytest.mark.sampled
def test_a_run_on_prompts_and_completions_is_prompted_as_it_was_trained(tmp_path, capsys):
    """Without the template that there is, each message by itself."""
    lines = [{"prompt": f"{i} the of to", "completion": f" and in {i}"} for i in range(24)]
    file = write_lines(tmp_path / "a.jsonl", lines)
    config = {
        "model": MODEL,
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "data": {"source": "jsonl", "path": str(file), "seq_len": 32, "chat_template": "chatml"},
        "run": {"steps": 1, "sample_tokens": 4, "output": str(tmp_path / "run")},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    trainer = open_run(source_of(tmp_path / "config.json"))
    trainer.run()
    assert FinalSample(trainer.engine, trainer.corpus).text().startswith("def ")
    options = {"temperature": 0.0, "tokenizer": trainer.corpus.tokenizer}
    wanted = [each.text for each in trainer.engine.generate(["the of", "to"], 4, **options)]
    trainer.close()
    capsys.readouterr()
    asked = ["sample", str(tmp_path / "config.json"), "--tokens", "4", "--temperature", "0"]
    for text, answer in zip(["the of", "to"], wanted, strict=True):
        assert main([*asked, "--chat", text, "--json"]) == 0
        said = json.loads(capsys.readouterr().out)["messages"]
        assert [each["content"] for each in said] == [text, answer]
    assert main([*asked, "--chat", "a", "--system", "b"]) == 2
    assert "--system: this run was trained on prompts" in capsys.readouterr().err


@pytest.mark.sampled
def test_each_line_of_the_input_is_a_turn(run, monkeypatch, capsys):
    config, _, _ = run
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n\nyou\n"))
    assert main(["sample", str(config), "--chat", "--tokens", "2", "--json"]) == 0
    messages = json.loads(capsys.readouterr().out)["messages"]
    assert [each["content"] for each in messages[::2]] == ["hi", "you"]
    assert [each["role"] for each in messages] == ["user", "assistant"] * 2
    for words, problem in (
        (["--chat", "a", "--prompt", "b"], "--chat: set together with --prompt"),
        (["--system", "a"], "--system: only --chat"),
    ):
        assert main(["sample", str(config), *words]) == 2
        assert problem in capsys.readouterr().err
