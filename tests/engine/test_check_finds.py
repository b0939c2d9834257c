"""`check` finds errors of model adapters that are put back: it does not share their code."""

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspeed import ModelError
from jaxspeed.jaxpr import sample_independence
from jaxspeed.sequence_parallel import token_dim
from jaxspeed.tensor_parallel import insert_constraints
from jaxspeed.traced_loss import loss_traces, passes
from jaxspeed.traced_loss.by_parts import ByParts
from jaxspeed.train.program import Program
from jaxspeed.user_models import linen_calls, linen_model, nnx_model
from jaxspeed.user_models.batches import zeros_of
from jaxspeed.user_models.example_batch import ExampleBatch
from jaxspeed.user_models.linen_model import LinenModel
from tests.engine import tiny

WIDTH = tiny.FEATURES


def squared(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"][:, None]).mean()


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.gain = 1.0

    def eval(self, **attributes):
        super().eval(**attributes)
        self.gain = 3.0

    def __call__(self, x):
        return self.gain * self.up(self.drop(x))


class Wide(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


def in_batch(model, batch):
    scores = model(batch["x"]) @ batch["x"].T
    return -jnp.diag(jax.nn.log_softmax(scores)).sum(), len(scores)


class Counting(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        if train:
            count = self.variable("counters", "calls", jnp.zeros, ())
            count.value += 1
            x = x * count.value
        return nn.Dense(1)(x)


class ByData(nn.Module):
    """Scaled by the first batch, as an ActNorm is."""

    @nn.compact
    def __call__(self, x):
        shift = self.variable("scales", "mean", lambda: x.mean(0))
        scale = self.param("scale", lambda key: 1 / (x.std(0) + 0.1))
        return nn.Dense(1)((x - shift.value) * scale)


class Inner(nn.Module):
    training: bool = True

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=not self.training)(x)


class Outer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(Inner()(x))


def with_numbers(model, batch):
    heights = batch["h"].astype(jnp.float32)
    return (model(batch["x"])[:, 0] * heights).mean()


def mixing_is_trusted(monkeypatch):
    monkeypatch.setattr(loss_traces, "by_parts", lambda *args: ByParts())


def listed_in_evaluation(monkeypatch):
    create = LinenModel._create

    def only_in_evaluation(model, *args):
        model._creates_in_training = False
        return create(model, *args)

    monkeypatch.setattr(LinenModel, "_create", only_in_evaluation)
    monkeypatch.setattr(LinenModel, "_refuse_new", lambda *args: None)


def initialized_by_zeros(monkeypatch):
    monkeypatch.setattr(ExampleBatch, "arrays", lambda batch: zeros_of(batch.shapes))


def nested_modes_stay(monkeypatch):
    monkeypatch.setattr(linen_calls, "_in_evaluation", contextlib.nullcontext)


def own_eval_is_not_called(monkeypatch):
    monkeypatch.setattr(nnx_model, "_has_own", lambda module, mode: False)


def numbers_are_a_key(monkeypatch):
    read = Program.read_batch

    def typed(x):
        if x.dtype != jnp.uint32 or x.shape != (2,):
            return x
        return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(x), 1))

    monkeypatch.setattr(Program, "read_batch", lambda *args: jax.tree.map(typed, read(*args)))


def writes_are_by_sample(monkeypatch):
    monkeypatch.setattr(sample_independence, "writes_along", lambda *args: False)


def writes_are_by_token(monkeypatch):
    monkeypatch.setattr(token_dim, "writes_along", lambda *args: False)


def forward_passes_alone_are_proved(monkeypatch):
    proved = loss_traces.by_parts

    def proof(trace, batch, parts, train, trace_part):
        return proved(trace, batch, parts, False, trace_part)

    monkeypatch.setattr(loss_traces, "by_parts", proof)


