"""A list of layers trains as the same model written by hand, whatever repeats in it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxspeed
from jaxspeed import LayerSpec, PipelineModule, TiedLayerSpec
from jaxspeed.hlo import largest_buffers
from jaxspeed.train.build import build_program
from jaxspeed.user_models.repeated_run import Run
from tests.support import reference

WIDTH, VOCAB, SEQ, BATCH, STEPS = 8, 16, 6, 8, 10
RATE = 0.01


# -- layers ---------------------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, width, rate=0.0, *, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.down(jax.nn.gelu(self.up(self.norm(x)))))


class Mixer(nnx.Module):
    """Along the sequence."""

    def __init__(self, length, *, rngs):
        self.mix = nnx.Linear(length, length, rngs=rngs)

    def __call__(self, x):
        return x + jnp.swapaxes(self.mix(jnp.swapaxes(x, 1, 2)), 1, 2)


class Halve(nnx.Module):
    """Has no parameters, and takes no rngs."""

    def __call__(self, x):
        return x / 2


def attend(embed, x):
    return embed.attend(x)


# -- the same models, written by hand -------------------------------------------------------------


class Language(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(WIDTH, 0.2, rngs=rngs) for _ in range(3)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


class Pairs(nnx.Module):
    def __init__(self, rngs):
        self.mixers, self.blocks = nnx.List([]), nnx.List([])
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        for _ in range(2):
            self.mixers.append(Mixer(SEQ, rngs=rngs))
            self.blocks.append(Block(WIDTH, 0.1, rngs=rngs))
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for mixer, block in zip(self.mixers, self.blocks, strict=True):
            x = block(jnp.tanh(mixer(x)))
        return self.last(x / 2)[..., 0]


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.one = nnx.Linear(WIDTH, 12, rngs=rngs)
        self.two = nnx.Linear(12, 5, rngs=rngs)

    def __call__(self, x):
        return self.two(jax.nn.relu(self.one(x))).sum(-1)


# -- both, side by side ---------------------------------------------------------------------------


def nll(logits, labels):
    """(sum, weight); label 0 is padding."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses * (labels > 0)), jnp.sum(labels > 0)


def mean_square(outputs, labels):
    return jnp.mean((outputs - labels) ** 2)


def tokens(rng):
    return rng.integers(0, VOCAB, (BATCH, SEQ)), rng.integers(0, VOCAB, (BATCH, SEQ))


def vectors(rng):
    x = rng.normal(size=(BATCH, SEQ, WIDTH)).astype(np.float32)
    return x, np.sin(x.sum(-1))


@dataclass(frozen=True)
class Case:
    """`paths` maps each path of the list's model to those by hand, one a repeat for a stack's."""

    layers: Callable[[], list[Any]]
    by_hand: type[nnx.Module]
    loss_fn: Callable[[Any, Any], Any]
    sample: Callable[[np.random.Generator], Any]
    run: Run | None
    paths: dict[str, str | list[str]] = field(default_factory=dict)

    @property
    def model(self):
        return PipelineModule(self.layers(), loss_fn=self.loss_fn)

    def by_hand_at(self, values, path):
        """The value of a path of the list's model, from the values by hand."""
        prefix = next(p for p in self.paths if path.startswith(p + "/"))
        rest, theirs = path.removeprefix(prefix), self.paths[prefix]
        if isinstance(theirs, str):
            return values[theirs + rest]
        return np.stack([values[p + rest] for p in theirs])


CASES = {
    "tied embedding and head, dropout": Case(
        lambda: [
            TiedLayerSpec("embed", nnx.Embed, VOCAB, WIDTH),
            *[LayerSpec(Block, WIDTH, rate=0.2) for _ in range(3)],
            lambda rngs: nnx.LayerNorm(WIDTH, rngs=rngs),
            TiedLayerSpec("embed", nnx.Embed, VOCAB, WIDTH, forward_fn=attend),
        ],
        Language,
        nll,
        tokens,
        Run(1, 1, 3),
        {
            "tied/embed": "embed",
            "blocks/0": ["blocks/0", "blocks/1", "blocks/2"],
            "after/0": "norm",
        },
    ),
    "pairs with a function between": Case(
        lambda: [
            LayerSpec(nnx.Linear, WIDTH, WIDTH),
            *[LayerSpec(Mixer, SEQ), jnp.tanh, LayerSpec(Block, WIDTH, 0.1)] * 2,
            LayerSpec(Halve),
            lambda rngs: nnx.Linear(WIDTH, 1, rngs=rngs),
            lambda x: x[..., 0],
        ],
        Pairs,
        mean_square,
        vectors,
        Run(1, 3, 2),
        {
            "before/0": "first",
            "blocks/0": ["mixers/0", "mixers/1"],
            "blocks/2": ["blocks/0", "blocks/1"],
            "after/1": "last",
        },
    ),
    "nothing repeats": Case(
        lambda: [
            LayerSpec(nnx.Linear, WIDTH, 12),
            jax.nn.relu,
            LayerSpec(nnx.Linear, 12, 5),
            lambda x: x.sum(-1),
        ],
        Plain,
        mean_square,
        vectors,
        None,
        {"layers/0": "one", "layers/2": "two"},
    ),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def values_of(module, kind=nnx.Variable):
    def plain(v):
        x = v.get_value()
        key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if key else x)

    state = nnx.to_flat_state(nnx.state(module, kind))
    return {"/".join(map(str, path)): plain(v) for path, v in state}


