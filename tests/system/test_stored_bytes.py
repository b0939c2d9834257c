"""Bytes a device of what is stored and accumulated, from live arrays and compiled loops.

The formulas (Psi parameters, N data ranks), role by role in bytes a parameter and Adam:

| | read | master | moments | accumulated gradient |
|---|---|---|---|---|
| mixed, stage 0 | 2 | 4 | 8 | g |
| stage 1 | 2 | 4/N | 8/N | g |
| stage 2 | 2 | 4/N | 8/N | g/N |
| stage 3 | - | 4/N | 8/N | g/N |
| fp32, stage 0 | 4 | - | 8 | 4 |
| stage 1 | 4 | - | 8/N | 4 |
| stage 2 | 4 | - | 8/N | 4/N |
| stage 3 | 4/N | - | 8/N | 4/N |

g is 2 with `grad_accum_dtype: bf16`, 4 by default. DeepSpeed's stage 3 keeps a 16-bit copy as well
(16 Psi/N in all); here layers read a cast of the master, so that it is 14 Psi/N.
"""

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jaxspeed.models import build

import jaxspeed
from jaxspeed.hlo import loop_carry_shapes
from tests.support.covering import covering
from tests.system import stacks

LAYERS, WIDTH = 2, 64
PSI = LAYERS * WIDTH * WIDTH + WIDTH
ACCUMULATION = 2
ITEMSIZE = {"f32": 4, "bf16": 2, "f16": 2}


class Case(NamedTuple):
    stage: int
    mesh: dict[str, int]
    precision: str  # "mixed", "mixed, bf16 gradients" or "fp32"

    @property
    def name(self) -> str:
        mesh = "x".join(f"{axis}{n}" for axis, n in self.mesh.items())
        return f"stage{self.stage}-{mesh}-{self.precision.replace(' ', '')}"


def formulas(case: Case) -> dict[str, Fraction]:
    """The table above, in bytes a parameter."""
    n = case.mesh["data"]  # replicas hold copies: they cut nothing
    cut = [Fraction(1), Fraction(1, n)]
    stored_cut, grad_cut, read_cut = (
        cut[case.stage >= 1],
        cut[case.stage >= 2],
        cut[case.stage == 3],
    )
    if case.precision == "fp32":
        return {"param": 4 * read_cut, "opt": 8 * stored_cut, "grad": 4 * grad_cut}
    found = {
        "param": Fraction(2),
        "master": 4 * stored_cut,
        "opt": 8 * stored_cut,
        "grad": (2 if "bf16" in case.precision else 4) * grad_cut,
    }
    if case.stage == 3:
        del found["param"]
    return found


STAGES = (0, 1, 2, 3)
PRECISIONS = ("mixed", "mixed, bf16 gradients", "fp32")
DATA = tuple({"data": n} for n in (1, 2, 4, 8))
REPLICATED = ({"replica": 2, "data": 4}, {"replica": 4, "data": 2}, {"replica": 2, "data": 2})
EVERY = [Case(s, m, p) for s in STAGES for m in (*DATA, *REPLICATED) for p in PRECISIONS]
# Every pair of a stage, a mesh and a precision; replicas with every stage.
COVERING = [
    case
    for case in EVERY
    if (STAGES.index(case.stage) + PRECISIONS.index(case.precision)) % 3
    == [*DATA, *REPLICATED].index(case.mesh) % 3
    and case.mesh not in REPLICATED[1:]
]
ALWAYS = COVERING[::2]  # every stage, mesh and precision


def engine_of(case: Case, model: Any = None, loss: Any = stacks.loss, **more: Any) -> Any:
    count = math.prod(case.mesh.values())
    if case.precision == "mixed, bf16 gradients":
        more["data_types"] = {"grad_accum_dtype": "bf16"}
    config = stacks.config_of(
        case.stage,
        mixed=case.precision != "fp32",
        accumulation=ACCUMULATION,
        mesh=case.mesh,
        **more,
    )
    model = model or stacks.FORMS["listed"](LAYERS, WIDTH)
    return jaxspeed.initialize(model, loss, config, devices=jax.devices()[:count])


