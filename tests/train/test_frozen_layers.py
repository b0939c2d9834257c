"""Freezing some layers of a stack or a list: ten steps against plain Optax, bytes, the rule."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxspeed
from jaxspeed.errors import ConfigError, ModelError
from jaxspeed.jaxpr.traverse import bodies, consts_and_carry
from tests.support.covering import covering
from tests.train.frozen_nets import LAYERS, Listed, Stacked, batches, loss, plain, stacked

RATE = 1e-2
ADAM = {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.1}}
HOST = {"device": "cpu"}
SETTINGS = {  # sections of the config
    "stage 0": {"zero_optimization": {"stage": 0}, "gradient_accumulation_steps": 2},
    "stage 1": {"zero_optimization": {"stage": 1}},
    "stage 2": {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2},
    "stage 3": {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 2},
    "stage 3 remat": {"zero_optimization": {"stage": 3}, "parallel": {"remat": "full"}},
    "tensor 2": {
        "zero_optimization": {"stage": 3},
        "mesh": {"tensor": 2},
        "parallel": {"logical_axes": {"up/kernel": [None, "mlp"], "up/bias": ["mlp"]}},
    },
    "offload": {
        "zero_optimization": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST}
    },
    "offload 2": {"zero_optimization": {"stage": 2, "offload_optimizer": HOST}},
}
RANGES = {  # trained layers of the blocks
    "blocks[2:4]/**": [2, 3],
    "blocks[-2:]/**": [4, 5],
    "blocks[:1]/**": [0],
    "blocks[1:5]/**": [1, 2, 3, 4],
}


def start(model=Stacked, trainable=("blocks[2:4]/**", "head/**"), transform=None, **sections):
    zero = {"stage3_param_persistence_threshold": 0, **sections.pop("zero_optimization", {})}
    config = {
        "train_batch_size": 16,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "optimizer": ADAM,
        "run": {"seed": 3, "compilation_cache": False},
        **({"trainable": list(trainable)} if trainable else {}),
        **sections,
    }
    if transform is not None:
        del config["optimizer"]
    if "logical_axes" in config.get("parallel", {}):
        axes = config["parallel"]["logical_axes"]
        names = {f"blocks/{path}": ["layers", *dims] for path, dims in axes.items()}
        config["parallel"] = {**config["parallel"], "logical_axes": names}
    return jaxspeed.initialize(model, loss, config, transform, example_batch=batches(1)[0])


def trained(engine, steps=10):
    """(losses, parameters) before and after."""
    before = stacked(engine.parameters)
    losses = [float(engine.train_batch(batch)["loss"]) for batch in batches(steps)]
    return before, losses, stacked(engine.parameters)


def assert_as_by_optax(engine, layers, others=("head",), steps=10):
    before, losses, after = trained(engine, steps)
    adam = optax.adamw(RATE, weight_decay=0.1)
    wanted, values = plain(before, layers, others, adam, batches(steps))
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    for path, value in values.items():
        np.testing.assert_allclose(after[path], value, rtol=0, atol=1e-5, err_msg=path)
    for path, x in before.items():
        rows = [i for i in range(LAYERS) if i not in layers]
        if path.startswith("blocks/"):
            np.testing.assert_array_equal(after[path][rows], x[rows], err_msg=path)


GRID = [(name, pattern) for name in SETTINGS for pattern in RANGES]
DEFAULT = [
    ("stage 0", "blocks[2:4]/**"),
    ("stage 2", "blocks[-2:]/**"),
    ("stage 3 remat", "blocks[1:5]/**"),
    ("tensor 2", "blocks[-2:]/**"),
    ("offload", "blocks[2:4]/**"),
]


@pytest.mark.default_cases("stage 0-blocks[2:4]/**")
@pytest.mark.parametrize(("setting", "pattern"), covering(GRID, DEFAULT))
def test_ten_steps_equal_plain_optax_on_the_trained_layers(setting, pattern):
    engine = start(trainable=(pattern, "head/**"), **SETTINGS[setting])
    assert_as_by_optax(engine, RANGES[pattern])


@pytest.mark.sampled
@pytest.mark.parametrize("setting", covering(SETTINGS, ["tensor 2"]))
def test_the_check_against_plain_flax_knows_which_layers_are_trained(setting):
    report = start(**SETTINGS[setting]).check(batches(1)[0])
    assert report.ok, str(report)


def test_the_key_of_the_config_trains_what_it_names():
    """In a list the same patterns name the same layers."""
    engine = start(Listed, trainable=("blocks[-2:]/**", "head/**"))
    assert_as_by_optax(engine, [4, 5])


def test_frozen_groups_of_the_optimizer_leave_the_same_layers():
    groups = [{"pattern": p, "frozen": True} for p in ("blocks[:2]/**", "blocks[4:]/**", "input")]
    engine = start(trainable=None, optimizer=ADAM | {"groups": groups})
    assert_as_by_optax(engine, [2, 3])


@pytest.mark.sampled
def test_groups_of_layers_have_their_own_rates():
    """As layers that are trained and not, those with another rate are leaves of their own."""
    groups = [{"pattern": "blocks[:3]/**", "lr_factor": 0.5}]
    engine = start(
        trainable=None, optimizer={"type": "SGD", "params": {"lr": 0.1}, "groups": groups}
    )
    before, _, after = trained(engine, 1)
    free = start(trainable=None, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    _, _, plain_after = trained(free, 1)
    for path in (p for p in before if p.startswith("blocks/")):
        moved, plainly = after[path] - before[path], plain_after[path] - before[path]
        np.testing.assert_allclose(moved[:3], 0.5 * plainly[:3], atol=1e-6)
        np.testing.assert_allclose(moved[3:], plainly[3:], atol=1e-6)


def test_automatic_mixed_precision_rewrites_each_part_of_the_scan():
    """Both scans have one body, which is rewritten for the parameters of each."""
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    _, losses, _ = trained(start(**autocast), 3)
    _, wanted, _ = trained(start(), 3)
    np.testing.assert_allclose(losses, wanted, rtol=3e-2)


def test_an_optax_transformation_sees_the_trained_layers():
    engine = start(transform=optax.adamw(RATE, weight_decay=0.1))
    shapes = {x.shape[:1] for x in jax.tree.leaves(engine.state.opt) if x.ndim > 1}
    assert shapes <= {(2,), (16,)}  # two layers; the head
    assert_as_by_optax(engine, [2, 3])


# -- the rule -------------------------------------------------------------------------------------


def test_what_is_trained_and_in_a_frozen_group_is_one_error_that_names_it():
    groups = [{"pattern": "blocks[3:5]/up", "frozen": True}]
    with pytest.raises(
        ConfigError, match="both name blocks/3/up/bias, blocks/3/up/kernel"
    ) as error:
        start(optimizer=ADAM | {"groups": groups})
    assert "blocks/4" not in str(error.value)  # which trainable does not name


def test_trainable_in_two_places_is_an_error_unless_it_is_the_same():
    config = {"train_batch_size": 16, "optimizer": ADAM, "trainable": ["head/**"]}
    with pytest.raises(ConfigError, match="trainable: given twice"):
        jaxspeed.initialize(Stacked, loss, config, trainable="input/**")
    jaxspeed.initialize(Stacked, loss, config, trainable=["head/**"])


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("blocks[9:]/**", r"blocks\[0:6\]/.*\. blocks has 6 layers$"),
        ("block[2:4]/up", r"blocks\[0:6\]/up.*\. A stack of layers is known by the name"),
        ("haed", "head"),
    ],
)
def test_a_pattern_that_names_no_layer_names_the_nearest(pattern, near):
    with pytest.raises(ModelError, match=f"covers no parameter of this model; nearest: .*{near}"):
        start(trainable=[pattern])
    groups = [{"pattern": pattern, "frozen": True}]
    with pytest.raises(ConfigError, match=f"covers no parameter of this model; .*{near}"):
        start(trainable=None, optimizer=ADAM | {"groups": groups})


# -- what a step stores, computes and sends -----------------------------------------------------


def scans(jaxpr):
    """(trips, whether it is a backward pass, bytes that it stacks) of the scans over blocks."""
    for eqn in jaxpr.eqns:
        for body in bodies(eqn):
            yield from scans(body.jaxpr)
        if eqn.primitive.name == "scan":
            stacks = eqn.outvars[consts_and_carry(eqn)[1] :]
            size = sum(v.aval.size * v.aval.dtype.itemsize for v in stacks)
            yield eqn.params["length"], eqn.params["reverse"], size


@pytest.mark.parametrize("setting", covering(SETTINGS, ["stage 0", "tensor 2", "offload 2"]))
def test_layers_below_the_lowest_trained_one_save_nothing_and_have_no_backward_pass(setting):
    engine = start(**SETTINGS[setting])
    batch = engine.program.abstract_batch(batches(1)[0])
    traced = engine.program.step.trace(engine.program.state, batch)
    found = [scan for scan in scans(traced.jaxpr) if scan[0] == 2]
    assert next(size for _, reverse, size in found if not reverse) == 0
    above, own = (size for _, reverse, size in found if reverse)
    layers = sum(x[2:4].nbytes for p, x in engine.parameters.items() if p.startswith("blocks"))
    assert above == 0 and own <= layers  # gradients of weights


def test_a_step_computes_less_the_more_is_frozen():
    engine, everything = start(), start(trainable=None)
    assert engine.compiled(batches(1)[0]).flops < 0.75 * everything.compiled(batches(1)[0]).flops


def trained_bytes(parameters):
    own = sum(x[2:4].nbytes for path, x in parameters.items() if path.startswith("blocks"))
    return own + sum(x.nbytes for path, x in parameters.items() if path.startswith("head"))


@pytest.mark.parametrize("setting", covering(SETTINGS, ["stage 1", "tensor 2", "offload"]))
def test_frozen_layers_have_no_byte_of_gradient_and_optimizer_state(setting):
    engine = start(**SETTINGS[setting])
    own = trained_bytes(engine.parameters)
    roles = {role: total for role, (total, _) in engine.placements.bytes_by_role().items()}
    assert roles["grad"] == own and 2 * own <= roles["opt"] < 2 * own + 64
    stored = sum(x.nbytes for x in jax.tree.leaves(engine.state.opt) if x.ndim)
    assert stored <= 2 * own + 2 * 8 * 4  # the head's bias is padded


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("stage", covering([0, 1, 2, 3], [0, 2]))
def test_no_byte_of_a_frozen_layer_is_reduced(stage):
    engine = start(
        zero_optimization={"stage": stage},
        gradient_accumulation_steps=2,
        train_micro_batch_size_per_gpu=1,
    )
    own = trained_bytes(engine.parameters)
    sent = [c for c in engine.compiled(batches(1)[0]).collectives if c.kind == "all-reduce"]
    gradients = sum(c.bytes * c.runs for c in sent)
    per_micro_batch = 2 if stage >= 2 else 1
    assert own <= gradients <= per_micro_batch * own + 256  # scalars: the loss, the norm


class Unrolled(Stacked):
    """The stack is read by numbers that are known when it is traced."""

    def __call__(self, x):
        x = self.input(x)
        graph, state = nnx.split(self.blocks)
        for i in range(self.layers):
            one = jax.tree.map(lambda leaf, i=i: leaf[i], state)
            x = jax.checkpoint(lambda one, x: nnx.merge(graph, one)(x))(one, x)
        return self.head(x)[:, 0]


class Checkpointed(Stacked):
    """The scan is inside of a checkpoint and of a jit."""

    def __call__(self, x):
        graph, state = nnx.split(self.blocks)

        @jax.jit
        @jax.checkpoint
        def run(state, x):
            def body(x, one):
                return nnx.merge(graph, one)(x), x.sum()

            return jax.lax.scan(body, x, state)[0]

        return self.head(run(state, self.input(x)))[:, 0]


class Indexed(Stacked):
    """The stack is read by numbers that are not known, so that its gradient is of all layers."""

    def __call__(self, x):
        graph, state = nnx.split(self.blocks)

        def body(i, x):
            return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[i], state))(x)

        return self.head(jax.lax.fori_loop(0, self.layers, body, self.input(x)))[:, 0]


NAMED = {
    "logical_axes": {
        f"{n}/{p}": [None] * d for n in ("up", "down") for p, d in (("kernel", 2), ("bias", 1))
    }
}


@pytest.mark.default_cases("Checkpointed-0")
@pytest.mark.parametrize(
    ("model", "stage"),
    covering(
        [(m, s) for m in (Unrolled, Checkpointed, Indexed) for s in (0, 3)],
        [(Unrolled, 3), (Checkpointed, 0), (Indexed, 3)],
    ),
)
def test_however_the_stack_is_read(model, stage, caplog):
    engine = start(model, zero_optimization={"stage": stage}, parallel=NAMED)
    assert_as_by_optax(engine, [2, 3])
    assert ("reads all layers of" in caplog.text) == (model is Indexed)
