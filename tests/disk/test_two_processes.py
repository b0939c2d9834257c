"""Two processes, each with a file of its own: the numbers of one, and a checkpoint of both."""

import numpy as np
import pytest

from tests.disk.disk_models import engine, program
from tests.disk.two_processes import CONFIG, STEPS, steps
from tests.support.processes import start


@pytest.mark.sampled
def test_two_processes_train_as_one_and_resume(tmp_path):
    group = start(tmp_path / "out", 2, "tests.disk.two_processes", tmp_path)
    codes = group.codes()
    assert codes == [0, 0], "\n".join(group.said(rank)[-3000:] for rank in (0, 1))
    assert all("resumed bitwise" in group.said(rank) for rank in (0, 1))
    assert not [*(tmp_path / "disk").iterdir()]
    one = engine(program("nvme", tmp_path / "one", **CONFIG))
    steps(one, 0, STEPS)
    with np.load(tmp_path / "params.npz") as theirs:
        for path, x in one.state.params.items():
            np.testing.assert_allclose(
                np.asarray(x, np.float32), theirs[path], atol=1e-2, rtol=1e-2
            )
