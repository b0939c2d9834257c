"""One run in 1, 2 and 4 processes of 8 simulated devices in all: the same losses, by any way of
dividing it; and a checkpoint of some is continued by others."""

import json

import jax
import numpy as np
import pytest

import jaxspeed
from tests.run.parity_process import KINDS, STEPS, config_of
from tests.support import processes
from tests.train.cases import CASES


def by_processes(folder, kind, count, steps):
    """What process 0 prints; the others have the same losses."""
    words = (kind, folder / "checkpoints", steps)
    group = processes.start(folder, count, "tests.run.parity_process", *words)
    codes = group.codes(400)
    assert codes == [0] * count, "\n".join(group.said(rank)[-3000:] for rank in range(count))
    said = [json.loads(group.said(rank).splitlines()[-1]) for rank in range(count)]
    assert all(one == said[0] for one in said)
    return said[0]


def by_one(kind, steps):
    """The losses of this process with all 8 devices."""
    case = CASES["gpt2"]
    engine = jaxspeed.initialize(case.model, case.loss, config_of(kind), case.optimizer("adam"))
    return [float(engine.train_batch(batch)["loss"]) for batch in case.batches(2, steps=steps)]


# By default test_real_runs.py has the losses, tests/checkpoint what 1 and 2 processes save.
@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_processes_have_the_losses_of_one_and_continue_each_others_checkpoints(tmp_path, kind):
    assert jax.device_count() == 8
    expected = by_one(kind, STEPS + 2)
    first = by_processes(tmp_path, kind, 2, STEPS)
    then = by_processes(tmp_path, kind, 4, 2)
    assert (first["from"], then["from"], then["step"]) == (None, f"step-{STEPS:08}", STEPS)
    found = first["losses"] + then["losses"]
    print(kind, np.max(np.abs(np.divide(found, expected) - 1)))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    case = CASES["gpt2"]
    engine = jaxspeed.initialize(case.model, case.loss, config_of(kind), case.optimizer("adam"))
    assert engine.load_checkpoint(tmp_path / "checkpoints")[0] == f"step-{STEPS + 2:08}"
