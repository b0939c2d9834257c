"""A codec of a test's own: adapters on a frozen base in 8 bits, and moments in 8 bits.

The references are plain JAX on one device: they round the base once, and the moments after each
step, as the codec does. Blocks are of two numbers, which no sharding here divides.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxspeed
from jaxspeed.config import load_config
from jaxspeed.engine.engine import Engine
from jaxspeed.engine.oom_help import _otherwise, stored_bytes
from jaxspeed.errors import ModelError, PlacementError
from jaxspeed.placement import Leaf, build_mesh, build_table
from jaxspeed.placement.codec import CodecRule, StoredValue
from jaxspeed.placement.memory_kinds import in_host
from jaxspeed.placement.paths import flat_with_paths
from jaxspeed.planner.memory import memory_of
from jaxspeed.train.build import build_program
from tests.checkpoint import states
from tests.engine import tiny
from tests.support.covering import covering
from tests.support.int8_blocks import Int8Blocks, Int8Leaf, Int8Rows, rounded

LAYERS, WIDTH, RANK, STEPS, LR, MOMENTUM = 3, 16, 4, 3, 0.05, 0.9
INT8, FOURS = Int8Blocks(2), Int8Blocks(4)
BASE, MOMENTS = CodecRule("param", "w", INT8), CodecRule("opt", "**", INT8)
OF_HEAD = CodecRule("opt", "head", Int8Leaf(2))  # alike, with an array of the entire leaf
TRAINED = ("down", "up", "head")


def init(key: jax.Array, stacked: bool) -> Any:
    keys = jax.random.split(key, 4)
    layers = {
        "w": jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5,
        "down": jax.random.normal(keys[1], (LAYERS, WIDTH, RANK)) / WIDTH**0.5,
        "up": jax.random.normal(keys[2], (LAYERS, RANK, WIDTH)) / RANK**0.5,
    }
    listed = [jax.tree.map(lambda x, i=i: x[i], layers) for i in range(LAYERS)]
    head = jax.random.normal(keys[3], (WIDTH, 2)) / WIDTH**0.5
    return {"layers": layers if stacked else listed, "head": head}


@jaxspeed.unit
def block(p: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ p["w"] + x @ p["down"] @ p["up"])


def listed(params: Any, x: jax.Array) -> jax.Array:
    for layer in params["layers"]:
        x = block(layer, x)
    return x @ params["head"]


def stacked(params: Any, x: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, params["layers"])
    return x @ params["head"]


def unrolled(params: Any, x: jax.Array) -> jax.Array:
    """A stack whose layers are taken out one by one: views of the stored arrays."""
    for i in range(LAYERS):
        x = block(jax.tree.map(lambda w, i=i: w[i], params["layers"]), x)
    return x @ params["head"]


FORMS = {"listed": listed, "stacked": stacked, "unrolled": unrolled}


def loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    error = jnp.square(model(batch["x"]) - batch["y"])
    return error.sum(), jnp.asarray(error.size, error.dtype)


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(16, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, :2])}


def sections(form: str, stage: int, tensor: int = 1, offload: str = "", **more: Any) -> Any:
    front = [] if form == "listed" else ["layers"]
    names = {"w": [*front, None, "mlp"], "up": [*front, None, "mlp"]}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    zero |= {f"offload_{kind}": {"device": "cpu"} for kind in offload.split()}
    parallel = {"logical_axes": names, **more.pop("parallel", {})}
    return {
        "train_batch_size": 16,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": MOMENTUM}},
        "zero_optimization": zero,
        "mesh": {"tensor": tensor},
        "parallel": parallel,
        **more,
    }


def engine(form: str, stage: int, codecs: Any = (BASE, OF_HEAD, MOMENTS), **more: Any) -> Engine:
    pair = (partial(init, stacked=form != "listed"), FORMS[form])
    config = load_config(sections(form, stage, **more))
    program = build_program(config, pair, loss, trainable=TRAINED, codecs=codecs)
    return Engine(program, program.init(3))


def by_name(params: Any) -> dict[str, np.ndarray]:
    return {path: np.asarray(x) for path, x in flat_with_paths(params).items()}


def plain(form: str, codec: Int8Blocks | None = INT8, accumulation: int = 1) -> Any:
    """The parameters before and after the steps, by plain JAX."""
    params = init(jax.random.key(3), form != "listed")
    if codec:
        params = jax.tree.map_with_path(
            lambda path, x: rounded(x, codec) if path[-1].key == "w" else x, params
        )
    first, moments = params, jax.tree.map(jnp.zeros_like, params)
    for step in range(STEPS):
        given = batch(step)
        mean = lambda p: (lambda s, w: s / w)(*loss(partial(FORMS[form], p), given))  # noqa: E731,B023
        grads = jax.grad(mean)(params)
        moments = jax.tree.map(lambda m, g: MOMENTUM * m + g, moments, grads)
        params = jax.tree.map_with_path(
            lambda path, p, m: p if path[-1].key == "w" else p - LR * m, params, moments
        )
        if codec:
            moments = jax.tree.map(lambda m: rounded(m, codec), moments)
    return by_name(first), by_name(params)


def trained(made: Engine) -> dict[str, np.ndarray]:
    for step in range(STEPS):
        made.train_batch(batch(step))
    return by_name(made.parameters)


def is_encoded(stored: Any) -> bool:
    return isinstance(stored, dict) and stored["codes"].dtype == jnp.int8


GRID = [
    (form, stage, tensor, offload)
    for form in FORMS
    for stage in (0, 1, 2, 3)
    for tensor in (1, 2)
    for offload in ("", "optimizer", "optimizer param")
    if stage == 3 or "param" not in offload
]
FEW = [
    ("listed", 3, 2, ""),
    ("stacked", 3, 2, "optimizer param"),
    ("unrolled", 3, 1, "optimizer"),
]


@pytest.mark.default_cases("unrolled-3-1-optimizer")
@pytest.mark.parametrize(("form", "stage", "tensor", "offload"), covering(GRID, FEW))
def test_adapters_train_on_an_int8_base_with_int8_moments(form, stage, tensor, offload):
    made = engine(form, stage, tensor=tensor, offload=offload)
    first, last = plain(form)
    for path, x in by_name(made.parameters).items():
        np.testing.assert_allclose(x, first[path], rtol=1e-6, err_msg=path)
    frozen = {path for path in first if path.endswith("w")}
    assert all(is_encoded(made.state.params[path]) for path in frozen)
    assert not any(path in made.state.master for path in frozen)
    moments = made.program.layout.flat(made.state.opt)
    of_weights = [x for path, x in moments.items() if path.endswith(TRAINED)]
    assert of_weights and all(map(is_encoded, of_weights))
    assert not any(path.endswith("/w") for path in moments)
    for stored in of_weights:
        assert all(in_host(x.sharding) == ("optimizer" in offload) for x in stored.values())
    found = trained(made)
    for path in first:
        # A code may be the next one: of a moment's block, a step of the largest / 127.
        atol = 2e-6 + (0 if path in frozen else LR * 0.5 * np.abs(last[path]).max() / 127)
        np.testing.assert_allclose(found[path], last[path], rtol=0, atol=atol, err_msg=path)
    exact = plain(form, None)[1]
    assert any(np.abs(exact[p] - last[p]).max() > 1e-3 for p in first), "rounding is visible"


def test_the_table_and_the_estimate_have_the_bytes_of_the_codes():
    made, wide = (engine("stacked", 3, codecs) for codecs in ((BASE, MOMENTS), ()))
    size = LAYERS * WIDTH * WIDTH
    codes = size + 4 * size // 2
    bytes_ = [e.placements.bytes_by_role() for e in (made, wide)]
    assert bytes_[1]["param"][0] - bytes_[0]["param"][0] == 4 * size - codes
    assert bytes_[1]["param"][1] - bytes_[0]["param"][1] == (4 * size - codes) // 8
    assert stored_bytes(_otherwise(made.program, 3)) == stored_bytes(made.placements)
    assert "int8 blocks of 2 of f32" in str(made.placements)
    estimates = [
        {c.name: c.bytes for c in memory_of(e.program, batch()).components if c.lasting}
        for e in (made, wide)
    ]
    assert estimates[1]["parameters"] - estimates[0]["parameters"] == (4 * size - codes) // 8
    assert estimates[0]["optimizer"] < estimates[1]["optimizer"]


def test_an_unrolled_stack_is_not_gathered_at_once():
    made = engine("unrolled", 3)
    text = made.program.step.lower(
        made.program.state, made.program.abstract_batch(batch())
    ).as_text()
    gathered = [line for line in text.splitlines() if f"<{LAYERS}x{WIDTH}x{WIDTH}xf32>" in line]
    assert not gathered, "the stack is never decoded"


def test_a_skipped_step_changes_no_code():
    made = engine("listed", 1, fp16={"enabled": True, "loss_scale": 128.0})
    made.train_batch(batch(0))
    before = jax.device_get(made.state)
    bad = batch(1)
    bad["x"][0, 0] = np.inf
    assert made.train_batch(bad)["skipped"]
    after = jax.device_get(made.state)
    jax.tree.map(np.testing.assert_array_equal, before.opt, after.opt)
    jax.tree.map(np.testing.assert_array_equal, before.params, after.params)


CHECKED = [
    ("stacked", {"parallel": {"remat": {"every_n": 3}}, "bf16": {"enabled": True}}),
    ("listed", {"parallel": {"remat": "full"}, "gradient_accumulation_steps": 2}),
    ("stacked", {"parallel": {"data_reduction": "ring"}}),
    ("listed", {"parallel": {"data_reduction": "ring", "remat": {"every_n": 3}}}),
]


@pytest.mark.default_cases("stacked-more0")
@pytest.mark.parametrize(("form", "more"), covering(CHECKED, [CHECKED[0], CHECKED[2]]))
def test_the_step_agrees_with_plain_training_on_the_decoded_base(form, more):
    made = engine(form, 3, (BASE,), **more)
    report = made.check(batch())
    assert report.ok, report


def test_the_arrays_of_a_value_have_its_sharding_unless_their_blocks_cover_several_shards():
    mesh = build_mesh({"data": 4, "tensor": 2})
    at = NamedSharding(mesh, PartitionSpec("data", None, "tensor"))

    def specs(codec: Any) -> dict[str, Any]:
        value = StoredValue((8, 4, 6), (8, 4, 8), np.dtype("float32"), at, codec)
        return {name: (x.shape, x.sharding.spec) for name, x in value.arrays.items()}

    assert specs(FOURS)["scales"] == ((8, 4, 2), PartitionSpec("data", None, "tensor"))
    assert specs(Int8Blocks(8))["scales"] == ((8, 4, 2), PartitionSpec("data", None, "tensor"))
    assert specs(Int8Rows())["scales"] == ((8, 4), PartitionSpec("data", None))
    assert specs(Int8Leaf(8))["factor"] == ((1,), PartitionSpec(None))
    assert specs(Int8Rows())["codes"] == ((8, 4, 8), PartitionSpec("data", None, "tensor"))
    own = NamedSharding(mesh, PartitionSpec("data"))
    layers = StoredValue((8,), (8,), np.dtype("float32"), own, FOURS, 1)
    assert layers.arrays["scales"].shape == (8,), "a block stays inside a layer"


def test_a_codec_may_have_the_same_codes_on_every_mesh():
    """ZeRO pads the dim that it shards, so that a shard ends where a block does."""
    leaf = Leaf("w", (12, 10), jnp.dtype("float32"), (None, "mlp"), trainable=False)
    x = jax.random.normal(jax.random.key(0), leaf.shape)
    codec = Int8Leaf(4)
    rules, found = (CodecRule("param", "w", codec),), []
    for sizes in ({"data": 8}, {"data": 4, "tensor": 2}, {"data": 1}):
        mesh = build_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
        table = build_table([leaf], mesh, stage=3, codecs=rules)
        value = table.stored(table["w"], table["w"].source)
        stored = jax.jit(value.encode, out_shardings=value.shardings)(x)
        np.testing.assert_allclose(jax.jit(value.decode)(stored), rounded(x, codec), rtol=1e-6)
        found.append({"codes": stored["codes"][:12, :10], "scales": stored["scales"][:12, :3]})
        assert stored["factor"].sharding.is_fully_replicated
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(other), jax.device_get(found[0]))
    wide = Leaf("w", (3, 20), jnp.dtype("float32"), trainable=False)
    row = build_table([wide], build_mesh({"data": 8}), stage=3, codecs=rules)["w"]
    assert row.shape(row.source) == (3, 32), "eight shards of a block"


@pytest.mark.sampled
@pytest.mark.parametrize("tensor", covering([1, 2], [2]))
def test_padding_stays_in_the_stored_arrays(tensor):
    """Dims of 12 and 7 over 8 and 4 shards."""
    config = tiny.config(3, mesh={"tensor": tensor}, parallel={"logical_axes": states.NAMES})
    config["optimizer"] = {"type": "SGD", "params": {"lr": LR, "momentum": MOMENTUM}}
    codecs = (CodecRule("param", "narrow/kernel", Int8Rows()), CodecRule("opt", "**", Int8Leaf()))
    program = build_program(
        load_config(config),
        states.Awkward,
        tiny.squared_error,
        trainable=("wide", "head"),
        codecs=codecs,
    )
    made = Engine(program, program.init(0))
    stored = made.state.params["narrow/kernel"]
    assert stored["codes"].shape != (12, 7) == made.parameters["narrow/kernel"].shape
    samples = tiny.batch(8 // tensor)
    for _ in range(2):
        assert made.check(samples).ok
        made.train_batch(samples)


@pytest.mark.sampled
def test_padded_rows_are_streamed_with_their_scales():
    """Seven rows over eight shards, updated a row at a time, with a scale for each row."""
    pair = (
        lambda key: {"up": jax.random.normal(key, (7, 12)), "down": jnp.ones((12, 2))},
        lambda params, x: jnp.tanh(x[:, :7] @ params["up"]) @ params["down"],
    )
    config = {**sections("listed", 3, offload="optimizer"), "parallel": {}}
    rules = (CodecRule("opt", "up", Int8Rows()),)
    program = build_program(load_config(config), pair, loss, codecs=rules)
    made = Engine(program, program.init(3))
    row = program.table["up"]
    assert row.shape(row.opt) == (8, 12)
    plan = program.update.streamed.plan(row, program.update.streamed.layouts(row))
    assert plan.dim == 0 and plan.num_shards == 8
    for step in range(2):
        assert made.check(batch(step)).ok
        made.train_batch(batch(step))
    (moment,) = [x for p, x in program.layout.flat(made.state.opt).items() if p.endswith("up")]
    assert is_encoded(moment) and moment["scales"].shape == (8,)
    exact = program.layout.logical(jax.device_get(made.state.opt))
    (value,) = [x for path, x in by_name(exact).items() if path.endswith("up")]
    np.testing.assert_allclose(value, rounded(value, Int8Rows()), rtol=1e-6)
    assert np.abs(value).min() < np.abs(value).max()


def test_evaluation_and_the_average_read_decoded_values():
    made = engine("listed", 3, optimizer={**sections("listed", 3)["optimizer"], "ema_decay": 0.5})
    expected = loss(partial(listed, jax.tree.map(jnp.asarray, _tree(made))), batch())
    found = float(made.eval_batch(batch())["loss"])
    np.testing.assert_allclose(found, float(expected[0] / expected[1]), rtol=1e-5)
    assert all(not isinstance(x, dict) and x.dtype == jnp.float32 for x in made.state.ema.values())
    with made.evaluating():
        np.testing.assert_allclose(float(made.eval_batch(batch())["loss"]), found, rtol=1e-6)


def _tree(made: Engine) -> Any:
    flat = made.parameters
    layers = [{n: flat[f"layers/{i}/{n}"] for n in ("w", "down", "up")} for i in range(LAYERS)]
    return {"layers": layers, "head": flat["head"]}


def test_a_codec_of_a_trained_parameter_is_refused():
    with pytest.raises(PlacementError, match="of head, which is trained"):
        engine("listed", 3, (CodecRule("param", "**", INT8),))
    with pytest.raises(PlacementError, match="no parameter matches 'b'; nearest: "):
        engine("listed", 3, (CodecRule("param", "b", INT8),))


def test_a_loss_that_writes_an_encoded_parameter_is_refused():
    from flax import nnx

    class Writes(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.w = nnx.Param(jnp.ones((8, 8)))
            self.head = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x):
            y = self.head(x @ self.w[...])
            self.w[...] = self.w[...] * 0.5
            return y

    program = build_program(
        load_config(tiny.config(3)),
        Writes,
        tiny.squared_error,
        trainable="head",
        codecs=(CodecRule("param", "w", INT8),),
    )
    made = Engine(program, program.init(0))
    with pytest.raises(ModelError, match="stored by the codec int8 blocks of 2"):
        made.train_batch(tiny.batch())
