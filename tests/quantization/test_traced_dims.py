"""A base is quantized along the dims that its products contract, which the traced loss has.

The model is that of `tests/train/test_quantized_base.py` with each weight [*outputs, *inputs].
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed import models
from jaxspeed.checkpoint import Checkpointer
from jaxspeed.config import load_config
from jaxspeed.engine.engine import Engine
from jaxspeed.placement.codec import PLAIN
from jaxspeed.train.build import build_program
from tests.models.test_stack import BATCHES
from tests.quantization import numpy_codes
from tests.support.covering import covering
from tests.train import test_quantized_base as base
from tests.train.test_quantized_base import HEADS, SIZE, WIDTH, batch, loss

DIMS = {"up": (1, 0), "down": (1, 0), "out": (2, 0, 1)}  # of the model, of a layer's natural ones
AXES = {
    "up": ["layers", "mlp", "embed"],
    "down": ["layers", "embed", "mlp"],
    "out": ["layers", "embed", "heads", "head_dim"],
    "scale": ["layers", "embed"],
}


def changed(params, dims):
    """A model's parameters with the dims of each layer's weights in another order."""

    def of_leaf(path, x):
        order = dims.get(path[-1].key.rpartition("/")[2], range(1))
        front = x.ndim - len(order)
        return x.transpose([*range(front), *(front + d for d in order)])

    return jax.tree.map_with_path(of_leaf, params)


def init(key):
    return changed(base.init(key, True), DIMS)


def apply(params, x):
    def block(x, p):
        y = x * p["scale"]
        heads = jnp.concatenate([y, y], -1).reshape(*y.shape[:-1], HEADS, SIZE)
        x = x + jnp.einsum("bhd,ehd->be", jnp.tanh(heads), p["out"])
        return x + jnp.tanh((x * p["scale"]) @ p["up"].T) @ p["down"].T, None

    x, _ = jax.lax.scan(block, x, params["layers"])
    return x @ params["head"]


def engine(pair, mesh=None, stage=3, axes=None, example=True, devices=None, **quantize):
    more = {"parallel": {"logical_axes": axes or {}}}
    quantize = {"weights": "nf4", **quantize}
    given = base.sections("stacked", stage, mesh, quantize=quantize) | more
    batches = batch() if example else None
    program = build_program(load_config(given), pair, loss, devices=devices, example_batch=batches)
    return Engine(program, program.init(3))


@pytest.fixture(scope="module")
def natural():
    """The same model with weights [*inputs, *outputs], on one device, after a step."""
    one = jax.devices()[:1]
    made = base.engine("stacked", 0, devices=one)
    codes = jax.device_get(made.state.params)
    made.train_batch(batch())
    return codes, jax.device_get(made.parameters)


MESHES = {"one": {}, "data": {}, "tensor": {"tensor": 2}, "pipe": {"pipe": 2}}


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", covering(list(MESHES), ["one", "tensor"]))
def test_codes_of_out_in_are_those_of_in_out(natural, mesh):
    """Also the scales of heads, the second level and the trained parameters."""
    devices = jax.devices()[:1] if mesh == "one" else None
    axes = {} if mesh == "one" else AXES  # one has no names at all
    made = engine((init, apply), MESHES[mesh], 0 if mesh == "one" else 3, axes, devices=devices)
    codes, after = natural
    for name, dims in DIMS.items():
        stored = jax.device_get(made.state.params[f"layers/{name}"])
        for part, expected in codes[f"layers/{name}"].items():
            own = (0, *(1 + d for d in dims))
            wanted = expected.transpose(own) if expected.ndim == len(own) else expected
            inside = stored[part][tuple(map(slice, wanted.shape))]
            np.testing.assert_array_equal(inside, wanted, f"{name} {part}")
    made.train_batch(batch())
    found = base.by_name(made.parameters)
    for path, x in base.by_name(changed(after, DIMS)).items():
        np.testing.assert_allclose(found[path], x, rtol=1e-5, atol=1e-5, err_msg=path)


@pytest.mark.full
def test_a_checkpoint_has_the_order_of_dims(tmp_path):
    made = engine((init, apply), axes=AXES)
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(made.program, made.state, tag="first")
    checkpoints.close()
    first = base.by_name(made.parameters)
    other = engine((init, apply), {"tensor": 2}, 1, AXES)
    found = Checkpointer(tmp_path).restore(other.program, tag="first")
    other.state = found.state
    assert not found.notes
    for path, x in base.by_name(other.parameters).items():
        np.testing.assert_array_equal(x, first[path], err_msg=path)


def experts_init(key):
    keys = jax.random.split(key, 5)
    draw = lambda key, *shape: jax.random.normal(key, shape) / 8  # noqa: E731
    return {
        "words": draw(keys[0], 16, WIDTH),
        "experts": {
            "up": draw(keys[1], 3, 96, WIDTH),  # [experts, out, in]
            "down": draw(keys[2], 3, 96, WIDTH),  # [experts, in, out]
        },
        "gains": draw(keys[3], 3, WIDTH),
        "head": draw(keys[4], WIDTH, 2),
    }


def experts_apply(params, x):
    x = x + params["words"][jnp.argmax(x, -1) % 16] + (x @ params["words"].T) @ params["words"]
    hidden = jnp.tanh(jnp.einsum("bd,emd->bem", x, params["experts"]["up"]))
    x = x + jnp.einsum("bem,emd->bd", hidden, params["experts"]["down"]) / 3
    x, _ = jax.lax.scan(lambda x, gain: (x * (1 + gain), None), x, params["gains"])
    return x @ params["head"]


@pytest.mark.default_cases("int8")
@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_stacks_of_experts_that_are_read_by_einsums(weights):
    """Of a model without names: each in its own direction; a table and gains are not quantized."""
    quantize = {"weights": weights} | ({"double": False} if weights == "nf4" else {})
    made = engine((experts_init, experts_apply), **quantize)
    encoded = {path for path, x in made.state.params.items() if isinstance(x, dict)}
    assert encoded == {"experts/up", "experts/down"}
    first = base.by_name(experts_init(jax.random.key(3)))
    for name in encoded:
        weight, found = first[name], base.by_name(made.parameters)[name]
        if name == "experts/down":
            weight, found = weight.swapaxes(1, 2), found.swapaxes(1, 2)
        for own, value in zip(weight, found, strict=True):
            if weights == "nf4":
                codes = numpy_codes.four_bit(own, weights, False)
                expected = numpy_codes.dequantized(codes, weights, own.shape[1])
            else:
                largest = np.abs(own).max(1, keepdims=True)
                codes = np.round(own * (np.float32(127) / largest))
                expected = codes * largest * np.float32(1 / 127)
            np.testing.assert_allclose(value, expected, rtol=0, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("name", covering(sorted(BATCHES.keys() - {"mlp"}), ["gpt2"]))
def test_families_have_the_codecs_of_their_names(name):
    built, found = models.build(name, "tiny"), []
    given = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "trainable": ["**/scale"],
        "model": {"quantize": {}},
    }
    for example in (None, BATCHES[name]):
        program = build_program(
            load_config(given), built.factory, built.loss,
            devices=jax.devices()[:1], example_batch=example,
        )  # fmt: skip
        rows = {row.path: row.param.codec for row in program.table if row.param}
        found.append({path: codec for path, codec in rows.items() if codec != PLAIN})
    assert found[0] == found[1] != {}
