"""lm-eval's requests as batches of an engine, which is a table of bigrams here."""

import importlib.util
import json
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers

from jaxspeed.cli.eval import config_of_folder
from jaxspeed.cli.main import main
from jaxspeed.config import load_config
from jaxspeed.data import ByteTokenizer
from jaxspeed.data.tokenizer import load_tokenizer
from jaxspeed.engine.logprobs import Logprobs
from jaxspeed.errors import ConfigError, DataError, ExitCode
from jaxspeed.generation import Generated
from jaxspeed.run.lm_eval_tasks import (
    IGNORED,
    Stopped,
    TaskRequests,
    generation_options,
    scores_of,
)

pytestmark = pytest.mark.fast

CONTEXT, MICRO, RANKS = 24, 4, 2
LOGPROBS = np.log(np.random.default_rng(0).dirichlet(np.ones(256), 256)).astype(np.float32)
TOP = LOGPROBS.argmax(-1)


class Bigrams:
    """An engine; it keeps the batches and the requests that it gets."""

    program = SimpleNamespace(batch=SimpleNamespace(train=8, accumulation=8 // MICRO), ranks=RANKS)
    config = SimpleNamespace(data=SimpleNamespace(seq_len=None))

    def __init__(self):
        self.batches, self.generated = [], []

    def logprobs(self, batch, is_top):
        tokens, targets = batch["tokens"], batch["targets"]
        self.batches.append(batch)
        counted = targets != IGNORED
        values = np.where(counted, LOGPROBS[tokens, targets], 0)
        top = np.where(counted, TOP[tokens] == targets, False) if is_top else None
        return Logprobs(values, None, top, None, counted, values.sum(-1))

    def generate(self, prompts, tokens, **options):
        self.generated.append((prompts, tokens, options))
        return [Generated("", (*b"a text. END", *ids[-1:]), "tokens") for ids in prompts]


def requests(stop=lambda: False, tokenizer=None, context=CONTEXT):
    engine = Bigrams()
    return engine, TaskRequests(engine, tokenizer or ByteTokenizer(), context, stop)


def answers(tasks, pairs):
    return tasks._loglikelihood_tokens([(None, *pair) for pair in pairs])


def written(tasks, prompts):
    return tasks.generate_until([SimpleNamespace(args=prompt) for prompt in prompts])


def expected(before, after):
    ids = [*before, *after]
    pairs = [(ids[i - 1], ids[i]) for i in range(len(before), len(ids))]
    total = sum(float(LOGPROBS[pair]) for pair in pairs)
    return pytest.approx(total, abs=1e-4), all(TOP[a] == b for a, b in pairs)


def after_top(ids, count):
    """The most likely tokens after these."""
    for _ in range(count):
        ids = [*ids, int(TOP[ids[-1]])]
    return ids[-count:]


def test_a_continuations_tokens_count_and_a_context_loses_its_first_ones():
    engine, tasks = requests()
    rng = np.random.default_rng(1)
    sizes = [(1, 1), (5, 3), (1, CONTEXT), (CONTEXT, 1), (CONTEXT, 2), (60, 7), (2, 9)]
    pairs = [[rng.integers(1, 256, size).tolist() for size in both] for both in sizes]
    assert answers(tasks, pairs) == [expected(*pair) for pair in pairs]
    rows = {tuple(row) for batch in engine.batches for row in batch["tokens"].tolist()}
    for before, after in pairs[-3:-1]:  # too long: the inputs are the last ones
        assert tuple([*before, *after][-CONTEXT - 1 : -1]) in rows


def test_a_continuation_is_greedy_if_each_of_its_tokens_is_the_most_likely():
    _, tasks = requests()
    before = [7, (int(TOP[7]) + 1) % 256]  # whose own tokens are not
    after = after_top(before, 4)
    wrong = [[*after[:i], (after[i] + 1) % 256, *after[i + 1 :]] for i in range(4)]
    scored = answers(tasks, [(before, x) for x in [after, *wrong, after[:1]]])
    assert [is_greedy for _, is_greedy in scored] == [True, *[False] * 4, True]


def test_rows_of_a_batch_are_alike_and_few_shapes_are_compiled():
    engine, tasks = requests(context=256)
    rng = np.random.default_rng(2)
    pairs = [(rng.integers(0, 9, n).tolist(), [1]) for n in [*rng.integers(1, 256, 90), 3, 250]]
    assert answers(tasks, pairs) == [expected(*pair) for pair in pairs]
    shapes = Counter(batch["tokens"].shape for batch in engine.batches)
    tokens = MICRO * 256  # of a batch in training, as long as the context
    lengths = Counter(max(16, 1 << (len(before) - 1).bit_length()) for before, _ in pairs)
    assert {length for _, length in shapes} == set(lengths) and len(shapes) == len(lengths)
    assert lengths[16] < 32 and lengths[256] > 8  # few of one, many of another
    for (rows, length), count in shapes.items():
        enough = next(2**i for i in range(1, 9) if 2**i >= lengths[length])
        assert (rows, count) == (min(tokens // length, enough), -(-lengths[length] // rows))
        assert rows % RANKS == 0


@pytest.mark.parametrize("pair", [([1], []), ([1], [2] * (CONTEXT + 1))])
def test_a_continuation_that_the_model_cannot_score_is_refused(pair):
    with pytest.raises(
        DataError, match=rf"continuations have {len(pair[1])} to .* allows 1 to {CONTEXT}"
    ):
        answers(requests()[1], [pair])


def test_a_text_ends_before_the_first_stop_string_and_a_prompt_loses_its_first_tokens():
    engine, tasks = requests()
    wanted = {"until": ["END", "t.", ""], "max_gen_toks": 10}
    asked = [("ab", wanted), ("x" * 50 + "yz", wanted), ("", {"until": "."}), ("ab", wanted)]
    with pytest.raises(ConfigError, match=r"max_gen_toks 256; .* context, 24"):
        written(tasks, asked)
    asked[2] = ("", {"max_gen_toks": 4})
    engine, tasks = requests()
    assert written(tasks, asked) == ["a tex", "a tex", "a text. END", "a tex"]
    (_, tokens, options), *_ = engine.generated
    assert tokens == 10
    prompts = [prompt for batch, *_ in engine.generated for prompt in batch]
    assert list(b"x" * 12 + b"yz") in prompts and [ByteTokenizer.end] in prompts
    assert options["stop"] == ["END", "t."] and options["temperature"] == 0
    assert options["stop_tokens"] == [ByteTokenizer.end] and options["context"] == CONTEXT
    seeds = [options["seed"] for *_, options in engine.generated]
    assert len(set(seeds)) == len(seeds)  # repeats of a prompt draw other tokens


@pytest.mark.parametrize(
    "wanted, options",
    [
        ({}, ([], 256, {"temperature": 0.0})),
        (
            {"until": "a", "max_tokens": 3, "max_new_tokens": 4, "temperature": 0.5, "top_p": 0.9},
            (["a"], 4, {"temperature": 0.5, "top_p": 0.9}),
        ),
        ({"do_sample": False, "temperature": 0.5, "top_k": 3}, ([], 256, {"temperature": 0.0})),
        (
            {"do_sample": True, "temperature": 1, "repetition_penalty": 1.2},
            ([], 256, {"temperature": 1.0, "repetition_penalty": 1.2}),
        ),
    ],
)
def test_generation_kwargs_are_read_as_lm_eval_reads_them(wanted, options):
    assert generation_options(wanted) == options


def test_other_generation_kwargs_are_ignored_with_a_warning(caplog):
    generation_options({"num_beams": 4, "until": []})
    assert caplog.messages == ["tasks: generation_kwargs that are ignored: num_beams"]


def test_special_tokens_are_added_unless_a_text_begins_with_the_first():
    words = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "?": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    tokenizer = load_tokenizer(made.to_str().encode())
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer.beside = {"tokenizer_config.json": json.dumps(names).encode()}
    _, tasks = requests(tokenizer=tokenizer)
    assert tasks.tok_encode("a b") == [0, 2, 3] and tasks.tok_encode("<s> a b") == [0, 2, 3]
    assert tasks.tok_encode("a b", False) == [2, 3]
    assert (tasks.prefix_token_id, tasks.eot_token_id) == (0, 1)


def test_a_run_that_is_to_stop_ends_between_two_batches():
    engine, tasks = requests(stop=lambda: len(engine.batches) == 2)
    with pytest.raises(Stopped):
        answers(tasks, [([1], [2] * n) for n in (1, 20, 1, 20) * 9])
    assert len(engine.batches) == 2


def test_scores_are_numbers_by_task_and_metric():
    metrics = {"alias": "a", "sample_len": 3, "acc,none": 0.5, "acc_stderr,none": "N/A"}
    filtered = {"exact_match,strict-match": 1}
    scores = {"t/acc": 0.5, "u/exact_match,strict-match": 1.0}
    assert scores_of({"t": metrics, "u": filtered}) == scores


def test_a_folder_of_a_model_or_an_adapter_is_evaluated_without_a_config(tmp_path):
    base, adapter, run = (tmp_path / name for name in ("base", "adapter", "run"))
    files = {base: "config.json", adapter: "adapter_config.json", run: "run.yaml"}
    for folder, file in files.items():
        folder.mkdir()
        (folder / file).write_text(
            json.dumps({"base_model_name_or_path": str(base), "peft_type": "LORA"})
        )
    configs = [load_config(config_of_folder(str(folder))) for folder in (base, adapter)]
    assert [config.model.pretrained for config in configs] == [str(base)] * 2
    assert configs[0].lora is None and configs[1].lora.adapter == str(adapter)
    assert [config.run.output for config in configs] == [str(base), str(adapter)]
    assert config_of_folder(str(run)) == str(run)  # by its own config


@pytest.mark.parametrize(
    "words, error",
    [
        (["--tasks", "arc_easy"], r'--tasks: needs lm_eval, .*pip install "jaxspeed\[eval\]"'),
        (["--tasks", "arc_easy", "--data", "a.txt"], "--tasks: .*without --data"),
        (["--tasks", ","], "--tasks: needs names"),
        (["--limit", "5"], "--limit, --num-fewshot: need --tasks"),
        (["--tasks", "a", "--limit", "0"], "--limit, .*a number of examples"),
        (["--tasks", "a", "--num-fewshot", "-1"], "--num-fewshot: .*a number of examples"),
    ],
)
def test_the_command_refuses_tasks_before_it_reads_the_config(words, error, monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "lm_eval" else real(name)
    )
    assert main(["eval", "no_config.yaml", *words]) == ExitCode.CONFIG
    assert re.search(error, capsys.readouterr().err)
