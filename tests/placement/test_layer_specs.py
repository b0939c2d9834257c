"""Layer specs: the dim of each parameter that they shard."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxspeed.models import gpt2, llama, vit
from jaxspeed.models.layers import Linear

from jaxspeed.config import Config, TensorLayerSpec
from jaxspeed.errors import ConfigError
from jaxspeed.placement import Leaf, build_mesh, build_table
from jaxspeed.placement.apply_layer_specs import Use, named_by_specs

pytestmark = pytest.mark.fast


def leaf(path, *shape, names=()):
    return Leaf(path, shape, jnp.float32, names)


def names_of(leaves, layer_specs, uses=None, **keywords):
    """{path: names} under `tensor_parallel.partition_config.layer_specs` as a user writes them."""
    config = Config(tensor_parallel={"partition_config": {"layer_specs": layer_specs}})
    named = named_by_specs(leaves, config.layer_specs, uses, **keywords)
    return {item.path: item.names for item in named}


def cut_of(item, word, uses=None):
    """Dim of one leaf that a spec shards, or None."""
    names = names_of([item], {item.path: word}, uses)[item.path]
    sharded = [dim for dim, name in enumerate(names) if name in ("tensor", "vocab")]
    assert len(sharded) <= 1
    return sharded[0] if sharded else None


@pytest.mark.parametrize(
    ("word", "shape", "dim"),
    [
        ("column", (8, 32), 1),  # [in, out]
        ("row", (32, 8), 0),
        ("replicated", (8, 32), None),
        ("column", (32,), 0),
        ("row", (8,), None),
        ("column", (), None),
        ("column", (3, 3, 16, 32), 3),  # [height, width, in, out]
        ("row", (3, 3, 16, 32), 2),
        ("column", (3, 3, 3, 16, 32), 4),
        ("vocabulary", (256, 8), 0),  # a table
        ("vocabulary", (8, 256), 1),  # a head
        ("vocabulary", (256,), 0),  # its bias
        ({"type": "column", "dim": 0}, (8, 32), 0),
        ({"type": "row", "dim": -1}, (8, 4, 16), 2),
    ],
)
def test_without_a_traced_program_the_shape_tells_the_dim(word, shape, dim):
    assert cut_of(leaf("a/kernel", *shape), word) == dim


@pytest.mark.parametrize(
    ("word", "names", "shape", "dim"),
    [
        ("column", ("layers", None, None), (4, 8, 32), 2),
        ("row", ("layers", None, None), (4, 32, 8), 1),
        ("column", ("layers", None), (4, 32), 1),
        ("row", ("layers", None), (4, 8), None),
        ("vocabulary", ("layers", None, None), (256, 8, 64), 2),
        ("column", ("embed", "heads", "head_dim"), (8, 4, 16), 1),
        ("row", ("heads", "head_dim", "embed"), (4, 16, 8), 0),
        ("row", ("layers", "heads", "head_dim", "embed"), (2, 4, 16, 8), 1),
    ],
)
def test_names_that_the_model_gives_shift_the_dim(word, names, shape, dim):
    item = leaf("a/kernel", *shape, names=names)
    got = names_of([item], {"a": word})["a/kernel"]
    at = [i for i, name in enumerate(got) if name in ("tensor", "vocab", "heads")]
    assert at == ([] if dim is None else [dim])


@pytest.mark.parametrize(
    ("word", "use", "shape", "dim"),
    [
        ("column", Use((0,), (1, 2)), (8, 4, 16), 1),
        ("row", Use((0, 1), (2,)), (4, 16, 8), 0),
        ("column", Use((2,), (1,)), (4, 32, 8), 1),  # stacked, and [out, in] as torch has it
        ("row", Use((2,), (1,)), (4, 32, 8), 2),
        ("vocabulary", Use((1,), (0,)), (8, 64), 0),  # a tied head, of more features than tokens
        ("vocabulary", Use((0,), (1,)), (64, 8), 1),
    ],
)
def test_the_traced_program_tells_the_dim_whatever_the_shape(word, use, shape, dim):
    assert cut_of(leaf("a/kernel", *shape), word, {"a/kernel": use}) == dim


def test_a_table_that_is_in_no_product_is_cut_by_rows_whatever_its_sizes():
    assert cut_of(leaf("embed/table", 16, 64), "vocabulary", {}) == 0


@pytest.mark.parametrize(
    ("kernel", "use", "bias", "sharded"),
    [
        ((8, 4, 16), Use((0,), (1, 2)), (4, 16), ("tensor", None)),  # [embed, heads, head_dim]
        ((2, 8, 32), Use((1,), (2,)), (2, 32), (None, "tensor")),  # stacked
        ((8, 8, 32), Use((1,), (2,)), (8, 32), (None, "tensor")),  # as many layers as inputs
        ((2, 8, 4, 16), Use((1,), (2, 3)), (2, 4, 16), (None, "tensor", None)),
    ],
)
def test_the_bias_of_a_column_is_sharded_where_its_kernels_outputs_are(kernel, use, bias, sharded):
    leaves = [leaf("q/kernel", *kernel), leaf("q/bias", *bias)]
    assert names_of(leaves, {"q": "column"}, {"q/kernel": use})["q/bias"] == sharded


def test_the_bias_of_a_row_is_whole_though_the_dim_that_is_cut_has_its_size():
    leaves = [leaf("o/kernel", 8, 8), leaf("o/bias", 8)]
    for word in ("row", {"type": "row", "dim": 0}):
        assert names_of(leaves, {"o": word}) == {
            "o/kernel": ("tensor", None),
            "o/bias": (None,),
        }


def test_a_bias_is_cut_where_the_said_dim_is_though_another_has_its_size():
    leaves = [leaf("torch/weight", 8, 8), leaf("torch/bias", 8)]  # [out, in]
    assert names_of(leaves, {"torch": {"type": "column", "dim": 0}}) == {
        "torch/weight": ("tensor", None),
        "torch/bias": ("tensor",),
    }


def test_a_dim_that_was_said_of_a_bias_alone_is_the_biass():
    leaves = [leaf("q/kernel", 8, 4, 16), leaf("q/bias", 4, 16)]
    specs = {"q/bias": {"type": "column", "dim": 1}, "q": {"type": "column", "dim": 2}}
    assert names_of(leaves, specs) == {
        "q/kernel": (None, None, "tensor"),
        "q/bias": (None, "tensor"),
    }


def test_a_dim_that_was_said_of_a_module_is_its_kernels_and_the_bias_follows():
    leaves = [leaf("q/kernel", 8, 4, 16), leaf("q/bias", 4, 16), leaf("up/bias", 32)]
    specs = {"q": {"type": "column", "dim": 1}, "up": "column"}
    assert names_of(leaves, specs) == {
        "q/kernel": (None, "tensor", None),
        "q/bias": ("tensor", None),
        "up/bias": ("tensor",),
    }


def test_parameters_of_one_module_without_names_of_flax_are_each_sharded_by_their_own_spec():
    """As a pair of pure functions has them: one flat dict, in which shapes meet by chance."""
    leaves = [leaf("w2", 32, 8), leaf("b1", 32), leaf("w1", 8, 32), leaf("conv", 3, 3, 8, 32)]
    assert names_of(leaves, {"w1": "column", "b1": "column", "w2": "row"}) == {
        "w2": ("tensor", None),
        "b1": ("tensor",),
        "w1": (None, "tensor"),
        "conv": (),
    }


def test_the_first_pattern_that_covers_a_leaf_counts():
    leaves = [leaf("mlp/down/kernel", 32, 8), leaf("mlp/up/kernel", 8, 32)]
    assert names_of(leaves, {"**/down": "row", "mlp": "column"}) == {
        "mlp/down/kernel": ("tensor", None),
        "mlp/up/kernel": (None, "tensor"),
    }


def test_a_spec_overrides_which_dim_the_model_shards_and_keeps_its_other_names():
    names = ("layers", "embed", "heads", "head_dim")
    q = leaf("q/kernel", 2, 8, 4, 16, names=names)
    replicated = ("layers", "embed", None, "head_dim")
    assert names_of([q], {"q": "replicated"})["q/kernel"] == replicated
    assert names_of([q], {"q": "row"})["q/kernel"] == ("layers", "tensor", None, "head_dim")


def test_a_name_by_which_the_model_shards_the_same_dim_stays():
    """Key and value heads that the axis does not divide are replicated, by their name."""
    k = leaf("k/kernel", 8, 1, 16, names=("embed", "kv_heads", "head_dim"))
    assert names_of([k], {"k": "column"})["k/kernel"] == k.names


def test_a_vocabulary_may_be_padded_whatever_the_model_calls_it():
    head = leaf("head/kernel", 8, 101, names=("embed", "tensor"))
    assert names_of([head], {"head": "vocabulary"})["head/kernel"] == ("embed", "vocab")


def test_what_no_spec_covers_is_as_the_model_made_it():
    norm = leaf("norm/scale", 8, names=("embed",))
    assert (
        named_by_specs([norm, leaf("up/kernel", 8, 32)], [TensorLayerSpec("up", "column")])[0]
        is norm
    )


BLOCKS = [
    leaf(f"blocks/{i}/{name}/kernel", 8, 4, 16)
    for i in range(12)
    for name in ("query", "key")
]  # fmt: skip
BAD = {
    "a dim that the shape does not determine": (
        BLOCKS,
        {"query": "column"},
        '"query" as column, which covers blocks/0/query/kernel, blocks/1/query/kernel',
        '{"query": {"type": "column", "dim": k}}, or pass an example_batch',
    ),
    "stacked heads, which are no convolution": (
        [leaf("blocks/q/kernel", 24, 64, 4, 16)],
        {"blocks/q": "column"},
        "of shape (24, 64, 4, 16)",
        '"dim": k',
    ),
    "a square table": (
        [leaf("embed/table", 64, 64)],
        {"embed": "vocabulary"},
        '"embed" as vocabulary',
        '"dim": k',
    ),
    "a dim that is not there": (
        [leaf("up/kernel", 8, 32)],
        {"up": {"type": "column", "dim": 2}},
        "up/kernel of shape (8, 32)",
        "Needs a dim from 0 to 1, not 2",
    ),
    "a pattern that covers nothing": (
        [leaf("up/kernel", 8, 32)],
        {"up": "column", "dwon": "row"},
        '"dwon", which covers no parameter',
        "It has, for example: up/kernel",
    ),
    "a regex of which no name is there": (
        [leaf("up/kernel", 8, 32)],
        [{"patterns": [r".*\.[qkv]_proj$"]}],
        r'layer_specs.0.patterns.0: found ".*\.[qkv]_proj$", which covers no parameter',
        "up/kernel",
    ),
    "a pattern that an earlier one hides": (
        [leaf("mlp/up/kernel", 8, 32), leaf("mlp/down/kernel", 32, 8)],
        {"mlp": "column", "down": "row"},
        'all of whose parameters "mlp" covers first',
        'Put it before "mlp", or remove it',
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_spec_that_cannot_be_followed_is_refused_with_what_would_work(name):
    leaves, specs, found, works = BAD[name]
    with pytest.raises(ConfigError) as caught:
        names_of(leaves, specs)
    message = str(caught.value)
    assert message.startswith("1 problem in the config, for this model:")
    assert "tensor_parallel.partition_config.layer_specs" in message
    assert found in message
    assert works in message


def test_all_problems_come_in_one_error():
    with pytest.raises(ConfigError, match="3 problems"):
        names_of(BLOCKS, {"query": "column", "key": "row", "value": "column"})


def test_a_bias_does_not_repeat_its_kernels_problem():
    leaves = [leaf("query/kernel", 8, 4, 16), leaf("query/bias", 4, 16)]
    with pytest.raises(ConfigError, match=r"1 problem.*\n.*covers query/kernel of shape"):
        names_of(leaves, {"query": "column"})


def test_one_name_of_a_regex_is_enough():
    leaves = [leaf("q_proj/kernel", 8, 32)]
    specs = [{"patterns": [r".*\.[qkv]_proj\.weight$"], "partition_type": "column"}]
    assert names_of(leaves, specs)["q_proj/kernel"] == (None, "tensor")


def test_a_leaf_that_logical_axes_name_too_is_refused():
    leaves = [leaf("up/kernel", 8, 32)]
    with pytest.raises(ConfigError, match=r"logical_axes names up/kernel.*keep one"):
        names_of(leaves, {"up": "column"}, logical_axes=["**/up/kernel"])


def test_a_preset_gives_way_to_logical_axes_and_to_layer_specs():
    leaves = [leaf(f"{name}/kernel", 8, 8) for name in ("up", "gate", "down")]
    config = Config(
        tensor_parallel={
            "preset_model": "llama",
            "partition_config": {"layer_specs": {"gate": "replicated"}},
        }
    )
    named = named_by_specs(leaves, config.layer_specs, logical_axes=["up"])
    assert [item.names for item in named] == [(), (None, None), ("tensor", None)]


def test_a_preset_that_covers_nothing_is_refused():
    config = Config(tensor_parallel={"preset_model": "gpt2"})
    with pytest.raises(ConfigError, match=r'preset_model: found "gpt2", which covers no parameter'):
        named_by_specs([leaf("c_attn/kernel", 8, 24)], config.layer_specs)


def parameters(model):
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return [
        leaf("/".join(map(str, path)), *v.shape, names=v.get_metadata()["logical_axes"])
        for path, v in flat
    ]


def uses_of(model, heads):
    """How the families use their parameters, from what their layers contract."""
    uses = {name: Use((1,), (0,)) for name in heads}  # hidden @ table.T
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Linear):
            first = 1 if path[0] == "blocks" else 0  # one layer of a stack at a time
            dims = range(first, len(node.kernel.shape))
            at = node.contracted
            uses["/".join(map(str, (*path, "kernel")))] = Use(tuple(dims[:at]), tuple(dims[at:]))
    return uses


FAMILIES = {
    "gpt2": (gpt2, {}, ["embed/table"]),
    "gpt2 with its own head": (gpt2, {"tie_word_embeddings": False}, ["head/table"]),
    "llama": (llama, {}, ["head/table"]),
    "llama of one key-value head": (llama, {"num_key_value_heads": 1}, ["head/table"]),
    "vit": (vit, {}, []),
}


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_preset_cuts_what_the_familys_own_names_cut(family, traced):
    module, sizes, heads = FAMILIES[family]
    config = replace(module.PRESETS["tiny"], **sizes)
    model = nnx.eval_shape(lambda: module.build(config, nnx.Rngs(0)))
    leaves = parameters(model)
    bare = [replace(item, names=()) for item in leaves]
    if not traced:  # names that a stack needs, and that distinguish heads from convolutions
        kept = ("layers", "head_dim")
        bare = [
            replace(item, names=tuple(name if name in kept else None for name in item.names))
            for item in leaves
        ]
    specs = Config(tensor_parallel={"preset_model": family.split()[0]}).layer_specs
    named = named_by_specs(bare, specs, uses_of(model, heads) if traced else None)

    mesh = build_mesh({"tensor": 2}, jax.devices()[:2])
    ours = {row.path: entries_of(row) for row in build_table(named, mesh)}
    theirs = {row.path: entries_of(row) for row in build_table(leaves, mesh)}
    assert ours == theirs
    assert sum("tensor" in entries for entries in ours.values()) >= 6


def entries_of(row):
    """The entries of a spec, one a dim."""
    spec = tuple(row.read.spec)
    return spec + (None,) * (len(row.leaf.shape) - len(spec))


class Foreign(nnx.Module):
    """With nnx's own attention, whose kernels have three dims and no names."""

    def __init__(self, rngs):
        self.attn = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.up = nnx.Linear(32, 128, rngs=rngs)
        self.down = nnx.Linear(128, 32, rngs=rngs)