def live_bytes(engine: Any) -> dict[str, int]:
    """Bytes on one device by role, from the shards that the arrays have there; all alike."""
    state = engine.state
    roles = {"param": state.params, "master": state.master, "opt": parameter_like(state.opt)}
    found = {}
    for role, tree in roles.items():
        per_device = {
            device: sum(shard_bytes(x, device) for x in jax.tree.leaves(tree))
            for device in engine.program.mesh.devices.flat
        }
        assert len(set(per_device.values())) == 1, f"{role} differs between devices: {per_device}"
        found[role] = next(iter(per_device.values()))
    return {role: count for role, count in found.items() if count}


def parameter_like(opt: Any) -> list[jax.Array]:
    """The moments: what the optimizer keeps but its counter."""
    return [x for x in jax.tree.leaves(opt) if x.ndim]


def shard_bytes(x: jax.Array, device: jax.Device) -> int:
    return sum(shard.data.nbytes for shard in x.addressable_shards if shard.device == device)


def carried(engine: Any, batch: Any) -> list[tuple[str, tuple[int, ...]]]:
    """The arrays (no scalars: counters, sums of the loss) that the accumulation loop changes."""
    program = engine.program
    step = program.step.lower(program.state, program.abstract_batch(batch)).compile()
    return [(dtype, shape) for dtype, shape in loop_carry_shapes(step.as_text()) if shape]


def bytes_of(arrays: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    return sum(ITEMSIZE[dtype] * math.prod(shape) for dtype, shape in arrays)


def batch_for(case: Case) -> Any:
    return stacks.batch_of(math.prod(case.mesh.values()) * ACCUMULATION, WIDTH)


def check(case: Case) -> None:
    engine = engine_of(case)
    found = live_bytes(engine)
    accumulators = carried(engine, batch_for(case))
    assert len(accumulators) == LAYERS + 1, f"the loop carries {accumulators}"
    found["grad"] = bytes_of(accumulators)
    assert found == {role: psi * PSI for role, psi in formulas(case).items()}
    counters = sum(x.nbytes for x in jax.tree.leaves(engine.state.opt) if not x.ndim)
    told = {role: per for role, (_, per) in engine.placements.bytes_by_role().items() if per}
    assert told == {**found, "opt": found["opt"] + counters}, "the table tells what is there"


@pytest.mark.default_cases("stage2-data4-mixed", every=6)
@pytest.mark.parametrize("case", ALWAYS, ids=lambda case: case.name)
def test_bytes_of_every_role_equal_the_formula(case):
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("case", [c for c in EVERY if c not in ALWAYS], ids=lambda case: case.name)
def test_bytes_of_every_role_equal_the_formula_in_the_full_product(case):
    check(case)


@pytest.mark.parametrize("stage", covering(STAGES, [1, 3]))
def test_a_step_leaves_every_array_where_it_was(stage):
    case = Case(stage, {"data": 8}, "mixed")
    engine = engine_of(case)
    before = live_bytes(engine)
    batch = jax.tree.map(lambda s: np.ones(s.shape, s.dtype), batch_for(case))
    engine.train_batch(batch)
    assert live_bytes(engine) == before == {r: b * PSI for r, b in stored(case).items()}


def stored(case: Case) -> dict[str, Fraction]:
    return {role: psi for role, psi in formulas(case).items() if role != "grad"}


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", covering([1, 2, 3], [2, 3]))
def test_padding_is_all_that_the_formula_leaves_out(stage):
    """Matrices of 60 x 60 on 8 devices: ceil(60 / 8) = 8 rows each, and 8 of the shift's 60."""
    case = Case(stage, {"data": 8}, "fp32")
    engine = engine_of(case, model=stacks.FORMS["listed"](LAYERS, 60))
    cut, whole = LAYERS * 8 * 60 + 8, LAYERS * 60 * 60 + 60
    assert live_bytes(engine) == {"param": 4 * (cut if stage == 3 else whole), "opt": 8 * cut}
    accumulators = carried(engine, stacks.batch_of(8 * ACCUMULATION, 60))
    assert bytes_of(accumulators) == 4 * (cut if stage >= 2 else whole)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_a_language_model_too(stage):
    """gpt2 tiny: on 8 devices every leaf of it can be cut into equal parts."""
    family = build("gpt2", "tiny")
    case = Case(stage, {"data": 8}, "mixed")
    engine = engine_of(case, family.factory, family.loss)
    psi = sum(math.prod(row.leaf.shape) for row in engine.placements)
    assert live_bytes(engine) == {role: each * psi for role, each in stored(case).items()}
