"""Rewards in two processes, each of which calls functions for its own groups."""

import json
import re

import numpy as np
import pytest

from tests.rewards.process import LIMIT
from tests.rewards.scored import reward_model
from tests.support import processes

pytestmark = pytest.mark.sampled


def said(group, rank, what):
    line = re.search(rf"^{what}: (.*)$", group.said(rank), re.MULTILINE)
    assert line, group.said(rank)[-3000:]
    return line[1]


@pytest.mark.parametrize("errors", ["drop", "error"])
def test_a_reward_that_sleeps_for_ever_on_one_process_counts_alike_on_all(tmp_path, errors):
    folder = reward_model(tmp_path / "a-reward-model")
    group = processes.start(tmp_path, 2, "tests.rewards.process", folder, errors)
    assert group.codes(200) == [0, 0], group.said(0)[-2000:] + group.said(1)[-2000:]
    first, second = (json.loads(said(group, rank, "outcome")) for rank in (0, 1))
    assert json.dumps(first) == json.dumps(second)  # nan is not equal to itself
    assert (folder / f"sleeping-{errors}").exists()
    for rank in (0, 1):
        assert LIMIT <= float(said(group, rank, "took")) < LIMIT + 2
    line = f"reward sleeps, data, line 4: took more than {LIMIT:g} s (objective.reward_timeout)"
    if errors == "error":
        assert first["error"].startswith(f"RunError: {line}. With objective.reward_error")
        return
    assert first["failures"] == [line]
    values = np.array(first["values"])
    nan = np.nan
    np.testing.assert_array_equal(values[:, 0], [1, 1, 1, 1, 1, 1, nan, nan, 1, 1])
    np.testing.assert_array_equal(values[:, 1], 0)
    assert np.isfinite(values[:, 2]).all() and values[:, 2].std() > 0.1
    assert "took more than" in group.said(0).replace(said(group, 0, "outcome"), "")  # a warning
    assert "took more than" not in group.said(1).replace(said(group, 1, "outcome"), "")
    # What process 0's function has sampled counts, and a failure on one process is one on all.
    assert said(group, 0, "rollout") == said(group, 1, "rollout")
    assert said(group, 1, "rollout").count("tokens=(1,)") == 4  # of prompts and completions
    assert "ValueError (process.py, line" in said(group, 0, "failed")
    assert said(group, 0, "failed").startswith("PeerError: process 1, objective.rollout")
    assert said(group, 1, "failed").startswith("ModelError: objective.rollout")
