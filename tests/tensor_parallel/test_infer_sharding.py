"""Inferred sharding of unannotated models: the proposal, its counted collectives, its reasons.

The expected sharding of each model is written by hand, after Megatron's paper: column, then row,
for each pair of matmuls. That it is right is tested by running the model sharded so; that it is
cheap, by counting the collectives of the compiled program.
"""

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from jaxspeed.models import gpt2, llama, vit

import jaxspeed
from jaxspeed.config import Config, match
from jaxspeed.hardware.chip import read_chips
from jaxspeed.hlo.collectives import collectives
from jaxspeed.placement.apply_layer_specs import Use, named_by_specs
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.rules import model_sharding
from jaxspeed.tensor_parallel import propagate_dims, propose_sharding, uses_of
from jaxspeed.tensor_parallel.matmuls import matmuls_of
from jaxspeed.tensor_parallel.max_weight_set import best_set
from tests.support import foreign_models
from tests.support.covering import covering
from tests.tensor_parallel.inferring import mesh, traced

HEADS = {"query/kernel": 1, "query/bias": 0, "key/kernel": 1, "key/bias": 0}
HEADS |= {"value/kernel": 1, "value/bias": 0, "out/kernel": 0}
FLAT_HEADS = {f"{name}/{leaf}": dim for name in "qkv" for leaf, dim in (("kernel", 1), ("bias", 0))}
FLAT_HEADS |= {"o/kernel": 0}
FEED = {"widen/kernel": 1, "widen/bias": 0, "narrow/kernel": 0}


def under(prefix, sharded):
    return {f"{prefix}/{path}": dim for path, dim in sharded.items()}


def in_layers(prefix, sharded):
    return under(f"{prefix}/0", sharded) | under(f"{prefix}/1", sharded)


ENCODER = in_layers("encoder", under("attention", HEADS) | under("feed", FEED))
DECODER = in_layers("decoder", under("own", HEADS) | under("cross", HEADS) | under("feed", FEED))
BLOCKS = in_layers("blocks", under("attn", FLAT_HEADS) | under("mlp", FEED))
DENSE = {"Dense_0/kernel": 1, "Dense_0/bias": 0, "Dense_1/kernel": 0}
LINEN = under("MultiHeadDotProductAttention_0", HEADS) | DENSE
# model -> (how it is built, {path: its sharded dim, over 4 devices}, replicated weights)
CASES = {
    "encoder-decoder": (
        lambda: foreign_models.encoder_decoder(shared=False),
        ENCODER
        | DECODER
        | {"source/embedding": 0, "target/embedding": 0, "head/kernel": 1, "head/bias": 0},
        [],
    ),
    "encoder-decoder, one table": (
        lambda: foreign_models.encoder_decoder(shared=True),
        ENCODER | DECODER | {"source/embedding": 0},
        [],
    ),
    "convolutions and attention": (
        foreign_models.conv_attention,
        in_layers(
            "convs",
            {
                "widen/kernel": 3,
                "widen/bias": 0,
                "depthwise/kernel": 3,
                "depthwise/bias": 0,
                "narrow/kernel": 2,
            },
        )
        | under("mixer", under("attention", HEADS) | under("feed", FEED)),
        ["stem/kernel", "head/kernel"],
    ),
    "tower of 4": (
        lambda: foreign_models.tower(24, 64, 40, 96, 16),
        {
            "etagea/kernel": 1,
            "etagea/bias": 0,
            "etageb/kernel": 0,
            "etagec/kernel": 1,
            "etagec/bias": 0,
            "etaged/kernel": 0,
        },
        [],
    ),
    "residual tower": (
        foreign_models.residual,
        {f"twigs/{i}/{path}": dim for i in range(3) for path, dim in FEED.items()},
        ["gate_in/kernel", "gate_out/kernel"],
    ),
    "residual of single matmuls": (
        foreign_models.square,
        {},
        ["steps/0/kernel", "steps/1/kernel"],
    ),
    "gated by einsum": (foreign_models.gated, {"w13": 2, "w2": 0}, []),
    "fused projection": (
        lambda: foreign_models.decoder(fused=True),
        in_layers("blocks", under("mlp", FEED)) | {"tok/embedding": 0},
        [f"blocks/{i}/attn/{w}/kernel" for i in range(2) for w in ("qkv", "o")],
    ),
    "grouped heads": (lambda: foreign_models.decoder(kv=4), BLOCKS | {"tok/embedding": 0}, []),
    "fewer key heads than parts": (
        lambda: foreign_models.decoder(kv=2),
        in_layers("blocks", under("mlp", FEED)) | {"tok/embedding": 0},
        [f"blocks/{i}/attn/{w}/kernel" for i in range(2) for w in "qkvo"],
    ),
    "one key head": (
        lambda: foreign_models.decoder(kv=1),
        {p: d for p, d in BLOCKS.items() if "/k/" not in p and "/v/" not in p}
        | {"tok/embedding": 0},
        [f"blocks/{i}/attn/{w}/kernel" for i in range(2) for w in "kv"],
    ),
    "checkpointed": (
        lambda: foreign_models.decoder(foreign_models.checkpointed),
        BLOCKS | {"tok/embedding": 0},
        [],
    ),
    "jitted": (
        lambda: foreign_models.decoder(foreign_models.jitted),
        BLOCKS | {"tok/embedding": 0},
        [],
    ),
    "stacked and scanned": (
        foreign_models.stacked,
        {
            f"blocks/{path}": dim + 1
            for path, dim in (under("attn", FLAT_HEADS) | under("mlp", FEED)).items()
        }
        | {"tok/embedding": 0},
        [],
    ),
    "Linen": (
        foreign_models.linen,
        under("LinenBlock_0", LINEN)
        | under("LinenBlock_1", LINEN)
        | {"Embed_0/embedding": 0, "Dense_0/kernel": 1},
        [],
    ),
}


