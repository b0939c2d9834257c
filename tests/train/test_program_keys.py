"""What config keys change of a program: its state's arrays, and its traced step.

Nothing is compiled: the state has shapes, dtypes, shardings and memory kinds, as training will have
them, and the step is counted as it is traced.
"""

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxspeed.models import gpt2

import jaxspeed
from jaxspeed.config import Config
from jaxspeed.errors import ConfigError
from jaxspeed.jaxpr.primitives import CHECKPOINTS
from jaxspeed.train import build_program
from jaxspeed.user_models.config_model import resolve_model
from tests.engine import tiny

WIDTH, LAYERS, SEQ, RANKS = 64, 8, 16, 8
UP, DOWN, HEAD = "layers/0/up/kernel", "layers/0/down/kernel", "head/kernel"


def init(key):
    keys = jax.random.split(key, LAYERS)
    up, down = jnp.zeros((WIDTH, 2 * WIDTH)), jnp.zeros((2 * WIDTH, WIDTH))
    layers = [{"up": {"kernel": up}, "down": {"kernel": down}} for _ in keys]
    return {"layers": layers, "head": {"kernel": jnp.zeros((WIDTH, 8))}}


@jaxspeed.unit
def layer(p, x):
    return x + jnp.tanh(x @ p["up"]["kernel"]) @ p["down"]["kernel"]


def apply(p, x):
    for each in p["layers"]:
        x = layer(each, x)
    return x @ p["head"]["kernel"]


def loss(model, batch):
    """(sum, weight)."""
    error = jnp.square(model(batch["x"]))
    return error.sum(), jnp.asarray(error.size, error.dtype)


def program(model=(init, apply), loss_fn=loss, shape=(SEQ, WIDTH), **sections):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        **sections,
    }
    example = {"x": np.zeros((RANKS, *shape), np.float32)}
    return build_program(Config(**config), model, loss_fn, example_batch=example)


def zero(stage, **more):
    return {"stage": stage, "stage3_param_persistence_threshold": 0, **more}


# -- the state ------------------------------------------------------------------------------------


def share(x):
    """The share of an array that one device holds."""
    return math.prod(x.sharding.shard_shape(x.shape)) / x.size


def moments(made):
    return [x for x in jax.tree.leaves(made.state.opt) if x.ndim]


@pytest.mark.parametrize(
    ("sections", "sizes"),
    [
        ({"mesh": {"replica": -1, "data": 4}}, {"replica": 2, "data": 4}),
        ({"mesh": {"replica": 4}}, {"replica": 4, "data": 2}),
        ({"mesh": {"tensor": 2}}, {"tensor": 2, "data": 4}),
        ({"mesh": {"replica": -1}, "data_parallel_size": 8}, {"replica": 8}),
        ({"mesh": {"tensor": -1}, "data_parallel_size": 2}, {"data": 2, "tensor": 4}),
        ({"mesh": {"seq": 2}}, {"data": 4, "seq": 2}),
        ({"sequence_parallel_size": 4}, {"data": 2, "seq": 4}),
        ({"tensor_parallel": {"autotp_size": 2}}, {"tensor": 2, "data": 4}),
        ({"zero_optimization": zero(3, mics_shard_size=2)}, {"replica": 4, "data": 2}),
        ({"mesh": {"pipe": 2}, "gradient_accumulation_steps": 2}, {"pipe": 2, "data": 4}),
        ({"pipeline": {"stages": 2}, "gradient_accumulation_steps": 2}, {"pipe": 2, "data": 4}),
    ],
    ids=[
        *("data", "replica", "tensor", "all ranks", "ranks", "seq", "sequence size", "autotp"),
        *("mics", "pipe", "stages"),
    ],
)
def test_weights_are_sharded_over_the_mesh_that_is_asked_for(sections, sizes):
    made = program(**{"zero_optimization": zero(3), **sections})
    assert {axis: n for axis, n in made.mesh.shape.items() if n > 1} == sizes
    parts = math.prod(n for axis, n in sizes.items() if axis != "replica")
    assert share(made.state.params[UP]) == 1 / parts