def test_a_preset_knows_the_names_of_nnxs_attention():
    state = nnx.state(nnx.eval_shape(lambda: Foreign(nnx.Rngs(0))), nnx.Param)
    leaves = [leaf("/".join(path), *v.shape) for path, v in nnx.to_flat_state(state)]
    uses = {
        **{f"attn/{name}/kernel": Use((0,), (1, 2)) for name in ("query", "key", "value")},
        "attn/out/kernel": Use((0, 1), (2,)),
    }
    specs = Config(tensor_parallel={"preset_model": "vit"}).layer_specs
    named = {item.path: item.names for item in named_by_specs(leaves, specs, uses)}
    sharded = {
        path: names.index(next(filter(None, names))) for path, names in named.items() if any(names)
    }
    assert sharded == {
        **{f"attn/{name}/kernel": 1 for name in ("query", "key", "value")},
        **{f"attn/{name}/bias": 0 for name in ("query", "key", "value")},
        "attn/out/kernel": 0,
        "up/kernel": 1,
        "up/bias": 0,
        "down/kernel": 0,
    }


def test_the_parts_of_a_column_and_of_its_row_give_the_whole_product():
    """y = gelu(x A + a) B + b from what each of two devices holds, in plain numpy."""
    leaves = [leaf("up/kernel", 8, 32), leaf("up/bias", 32), leaf("down/kernel", 32, 8)]
    specs = {"up": "column", "down": "row"}
    named = [
        replace(item, names=names)
        for item, names in zip(leaves, names_of(leaves, specs).values(), strict=True)
    ]
    table = build_table(named, build_mesh({"tensor": 2}, jax.devices()[:2]))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 8))
    arrays = {item.path: rng.normal(size=item.shape) for item in leaves}
    full = np.tanh(x @ arrays["up/kernel"] + arrays["up/bias"]) @ arrays["down/kernel"]
    partial = []
    for device in jax.devices()[:2]:
        mine = {
            path: array[table.sharding(table[path].read).devices_indices_map(array.shape)[device]]
            for path, array in arrays.items()
        }
        partial.append(np.tanh(x @ mine["up/kernel"] + mine["up/bias"]) @ mine["down/kernel"])
    np.testing.assert_allclose(partial[0] + partial[1], full, rtol=1e-12)
