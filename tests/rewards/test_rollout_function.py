"""A function that samples in place of the model: its form, and what is refused."""

import sys
from types import ModuleType

import numpy as np
import pytest

from jaxspeed.config.rollout_options import GrpoOptions
from jaxspeed.errors import ConfigError, ModelError
from jaxspeed.rewards.rollout_function import RolloutFunction, RolloutTrainer
from jaxspeed.rewards.scoring import TrainerProgress

pytestmark = pytest.mark.fast

TRAINER = RolloutTrainer(
    "engine", "tokenizer", GrpoOptions(rewards=["a:b"]), TrainerProgress(1, 2, 0.5)
)
WHERE = ["line 1", "line 1", "line 2"]
PROMPTS = ["a", "a", [{"role": "user", "content": "b"}]]


@pytest.fixture
def rows_of(monkeypatch):
    """The rows that come of what a function returns."""
    module = ModuleType("a_module")
    monkeypatch.setitem(sys.modules, "a_module", module)

    def rows(result):
        def function(prompts, trainer):
            assert (trainer.args.num_generations, trainer.engine) == (8, "engine")
            assert prompts == PROMPTS
            prompts[2][0]["content"] = "changed"  # of a copy
            return result() if callable(result) else result

        module.function = function
        rollout = RolloutFunction("a_module:function", most=3, context=6, vocab_size=10)
        return rollout(PROMPTS, WHERE, TRAINER)

    return rows


def result_of(**changes):
    result = {
        "prompt_ids": [[1, 2], np.array([3]), [4, 5, 6]],
        "completion_ids": [[7], [8, 9, 0], [1, 2]],
        "logprobs": [[-1.0], np.array([-0.5, np.nan, -0.25]), [-2, None]],
        "env_mask": [[1], [1, 0, 1], [1, 0]],
        "turns": [1, 2, 3],
        "source": "a server",
        **changes,
    }
    return {name: x for name, x in result.items() if x is not ...}


def test_a_row_has_its_tokens_mask_and_columns(rows_of):
    rows = rows_of(result_of())
    assert [row.prompt_tokens for row in rows] == [(1, 2), (3,), (4, 5, 6)]
    assert [row.tokens for row in rows] == [(7,), (8, 9, 0), (1, 2)]
    assert [row.is_model.tolist() for row in rows] == [[True], [True, False, True], [True, False]]
    np.testing.assert_array_equal(rows[1].logprobs, np.float32([-0.5, np.nan, -0.25]))
    assert [row.columns for row in rows] == [{"turns": i, "source": "a server"} for i in (1, 2, 3)]
    assert PROMPTS[2][0]["content"] == "b"


def test_log_probabilities_and_the_mask_may_be_left_out(rows_of):
    for rows in (rows_of(result_of(logprobs=..., env_mask=...)), rows_of(result_of(logprobs=None))):
        assert all(row.logprobs is None and len(row.is_model) == len(row.tokens) for row in rows)
    assert all(row.is_model.all() for row in rows_of(result_of(env_mask=None, logprobs=None)))


REFUSED = {
    "a list": ([1], "returned list, and not a dict"),
    "a key": (result_of(completion_ids=...), "returned no completion_ids"),
    "a name": (result_of(prompts=PROMPTS), "returned prompts, which rewards get anyway"),
    "rows": (result_of(completion_ids=[[1]]), "completion_ids of 1 rows for 3 prompts"),
    "a column": (result_of(turns=[1]), "turns of 1 rows for 3 prompts"),
    "no rows": (result_of(env_mask=1), "env_mask that is no list"),
    "no prompt": (result_of(prompt_ids=[[1], [], [1]]), "line 1: prompt_ids is empty"),
    "tokens": (
        result_of(completion_ids=[[7], [8, 9, 0], "ab"]),
        "line 2: completion_ids has to be a list of token ids",
    ),
    "a token": (
        result_of(completion_ids=[[10], [8, 9, 0], [1, 2]]),
        "line 1: completion_ids has 10, which is not in the vocabulary of 10",
    ),
    "a long one": (
        result_of(completion_ids=[[7], [8, 9, 0, 1], [1, 2]]),
        "line 1: a completion of 4 tokens, which is more than objective.max_completion_length: 3",
    ),
    "the context": (
        result_of(prompt_ids=[[1, 2], [3], [4, 5, 6, 7, 8]]),
        r"line 2: 5 \+ 2 tokens, and the model reads 6",
    ),
    "log-probabilities": (
        result_of(logprobs=[[-1.0], [-1.0], [-1, -1]]),
        "line 1: logprobs has 1 numbers for 3 tokens",
    ),
    "numbers": (
        result_of(logprobs=[["x"], [-1.0] * 3, [-1, -1]]),
        "line 1: logprobs has to be a list of numbers",
    ),
    "nan": (
        result_of(logprobs=[[np.nan], [-1.0] * 3, [-1, -1]]),
        "line 1: logprobs are not finite at the model's tokens",
    ),
    "a mask": (
        result_of(env_mask=[[1], [1, 0, 2], [1, 0]]),
        "line 1: env_mask has other values than 0 and 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_not_the_form_is_refused_by_name(case, rows_of):
    result, why = REFUSED[case]
    with pytest.raises(ConfigError, match=f"objective.rollout: a_module:function.*{why}"):
        rows_of(result)


def test_what_the_function_raises_names_its_line(rows_of):
    def fail():
        raise KeyError("a server")

    with pytest.raises(ModelError, match=r"raised KeyError \(test_rollout_function\.py, line "):
        rows_of(fail)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("a_name", "is no import path package.module:name"),
        ("absent_module:f", "cannot be imported: No module named"),
        ("sys:path", "is not callable"),
    ],
)
def test_a_function_that_is_not_there_is_an_error_before_the_run(path, why):
    with pytest.raises(ConfigError, match=f"objective.rollout: {path} {why}"):
        RolloutFunction(path, most=3, context=None, vocab_size=None)