def test_the_stage_and_the_threshold_decide_what_is_sharded():
    made = program(zero_optimization={"stage": 2})
    assert {share(x) for x in moments(made)} == {1 / RANKS}
    assert {share(x) for x in made.state.params.values()} == {1}
    threshold = WIDTH * 2 * WIDTH  # the head is smaller
    made = program(zero_optimization={"stage": 3, "stage3_param_persistence_threshold": threshold})
    assert share(made.state.params[UP]) == 1 / RANKS and share(made.state.params[HEAD]) == 1


CPU = {"device": "cpu"}


@pytest.mark.parametrize(
    ("section", "hosted"),
    [
        ({"offload_optimizer": CPU}, {"opt"}),
        ({"cpu_offload": True}, {"opt"}),
        ({"offload_param": CPU}, {"params"}),
        ({"cpu_offload_param": True}, {"params"}),
    ],
    ids=["offload_optimizer", "cpu_offload", "offload_param", "cpu_offload_param"],
)
def test_state_is_in_host_memory_where_it_is_offloaded(section, hosted):
    made = program(zero_optimization=zero(3, **section))
    kinds = {
        "params": {x.sharding.memory_kind for x in made.state.params.values()},
        "opt": {x.sharding.memory_kind for x in moments(made)},
    }
    assert kinds == {
        name: {"pinned_host" if name in hosted else "device"} for name in ("params", "opt")
    }


def test_a_ratio_offloads_that_share_of_the_bytes():
    made = program(zero_optimization=zero(3, offload_optimizer={**CPU, "ratio": 0.5}))
    hosted = sum(x.size for x in moments(made) if x.sharding.memory_kind == "pinned_host")
    largest = WIDTH * 2 * WIDTH / sum(x.size for x in made.state.params.values())
    assert 0.5 <= hosted / sum(x.size for x in moments(made)) < 0.5 + largest


def test_offloaded_state_is_updated_where_it_is_asked_for():
    def on_host(**more):
        made = program(zero_optimization=zero(3, offload_optimizer={**CPU, **more}))
        return operations(made)["compute_on"]

    assert on_host(where="host") == on_host() + len(program().state.params)


BF16, FP16, FP32 = (jnp.dtype(name) for name in ("bfloat16", "float16", "float32"))
ALONE = {"bf16": "bf16_master_weights_and_grads", "fp16": "fp16_master_weights_and_grads"}


def dtypes(tree):
    return {x.dtype for x in jax.tree.leaves(tree) if x.ndim}


@pytest.mark.parametrize(("name", "dtype"), [("bf16", BF16), ("fp16", FP16)], ids=["bf16", "fp16"])
def test_masters_are_fp32_unless_they_are_asked_for_in_the_compute_dtype(name, dtype):
    made = program(**{name: {"enabled": True}})
    assert dtypes(made.state.params) == {dtype} and dtypes(made.state.master) == {FP32}
    assert dtypes(made.state.opt) == {FP32}
    alone = program(**{name: {"enabled": True, ALONE[name]: True}})
    assert not alone.state.master and dtypes(alone.state.params) == {dtype}


def test_moments_are_stored_in_bf16_where_that_is_asked_for():
    made = program(bf16={"enabled": True, "bf16_optimizer_states": True})
    assert dtypes(made.state.opt) == {BF16} and dtypes(made.state.master) == {FP32}


def test_parameters_in_full_precision_are_not_cast():
    made = program(bf16={"enabled": True}, parallel={"full_precision": ["head/**"]})
    kept = {path for path, x in made.state.params.items() if x.dtype == FP32}
    assert kept == {HEAD}


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["head"], {HEAD}),
        (["head.weight"], {HEAD}),
        (["0.*kernel"], {UP, DOWN}),
        (["layers.0.up", HEAD], {UP, HEAD}),
        ([], set()),
        ("auto", set()),
    ],
)
def test_names_keep_parameters_in_fp32(names, kept):
    made = program(bf16={"enabled": True}, data_types={"keep_in_fp32_modules": names})
    assert {path for path, x in made.state.params.items() if x.dtype == FP32} == kept


