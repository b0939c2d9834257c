"""Unlike blocks become contiguous stages: an encoder and a decoder, a UNet with skip connections.

Losses and parameters equal a plain Optax loop's, for any mesh of stages and data ranks.

Each stage takes a branch of one program. XLA's partitioner would put exchanges among *all* devices
into the branches, which wait for stages that are in another branch (the last test, jax 0.10.2: on
simulated devices such a program hangs). So the data axes are manual around the branches.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxspeed
from jaxspeed.config import Config
from jaxspeed.errors import ModelError, PlacementError
from jaxspeed.pipeline.step_values import split_program
from jaxspeed.placement.specs import spec_axes
from jaxspeed.placement.stacks import UnlikeStages
from jaxspeed.train import build_program
from jaxspeed.train.tensor_names import traced_example
from tests.support.covering import covering

WIDTH, VOCAB, SAMPLES = 8, 16, 8
RNG = np.random.default_rng(0)


class Mixer(nnx.Module):
    def __init__(self, rngs, wide):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, wide * WIDTH, rngs=rngs)
        self.down = nnx.Linear(wide * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class Reader(nnx.Module):
    """A decoder's block: it reads the encoder's output, whichever stage that is on."""

    def __init__(self, rngs):
        self.query, self.key, self.out = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3))
        self.mixer = Mixer(rngs, 3)

    def __call__(self, x, memory):
        scores = jnp.einsum("bqe,bke->bqk", self.query(x), self.key(memory))
        return self.mixer(x + self.out(jax.nn.softmax(scores) @ memory))


class Seq2Seq(nnx.Module):
    """The embedding is read by both halves and by the head."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.encoder = nnx.List([Mixer(rngs, 2) for _ in range(2)])
        self.decoder = nnx.List([Reader(rngs) for _ in range(2)])

    def __call__(self, source, target):
        memory = self.embed(source)
        for block in self.encoder:
            memory = block(memory)
        x = self.embed(target)
        for block in self.decoder:
            x = block(x, memory)
        return self.embed.attend(x)


class Level(nnx.Module):
    def __init__(self, rngs, width, out):
        self.norm = nnx.GroupNorm(width, num_groups=2, rngs=rngs)
        self.conv = nnx.Conv(width, out, (3,), rngs=rngs)

    def __call__(self, x):
        return self.conv(jax.nn.silu(self.norm(x)))


class UNet(nnx.Module):
    """Two skip connections; no two blocks are alike."""

    def __init__(self, rngs):
        self.first = nnx.Conv(2, 4, (3,), rngs=rngs)
        self.down1, self.down2 = Level(rngs, 4, 8), Level(rngs, 8, 16)
        self.middle = Level(rngs, 16, 16)
        self.up2, self.up1 = Level(rngs, 32, 8), Level(rngs, 16, 4)
        self.last = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        a = self.down1(self.first(x))
        b = self.down2(nnx.avg_pool(a, (2,), (2,)))
        x = self.up2(jnp.concatenate([self.middle(b), b], -1))
        x = self.up1(jnp.concatenate([jnp.repeat(x, 2, axis=1), a], -1))
        return self.last(x)


class BatchMean(UNet):
    """A block subtracts the mean over samples."""

    def __call__(self, x):
        x = self.down2(self.down1(self.first(x)))
        x = self.middle(x - x.mean(0))
        return self.last(self.up1(jnp.concatenate([self.up2(jnp.concatenate([x, x], -1))] * 2, -1)))


def with_mixed(mix):
    """A UNet whose blocks are followed by `mix`."""

    class Mixed(UNet):
        def __call__(self, x):
            x = mix(self.down2(self.down1(self.first(x))))
            x = self.middle(x)
            x = self.up2(jnp.concatenate([x, x], -1))
            return self.last(self.up1(jnp.concatenate([x, x], -1)))

    return Mixed