@each_case
def test_the_run_that_repeats_is_found(case):
    assert case.model.run == case.run


@pytest.mark.default_cases("pairs with a function between", "nothing repeats")
@each_case
def test_initial_weights_and_streams_are_those_of_the_layers_built_in_turn(case):
    theirs = values_of(case.by_hand(nnx.Rngs(3)))
    ours = values_of(case.model(nnx.Rngs(3)))
    assert sum(x.size for x in ours.values()) == sum(x.size for x in theirs.values())
    for path, x in ours.items():
        wanted = case.by_hand_at(theirs, path)
        np.testing.assert_allclose(x, wanted, rtol=1e-6, atol=1e-6, err_msg=path)


@pytest.mark.default_cases("pairs with a function between", "nothing repeats")
@each_case
def test_outputs_equal_dropout_included(case):
    inputs, _ = case.sample(np.random.default_rng(0))
    theirs = case.by_hand(nnx.Rngs(3))(jnp.asarray(inputs))
    ours = case.model(nnx.Rngs(3))(jnp.asarray(inputs))
    assert np.linalg.norm(ours - theirs) <= 1e-6 * np.linalg.norm(theirs)


def engine_of(case, **more):
    config = {
        "train_batch_size": BATCH,
        "zero_optimization": {"stage": 0},
        **more,
    }
    sgd = optax.sgd(RATE, momentum=0.9)
    return jaxspeed.initialize(
        model=case.model, config=config, optimizer=sgd, devices=jax.devices()[:1]
    )


@pytest.mark.default_cases("2-nothing repeats")
@each_case
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.full), 2])
def test_ten_steps_equal_the_model_by_hand(case, accumulation):
    rng = np.random.default_rng(0)
    batches = [case.sample(rng) for _ in range(STEPS)]
    expected = reference.train(
        reference.NnxReference(case.by_hand),
        lambda model, batch: case.loss_fn(model(batch[0]), batch[1]),
        batches,
        optax.sgd(RATE, momentum=0.9),
        accumulation=accumulation,
    )
    engine = engine_of(case, gradient_accumulation_steps=accumulation)
    losses = [float(engine.train_batch(batch)["loss"]) for batch in batches]
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-6, atol=1e-6)
    assert engine.parameters
    for path, x in engine.parameters.items():
        wanted = case.by_hand_at(expected.last, path)
        np.testing.assert_allclose(x, wanted, rtol=1e-6, atol=1e-6, err_msg=path)


LANGUAGE = CASES["tied embedding and head, dropout"]


@pytest.fixture(scope="module")
def language():
    return engine_of(LANGUAGE)


def test_a_batch_is_a_pair_a_list_or_a_mapping(language):
    inputs, labels = LANGUAGE.sample(np.random.default_rng(0))
    losses = []
    for batch in ((inputs, labels), [inputs, labels], {"inputs": inputs, "labels": labels}):
        language.reset()
        losses.append(float(language.train_batch(batch)["loss"]))
    assert losses == [losses[0]] * 3


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 3])
def test_eight_devices_agree_with_one(stage):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine = jaxspeed.initialize(
        model=LANGUAGE.model,
        config={"train_batch_size": BATCH, "zero_optimization": zero},
        optimizer=optax.sgd(0.1),
    )
    batch = LANGUAGE.sample(np.random.default_rng(0))
    assert engine.check(batch).ok


def test_a_list_is_initialised_straight_into_shards():
    """No array of the compiled initial program is larger than the largest shard."""
    layers = [LayerSpec(nnx.Linear, 64, 64, use_bias=False) for _ in range(8)]
    model = PipelineModule(layers, loss_fn=mean_square)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = jaxspeed.Config.load({"train_batch_size": 8, "zero_optimization": zero})
    program = build_program(
        config, model, model.batch_loss, optimizer=optax.sgd(0.1), devices=jax.devices()
    )
    compiled = jax.jit(program.init).lower(0).compile()
    (largest, *_) = largest_buffers(compiled.as_text(), 1)
    assert largest.bytes == 4 * 8 * 64 * 64 // 8