def test_products_of_parameters_that_are_kept_in_fp32_are_in_fp32():
    def products(**sections):
        """Dtypes of the products with the head and with the layers' weights, forward and back.

        Activations in bf16 are operands as they are, which is exact.
        """
        found = {"head": set(), "layers": set()}
        for eqn in traced(program(bf16={"enabled": True}, **sections)):
            if eqn.primitive.name == "dot_general":
                shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
                at = "head" if any(sorted(shape) == [8, WIDTH] for shape in shapes) else "layers"
                found[at] |= {v.aval.dtype for v in eqn.outvars}
        return found

    assert products() == {"head": {BF16}, "layers": {BF16}}
    kept = products(data_types={"keep_in_fp32_modules": ["head"]})
    assert kept == {"head": {FP32}, "layers": {BF16}}


def test_a_name_that_is_in_no_path_is_an_error():
    with pytest.raises(ConfigError, match=r"keep_in_fp32_modules: 'router' is in no path"):
        program(data_types={"keep_in_fp32_modules": ["router"]})


def test_an_average_of_the_weights_is_state():
    average = {"type": "SGD", "params": {"lr": 0.1}, "ema_decay": 0.9}
    assert program(optimizer=average).state.ema.keys() == program().state.params.keys()


# -- the tensor axis ------------------------------------------------------------------------------