ORDER = np.arange(SAMPLES * 8 * 16, dtype=np.float32)
# What each data rank alone would compute otherwise; a sum with x keeps the dim of samples.
MIXED = {
    "reduce_max": lambda x: x / jnp.abs(x).max(),
    "rev": lambda x: x + x[::-1],
    "cumsum": lambda x: x + jnp.cumsum(x, axis=0),
    "dot_general": lambda x: jnp.einsum("btc,dtc,dse->bse", x, x, x),
    "scatter": lambda x: x.at[0].set(0.0),
    "slice": lambda x: x - x[:1],
    "iota": lambda x: x * jnp.arange(x.shape[0], dtype=x.dtype)[:, None, None],
    "constant": lambda x: x + ORDER.reshape(-1, 8, 16)[: x.shape[0]],
    "random_bits": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
    "scan": lambda x: lax.scan(lambda c, y: (c + y, c + y), jnp.zeros(x.shape[1:]), x)[1] + x,
    "while": lambda x: lax.while_loop(lambda c: c.max() > 1e3, lambda c: c / 2, x),
}
FOUND = {
    "scatter": "a scatter writes to a sample by its number",
    "iota": "a mul numbers samples",
    "constant": "a add numbers samples, or has a value for each",
    "random_bits": "a stage draws numbers for samples",
    "scan": "a scan carries values from sample to sample",
    "while": "a reduce_max mixes samples",
}
# Samples stay apart.
APART = {
    "another dim": lambda x: x + jnp.cumsum(jnp.sort(x, axis=1), axis=1)[:, ::-1],
    "merged with positions": lambda x: x + jnp.tanh(x.reshape(-1, 16)).reshape(x.shape),
    "attention": lambda x: x + jax.nn.softmax(x @ x.swapaxes(1, 2)) @ x,
    "scan": lambda x: x + lax.map(jnp.tanh, x),
    "vmap": lambda x: x + jax.vmap(lambda y: y - y.mean())(x),
}


def translation(model, batch):
    logits = model(batch["source"], batch["target"][:, :-1])
    targets = batch["target"][:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def denoising(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


def signal():
    return RNG.normal(size=(SAMPLES, 8, 2)).astype(np.float32)


def tokens(length):
    return RNG.integers(0, VOCAB, (SAMPLES, length)).astype(np.int32)


CASES = {
    "encoder-decoder": (Seq2Seq, translation, {"source": tokens(5), "target": tokens(7)}),
    "UNet": (UNet, denoising, {"x": signal(), "y": signal()}),
    "batch mean": (BatchMean, denoising, {"x": signal(), "y": signal()}),
}
CONFIG = {
    "train_batch_size": SAMPLES,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
}


def engine(name, pipe, data=1, **config):
    model, loss, batch = CASES[name]
    config = {**CONFIG, "mesh": {"pipe": pipe, "data": data}, **config}
    devices = jax.devices()[: pipe * data]
    return jaxspeed.initialize(
        model, loss, config=config, example_batch=batch, devices=devices
    ), batch


@functools.cache
def plain(name, steps=3):
    """Losses, and the parameters after them."""
    model, loss, batch = CASES[name]
    graph, params, rest = nnx.split(model(nnx.Rngs(0)), nnx.Param, ...)
    tx = optax.sgd(0.05, momentum=0.9)
    state, losses = jax.jit(tx.init)(params), []

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(lambda p: loss(nnx.merge(graph, p, rest), batch))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    for _ in range(steps):
        params, state, value = step(params, state)
        losses.append(float(value))
    return losses, {"/".join(map(str, path)): x[...] for path, x in nnx.to_flat_state(params)}


SETTINGS = {
    "encoder-decoder, data, stage 1": (
        "encoder-decoder",
        2,
        2,
        {"zero_optimization": {"stage": 1}},
    ),
    "UNet, three stages": ("UNet", 3, 1, {"zero_optimization": {"stage": 3}}),
    "encoder-decoder, four stages": (
        "encoder-decoder",
        4,
        1,
        {"parallel": {"pipeline_schedule": "gpipe"}},
    ),
    "UNet, data": ("UNet", 2, 2, {}),
}


@pytest.fixture(scope="module")
def run_of():
    """The run of a setting at its beginning, and its batch."""
    made = functools.cache(lambda name: setting_engine(*SETTINGS[name]))

    def at_its_beginning(name):
        run, batch = made(name)
        run.reset()
        return run, batch

    return at_its_beginning


def setting_engine(case, pipe, data, config):
    return engine(case, pipe, data, **config)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[[], pytest.mark.sampled, pytest.mark.full][min(i, 2)])
        for i, n in enumerate(SETTINGS)
    ],
)
def test_unlike_stages_train_as_plain_optax(name, run_of):
    run, batch = run_of(name)
    losses, params = plain(SETTINGS[name][0])
    evaluated = float(run.eval_batch(batch)["loss"])
    np.testing.assert_allclose(evaluated, losses[0], rtol=1e-5)
    got = [float(run.train_batch(batch)["loss"]) for _ in range(3)]
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    assert losses[2] < losses[0]
    found = run.parameters
    assert found.keys() == params.keys()
    for path, x in params.items():
        np.testing.assert_allclose(found[path], x, atol=1e-5, err_msg=path)


