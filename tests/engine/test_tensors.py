"""Batches of tensors of other libraries, from loaders like torch's, and of Grain."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed import BatchError
from tests.engine import tiny
from tests.support.tensors import DlpackTensor, Loader, Tensor, torch_tensor

BATCH = tiny.batch(24)


@pytest.fixture(scope="module")
def engine():
    return tiny.engine()


KINDS = {
    "tensors with __array__": lambda: Tensor,
    "tensors with DLPack": lambda: DlpackTensor,
    "torch": torch_tensor,
}


@pytest.mark.parametrize("name", KINDS)
def test_the_batches_of_a_loader_are_those_of_the_arrays(engine, name):
    tensor = KINDS[name]()
    batches = zip(Loader(BATCH, 8, tensor), Loader(BATCH, 8, np.asarray), strict=True)
    for batch, arrays in batches:
        assert float(engine.eval_batch(batch)["loss"]) == float(engine.eval_batch(arrays)["loss"])


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
