"""Memory budget: by the estimate no choice that fits is cheaper, and the estimate is right.

The estimate is compared with JAX itself: the residuals that `jax.checkpoint` saves under a policy,
and the FLOPs of the lowered gradient program, before a compiler's common subexpression elimination.
"""

import functools
import random

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxspeed.models import gpt2, llama, vit

from jaxspeed import ops
from jaxspeed.remat.budget import RematCosts, UnitResiduals, cheapest
from jaxspeed.remat.resolve import names_policy
from jaxspeed.remat.unit_jaxprs import UnitJaxpr
from tests.support.covering import examples

EMBED, SEQ, BATCH = 256, 24, 2  # wide: matmuls outweigh what XLA takes an erf for
SIZES = {"hidden_size": EMBED, "num_attention_heads": 4}
FLOPS_PER_BYTE = 50.0  # little: such that some names are better offloaded than recomputed
FAMILIES = ("gpt2", "llama", "vit")


def block_of(family):
    rngs = nnx.Rngs(0)
    if family == "gpt2":
        return gpt2.block(gpt2.Config(**SIZES), rngs)
    if family == "vit":
        return vit.block(vit.Config(**SIZES), rngs)
    sizes = {"num_key_value_heads": 2, "intermediate_size": 640}
    return llama.block(llama.Config(**SIZES, **sizes), rngs)


@functools.cache
def case(family):
    """(the block as a function of its parameters and its input, those two, the estimate)."""
    graphdef, params = nnx.split(block_of(family))
    x = jnp.ones((BATCH, SEQ, EMBED))
    more = ()
    if family == "llama":
        freqs = ops.frequencies(EMBED // 4, 1e4, None)
        more = ([ops.rotation(jnp.arange(SEQ), freqs)],)

    def block(params, x):
        return nnx.merge(graphdef, params)(x, *more)

    closed = jax.make_jaxpr(block)(params, x)
    program = closed.jaxpr
    assert not closed.consts or family == "llama"
    program = program.replace(constvars=[], invars=[*program.constvars, *program.invars])
    is_activation = tuple(v is program.invars[-1] for v in program.invars)
    active = tuple(v not in closed.jaxpr.constvars for v in program.invars)
    unit = UnitResiduals.of(UnitJaxpr(program, 1, is_activation, active))
    return block, params, x, RematCosts((unit,), flops_per_byte=FLOPS_PER_BYTE)


def room_of(costs, share):
    return int(share * sum(costs.bytes.values()))


def any_choice(costs, room, generator):
    """A random choice that fits: each name saved, offloaded or recomputed."""
    while True:
        places = {name: generator.randrange(3) for name in costs.names}
        found = tuple(
            frozenset(name for name, place in places.items() if place == which) for which in (1, 2)
        )
        if costs.device_bytes(found) <= room:
            return found


@pytest.mark.default_cases("vit")
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=examples(6, 15), deadline=None)
@given(share=st.floats(0, 1.1), seed=st.integers(0, 999))
def test_no_random_choice_that_fits_costs_less(family, share, seed):
    costs, generator = case(family)[3], random.Random(seed)
    room = room_of(costs, share)
    choice = cheapest(costs, room)
    assert costs.device_bytes(choice) <= room
    tried = [costs.flops(any_choice(costs, room, generator)) for _ in range(50)]
    assert costs.flops(choice) <= min(tried)


@pytest.mark.parametrize("family", FAMILIES)
def test_more_room_never_costs_more(family):
    costs = case(family)[3]
    spent = [costs.flops(cheapest(costs, room_of(costs, share / 10))) for share in range(11)]
    assert spent == sorted(spent, reverse=True)
    assert spent[0] > spent[-1]


def saved_bytes(block, params, x, policy):
    """Bytes of the residual activations of a checkpointed block, its input included."""
    again = jax.checkpoint(block, policy=policy)
    pullback = jax.eval_shape(lambda *args: jax.vjp(again, *args)[1], params, x)
    held = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape[:2] == x.shape[:2]]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in held)


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_of_a_name_are_those_that_jax_saves_for_it(family):
    block, params, x, costs = case(family)
    nothing = saved_bytes(block, params, x, None)
    for name in costs.names:
        assert (
            saved_bytes(block, params, x, names_policy([name], [])) - nothing == costs.bytes[name]
        )
    assert costs.input_bytes == x.size * x.dtype.itemsize


def lowered_flops(block, params, x, policy):
    """FLOPs of the loss and gradients of a block, counted in the lowered program."""
    again = jax.checkpoint(block, policy=policy)
    step = jax.grad(lambda params, x: jnp.sum(jnp.sin(again(params, x))), argnums=(0, 1))
    return jax.jit(step).lower(params, x).cost_analysis()["flops"]


@pytest.mark.default_cases("vit")
@pytest.mark.parametrize("family", FAMILIES)
def test_flops_that_a_choice_spares_are_absent_from_the_lowered_program(family):
    """To 1% of a forward pass: XLA counts an erf as some fifty operations, the estimate as one."""
    block, params, x, costs = case(family)

    def estimate(names):
        return costs.flops((frozenset(names), frozenset()))

    again, forward = lowered_flops(block, params, x, None), estimate(())
    for names in [*((name,) for name in costs.names), costs.names]:
        spared = again - lowered_flops(block, params, x, names_policy(names, []))
        assert abs(forward - estimate(names) - spared) <= 0.01 * forward, names