@pytest.fixture(scope="module")
def program():
    """A model traced, once for all tests of the module."""
    known = {}

    def of(name):
        if name not in known:
            known[name] = traced(CASES[name][0]())
        return known[name]

    return of


def proposal_of(program, tensor=4):
    return propose_sharding(program.propagated, program.leaves, tensor)


def dims(proposal):
    return {path: at.dim for path, at in proposal.sharded.items()}


@pytest.mark.default_cases("encoder-decoder", every=2)
@pytest.mark.parametrize("name", CASES)
def test_the_proposal_is_what_a_person_would_write(program, name):
    _, sharded, replicated = CASES[name]
    found = proposal_of(program(name))
    assert dims(found) == sharded
    assert sorted(found.replicated) == sorted(replicated)


@pytest.mark.parametrize("tensor", [2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_the_patterns_for_the_config_shard_the_same(program, name, tensor):
    """Through the config, as a user keeps them."""
    traced_model = program(name)
    found = proposal_of(traced_model, tensor)
    assert found.layer_specs or not found.sharded
    settings = {"train_batch_size": 8}
    config = Config.model_validate({**settings, **found.config})
    uses = uses_of(traced_model.propagated)
    named = named_by_specs(traced_model.leaves, config.layer_specs, uses)
    assert {leaf.path: leaf.names for leaf in named if any(leaf.names)} == found.names


@pytest.mark.parametrize("name, block", [("jitted", "blocks/*"), ("stacked and scanned", "blocks")])
def test_patterns_are_as_few_as_the_kinds_of_modules(program, name, block):
    assert proposal_of(program(name)).layer_specs == {
        **{f"{block}/attn/{w}": "column" for w in "qkv"},
        f"{block}/attn/o": "row",
        f"{block}/mlp/widen": "column",
        f"{block}/mlp/narrow": "row",
        "tok": "vocabulary",
    }


def test_a_module_name_that_occurs_twice_gets_two_patterns(program):
    """LinenBlock_0/Dense_0 is column-sharded, the head Dense_0 by its vocabulary."""
    specs = proposal_of(program("Linen")).layer_specs
    assert specs["LinenBlock_*/Dense_0"] == "column"
    assert next(word for p, word in specs.items() if match(p, "Dense_0/kernel")) == "vocabulary"


# -- they are right, and send no more than was counted --------------------------------------------

MESHES = [(2, 4), (4, 2), (1, 8)]
COVERING = {
    "encoder-decoder": (2, 4),
    "convolutions and attention": (1, 8),
    "tower of 4": (2, 4),
    "residual tower": (4, 2),
    "gated by einsum": (1, 8),
    "fused projection": (4, 2),
    "one key head": (2, 4),
    "stacked and scanned": (2, 4),
}
GRID = [
    pytest.param(name, sizes, marks=[] if COVERING.get(name) == sizes else [pytest.mark.full])
    for name, sizes in itertools.product(CASES, MESHES)
]


@pytest.mark.default_cases("gated by einsum-sizes20")
@pytest.mark.parametrize("name, sizes", GRID)
def test_sharded_as_proposed_a_model_computes_the_same_and_sends_what_was_counted(
    program, name, sizes
):
    traced_model, (data, tensor) = program(name), sizes
    found = proposal_of(traced_model, tensor)
    compiled, loss_and_grads = run_sharded(traced_model, found, data, tensor)
    reference = jax.jit(jax.value_and_grad(traced_model.run))(
        traced_model.params, traced_model.rest
    )
    assert_close(loss_and_grads, reference)
    over_tensor = [
        c for c in collectives(compiled.as_text(), mesh(data, tensor)) if "tensor" in c.axes
    ]
    assert {c.kind for c in over_tensor} <= {m.kind for m in found.sends}
    again = 2 if name == "checkpointed" else 1  # recomputed collectives are sent again
    counted = sum(m.runs * (1 if m.backward else again) for m in found.sends)
    assert sum(c.runs for c in over_tensor) <= counted
    sent = sum(c.runs * c.elements for c in over_tensor)
    assert sent <= most_elements(traced_model, found, again) / data


def run_sharded(program, proposal, data, tensor):
    """(compiled, (loss, gradients)), with no constraint but on the parameters and the batch."""
    where = mesh(data, tensor)

    def sharding(path, x):
        at = proposal.sharded.get(path)
        names = ["tensor" if at and at.dim == dim else None for dim in range(x.ndim)]
        return NamedSharding(where, PartitionSpec(*names))

    params = {path: sharding(path, x) for path, x in program.params.items()}
    replicated = NamedSharding(where, PartitionSpec())
    rest = [replicated] * len(program.rest)
    rest[program.batch] = [NamedSharding(where, PartitionSpec("data"))] * len(rest[program.batch])
    step = jax.jit(
        jax.value_and_grad(program.run),
        in_shardings=(params, rest),
        out_shardings=(replicated, params),
    )
    compiled = step.lower(program.params, program.rest).compile()
    given = jax.device_put((program.params, program.rest), (params, rest))
    return compiled, compiled(*given)


def assert_close(found, reference):
    largest = max(np.abs(g).max() for g in reference[1].values())
    np.testing.assert_allclose(found[0], reference[0], rtol=1e-5)
    for path, g in reference[1].items():
        np.testing.assert_allclose(found[1][path], g, atol=1e-5 * largest, err_msg=path)


def most_elements(program, proposal, again):
    """What was counted, if the gradients of an array that several weights read are summed apart.

    The compiler reduces those of query, key and value one by one; the inserted boundaries sum them
    before the reduction.
    """
    forward = sum(m.elements * m.runs for m in proposal.sends if not m.backward)
    of = program.propagated.classes.of
    classes = {of(program.propagated.parameters[p][c.dim]) for p, c in proposal.sharded.items()}
    backward = 0
    for matmul in matmuls_of(program.propagated):
        for side, other in ((0, 1), (1, 0)):
            if matmul.operands[other].trained and matmul.classes("free", side) & classes:
                backward += matmul.operands[other].elements * matmul.times
    return again * forward + backward


def test_a_pair_sends_one_all_reduce_each_way(program):
    """Shoeybi et al. (arXiv:1909.08053), of [batch, seq, embed]."""
    found = proposal_of(program("jitted"))
    size = foreign_models.BATCH * (foreign_models.SEQ - 1) * foreign_models.WIDTH
    layers, pairs = 2, 2
    rows = [m for m in found.sends if m.site == "row"]
    columns = [m for m in found.sends if m.site == "column"]
    assert [m.elements for m in rows] == [size] * layers * pairs
    assert [m.elements for m in columns] == [size] * (layers * pairs + 1)  # and the head
    assert not any(m.backward for m in rows) and all(m.backward for m in columns)


def test_memory_that_all_decoder_layers_read_is_summed_once_for_keys_and_values(program):
    """Keys and values of one layer are of one array; queries are of another."""
    found = proposal_of(program("encoder-decoder"))
    encoded = foreign_models.BATCH * (foreign_models.SEQ - 2) * foreign_models.WIDTH
    columns = [m.elements for m in found.sends if m.site == "column"]
    encoder, cross = 2 * 2, 2
    assert columns.count(encoded) == encoder + cross


def of_function(loss, parameters, inputs):
    """(propagated, leaves) of a loss of parameters and inputs whose first dim is samples."""
    shapes = {**parameters, **inputs}
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes.values()]
    jaxpr = jax.make_jaxpr(loss)(*given).jaxpr
    variables = dict(zip(parameters, jaxpr.invars, strict=False))
    leaves = [Leaf(path, shape, jnp.float32) for path, shape in parameters.items()]
    return propagate_dims(jaxpr, variables, jaxpr.invars[len(parameters) :]), leaves


def test_casts_of_one_array_are_one_array_whose_gradient_is_summed_once():
    """Each layer of a mixed-precision model casts its own input."""

    def loss(embed, q, k, o, x):
        h = x @ embed
        a, b = (h.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16) for w in (q, k))
        return ((jnp.tanh(a) * b) @ o).sum()

    shapes = {"embed": (3, 16), "q": (16, 64), "k": (16, 64), "o": (64, 16)}
    found = propose_sharding(*of_function(loss, shapes, {"x": (8, 3)}), tensor=4)
    assert dims(found) == {"q": 1, "k": 1, "o": 0}
    assert [m.elements for m in found.sends if m.site == "column"] == [8 * 16]


