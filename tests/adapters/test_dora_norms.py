"""DoRA's norms: ||W||^2 is computed once a step, from the weights as they are stored."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.hlo.parser import Computation, Instruction, Module, leaves, parse
from jaxspeed.placement.constrain import constrain
from jaxspeed.traced_loss import micro_batch_loss
from jaxspeed.train.gather_once import GatherOnce, ModelState
from jaxspeed.train.gradients import MICRO_BATCHES
from tests.adapters.lora_loop import split_of
from tests.adapters.test_adapted_kinds import CASE, ROLES, STEPS, train_plainly
from tests.support.covering import covering

DORA = {"use_dora": True}
NF4, INT8 = ({"model": {"quantize": {"weights": weights}}} for weights in ("nf4", "int8"))
OFFLOADED = {
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_param": {"device": "cpu"},
    }
}
BF16 = {"bf16": {"enabled": True}}
PLACES = {"data": 8, "tensor": 2, "pipe": 2}


def engine(stage=3, tensor=1, pipe=1, lora=None, **more):
    return CASE.engine(stage, tensor, pipe, lora=DORA | (lora or {}), **more)


def inside_loops(module: Module) -> set[str]:
    """The computations that a loop runs."""

    def called(instruction: Instruction) -> set[str]:
        names = re.findall(r"%?([\w.-]+)", instruction.attributes)
        return {name for name in names if name in module.computations}

    found: set[str] = set()
    left = [
        name
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "while"
        for name in called(instruction)
    ]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += [x for i in module.computations[name].instructions.values() for x in called(i)]
    return found


def squares_of(computation: Computation, rank: int) -> list[str]:
    """Products of an array with itself, but for the Gram matrix of A."""
    return [
        str(instruction.shape)
        for instruction in computation.instructions.values()
        if instruction.opcode in ("multiply", "dot")
        and len({*instruction.operands}) == 1
        and next(leaves(instruction.shape)).dims[-2:] != (rank, rank)
    ]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "stage, tensor, pipe, more",
    covering(
        list(itertools.product(range(4), (1, 2), (1, 2), ({}, NF4))),
        [(0, 2, 1, NF4), (1, 1, 2, {}), (3, 1, 1, {})],
    ),
)
def test_no_weight_is_squared_in_the_loop_over_micro_batches(stage, tensor, pipe, more):
    check_squares(engine(stage, tensor, pipe, lora={"r": 3}, **more).program, stage == 3)


@pytest.mark.sampled
def test_without_the_constraint_squares_are_gathered_in_the_loop(monkeypatch):
    """That of `squares`, one of the sites in tests/system/test_dropped_constraints.py."""

    def others(x, sharding, site):
        return x if site == "squares" else constrain(x, sharding, site)

    monkeypatch.setattr(micro_batch_loss, "constrain", others)
    with pytest.raises(AssertionError, match="squares are gathered in the loop"):
        check_squares(engine(3, lora={"r": 3}, **NF4).program, sharded=True)


def check_squares(program, sharded):
    batch = program.abstract_batch(CASE.batches(1)[0])
    module = parse(program.step.lower(program.state, batch).compile().as_text())
    looped = inside_loops(module)
    assert looped
    computations = module.computations.items()
    inside = [x for name, each in computations if name in looped for x in squares_of(each, 3)]
    outside = [x for name, each in computations if name not in looped for x in squares_of(each, 3)]
    assert not inside
    assert len(outside) >= len(ROLES)
    if not sharded:  # the weights
        return
    gathers = [  # XLA:CPU moves the gathers of the loop in front of it
        next(leaves(instruction.shape)).elements
        for name, each in computations
        for instruction in each.instructions.values()
        if instruction.opcode.startswith("all-gather") and MICRO_BATCHES not in instruction.op_name
    ]
    assert gathers, "squares are gathered in the loop"
    least = min(math.prod(row.leaf.shape) for row in program.table if row.path in ROLES)
    assert max(gathers) < least, "a weight is gathered to be squared"


@pytest.mark.default_cases("tensor-more6")
@pytest.mark.parametrize(
    "place, more",
    covering(
        list(itertools.product(PLACES, ({}, NF4, INT8, BF16))),
        [("data", BF16), ("tensor", INT8), ("pipe", NF4)],
    ),
)
def test_squares_are_those_of_the_weights_as_layers_read_them(place, more):
    mesh = {"tensor": 2} if place == "tensor" else {"pipe": 2} if place == "pipe" else {}
    made = engine(3, **mesh, **more)
    program = made.program

    def squares(state):
        return program.traced_loss.with_squares(state.sources(program.table), {})

    found = jax.jit(program.in_mesh(squares))(made.state)
    assert found.keys() == {f"lora/{path}/squares" for path in ROLES}
    for path, value in split_of(made.parameters)[0].items():
        if path in ROLES:
            stacked, inputs, _ = ROLES[path]
            dtype = program.table[path].read.dtype
            read = np.asarray(jnp.asarray(value, dtype), np.float64)
            expected = np.sum(read**2, tuple(range(stacked, stacked + inputs)))
            np.testing.assert_allclose(found[f"lora/{path}/squares"], expected, rtol=1e-5)


@pytest.mark.sampled
def test_many_calls_of_a_model_read_squares_that_are_computed_once():
    made = engine(3)
    once = GatherOnce(made.program)
    state = once(ModelState.of(made.program, made.state))
    shapes = {path: (x.shape, x.sharding) for path, x in once.shapes.variables.items()}
    assert {path: (x.shape, x.sharding) for path, x in state.variables.items()} == shapes
    batch = CASE.batches(1)[0]
    loss = made.eval_batch(batch)["loss"]
    with made.evaluating():
        np.testing.assert_allclose(made.eval_batch(batch)["loss"], loss, rtol=1e-6)
    batch = made.program.abstract_batch(batch)
    module = parse(once.evaluate.lower(once.shapes, batch).compile().as_text())
    assert not [x for each in module.computations.values() for x in squares_of(each, 2)]


@pytest.mark.sampled
def test_weights_in_host_memory_are_squared_where_layers_read_them():
    """One more transfer takes longer."""
    made = engine(3, **OFFLOADED)
    assert not made.program.traced_loss.with_squares(made.state.sources(made.placements), {})


@pytest.mark.sampled
@pytest.mark.parametrize(
    "more",
    covering(
        [OFFLOADED, NF4, {**INT8, "parallel": {"remat": "full"}}, {**NF4, **OFFLOADED}],
        [OFFLOADED, {**INT8, "parallel": {"remat": "full"}}],
    ),
)
def test_dora_trains_as_a_plain_loop_however_weights_are_stored(more):
    made = engine(3, **more)
    start = {path: np.asarray(x) for path, x in made.parameters.items()}
    batches = CASE.batches(STEPS)
    losses = [float(made.train_batch(batch)["loss"]) for batch in batches]
    expected, own = train_plainly(start, batches, len(jax.devices()), has_dropout=False)
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-5)
    for path, value in split_of(made.parameters)[1].items():
        np.testing.assert_allclose(value, own[path], rtol=1e-5, atol=1e-5, err_msg=path)