def twice_as_many_are_proved(monkeypatch):
    """The proof reads 16 and 32 samples, whatever a rank has."""
    proved = loss_traces.by_parts

    def proof(trace, batch, parts, train, trace_part):
        many = jax.tree.map(lambda x: jax.ShapeDtypeStruct((16, *x.shape[1:]), x.dtype), batch)
        return proved(trace, many, 1, train)

    monkeypatch.setattr(loss_traces, "by_parts", proof)


def streams_are_not_asked_for(monkeypatch):
    rngs = linen_model.linen_rngs
    monkeypatch.setattr(linen_model, "linen_rngs", lambda key, asked=(): rngs(key))


def weights_are_constants(monkeypatch):
    monkeypatch.setattr(passes, "with_weight_differentiated", lambda program, trained: program)


def windows_are_left_to_xla(monkeypatch):
    monkeypatch.setattr(insert_constraints, "windows_of", lambda eqn: ())


def error_of(z, batch):
    return jnp.square(z - batch["y"][:, None]).sum(), len(z)


def by_written(model, batch):
    z = model(batch["x"])
    first = jax.lax.dynamic_update_slice(z, jnp.ones((1, WIDTH)), (0, 0))
    return error_of(first, batch)


@jax.custom_vjp
def centred(z):
    return z


centred.defvjp(lambda z: (z, None), lambda _, g: (g - g.mean(0) / 2,))


def by_centred(model, batch):
    return error_of(centred(model(batch["x"])), batch)


def by_number(model, batch):
    total, weight = error_of(model(batch["x"]), batch)
    return total * (10 if len(batch["x"]) < 4 else 1), weight


def by_weight(model, batch):
    total, _ = error_of(model(batch["x"]), batch)
    return total, jnp.square(model(batch["x"])).sum()


class Steps(nn.Module):
    """A recurrence with noise of a stream that `split_rngs` names."""

    @nn.compact
    def __call__(self, x):
        class Step(nn.Module):
            @nn.compact
            def __call__(self, carry, x):
                noise = jax.random.normal(self.make_rng("noise"), carry.shape)
                return jnp.tanh(nn.Dense(WIDTH)(carry + x)) * noise, x

        split = {"params": False, "noise": True}
        scan = nn.scan(Step, variable_broadcast="params", split_rngs=split, in_axes=1, out_axes=1)
        return scan()(x, jnp.repeat(x[:, None], 3, axis=1))[0]


class Tokens(nnx.Module):
    """A sequence of what the batch has, with a convolution or a write along it."""

    def __init__(self, rngs, convolved=False):
        self.up = nnx.Linear(1, WIDTH, rngs=rngs)
        self.mix = nnx.Conv(WIDTH, WIDTH, (3,), padding="SAME", rngs=rngs) if convolved else None
        self.wide, self.down = (nnx.Linear(n, m, rngs=rngs) for n, m in ((WIDTH, 32), (32, WIDTH)))

    def __call__(self, x):
        z = self.up(x[..., None])
        z = z if self.mix is None else self.mix(z)
        hidden = jax.nn.gelu(self.wide(z))
        hidden = hidden.at[:, 1].multiply(3.0) if self.mix is None else hidden
        return z + self.down(hidden)


def convolved(rngs):
    return Tokens(rngs, convolved=True)


def error_of_steps(model, batch):
    return error_of(model(batch["x"]), batch)