def test_what_is_read_from_the_batch_has_no_gradient_to_sum(program):
    found = proposal_of(program("tower of 4"))
    assert [m.elements for m in found.sends if m.backward] == [foreign_models.BATCH * 40]


def test_a_dim_of_samples_is_left_to_the_data_axis():
    """A parameter for each sample: its matmul's rows are the batch's."""
    shapes = {"memory": (8, 63), "w": (63, 5)}
    propagated, leaves = of_function(lambda m, w, x: (m @ w + x).sum(), shapes, {"x": (8, 5)})
    found = propose_sharding(propagated, leaves, tensor=4)
    assert not found.sharded and "dim 0 (8) is the batch's" in found.replicated["memory"]


@pytest.mark.parametrize(
    "name, path, use",
    [
        ("stacked and scanned", "blocks/mlp/widen/kernel", Use((1,), (2,))),
        ("convolutions and attention", "convs/0/widen/kernel", Use((2,), (3,))),
        ("convolutions and attention", "convs/0/depthwise/kernel", Use((), ())),
        ("encoder-decoder", "decoder/0/own/out/kernel", Use((0, 1), (2,))),
        ("encoder-decoder, one table", "source/embedding", Use((1,), (0,))),
        ("residual of single matmuls", "steps/0/kernel", Use((0,), (1,))),  # one class, two dims
    ],
)
def test_contracted_and_free_dims_of_a_parameter(program, name, path, use):
    assert uses_of(program(name).propagated)[path] == use


