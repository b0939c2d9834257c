"""Each decision that the library states to the compiler is needed: dropped, a check fails.

A site is one `constrain(..., "site")` in the source. For each there is a program in which it
matters, and what is read from that program, for a TPU v5e:2x4, is wrong without it.
"""

import ast
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspeed
from tests.moe import foreign_programs
from tests.support.topology import run_on_topology
from tests.system import cut_blocks, stacks, test_partitioned_residuals, test_pipeline_constraints
from tests.system.measured import LAYERS, PACKAGE, SEQ, WIDTH, collectives_of, sites
from tests.system.tpu import FEW_ROWS

MATRIX = WIDTH * WIDTH
# Its loss can be told from the traced program alone (tests/zero3/test_units_gathers.py): for
# all compilers that were tried, the argument's own sharding and the barrier say the same.
TRACED_ONLY = {"unit.shard"}
# The same of tests/tensor_parallel/test_shard_boundaries.py.
TRACED_ONLY |= {"tensor.leave.saved", "tensor.columns.backward"}
# What is dropped where devices share the work on a sample: test_shared_vocabulary.py and
# test_tensor_collectives.py.
ELSEWHERE = {"vocabulary.parts", *cut_blocks.DROPPED}
ELSEWHERE |= {*test_pipeline_constraints.CASES, *test_pipeline_constraints.TRACED}
ELSEWHERE |= {*test_partitioned_residuals.SITES}
ELSEWHERE |= {"samples.spread"}  # tests/train/test_vision_meshes.py
ELSEWHERE |= {"draw"}  # tests/train/test_draws.py
ELSEWHERE |= {"unit.step"}  # test_torus_gather.py
ELSEWHERE |= {"computed_arrays"}  # tests/engine/test_logprobs.py
ELSEWHERE |= {"squares"}  # tests/adapters/test_dora_norms.py
ELSEWHERE |= {"sequence", "unit.sum", "lookup.positions"}  # tests/sequence/test_left_to_xla.py
ELSEWHERE |= {"windows"}  # tests/sequence/test_windows.py
ELSEWHERE |= {"packed"}  # tests/optim/test_owners.py
ELSEWHERE |= {*foreign_programs.SITES}  # tests/moe/test_foreign_exchanges.py


@pytest.fixture(scope="module")
def programs() -> dict[str, Any]:
    return run_on_topology("tests.system.tpu:dropped", "v5e:2x4")


def moved(found: dict[str, Any]) -> dict[str, int]:
    """{kind: matrices moved in a step}."""
    total: dict[str, int] = {}
    for c in collectives_of(found):
        if c.elements >= MATRIX / 8:
            total[c.kind] = total.get(c.kind, 0) + c.elements // MATRIX * c.runs
    return total


def carried(found: dict[str, Any]) -> list[tuple[int, ...]]:
    return [tuple(shape) for _, shape in found["carry"] if len(shape) == 2]


def copied(found: dict[str, Any]) -> bool:
    """Whether a matrix is copied."""
    return any(b["opcode"] == "copy" and b["shape"] == [WIDTH, WIDTH] for b in found["largest"])


def looked_up(found: dict[str, Any], rows: int, micro: int) -> bool:
    """What was looked up crosses once in each pass; the table stays where it is."""
    every = [c for c in collectives_of(found) if c.elements >= MATRIX / 8]
    moved = [c.elements for c in every if c.kind == "all-to-all"]
    gathers = [c.elements for c in every if c.kind == "all-gather"]
    return moved == [micro * SEQ * WIDTH] * 2 and rows * WIDTH not in gathers


# What must hold of a program in which one site matters.
CHECKS: dict[str, Callable[[dict[str, Any]], bool]] = {
    # SGD in fp32 has nothing else that is cut: without it, all-reduce and update everywhere.
    "reduce": lambda f: moved(f) == {"reduce-scatter": LAYERS, "all-gather": LAYERS},
    # Stage 1 where each micro-batch is reduced: the table has whole accumulators.
    "accumulate": lambda f: carried(f) == [(WIDTH, WIDTH)] * LAYERS,
    # XLA:TPU would copy the old parameters, into whose buffers it gathers the new ones.
    "update.gather": lambda f: not copied(f),
    # Weights move, and each layer's do so in each pass.
    "unit.gather": lambda f: moved(f) == {"all-gather": 2 * LAYERS, "reduce-scatter": LAYERS},
    # The gradients of ZeRO 3 alone, with nobody to say where they should go.
    "unit.scatter": lambda f: moved(f) == {"all-gather": 2 * LAYERS, "reduce-scatter": LAYERS},
    # A table that is smaller than the activation would be gathered.
    "lookup.columns": lambda f: looked_up(f, **FEW_ROWS),
    # Layers would go on with the columns of every sample.
    "lookup.rows": lambda f: looked_up(f, **FEW_ROWS),
}


