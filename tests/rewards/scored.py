"""A folder with a reward model, an engine beside it, and completions to be scored."""

import numpy as np

import jaxspeed
from jaxspeed.rewards.scoring import RewardRow
from tests.interop import folders

PAD = 7
LENGTHS = [(3, 4), (3, 9), (5, 1), (5, 2), (1, 12), (1, 3), (2, 2), (2, 6), (8, 1), (8, 7)]


def reward_model(path):
    """The folder of one, whose padding ends some texts too."""
    tensors = folders.llama_tensors(seed=3)
    del tensors["lm_head.weight"]
    head = np.random.default_rng(4).normal(size=(1, folders.EMBED)).astype(np.float32)
    config = folders.LLAMA | {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "pad_token_id": PAD,
    }
    return folders.folder(path, config, {**tensors, "score.weight": head})


def engine_of(**more):
    sizes = {
        "hidden_size": folders.EMBED,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": folders.VOCAB,
    }
    config = {
        "model": {"family": "gpt2", "config": sizes},
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD"},
        **more,
    }
    return jaxspeed.initialize(config=config)


def rows_of(lengths=LENGTHS, **columns):
    """Two completions of each prompt, of these lengths."""
    rng = np.random.default_rng(1)
    rows = []
    for i, (prompt, completion) in enumerate(lengths):
        tokens = rng.integers(8, folders.VOCAB, prompt + completion).tolist()
        if i % 2:
            tokens[-1] = PAD
        of_prompt, of_completion = tuple(tokens[:prompt]), tuple(tokens[prompt:])
        record = {name: values[i // 2] for name, values in columns.items()}
        where = f"data, line {i // 2 + 1}"
        rows.append(RewardRow("", "", of_completion, of_prompt, record, where, i // 2))
    return rows
