"""A bad batch gives one error of our own, with the place in the batch and the numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspeed import BatchError, ModelError
from tests.engine import tiny
from tests.engine.tiny import Listed

GOOD = tiny.batch()


@pytest.fixture(scope="module")
def engine():
    return tiny.engine()


class Quacks:
    """Has what an array has, and is none (as another framework's tensor)."""

    shape, dtype, ndim = (8, 8), np.dtype("float32"), 2


def deleted():
    x = jnp.array(GOOD["x"])
    x.delete()
    return x


NO_ARRAYS = {
    "nothing": ({}, "holds no arrays"),
    "None": (None, "holds no arrays"),
    "text": ("text", "batch is a str"),
    "a number": (1.0, "batch is a float"),
    "an iterator": (iter([GOOD]), "batch is a list_iterator"),
    "bytes": ({**GOOD, "x": b"abc"}, r"batch\['x'\] is a bytes"),
    "lists": ({**GOOD, "x": GOOD["x"].tolist()}, r"batch\['x'\]\[0\]\[0\] is a float"),
    "another's tensor": ({**GOOD, "x": Quacks()}, "Quacks; it must be a NumPy or JAX array"),
    "shapes": ({**GOOD, "x": jax.ShapeDtypeStruct((8, 8), "float32")}, "ShapeDtypeStruct"),
    "words": ({**GOOD, "x": np.array(["a"] * 8)}, "dtype <U1"),
    "objects": ({**GOOD, "x": np.array([None] * 8)}, "dtype object"),
    "dates": ({**GOOD, "x": np.zeros(8, "M8[s]")}, "dtype datetime64"),
    "durations": ({**GOOD, "x": np.zeros(8, "m8[s]")}, "dtype timedelta64"),
    "records": ({**GOOD, "x": np.zeros(8, [("a", float)])}, r"batch\['x'\] has dtype"),
    "keys of two kinds": ({1: GOOD["x"], "y": GOOD["y"]}, "no tree of arrays"),
    "a deleted array": ({**GOOD, "x": deleted()}, r"batch\['x'\] has been deleted"),
}


@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
@pytest.mark.parametrize("case", NO_ARRAYS)
def test_what_is_no_array_is_named_with_its_place(engine, call, case):
    batch, message = NO_ARRAYS[case]
    with pytest.raises(BatchError, match=message):
        getattr(engine, call)(batch)


@pytest.mark.parametrize("call", ["train_batch", "check", "compiled", "diagnose"])
@pytest.mark.parametrize("samples", [0, 6, 16])
def test_the_error_of_a_wrong_batch_size_has_the_equation(engine, call, samples):
    message = rf"batch\['x'\] has {samples} samples.*8 = 1 per rank x 1 micro-batches x 8 data"
    with pytest.raises(BatchError, match=message):
        getattr(engine, call)(tiny.batch(samples))


@pytest.mark.parametrize(("samples", "would_do"), [(0, "8"), (6, "8"), (12, "8 or 16")])
def test_the_error_of_an_indivisible_evaluation_batch_names_sizes_that_work(
    engine, samples, would_do
):
    with pytest.raises(BatchError, match=f"{samples} samples, .* evenly; {would_do} would do"):
        engine.eval_batch(tiny.batch(samples))


def test_arrays_of_unequal_length_are_named(engine):
    ragged = {"x": GOOD["x"], "y": GOOD["y"][:4]}
    with pytest.raises(BatchError, match=r"batch\['y'\] has 4 samples"):
        engine.train_batch(ragged)
    with pytest.raises(BatchError, match=r"batch\['x'\] 8, batch\['y'\] 4"):
        engine.eval_batch(ragged)


NOT_THE_MODELS = {
    "a feature too few": ({**GOOD, "x": GOOD["x"][:, :5]}, r"\['x'\] float32\[8, 5\]"),
    "None where an array is read": ({**GOOD, "x": None}, r"\['x'\] None"),
    "an entry too few": ({"x": GOOD["x"]}, "KeyError.*'y'"),
    "an array where a dict is read": (GOOD["x"], "string indexing"),
    "a scalar where a matrix is read": ({**GOOD, "x": np.float32(1)}, r"\['x'\] float32\[\]"),
}


@pytest.mark.parametrize("call", ["train_batch", "eval_batch", "check", "compiled", "diagnose"])
@pytest.mark.parametrize("case", NOT_THE_MODELS)
def test_a_batch_that_the_model_cannot_read_is_shown_beside_the_models_error(engine, call, case):
    batch, message = NOT_THE_MODELS[case]
    with pytest.raises(ModelError, match=message) as told:
        getattr(engine, call)(batch)
    assert told.value.__cause__ is not None
    assert "tiny.py, line" in str(told.value)


def test_a_module_is_no_batch(engine):
    with pytest.raises(BatchError):
        engine.train_batch({"x": Listed(nnx.Rngs(0))})


def test_the_engine_trains_on_after_a_bad_batch(engine):
    with pytest.raises(BatchError):
        engine.train_batch(tiny.batch(6))
    with pytest.raises(ModelError):
        engine.train_batch({**GOOD, "x": None})
    assert np.isfinite(engine.train_batch(GOOD)["loss"])
