"""Reward models: scores as transformers computes them, on every mesh, and what is refused."""

import numpy as np
import pytest
import tokenizers
from tokenizers.models import WordLevel

from jaxspeed.config.rollout_options import GrpoOptions
from jaxspeed.data.tokenizer import LibraryTokenizer
from jaxspeed.errors import ConfigError, DataError, RunError
from jaxspeed.rewards.scoring import Rewards, TrainerProgress
from tests.interop import folders
from tests.rewards.scored import PAD, engine_of, reward_model, rows_of

PROGRESS = TrainerProgress(0, 1, 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return reward_model(tmp_path_factory.mktemp("scores") / "a-reward-model")


def padded(rows):
    texts = [(*row.prompt_tokens, *row.tokens) for row in rows]
    longest = max(map(len, texts))
    return np.array([[*text, *[PAD] * (longest - len(text))] for text in texts])


MESHES = {
    "data": {},
    "stage 3, tensor, seq": {
        "mesh": {"data": 2, "tensor": 2, "seq": 2},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    },
}


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", MESHES)
def test_scores_are_those_of_transformers(references, folder, mesh):
    """Of the last token of prompt and completion that is not padding."""
    rows = rows_of()
    theirs = references.call("adapter_files.scores", folder=folder, tokens=padded(rows))[:, 0]
    assert theirs.std() > 0.1
    program = engine_of(**MESHES[mesh]).program
    options = GrpoOptions(rewards=[str(folder)])
    with Rewards(options, tokenizer=None, program=program) as rewards:
        table = rewards.score(rows, PROGRESS)
    assert table.names == ["a-reward-model"] and table.values.shape == (len(rows), 1)
    np.testing.assert_allclose(table.values[:, 0], theirs, atol=1e-5)


def test_scores_do_not_depend_on_other_rows_and_stand_beside_functions(folder):
    rows, program = rows_of(), engine_of().program
    paths = ["tests.rewards.functions:length", str(folder)]
    options = GrpoOptions(rewards=paths, reward_workers=1)
    with Rewards(options, tokenizer=None, program=program) as rewards:
        together = rewards.score(rows, PROGRESS)
        assert together.names == ["length", "a-reward-model"]
        np.testing.assert_array_equal(together.values[:, 0], 0)  # completions are empty
        alone = [rewards.score([row], PROGRESS).values[0] for row in rows[:3]]
        np.testing.assert_allclose(alone, together.values[:3], atol=1e-6)
        assert np.ptp(together.values[:, 1]) > 0.1
        (model,) = rewards.models
        assert len(model._compiled) == 1  # one bucket of lengths
        with pytest.raises(DataError, match=r"line 2: .* 70 tokens, and the reward model .* 64"):
            rewards.score(rows_of([(1, 1), (1, 1), (30, 40)]), PROGRESS)
        model._state.params["score/kernel"] *= np.nan
        with pytest.raises(RunError, match="reward a-reward-model, data, line 1: the score is not"):
            rewards.score(rows[:2], PROGRESS)


@pytest.mark.fast
def test_a_folder_without_one_score_is_refused_before_the_run(folder, tmp_path):
    options = GrpoOptions(rewards=[str(tmp_path)])
    with pytest.raises(ConfigError, match=r"objective.rewards: .* is neither a function .*config"):
        Rewards(options, tokenizer=None)
    folders.folder(tmp_path, folders.LLAMA, folders.llama_tensors())
    with pytest.raises(ConfigError, match="is no reward model, which scores sequences with one"):
        Rewards(options, tokenizer=None)


def test_another_tokenizer_is_refused(folder):
    ours, theirs = (
        tokenizers.Tokenizer(WordLevel({"a": 0, word: 1}, unk_token="a")).to_str().encode()
        for word in "bc"
    )
    (folder / "tokenizer.json").write_bytes(theirs)
    try:
        options = GrpoOptions(rewards=[str(folder)])
        rewards = Rewards(options, tokenizer=LibraryTokenizer(ours, "ours"))
        with pytest.raises(ConfigError, match=r"objective.rewards: .* has another tokenizer"):
            rewards.add_models(engine_of().program)
    finally:
        (folder / "tokenizer.json").unlink()