def test_a_loss_function_of_initialize_takes_any_batch():
    model = PipelineModule(LANGUAGE.layers())
    engine = jaxspeed.initialize(
        model=model,
        loss_fn=lambda model, batch: nll(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]),
        config={"train_batch_size": BATCH},
        optimizer=optax.sgd(0.1),
    )
    batch = {"tokens": np.random.default_rng(0).integers(0, VOCAB, (BATCH, SEQ + 1))}
    assert float(engine.eval_batch(batch)["loss"]) > 0


# -- what is equal, and what is not ---------------------------------------------------------------


def run_of(*layers, **more):
    return PipelineModule(layers, **more).run


def comprehended(width):
    return [lambda rngs: nnx.Linear(width, width, rngs=rngs) for _ in range(3)]


FACTORY = lambda rngs: nnx.Linear(4, 4, rngs=rngs)  # noqa: E731
SPEC = LayerSpec(nnx.Linear, 4, 4)


@pytest.mark.parametrize(
    "layers, run",
    [
        ([FACTORY] * 3, Run(0, 1, 3)),
        (comprehended(4), Run(0, 1, 3)),
        (comprehended(4) + comprehended(5), Run(0, 1, 3)),  # one code, another width
        ([partial(FACTORY)] * 2, Run(0, 1, 2)),
        ([SPEC, FACTORY, SPEC, FACTORY], Run(0, 2, 2)),
        ([SPEC, LayerSpec(nnx.Linear, 4, 4, use_bias=False)], None),
        ([SPEC, LayerSpec(nnx.Linear, 4, out_features=4)], None),  # said in other words
        ([Halve] * 3, None),  # without parameters
        ([jax.nn.relu] * 4, None),
        ([TiedLayerSpec("one", nnx.Linear, 4, 4)] * 3, None),
    ],
)
def test_what_repeats(layers, run):
    assert run_of(*layers) == run


def test_layers_of_one_factory_that_come_out_unlike_do_not_repeat():
    widths = iter([4, 4, 5, 4])
    assert run_of(*[lambda rngs: nnx.Linear(4, next(widths), rngs=rngs)] * 4) == Run(0, 1, 2)


def test_layers_that_share_a_variable_do_not_repeat_and_it_is_said_why():
    class KeepsRngs(nnx.Module):
        def __init__(self, rngs):
            self.rngs, self.mix = rngs, nnx.Linear(4, 4, rngs=rngs)

    model = PipelineModule([LayerSpec(KeepsRngs)] * 2)
    assert model.run is None
    assert "layers 0, 1 share variables" in str(model)


def test_a_type_restricts_the_run():
    layers = [LayerSpec(nnx.Linear, 4, 4)] * 3 + [LayerSpec(Block, 4)] * 2
    assert run_of(*layers) == Run(0, 1, 3)
    assert run_of(*layers, partition_method="type:block") == Run(3, 1, 2)
    assert run_of(*layers, partition_method="Type:^Lin") == Run(0, 1, 3)


def test_seeded_layers_do_not_depend_on_what_stands_before_them():
    def weights(*before):
        layers = [*before, *[LayerSpec(nnx.Linear, 4, 4)] * 3]
        return PipelineModule(layers, seed_layers=True)(nnx.Rngs(0)).blocks[0].kernel.get_value()

    one = weights(LayerSpec(Block, 4))
    np.testing.assert_array_equal(one, weights(LayerSpec(nnx.Embed, 7, 4)))
    assert len({layer.tobytes() for layer in np.asarray(one)}) == 3


def test_tied_layers_are_one_module():
    model = LANGUAGE.model(nnx.Rngs(0))
    tables = [p for p in values_of(model, nnx.Param) if "embedding" in p]
    assert tables == ["tied/embed/embedding"]


def test_a_tuple_between_layers_is_one_argument():
    class Masked(nnx.Module):
        def __init__(self, rngs):
            self.mix = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, inputs):
            x, mask = inputs
            return self.mix(x) * mask, mask

    model = PipelineModule([lambda x: (x, x > 0), *[Masked] * 2, lambda inputs: inputs[0]])
    assert model.run == Run(1, 1, 2)
    assert model(nnx.Rngs(0))(jnp.ones((2, 4))).shape == (2, 4)