def test_a_table_that_is_only_looked_up_is_in_no_matmul(program):
    assert "source/embedding" not in uses_of(program("encoder-decoder").propagated)


# -- reasons -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, path, reason",
    [
        ("fused projection", "blocks/0/attn/qkv/kernel", "split into 3 parts"),
        ("fewer key heads than parts", "blocks/0/attn/q/kernel", "degrees that work: 1, 2;"),
        ("convolutions and attention", "stem/kernel", "dim 2 (3) is not divisible by 4"),
        ("residual of single matmuls", "steps/0/kernel", "no pair of matmuls"),
        ("one key head", "blocks/0/attn/k/kernel", "matmul of two activations"),
    ],
)
def test_replicated_weights_have_a_reason(program, name, path, reason):
    assert reason in proposal_of(program(name)).replicated[path]


def test_indivisible_heads_are_reported_with_the_degrees_that_work(program):
    found = proposal_of(program("jitted"), tensor=16)
    assert "degrees that work: 1, 2, 4, 8;" in found.replicated["blocks/0/attn/q/kernel"]


@pytest.mark.parametrize("name", CASES)
def test_every_matmul_weight_is_sharded_or_reported(program, name):
    """And nothing else is: what is printed accounts for each of them."""
    found = proposal_of(program(name))
    in_matmuls = {
        path
        for matmul in matmuls_of(program(name).propagated)
        for i in matmul.weights
        for path in matmul.operands[i].parameters
    }
    assert in_matmuls == set(found.replicated) | (set(found.sharded) & in_matmuls)
    text = str(found)
    for pattern in found.layer_specs:
        assert pattern in text
    assert text.count("replicated:") <= len(found.replicated)
    assert max(map(len, text.splitlines())) <= 100


def test_equal_layers_are_reported_once(program):
    text = str(proposal_of(program("fused projection")))
    assert text.count("replicated: blocks/*/attn/qkv/kernel [32x96]") == 1


# -- the reference families, without their names --------------------------------------------------

