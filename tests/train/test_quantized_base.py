"""Training on a frozen base in 4 or 8 bits: norms and the head, as plain JAX on its values.

The reference dequantizes once, by NumPy (`tests/quantization/numpy_codes.py`), on one device.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspeed
from jaxspeed.config import load_config
from jaxspeed.engine.engine import Engine
from jaxspeed.errors import ConfigError
from jaxspeed.placement.paths import flat_with_paths
from jaxspeed.train.build import build_program
from tests.quantization import numpy_codes
from tests.support.covering import covering

LAYERS, WIDTH, HIDDEN, HEADS, SIZE = 4, 64, 192, 4, 32
STEPS, LR, MOMENTUM = 3, 0.05, 0.9
NORMS = ["scale", "head"]
QUANTIZED = {"up": 1, "down": 1, "out": 2}  # by name, the number of input dims


def init(key: jax.Array, stacked: bool) -> Any:
    keys = jax.random.split(key, 4)
    draw = lambda key, *shape, fan: jax.random.normal(key, (LAYERS, *shape)) / fan**0.5  # noqa: E731
    layers = {
        "up": draw(keys[0], WIDTH, HIDDEN, fan=WIDTH),
        "down": draw(keys[1], HIDDEN, WIDTH, fan=HIDDEN),
        "out": draw(keys[2], HEADS, SIZE, WIDTH, fan=2 * WIDTH),
        "scale": jnp.ones((LAYERS, WIDTH)),
    }
    listed = [jax.tree.map(lambda x, i=i: x[i], layers) for i in range(LAYERS)]
    head = jax.random.normal(keys[3], (WIDTH, 2)) / WIDTH**0.5
    return {"layers": layers if stacked else listed, "head": head}


@jaxspeed.unit
def block(p: Any, x: jax.Array) -> jax.Array:
    y = x * p["scale"]
    heads = jnp.concatenate([y, y], -1).reshape(*y.shape[:-1], HEADS, SIZE)
    x = x + jnp.einsum("bhd,hde->be", jnp.tanh(heads), p["out"])
    return x + jnp.tanh((x * p["scale"]) @ p["up"]) @ p["down"]


def listed(params: Any, x: jax.Array) -> jax.Array:
    for layer in params["layers"]:
        x = block(layer, x)
    return x @ params["head"]


def stacked(params: Any, x: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, params["layers"])
    return x @ params["head"]


FORMS = {"listed": listed, "stacked": stacked}


def loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    error = jnp.square(model(batch["x"]) - batch["y"])
    return error.sum(), jnp.asarray(error.size, error.dtype)


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(16, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, :2])}


def sections(
    form: str,
    stage: int = 3,
    mesh: Any = None,
    offload: str = "",
    quantize: Any = None,
    **more: Any,
) -> Any:
    front = [] if form == "listed" else ["layers"]
    names = {
        "up": [*front, "embed", "mlp"],
        "down": [*front, "mlp", "embed"],
        "out": [*front, "heads", "head_dim", "embed"],
        "scale": [*front, "embed"],
    }
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    zero |= {f"offload_{kind}": {"device": "cpu"} for kind in offload.split()}
    return {
        "train_batch_size": 16,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": MOMENTUM}},
        "zero_optimization": zero,
        "mesh": mesh or {},
        "parallel": {"logical_axes": names, **more.pop("parallel", {})},
        "trainable": NORMS,
        "model": {"quantize": quantize or {"weights": "nf4"}},
        **more,
    }


def engine(form: str, *args: Any, devices: Any = None, plain: bool = False, **more: Any) -> Engine:
    pair = (partial(init, stacked=form != "listed"), FORMS[form])
    given = sections(form, *args, **more)
    if plain:
        del given["model"]
    program = build_program(load_config(given), pair, loss, devices=devices)
    return Engine(program, program.init(3))


def dequantized(x: jax.Array, name: str, quantize: dict[str, Any]) -> jax.Array:
    """A weight of one layer as it is quantized, by NumPy."""
    ins = int(np.prod(x.shape[: QUANTIZED[name]]))
    matrix = np.asarray(x).reshape(ins, -1).T
    values = quantize["weights"]
    if values == "int8":
        largest = np.abs(matrix).max(1, keepdims=True)
        value = np.round(matrix * (np.float32(127) / largest)) * largest / np.float32(127)
    else:
        found = numpy_codes.four_bit(matrix, values, quantize.get("double", True))
        value = numpy_codes.dequantized(found, values, ins)
    return jnp.asarray(value.T.reshape(x.shape), x.dtype)


def plain(form: str, quantize: dict[str, Any] | None) -> Any:
    """The parameters before and after the steps, by plain JAX."""
    params = init(jax.random.key(3), form != "listed")

    def rounded(path: Any, x: jax.Array) -> jax.Array:
        name = path[-1].key
        if name not in QUANTIZED or quantize is None:
            return x
        if form == "listed":
            return dequantized(x, name, quantize)
        return jnp.stack([dequantized(layer, name, quantize) for layer in x])

    params = jax.tree.map_with_path(rounded, params)
    first, moments = params, jax.tree.map(jnp.zeros_like, params)
    for step in range(STEPS):
        given = batch(step)
        mean = lambda p: (lambda s, w: s / w)(*loss(partial(FORMS[form], p), given))  # noqa: E731,B023
        grads = jax.grad(mean)(params)
        moments = jax.tree.map(lambda m, g: MOMENTUM * m + g, moments, grads)
        params = jax.tree.map_with_path(
            lambda path, p, m: p if path[-1].key in QUANTIZED else p - LR * m, params, moments
        )
    return by_name(first), by_name(params)


def by_name(params: Any) -> dict[str, np.ndarray]:
    return {path: np.asarray(x) for path, x in flat_with_paths(params).items()}


def trained(made: Engine) -> dict[str, np.ndarray]:
    for step in range(STEPS):
        made.train_batch(batch(step))
    return by_name(made.parameters)


def is_base(path: str) -> bool:
    return path.endswith(tuple(QUANTIZED))


MESHES = {
    "data": {},
    "tensor": {"tensor": 2},
    "pipe": {"pipe": 2},
    "both": {"tensor": 2, "pipe": 2},
}
GRID = [
    (form, stage, mesh, weights, offload)
    for form in FORMS
    for stage in (0, 1, 2, 3)
    for mesh in MESHES
    for weights in ("nf4", "fp4", "int8")
    for offload in ("", "optimizer", "optimizer param")
    if stage == 3 or "param" not in offload
]
FEW = [
    ("stacked", 3, "tensor", "nf4", ""),
    ("listed", 3, "data", "int8", ""),
    ("stacked", 1, "both", "nf4", ""),
    ("listed", 3, "pipe", "fp4", ""),
    ("stacked", 3, "data", "nf4", "optimizer param"),
]


@pytest.mark.default_cases("stacked-3-tensor-nf4-")
@pytest.mark.parametrize(("form", "stage", "mesh", "weights", "offload"), covering(GRID, FEW))
def test_training_is_that_of_plain_jax_on_the_values(form, stage, mesh, weights, offload):
    quantize = {"weights": weights}
    more = {"gradient_accumulation_steps": 2} if "pipe" in MESHES[mesh] else {}
    made = engine(form, stage, MESHES[mesh], offload, quantize, **more)
    first, last = plain(form, quantize)
    for path, x in by_name(made.parameters).items():
        np.testing.assert_allclose(x, first[path], rtol=0, atol=1e-6, err_msg=path)
    for path, stored in made.state.params.items():
        assert isinstance(stored, dict) == is_base(path), path
    assert not any(is_base(path) for path in made.state.master)
    found = trained(made)
    for path in first:
        np.testing.assert_allclose(found[path], last[path], rtol=0, atol=1e-5, err_msg=path)
    exact = plain(form, None)[1]
    assert any(np.abs(exact[p] - last[p]).max() > 1e-3 for p in first), "rounding is visible"


CODES = [
    (form, stage, mesh, weights)
    for form in FORMS
    for stage in (0, 3)
    for mesh in MESHES
    for weights in ("nf4", "int8")
]
FEW_CODES = [
    ("stacked", 3, "tensor", "nf4"),
    ("listed", 3, "data", "nf4"),
    ("stacked", 0, "pipe", "nf4"),
    ("stacked", 3, "data", "int8"),
]


@pytest.fixture(scope="module")
def codes_on_one_device():
    """{weights: {layer and name: arrays}} without a mesh."""

    def of(weights: str) -> dict[tuple[int, str], Any]:
        made = engine("listed", 0, devices=jax.devices()[:1], quantize={"weights": weights})
        return by_layer(made)

    return {weights: of(weights) for weights in ("nf4", "int8")}


def by_layer(made: Engine) -> dict[tuple[int, str], Any]:
    found = {}
    for path, stored in jax.device_get(made.state.params).items():
        if not is_base(path):
            continue
        _, *number, name = path.split("/")
        layers = [int(number[0])] if number else range(LAYERS)
        for layer in layers:
            found[layer, name] = stored if number else {k: x[layer] for k, x in stored.items()}
    return found


@pytest.mark.default_cases("stacked-3-data-int8", "stacked-3-tensor-nf4")
@pytest.mark.parametrize(("form", "stage", "mesh", "weights"), covering(CODES, FEW_CODES))
def test_codes_are_equal_on_every_mesh(codes_on_one_device, form, stage, mesh, weights):
    more = {"gradient_accumulation_steps": 2} if "pipe" in MESHES[mesh] else {}
    made = engine(form, stage, MESHES[mesh], quantize={"weights": weights}, **more)
    found = by_layer(made)
    for key, expected in codes_on_one_device[weights].items():
        for part, array in expected.items():
            own = found[key][part][tuple(map(slice, array.shape))]
            np.testing.assert_array_equal(own, array, f"{key} {part}")


def test_a_base_that_is_trained_is_refused():
    with pytest.raises(ConfigError, match=r"modules: .*up.* trained, and only frozen"):
        engine("stacked", trainable=["up", "head"], quantize={"modules": ["layers"]})
    with pytest.raises(ConfigError, match=r"quantizes the frozen weights.*are trained"):
        engine("stacked", trainable=["**"])
    with pytest.raises(ConfigError, match=r"'layers/upp' covers no weight.*nearest: layers/up"):
        engine("stacked", quantize={"modules": ["layers/upp"]})
    with pytest.raises(ConfigError, match=r"(?s)quantize.block.*int8.*quantize.double"):
        engine("stacked", quantize={"weights": "int8", "block": 64, "double": False})


def test_named_modules_alone_are_quantized():
    made = engine("stacked", quantize={"weights": "nf4", "modules": ["down", "layers/out"]})
    encoded = {path for path, x in made.state.params.items() if isinstance(x, dict)}
    assert encoded == {"layers/down", "layers/out"}


def test_deepspeeds_key_quantizes_what_is_frozen(caplog):
    """Where nothing is, it has no effect, as there."""
    given = sections("stacked")
    del given["model"]
    given["zero_optimization"]["zero_quantized_nontrainable_weights"] = True
    program = build_program(load_config(given), (partial(init, stacked=True), stacked), loss)
    assert "int8 rows of f32" in str(program.table)
    given["trainable"] = ["**"]
    caplog.set_level("INFO", "jaxspeed")
    program = build_program(load_config(given), (partial(init, stacked=True), stacked), loss)
    assert "int8" not in str(program.table)
    (said,) = (x for x in caplog.messages if "zero_quantized_nontrainable_weights" in x)
    assert "has no effect: " in said and "are trained" in said
