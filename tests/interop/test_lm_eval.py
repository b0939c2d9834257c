"""lm-eval's tasks on a Hugging Face folder: answers and scores are those of its own `hf` model."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from jaxspeed.data.tokenizer import read_tokenizer
from jaxspeed.run import source_of
from jaxspeed.run.lm_eval_tasks import TaskRequests, scores_of

pytestmark = pytest.mark.sampled

CONTEXT = 64
TEXT = "the cat sat on mat dog ran in park what is yes no maybe one two three"
WORDS = TEXT.split()
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": CONTEXT, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 1, "initializer_range": 0.3,
}  # fmt: skip
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
"""
CHOICE = """
output_type: multiple_choice
doc_to_text: "question: {{question}} answer:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
UNTIL = {"until": ["e"], "max_gen_toks": 12, "do_sample": False}
TEXTS = f"""
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {json.dumps(UNTIL)}
metric_list: [{{metric: exact_match}}, {{metric: bleu}}]
"""
PAIRS = [
    ["the cat", " sat on the mat"],
    ["", "the dog"],
    ["what is the answer? ", "yes"],
    ["the dog " * 40, "ran in the park"],
    ["<s>the cat", " sat"],
]
FEW = ("--limit", "5", "--num-fewshot", "2")
ROLLING = ["the cat sat on the mat. " * 12, "the dog"]
PROMPTS = [
    ["the dog", {"until": ["e", "a"], "max_gen_toks": 10}],
    ["the cat " * 30, {"until": "t", "max_gen_toks": 20}],
    ["one", {"max_gen_toks": 16, "until": []}],
]


def words(rng, most):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))


def tokenizer(folder):
    """Byte-pairs, a `<s>` before each text, and the files that transformers reads."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    trained.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(vocab_size=320, **options))
    trained.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    trained.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    classed = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | classed))
    return trained.get_vocab_size()


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, references):
    """(a config of the folder, the tasks' files, what lm-eval's own model answered)."""
    folder = tmp_path_factory.mktemp("lm_eval")
    model = folder / "model"
    model.mkdir()
    case = ("Llama", "LlamaForCausalLM", SIZES | {"vocab_size": tokenizer(model)})
    references.interpreter("lm_eval")  # or the tests are skipped, by its name
    references.call("families.save", case=case, folder=model)
    rng = random.Random(0)
    questions = [words(rng, 50) for _ in range(12)]
    texts = references.call(
        "lm_eval_scores.texts", folder=model, prompts=[[text, UNTIL] for text in questions]
    )
    answers = [text if i % 3 else "another" for i, text in enumerate(texts)]
    write(
        folder / "texts", TEXTS, [{"question": q, "answer": a} for q, a in zip(questions, answers)]
    )
    choices = [[words(rng, 6) for _ in range(4)] for _ in range(24)]
    labelled = [
        {"question": words(rng, 40), "choices": x, "label": rng.randrange(4)} for x in choices
    ]
    write(folder / "choice", CHOICE, labelled)
    tasks = [str(folder / "choice.yaml"), str(folder / "texts.yaml")]
    reference = references.call(
        "lm_eval_scores.recorded", folder=model, pairs=PAIRS, rolling=ROLLING, tasks=tasks
    )
    config = {
        "model": {"pretrained": str(model)},
        "train_batch_size": 8,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "data": {"source": "synthetic"},
        "run": {"compilation_cache": False, "devices": "cpu:8", "output": str(folder / "run")},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json", tasks, reference


def write(path, task, records):
    data = path.with_suffix(".jsonl")
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    path.with_suffix(".yaml").write_text(TASK.format(name=path.name, data=data) + task)


def test_answers_and_scores_are_those_of_lm_evals_own_model(evaluated, references):
    config, tasks, reference = evaluated
    source = source_of(config)
    folder = source.config.model.pretrained
    requests = TaskRequests(source.engine(), read_tokenizer(folder), CONTEXT, lambda: False)
    assert reference["context"] == CONTEXT
    scored = reference["scored"]
    for texts, before, after, *_ in scored:
        if texts and texts[0]:  # as TemplateLM splits them
            assert requests.tok_encode(texts[0].rstrip()) == before
            assert requests.tok_encode("".join(texts))[len(before) :] == after
    assert len({len(before) + len(after) > CONTEXT + 1 for _, before, after, *_ in scored}) == 2

    answers = requests._loglikelihood_tokens([request[:3] for request in scored])
    assert [value for value, _ in answers] == pytest.approx([x[3] for x in scored], abs=1e-4)
    assert [is_greedy for _, is_greedy in answers] == [x[4] for x in scored]
    assert answers[0][1] and not answers[1][1]

    written = reference["written"]
    texts = requests.generate_until([SimpleNamespace(args=x[:2]) for x in written])
    assert texts == [answer for _, _, answer in written]

    replayed = references.call(
        "lm_eval_scores.replayed",
        scored=[[x[0], *answer] for x, answer in zip(scored, answers) if x[0]],
        written=[[*x[:2], text] for x, text in zip(written, texts)],
        tasks=tasks,
    )
    assert replayed == reference["results"]
    assert 0 < replayed["choice"]["acc,none"] < 1
    assert replayed["texts"]["exact_match,none"] == pytest.approx(8 / 12)


def test_other_prompts_are_continued_as_by_lm_evals_own_model(evaluated, references):
    config, _, _ = evaluated
    source = source_of(config)
    folder = source.config.model.pretrained
    requests = TaskRequests(source.engine(), read_tokenizer(folder), CONTEXT, lambda: False)
    texts = references.call("lm_eval_scores.texts", folder=folder, prompts=PROMPTS)
    assert requests.generate_until([SimpleNamespace(args=x) for x in PROMPTS]) == texts


@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm_eval is not installed here: pip install 'jaxspeed[eval]'",
)
@pytest.mark.parametrize(("flags", "options"), [((), {}), (FEW, {"limit": 5, "num_fewshot": 2})])
def test_the_command_prints_those_scores(flags, options, evaluated, references, tmp_path):
    config, tasks, reference = evaluated
    model = config.with_name("model")
    words = ["eval", model, "--tasks", ",".join(tasks), "--json", *flags]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "jaxspeed", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    results = reference["results"]
    if options:
        results = references.call("lm_eval_scores.own", folder=model, tasks=tasks, **options)
    expected = scores_of(results)
    assert len(expected) == 8
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