FAMILIES = {
    "gpt2": (gpt2, {"tokens": foreign_models.tokens()}),
    "llama": (llama, {"tokens": foreign_models.tokens()}),
    "vit": (
        vit,
        {
            "images": foreign_models.numbers(32, 32, 3),
            "labels": foreign_models.tokens(1)[:, 0] % 10,
        },
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_families_need_no_names(family):
    """Heads, MLP and vocabulary, as their logical names have it; only vit's ends may differ."""
    module, batch = FAMILIES[family]
    sizes = module.PRESETS["tiny"] if "tiny" in module.PRESETS else module.Config()
    model = traced(
        foreign_models.Foreign(lambda rngs: module.build(sizes, rngs), batch, module.loss)
    )
    axes = dict.fromkeys(("pipe", "replica", "data", "seq", "expert"), 1) | {"tensor": 2}
    named = {
        leaf.path: dim
        for leaf in model.leaves
        for dim, axis in enumerate(model_sharding(leaf.shape, leaf.names, axes).spec)
        if axis
    }
    found = dims(proposal_of(model, tensor=2))
    ends = ("patches/", "head/") if family == "vit" else ()
    assert {path: dim for path, dim in found.items() if not path.startswith(ends)} == named


# -- the search -----------------------------------------------------------------------------------


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 9))
    worth = {i: draw(st.integers(-3, 12)) / 8 for i in range(count)}
    pairs = [p for p in itertools.combinations(range(count), 2) if draw(st.booleans())]
    return worth, {i: {a + b - i for a, b in pairs if i in (a, b)} for i in range(count)}


@given(graphs())
def test_the_chosen_set_is_the_best_of_all_sets(graph):
    worth, conflicts = graph
    chosen = best_set(worth, conflicts)
    assert not any(conflicts[a] & chosen for a in chosen)
    every = itertools.chain.from_iterable(
        itertools.combinations(worth, n) for n in range(len(worth) + 1)
    )
    best = max(
        sum(worth[x] for x in subset)
        for subset in every
        if not any(b in conflicts[a] for a, b in itertools.combinations(subset, 2))
    )
    assert sum(worth[x] for x in chosen) == best


def test_a_chain_of_a_thousand_matmuls_is_solved():
    """Of a path of equals every second one, whatever its length."""
    count = 1001
    near = {i: {j for j in (i - 1, i + 1) if 0 <= j < count} for i in range(count)}
    assert best_set(dict.fromkeys(range(count), 1.0), near) == frozenset(range(0, count, 2))


@pytest.mark.parametrize("layers", covering([8, 48], [8]))
def test_many_layers_one_by_one_take_no_longer_than_a_second(layers):
    class Deep(foreign_models.Decoder):
        def __init__(self, rngs):
            super().__init__(rngs)
            blocks = [foreign_models.Block(rngs) for _ in range(layers)]
            self.blocks = foreign_models.nnx.List(blocks)

    model = traced(
        foreign_models.Foreign(Deep, {"tokens": foreign_models.tokens()}, foreign_models.next_token)
    )
    start = time.process_time()
    found = proposal_of(model)
    specs = found.layer_specs
    assert time.process_time() - start < layers / 24  # 48: 0.5 s; twice that on a busy machine
    assert len(found.sharded) == layers * (len(FLAT_HEADS) + len(FEED)) + 1
    assert len(specs) == 7


@pytest.mark.parametrize("width", [64, 1024])
def test_a_proposal_says_whether_it_pays(width):
    """For y = tanh(x W1) W2 with x from a trained layer of its own, by hand."""
    batch, inner, tensor = 32, 4 * width, 4

    def apply(params, x):
        h = x * params["scale"]
        return jnp.tanh(h @ params["up"]) @ params["down"]

    shapes = {"scale": (width,), "up": (width, inner), "down": (inner, width)}
    found = jaxspeed.propose_tensor_sharding(
        (lambda key: {name: jnp.ones(shape) for name, shape in shapes.items()}, apply),
        lambda model, x: model(x).mean(),
        np.zeros((batch, width), np.float32),
        tensor,
    )
    flops = 3 * 2 * (2 * batch * width * inner)  # two matmuls, each with two gradients
    sent = 2 * (2 * (tensor - 1) / tensor) * 4 * batch * width  # an all-reduce in each pass
    assert found.sharded_flops == found.all_flops == flops
    assert found.flops_per_byte == pytest.approx(flops * (tensor - 1) / tensor / sent)

    chip = read_chips()["v5p"]  # a ring uses both links of one dim of the torus
    seconds = flops / tensor / (chip.flops["fp32"] * chip.reached["products"])
    seconds += sent / (2 * chip.link * chip.reached["links"])
    alone = flops / (chip.flops["fp32"] * chip.reached["products"])
    assert found.pays_on(chip) == (seconds < alone) == (width == 1024)
    assert ("saves time on" in str(found)) == (width == 1024)
