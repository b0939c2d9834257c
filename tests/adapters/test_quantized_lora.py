"""LoRA on a quantized base (QLoRA) equals the plain loop on the base's values."""

import itertools
import math

import jax
import numpy as np
import pytest

from tests.adapters.lora_loop import adapted_cases, split_of, train_plainly
from tests.quantization import numpy_codes
from tests.support.covering import covering

CASES = adapted_cases()
STEPS = 10
WEIGHTS = ("nf4", "fp4", "int8")
ALL = list(itertools.product(("gpt2", "llama", "experts"), WEIGHTS, range(4), (1, 2), (1, 2)))
COVERING = [
    ("llama", "nf4", 3, 2, 1),
    ("experts", "nf4", 3, 1, 1),
    ("gpt2", "int8", 1, 1, 2),
]


@pytest.mark.sampled
@pytest.mark.parametrize("name, weights, stage, tensor, pipe", covering(ALL, COVERING))
def test_qlora_equals_a_plain_loop_on_the_values(name, weights, stage, tensor, pipe):
    case = CASES[name]
    engine = case.engine(stage, tensor, pipe, model={"quantize": {"weights": weights}})
    base, adapters = split_of(engine.parameters)
    encoded = {path for path, x in engine.state.params.items() if isinstance(x, dict)}
    assert {path.removeprefix("lora/").rpartition("/")[0] for path in adapters} <= encoded
    batches = case.batches(STEPS)
    losses = [engine.train_batch(batch)["loss"] for batch in batches]
    expected, own = train_plainly(case, {**base, **adapters}, batches, 1.5)
    np.testing.assert_allclose(np.array(losses), expected, rtol=1e-5, atol=1e-5)
    after, trained = split_of(engine.parameters)
    for path, value in after.items():
        np.testing.assert_array_equal(value, base[path], err_msg=path)
    for path, value in trained.items():
        np.testing.assert_allclose(value, own[path], rtol=1e-5, atol=1e-5, err_msg=path)


def test_experts_are_quantized_and_cost_their_codes():
    """Each expert's matrix by itself, and the state's bytes are those of codes and adapters."""
    case = CASES["experts"]
    plain = case.engine(3)
    made = case.engine(3, model={"quantize": {"weights": "nf4", "double": False}})
    up = split_of(plain.parameters)[0]["blocks/up"]
    value = np.asarray(made.parameters["blocks/up"])
    for at in np.ndindex(*up.shape[:2]):
        codes = numpy_codes.four_bit(up[at].T, "nf4", False)
        expected = numpy_codes.dequantized(codes, "nf4", up.shape[2])
        np.testing.assert_array_equal(value[at].T, expected)
    trained = {path for path in made.state.params if path.startswith("lora/")}
    moments = made.program.layout.flat(made.state.opt)
    shapes = [x.shape for x in moments.values() if x.ndim]
    sizes = sum(math.prod(made.state.params[path].shape) for path in trained)
    assert sum(map(math.prod, shapes)) == 2 * sizes, "moments are those of the adapters"
    stored = made.state.params["blocks/up"]
    codes = stored["codes"][..., : up.shape[-1]]  # without the padding of shards
    assert codes.nbytes * 8 == up.nbytes, "half a byte each"
    assert not any(x.shape == up.shape and x.dtype == np.float32 for x in live_arrays(made))


def live_arrays(made):
    return jax.tree.leaves((made.state.params, made.state.master, made.state.opt))