def program_of(name, pipe, data=1, **config):
    model, loss, batch = CASES[name]
    config = Config(**{**CONFIG, "mesh": {"pipe": pipe, "data": data}, **config})
    devices = jax.devices()[: pipe * data]
    return build_program(config, model, loss, example_batch=batch, devices=devices)


def test_each_parameter_is_of_one_stage_unless_several_read_it():
    table = program_of("encoder-decoder", 2).table
    assert isinstance(table.stack, UnlikeStages)
    assert [row.path for row in table if row.path not in table.stack.paths] == ["embed/embedding"]
    for path, stage in table.stack.stage_of.items():
        assert stage == 0 or path.startswith("decoder"), path
        assert "pipe" in spec_axes(table[path].source.spec), path


def parts_of(name, pipe):
    _, loss, batch = CASES[name]
    program = program_of(name, pipe)
    traced = traced_example(program.model, loss, batch, program.mesh)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    return split_program(traced, program.table.stack, one)


def test_skip_connections_are_sent_through_the_stages_between():
    messages = parts_of("UNet", 3).messages
    sent = [[v.aval.shape for v in values] for values in messages.sent]
    assert (SAMPLES, 8, 8) in sent[0] and (SAMPLES, 8, 8) in sent[1]  # of the outer level
    (buffer,) = messages.shapes  # all messages have the shape of the largest
    assert buffer.size == max(sum(map(np.prod, shapes)) for shapes in sent)


@pytest.mark.parametrize(
    "name",
    covering(["encoder-decoder, data, stage 1", "UNet, data"], ["encoder-decoder, data, stage 1"]),
)
def test_no_branch_of_a_compiled_step_communicates(name, run_of):
    run, batch = run_of(name)
    program = run.program
    given = program.abstract_batch(batch)
    text = program.step.lower(program.state, given).compile().as_text()
    bodies = branch_bodies(text)
    assert len(bodies) >= 4  # forward and backward of two stages
    for body in bodies:
        assert not re.search(r"all-reduce|all-gather|collective-permute|all-to-all", body)


@pytest.mark.sampled
def test_a_checkpoint_of_unlike_stages_continues_without_stages(tmp_path, run_of):
    run, batch = run_of("UNet, three stages")
    run.train_batch(batch)
    run.save_checkpoint(tmp_path)
    run.wait()
    other, _ = engine("UNet", 1)
    other.load_checkpoint(tmp_path)
    losses, _ = plain("UNet")
    np.testing.assert_allclose(float(other.train_batch(batch)["loss"]), losses[1], rtol=1e-5)