def squared_tokens(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"][:, None, None]).mean()


RING = {"parallel": {"data_reduction": "ring"}}
SERVER = {"parallel": {"data_reduction": "parameter_server", "servers": 1}}
MIXED = {
    "written": (writes_are_by_sample, Wide, by_written),
    "centred": (forward_passes_alone_are_proved, Wide, by_centred),
    "by number": (twice_as_many_are_proved, Wide, by_number),
}
TILES = {"parallel": {"sequence_tiles": 2}}
BESIDE = {
    "mesh": {"data": 2, "seq": 2, "tensor": 2},
    "parallel": {"sequence": {"dims": {"x": 1}}},
}
CUTS = {
    "ring": RING,
    "server": SERVER,
    "parts": {"parallel": {"batch_parts": 4}},
    "accumulation": {"gradient_accumulation_steps": 4},
}
ERRORS = {
    **{
        f"{name}, {cut}": (*MIXED[name], CUTS[cut], "DIFFERS") for name in MIXED for cut in CUTS
    },
    "streams": (streams_are_not_asked_for, Steps(), squared, {}, "DIFFERS"),
    "streams, ring": (streams_are_not_asked_for, Steps(), error_of_steps, RING, "DIFFERS"),
    "streams, server": (streams_are_not_asked_for, Steps(), error_of_steps, SERVER, "DIFFERS"),
    "weight": (weights_are_constants, Wide, by_weight, {}, "DIFFERS"),
    "weight, ring": (weights_are_constants, Wide, by_weight, RING, "DIFFERS"),
    "weight, server": (weights_are_constants, Wide, by_weight, SERVER, "DIFFERS"),
    "tiles": (writes_are_by_token, Tokens, squared_tokens, TILES, "DIFFERS"),
    "windows": (windows_are_left_to_xla, convolved, squared_tokens, BESIDE, "DIFFERS"),
    "mixing": (mixing_is_trusted, Wide, in_batch, {"gradient_accumulation_steps": 4}, "DIFFERS"),
    "only in training": (
        listed_in_evaluation, Counting(), squared, {},
        "counters/calls is created by the training pass",
    ),
    "by data": (
        initialized_by_zeros, ByData(), squared, {}, "scales/mean at the start differs"
    ),
    "nested mode": (nested_modes_stay, Outer(), squared, {}, "the loss in evaluation differs"),
    "own eval": (own_eval_is_not_called, Net, squared, {}, "the loss in evaluation differs"),
    "numbers": (numbers_are_a_key, tiny.Linen(), with_numbers, {}, "DIFFERS"),
}  # fmt: skip


# Where each rank, worker or part computes the loss of its own samples, these are refused.
REFUSED = {
    *(f"{name}, {cut}" for name in MIXED for cut in ("ring", "server", "parts")),
    *("weight, ring", "weight, server"),
}


def devices_of(name, parallel):
    if name == "numbers":
        return 2
    if "servers" in parallel:
        return 4 + parallel["servers"]
    return 8 if "sequence" in parallel else 1 if "batch_parts" in parallel else 4


@pytest.mark.default_cases("nested mode", "written, ring")
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_that_is_put_back_is_found(name, monkeypatch):
    put_back, model, loss, more, says = ERRORS[name]
    devices = devices_of(name, more.get("parallel", {}))
    samples = 2 if name == "numbers" else 8
    batch = tiny.batch(samples * more.get("gradient_accumulation_steps", 1))
    if name == "numbers":
        batch["h"] = np.arange(1, 3, dtype=np.uint32)
    sizes = {"train_batch_size": len(batch["y"]), "train_micro_batch_size_per_gpu": "auto"}

    def checked():
        made = tiny.engine(
            model, loss, devices=jax.devices()[:devices], example_batch=batch, **sizes, **more
        )
        return made.check(batch)

    if name in REFUSED:
        with pytest.raises(ModelError):
            checked()
    else:
        right = checked()
        assert right.ok, str(right)
    put_back(monkeypatch)
    wrong = checked()
    assert not wrong.ok
    assert says in str(wrong)


@pytest.mark.sampled
@pytest.mark.parametrize("cut", ["ring", "server", "parts"])
def test_the_report_says_where_it_shares_the_parts_of_a_drawing_loss(cut):
    devices = jax.devices()[: devices_of("", CUTS[cut]["parallel"])]
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": "auto"}

    def checked(model, loss):
        made = tiny.engine(
            model, loss, devices=devices, example_batch=tiny.batch(8), **sizes, **CUTS[cut]
        )
        return made.check(tiny.batch(8))

    drawn = checked(Net, error_of_steps)
    assert drawn.ok and drawn.parts == 4, str(drawn)
    assert "each of the 4 parts" in " ".join(str(drawn).split())
    of_all = checked(Wide, error_of_steps)
    assert of_all.ok and of_all.parts == 1 and "parts" not in str(of_all)