def test_every_site_of_the_source_has_a_check():
    assert sites() == CHECKS.keys() | TRACED_ONLY | ELSEWHERE


@pytest.mark.parametrize("site", CHECKS)
def test_the_program_is_right_with_every_constraint(programs, site):
    assert CHECKS[site](programs[site]["kept"])


@pytest.mark.parametrize("site", CHECKS)
def test_a_dropped_constraint_is_caught(programs, site):
    assert not CHECKS[site](programs[site]["dropped"])


# -- per-device code ------------------------------------------------------------------------------

COLLECTIVES = {
    "psum", "pmean", "pmax", "pmin", "psum_scatter", "all_gather", "all_to_all", "ppermute",
    "pshuffle", "pswapaxes", "pbroadcast", "ragged_all_to_all",
}  # fmt: skip
OF_DEVICES = {
    "collective_matmul.py", "stage_shard_map.py", "stage_layout.py", "packed_layout.py", "steps.py",
    "own_axes.py", "dispatch.py", "sequence_passes.py", "programs.py",
    "windows.py", "owned.py",
}  # fmt: skip


def test_per_device_code_states_no_collective_of_its_own():
    """The shard_maps of the core only say what each device computes; sums stand outside them.

    A collective that is added must come with a test that it is missed (as below). The ring's has
    its own: test_a_step_of_the_ring_that_is_dropped_is_missed. What the stages of a pipeline send
    each other (stage_shard_map.py) is needed for every number of theirs, and where each layer's
    weights go (stage_layout.py) is compared in test_stage_layout.py, and in test_unlike_stages.py
    for unlike ones (packed_layout.py). own_axes.py replaces the model's own. A ring of data ranks
    (steps.py) has test_a_dropped_ring_step_changes_the_sum in test_ring_steps.py. What a mixture
    exchanges (dispatch.py) has its mutations in tests/moe/test_dispatch.py, and attention over
    sequences (sequence_passes.py) in tests/sequence/test_sequence_attention.py, as what neighbours
    of a window send (windows.py) in tests/sequence/test_windows.py. Without the exchange of owners
    (owned.py) every number of tests/optim/test_owners.py is wrong; programs.py shows bugs of JAX.
    """
    called = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for path in PACKAGE.rglob("*.py")
        if path.name not in OF_DEVICES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Attribute, ast.Name))
    }
    assert not called & COLLECTIVES


def step_of(devices: list[jax.Device], batch: Any) -> np.ndarray:
    """The first layer's matrix after one SGD step at stage 1, with two micro-batches a rank."""
    config = stacks.config_of(
        1,
        mixed=False,
        accumulation=16 // len(devices),
        mesh={"data": len(devices)},
        optimizer={"type": "SGD", "params": {"lr": 0.1}},
    )
    model = stacks.FORMS["listed"](2, 16)
    engine = jaxspeed.initialize(model, stacks.loss, config, devices=devices)
    engine.train_batch(batch)
    return np.asarray(engine.parameters["layers/0/w"])


def test_the_sum_over_ranks_is_missed_when_it_is_dropped(monkeypatch):
    x, y = jax.random.normal(jax.random.key(0), (2, 16, 16))
    batch = {"x": np.asarray(x), "y": np.asarray(y)}
    plain = step_of(jax.devices()[:1], batch)
    np.testing.assert_allclose(step_of(jax.devices(), batch), plain, rtol=1e-5, atol=1e-6)
    real = jax.shard_map

    def only_the_first_rank(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        """The partial sums of the first rank in place of every rank's own."""
        per_rank = real(*args, **kwargs)
        return lambda *xs: jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), per_rank(*xs))

    monkeypatch.setattr(jax, "shard_map", only_the_first_rank)
    assert np.abs(step_of(jax.devices(), batch) - plain).max() > 1e-3