def test_it_shows_its_layers():
    assert str(LANGUAGE.model).splitlines() == [
        "6 layers: 3 x 1 layers repeat",
        "   0  Embed(16, 8) tied as 'embed'  (tied)",
        "   1  Block(8, rate=0.2)  (repeats)",
        "   2  Block(8, rate=0.2)  (repeats)",
        "   3  Block(8, rate=0.2)  (repeats)",
        "   4  a factory <lambda>",
        "   5  Embed(16, 8) tied as 'embed'  (tied)",
    ]


# -- errors ---------------------------------------------------------------------------------------

TIED = TiedLayerSpec("one", nnx.Linear, 4, 4)


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: PipelineModule([]), "layers is empty"),
        (lambda: PipelineModule(SPEC), "layers is a LayerSpec; it is a list"),
        (lambda: PipelineModule([SPEC, 3]), "layer 1 is a int; a layer is jaxspeed.LayerSpec"),
        (lambda: PipelineModule([[SPEC]]), "layer 0 is a list"),
        (lambda: PipelineModule([int]), "layer 0 is int"),
        (
            lambda: PipelineModule([nnx.Linear(4, 4, rngs=nnx.Rngs(0))]),
            r"layer 0 is a built Linear.*LayerSpec\(Linear, \.\.\.\).*lambda rngs",
        ),
        (
            lambda: PipelineModule(nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))),
            "layers is a Sequential; it is a list",
        ),
        (lambda: PipelineModule([nn.Dense(4)]), "layer 0 is a Linen module.*ToNNX"),
        (lambda: PipelineModule([nn.Dense]), "layer 0 is a Linen module"),
        (
            lambda: PipelineModule([TIED, TiedLayerSpec("one", nnx.Linear, 4, 5)]),
            r"layer 1 is Linear\(4, 5\) tied as 'one', but .* Linear\(4, 4\)",
        ),
        (
            lambda: PipelineModule([TIED, TiedLayerSpec("one", nnx.LinearGeneral, 4, 4)]),
            "one class and equal arguments, or two keys",
        ),
        (lambda: PipelineModule([SPEC], loss_fn=3), r"loss_fn\(outputs, labels\)"),
        (
            lambda: PipelineModule([SPEC], partition_method="even"),
            "partition_method is 'even'; it is one of best, .*, or \"type:\" and a regex",
        ),
        (lambda: PipelineModule([SPEC], partition_method=4), "partition_method is 4"),
        (lambda: PipelineModule([SPEC], partition_method="type:("), "holds no regex"),
        (lambda: PipelineModule([SPEC], partition_method="type:"), "holds no regex"),
        (
            lambda: PipelineModule([SPEC, jnp.tanh], partition_method="type:block").run,
            "'type:block' is the class of no layer; there are: Linear, tanh",
        ),
        (lambda: LayerSpec(nnx.Linear(4, 4, rngs=nnx.Rngs(0))), "is given a Linear; it takes a cl"),
        (lambda: LayerSpec(nn.Dense, 4), "is given Dense; it takes a class of nnx.Module"),
        (lambda: LayerSpec(nnx.Linear, 4, 4, rngs=nnx.Rngs(0)), "remove rngs"),
        (lambda: TiedLayerSpec(nnx.Linear, 4, 4), "is given the key .*Linear"),
        (lambda: TiedLayerSpec("a/b", nnx.Linear, 4, 4), "is given the key 'a/b'"),
        (lambda: TiedLayerSpec("a", nnx.Linear, 4, 4, forward_fn=1), r"forward_fn\(module, x\)"),
        (lambda: run_of(lambda rngs: 3), "factory <lambda> in the list of layers returned a int"),
        (lambda: run_of(LayerSpec(nnx.Linear, 4)), "a layer, as it is built, raised TypeError"),
    ],
)
def test_refused_with_what_would_work(make, says):
    with pytest.raises(jaxspeed.ModelError, match=says):
        make()


def test_a_loss_given_twice_or_not_at_all_is_refused():
    given = {"config": {"train_batch_size": 8}, "optimizer": optax.sgd(0.1)}
    with pytest.raises(jaxspeed.ModelError, match="loss_fn: given twice"):
        jaxspeed.initialize(PipelineModule([SPEC], loss_fn=nll), nll, **given)
    with pytest.raises(jaxspeed.ModelError, match="loss_fn is missing"):
        jaxspeed.initialize(PipelineModule([SPEC]), **given)


@pytest.mark.parametrize("keys", [("x", "labels"), ("inputs", "labels", "mask"), ("inputs",)])
def test_a_batch_of_other_keys_is_refused(keys, language):
    inputs, _ = LANGUAGE.sample(np.random.default_rng(0))
    with pytest.raises(jaxspeed.BatchError, match=r"is \(inputs, labels\), or"):
        language.train_batch(dict.fromkeys(keys, inputs))