REFUSED = {
    "tensor": ({"mesh": {"pipe": 2, "tensor": 2}}, "Nor can unlike blocks .* need mesh.tensor 1"),
    "sharded gradients": (
        {"mesh": {"pipe": 2, "data": 2}, "zero_optimization": {"stage": 3}},
        "need zero_optimization.stage 0 or 1",
    ),
    "remat": ({"mesh": {"pipe": 2}, "parallel": {"remat": "full"}}, "need .*no remat"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_unlike_stages_exclude_are_named(name):
    model, loss, batch = CASES["UNet"]
    config, reason = REFUSED[name]
    count = int(np.prod([*config["mesh"].values()]))
    with pytest.raises((ModelError, PlacementError), match=reason):
        build_program(
            Config(**{**CONFIG, **config}),
            model,
            loss,
            example_batch=batch,
            devices=jax.devices()[:count],
        )


def test_blocks_that_mix_samples_are_refused_over_data_ranks_by_name():
    run, batch = engine("batch mean", 2, 2)
    with pytest.raises(ModelError, match=r"a sub mixes samples.*\(down1/conv, down1/norm"):
        run.train_batch(batch)


def refuse_mixed(model):
    batch = CASES["UNet"][2]
    config = Config(**{**CONFIG, "mesh": {"pipe": 2, "data": 2}})
    program = build_program(
        config, model, denoising, example_batch=batch, devices=jax.devices()[:4]
    )
    traced = traced_example(program.model, denoising, batch, program.mesh)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)

    def check():
        split_program(traced, program.table.stack, one).refuse_mixed_samples()

    program.in_mesh(check)()


@pytest.mark.parametrize("name", MIXED)
def test_operations_that_mix_samples_are_refused_over_data_ranks(name):
    found = FOUND.get(name, f"a {name} mixes samples")
    with pytest.raises(ModelError, match=f"mesh.pipe: {found}.*computed by each data rank"):
        refuse_mixed(with_mixed(MIXED[name]))


@pytest.mark.parametrize("name", APART)
def test_operations_on_each_sample_alone_are_accepted(name):
    refuse_mixed(with_mixed(APART[name]))


class Penalized(UNet):
    """A parameter that the loss alone reads."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.extra = nnx.Linear(WIDTH, WIDTH, rngs=rngs)


def test_a_value_without_samples_of_a_stage_is_refused_over_data_ranks(monkeypatch):
    def penalized(model, batch):
        return denoising(model, batch) + jnp.square(model.extra.kernel[...]).mean()

    monkeypatch.setitem(CASES, "penalized", (Penalized, penalized, CASES["UNet"][2]))
    run, batch = engine("penalized", 2, 2)
    with pytest.raises(ModelError, match=r"a float32\[\] that later stages read has no dim of s"):
        run.train_batch(batch)


COUNTING = {
    "a factor": lambda x: x / x.shape[0],
    "a branch": lambda x: x / 2 if x.shape[0] > 2 else x,
}


@pytest.mark.parametrize("name", COUNTING)
def test_blocks_that_compute_with_the_number_of_samples_are_refused(name, monkeypatch):
    case = with_mixed(COUNTING[name]), denoising, CASES["UNet"][2]
    monkeypatch.setitem(CASES, "counting", case)
    run, batch = engine("counting", 2, 2, gradient_accumulation_steps=2)
    with pytest.raises(ModelError, match="computes something else of 2 samples"):
        run.train_batch(batch)


def test_more_stages_than_parts_are_refused_with_the_blocks():
    class Scanned(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Param(rngs.params.normal((3, 2, 2)))
            self.second = nnx.Param(rngs.params.normal((2, 2, 2)))

        def __call__(self, x):
            for weights in (self.first[...], self.second[...]):
                x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]
            return x

    batch = CASES["UNet"][2]
    reason = r"reads its parameters \(first, second\) in 2 operations"
    with pytest.raises(PlacementError, match=reason):
        build_program(
            Config(**{**CONFIG, "mesh": {"pipe": 4}}),
            Scanned,
            denoising,
            example_batch=batch,
            devices=jax.devices()[:4],
        )


def branch_bodies(text):
    """The branches of the conditionals of a compiled program."""
    branches = re.findall(r"branch_computations=\{([^}]*)\}", text)
    branches += re.findall(r"(?:true|false)_computation=([^,\s]+)", text)
    names = {name.strip().lstrip("%") for found in branches for name in found.split(",")}
    assert names
    return [
        body
        for name, body in re.findall(r"^%([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S)
        if name in names
    ]


WIDTHS, EMBED = (64, 96, 48, 80), 256
ROOM = 2 * EMBED * max(WIDTHS)  # the weights of any stage in one row, padded


def test_branches_of_unlike_stages_hold_exchanges_with_the_devices_of_other_branches():
    mesh = jax.make_mesh((4, 2), ("pipe", "data"), axis_types=(AxisType.Auto,) * 2)

    def branch(width):
        def run(flat, x):
            up = flat[: EMBED * width].reshape(EMBED, width)
            down = flat[EMBED * width : 2 * EMBED * width].reshape(width, EMBED)
            return x + jnp.tanh(x @ up) @ down

        return run

    def stage_body(stage, flat, x):
        def loss(flat):
            return lax.switch(stage[0], [branch(w) for w in WIDTHS], flat[0], x[0]).sum()

        cut = NamedSharding(jax.sharding.get_abstract_mesh(), P(None, "data"))
        return lax.with_sharding_constraint(jax.grad(loss)(flat), cut)

    by_stage = P("pipe")
    step = jax.shard_map(
        stage_body,
        mesh=mesh,
        in_specs=(by_stage, by_stage, by_stage),
        out_specs=by_stage,
        axis_names={"pipe"},
        check_vma=False,
    )
    cut = NamedSharding(mesh, P("pipe", "data"))  # ZeRO 3
    shapes = [
        jax.ShapeDtypeStruct((4,), jnp.int32, sharding=NamedSharding(mesh, by_stage)),
        jax.ShapeDtypeStruct((4, ROOM), jnp.float32, sharding=cut),
        jax.ShapeDtypeStruct((4, 16, EMBED), jnp.float32, sharding=cut),
    ]
    text = jax.jit(step).lower(*shapes).compile().as_text()
    inside = branch_bodies(text)
    pairs = re.findall(r"source_target_pairs=\{(\{.*?\})\}", "\n".join(inside))
    devices = [set(map(int, re.findall(r"\d+", found))) for found in pairs]
    assert set(range(8)) in devices
