"""Batches of tensors of other libraries, from loaders like torch's, and of Grain."""

import subprocess
import sys
from importlib.util import find_spec

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed import BatchError
from tests.engine import tiny
from tests.support.documents import ROOT
from tests.support.tensors import DlpackTensor, Loader, Tensor

BATCH = tiny.batch(24)


@pytest.fixture(scope="module")
def engine():
    return tiny.engine()


KINDS = {
    "tensors with __array__": lambda: Tensor,
    "tensors with DLPack": lambda: DlpackTensor,
}


@pytest.mark.parametrize("name", KINDS)
def test_the_batches_of_a_loader_are_those_of_the_arrays(engine, name):
    tensor = KINDS[name]()
    batches = zip(Loader(BATCH, 8, tensor), Loader(BATCH, 8, np.asarray), strict=True)
    for batch, arrays in batches:
        assert float(engine.eval_batch(batch)["loss"]) == float(engine.eval_batch(arrays)["loss"])


# In a process of its own: none of the suite's imports torch.
WITH_TORCH = """
import numpy as np
import torch
from torch.utils.data import DataLoader
from tests.engine import tiny

engine, arrays = tiny.engine(), tiny.batch(24)
rows = [{name: x[i] for name, x in arrays.items()} for i in range(24)]
starts = range(0, 24, 8)
for start, batch in zip(starts, DataLoader(rows, batch_size=8), strict=True):
    assert all(isinstance(x, torch.Tensor) for x in batch.values())
    same = {name: x[start : start + 8] for name, x in arrays.items()}
    found, wanted = engine.eval_batch(batch), engine.eval_batch(same)
    assert float(found["loss"]) == float(wanted["loss"])
"""


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_the_batches_of_torchs_loader_are_those_of_the_arrays():
    subprocess.run([sys.executable, "-c", WITH_TORCH], check=True, cwd=ROOT)


def test_a_step_and_its_check_take_tensors(engine):
    batch = {name: Tensor(x[:8]) for name, x in BATCH.items()}
    assert engine.check(batch).ok
    expected = float(engine.eval_batch({name: x[:8] for name, x in BATCH.items()})["loss"])
    assert float(engine.train_batch(batch)["loss"]) == pytest.approx(expected, rel=1e-6)


def test_bfloat16_comes_through_dlpack(engine):
    x = jnp.asarray(BATCH["x"][:8], jnp.bfloat16)
    rest = {name: value[:8] for name, value in BATCH.items() if name != "x"}
    losses = [float(engine.eval_batch({**rest, "x": y})["loss"]) for y in (x, DlpackTensor(x))]
    assert losses[0] == losses[1]


def test_grains_batches_are_taken_as_they_are(engine):
    import grain

    rows = [dict(zip(BATCH, row)) for row in zip(*BATCH.values())]
    loader = grain.MapDataset.source(rows).shuffle(seed=0).batch(8).to_iter_dataset()
    losses = [float(engine.train_batch(batch)["loss"]) for batch in loader]
    assert len(losses) == 3 and np.isfinite(losses).all()


class Elsewhere(Tensor):
    def __array__(self, *args, **kwargs):
        raise RuntimeError("it requires grad")


def test_a_tensor_that_cannot_be_read_is_named(engine):
    batch = {name: x[:8] for name, x in BATCH.items()}
    with pytest.raises(BatchError, match=r"batch\['x'\] is a .*Elsewhere .*: it requires grad"):
        engine.train_batch({**batch, "x": Elsewhere(batch["x"])})
    with pytest.raises(BatchError, match=r"batch\['x'\] has dtype object"):
        engine.train_batch({**batch, "x": Tensor([None] * 8)})