class Named(nnx.Module):
    """Its weight is annotated by an axis of the model's own."""

    def __init__(self, rngs):
        axes = nnx.with_partitioning(nnx.initializers.zeros, (None, "columns"))
        self.linear = nnx.Linear(WIDTH, 8, use_bias=False, kernel_init=axes, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


NEVER = {"infer_tensor_cuts": "never"}
LLAMA = {"preset_model": "llama"}


def by_pattern(how, **more):
    return {"partition_config": {"layer_specs": how, **more}}


@pytest.mark.parametrize(
    ("tensor_parallel", "parallel", "sharded"),
    [
        ({}, {}, {UP, DOWN}),
        ({}, NEVER, set()),
        (LLAMA, NEVER, {UP, DOWN, HEAD}),
        (by_pattern({"up": "column"}), NEVER, {UP}),
        ({**LLAMA, **by_pattern({"head": "replicated"})}, NEVER, {UP, DOWN}),
        ({**LLAMA, **by_pattern({"up": "column"}, use_default_specs=False)}, NEVER, {UP}),
        ({}, {**NEVER, "logical_axes": {"**/up/kernel": ["embed", "mlp"]}}, {UP}),
    ],
    ids=["inferred", "never", "preset", "specs", "both", "specs alone", "logical axes"],
)
def test_weights_are_sharded_over_tensor_as_keys_say(tensor_parallel, parallel, sharded):
    made = program(mesh={"tensor": 2}, tensor_parallel=tensor_parallel, parallel=parallel)
    shares = {path: share(made.state.params[path]) for path in (UP, DOWN, HEAD)}
    assert shares == {path: 1 / 2 if path in sharded else 1 for path in shares}


def test_an_axis_of_the_models_own_is_the_tensor_axis():
    made = program(
        Named, mesh={"tensor": 2}, parallel={**NEVER, "axis_names": {"columns": "tensor"}}
    )
    (weight,) = made.state.params.values()
    assert share(weight) == 1 / 2


# -- the traced step ------------------------------------------------------------------------------


def equations(jaxpr: Any) -> Any:
    """All of a program and of its inner ones, each once."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for value in eqn.params.values():
            for each in value if isinstance(value, tuple | list) else [value]:
                if hasattr(getattr(each, "jaxpr", each), "eqns"):
                    yield from equations(each)


def traced(made, shape=(SEQ, WIDTH)):
    batch = {"x": jax.ShapeDtypeStruct((made.batch.train, *shape), jnp.float32)}
    return list(equations(made.step.trace(made.state, made.abstract_batch(batch)).jaxpr))


def operations(made, **how):
    return Counter(eqn.primitive.name for eqn in traced(made, **how))


def operands(made, name):
    return [e.invars[0].aval for e in traced(made) if e.primitive.name == name]


def test_gradients_accumulate_in_the_dtype_that_is_asked_for():
    def carried(**sections):
        made = program(gradient_accumulation_steps=4, **sections)
        loops = [eqn for eqn in traced(made) if eqn.primitive.name == "scan"]
        return {x.aval.dtype for e in loops for x in e.outvars if x.aval.size == 2 * WIDTH**2}

    assert carried(bf16={"enabled": True}) == {FP32}
    assert carried(bf16={"enabled": True}, data_types={"grad_accum_dtype": "bf16"}) == {BF16}


def test_gradients_are_reduced_when_it_is_asked_for():
    """Once a step from within a shard_map over the data axes, and else where they are computed."""
    each = {"gradient_reduction": "micro_batch"}
    assert operations(program(gradient_accumulation_steps=4))["shard_map"]
    assert not operations(program(gradient_accumulation_steps=4, parallel=each))["shard_map"]


def test_a_step_is_not_skipped_where_overflows_are_not_looked_for():
    looks = operations(program(bf16={"enabled": True}))
    assert looks["is_finite"] and looks["select_n"]
    trusts = operations(program(bf16={"enabled": True, "check_grad_overflow": False}))
    assert not trusts["is_finite"]


@pytest.mark.parametrize(
    ("dtype", "found"), [("bf16", BF16), ("fp16", FP16), (None, None)], ids=["bf16", "fp16", "off"]
)
def test_products_are_in_the_dtype_of_autocast(dtype, found):
    section = {"torch_autocast": {"enabled": True, "dtype": dtype}} if dtype else {}
    made = program(**section)
    assert dtypes(made.state.params) == {FP32}
    products = {x.dtype for x in operands(made, "dot_general")}
    assert products == {found or FP32}


RING = {"data_reduction": "ring"}


def permutes(**more):
    made = program(parallel={**RING, **more})
    return [eqn for eqn in traced(made) if eqn.primitive.name == "ppermute"]


def test_rings_go_round_as_their_keys_say():
    def directions(found):
        return {(b - a) % RANKS for eqn in found for a, b in eqn.params["perm"]}

    def messages(found):
        return {eqn.invars[0].aval.dtype.name for eqn in found}

    plain = permutes()
    assert directions(plain) == {1, RANKS - 1} and messages(plain) == {"float32"}
    assert len(directions(permutes(ring_directions="one"))) == 1
    assert "uint16" in messages(permutes(ring_wire="bf16"))  # as bits
    assert "int8" in messages(permutes(ring_wire="int8"))
    small = permutes(ring_bucket_bytes=70_000)
    largest = max(4 * eqn.invars[0].aval.size for eqn in small)
    assert largest <= 70_000 / RANKS < max(4 * eqn.invars[0].aval.size for eqn in plain)
    assert not operations(program())["ppermute"]


def test_units_are_recomputed_and_chosen_as_keys_say():
    def recomputed(model=(init, apply), loss_fn=loss, shape=(SEQ, WIDTH), **parallel):
        made = program(model, loss_fn, shape, parallel=parallel)
        how = operations(made, shape=shape)
        return sum(how[name] for name in CHECKPOINTS)

    assert recomputed() == 0 and recomputed(remat="full") == LAYERS
    assert recomputed(remat={"every_n": 2}) == LAYERS / 2
    listed = {"model": tiny.Listed, "shape": (tiny.FEATURES,)}
    assert recomputed(remat="full", **listed) == 3
    assert recomputed(remat="full", units=["Linear"], **listed) == 5


@pytest.mark.sampled
def test_activations_and_matmuls_overlap_over_tensor_as_keys_say():
    def counted(**parallel):
        made = program(mesh={"tensor": 2}, parallel=parallel)
        along = [
            eqn.params["sharding"].spec
            for eqn in traced(made)
            if eqn.primitive.name == "sharding_constraint" and eqn.invars[0].aval.ndim == 3
        ]
        return sum("tensor" in str(spec[1:2]) for spec in along), operations(made)["ppermute"]

    plain, permuted = counted()
    assert plain == permuted == 0
    along, permuted = counted(sequence_parallel_activations=True)
    assert along > 0 and permuted == 0
    _, permuted = counted(sequence_parallel_activations=True, tensor_overlap="ring")
    assert permuted > 0


STAGES, MICRO = 2, 4
ACTIVATION = SEQ * WIDTH * 4  # of a micro-batch of one sample


def staged(**parallel):
    pipe = {"mesh": {"pipe": STAGES}, "gradient_accumulation_steps": MICRO}
    return program(zero_optimization=zero(3), parallel=parallel, **pipe)


def test_stages_run_by_the_schedule_that_is_asked_for():
    def report(**parallel):
        made = staged(**parallel)
        return made.pipeline_report({"x": jax.ShapeDtypeStruct((16, SEQ, WIDTH), jnp.float32)})

    ticks = MICRO + STAGES - 1
    assert report().messages == 2 * ticks
    assert report().live_bytes < report(pipeline_schedule="gpipe").live_bytes == MICRO * ACTIVATION
    interleaved = {"pipeline_schedule": "interleaved"}
    assert report(**interleaved).messages == 2 * (2 * MICRO + STAGES - 1)
    assert report(**interleaved, pipeline_chunks=4).messages == 2 * (4 * MICRO + STAGES - 1)


def test_stages_recompute_and_gather_as_keys_say():
    def counted(**parallel):
        found = traced(staged(**parallel))
        loops = [eqn for eqn in found if eqn.primitive.name == "scan"]
        inside = [e for loop in loops for e in equations(loop.params["jaxpr"])]
        count = Counter(eqn.primitive.name for eqn in inside)
        return count["dot_general"], count["optimization_barrier"]

    products, barriers = counted()
    assert counted(pipeline_recompute="save")[0] < products
    assert counted(pipeline_gather="step")[1] < barriers


# -- the model ------------------------------------------------------------------------------------


def test_the_model_is_the_one_that_is_named():
    def shapes(**model):
        config = Config(model=model, train_batch_size=8, optimizer={"type": "SGD"})
        made = build_program(config, *resolve_model(config))
        return {row.path: row.leaf.shape for row in made.table}

    sizes = gpt2.PRESETS["tiny"]
    found = shapes(family="gpt2", preset="tiny", config={"hidden_size": 48})
    assert (sizes.vocab_size, 48) in found.values()
    plain = shapes(family="llama", preset="tiny")
    assert "blocks/mlp/gate/kernel" in plain and "blocks/mlp/gate/kernel" not in found


# -- the batch ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sections",
    [
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2},
        {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
    ],
    ids=["train", "accumulation"],
)
def test_a_step_has_the_micro_batches_that_are_asked_for(sections):
    """Two samples on each of 8 ranks, four times: the loss sees those of one rank or of all.

    Or twice as many, to read what depends on their number.
    """
    rows = set()

    def seen(model, batch):
        rows.add(batch["x"].shape[0])
        return loss(model, batch)

    made = program(loss_fn=seen, **sections)
    assert made.batch.train == 64
    loops = [eqn for eqn in traced(made) if eqn.primitive.name == "scan"]
    assert 4 in {eqn.params["length"] for eqn in loops}
    assert rows - {1, 8} and rows <= {1, 8, 2, 16, 32}
