"""What a ring's step sends, read from programs compiled for eight simulated devices.

In units of the model's bytes, for N ranks: N - 1 of N chunks in each phase. Stage 2 reduces each
micro-batch, stage 3 gathers each unit twice and scatters it once, in each. Left out are the
scalars: the ranks' losses and weights, and the norm of what is cut, which XLA adds up.
"""

from typing import Any

import jax
import pytest

from jaxspeed.communication import Communication, ring_bytes
from tests.support.covering import covering
from tests.support.topology import run_on_topology
from tests.system.measured import LAYERS, collectives_of, measure, stack_program
from tests.system.measured import WIDTH as TPU_WIDTH

WIDTH = 64
MODEL = LAYERS * WIDTH * WIDTH * 4  # bytes, without the shift
SCALARS = 64  # bytes


def sends(stage: int, ring: dict[str, Any] | None = None, **case: Any) -> list[Communication]:
    """The collectives of a step, in fp32."""
    parallel = {"data_reduction": "ring", **(ring or {})}
    program = stack_program(
        jax.devices(), stage, width=WIDTH, micro=2, mixed=False, parallel=parallel, **case
    )
    return collectives_of(measure(*program))


def volume(found: list[Communication], **where: Any) -> float:
    """In units of the model, of the collectives with these attributes."""
    chosen = [c for c in found if all(getattr(c, k) == v for k, v in where.items())]
    return sum(map(ring_bytes, chosen)) / MODEL


PHASE = 7 / 8
SCHEDULES = {
    # (stage, accumulation): (in the loop over micro-batches, once a step), in phases
    (0, 1): (0, 2),
    (0, 4): (0, 2),
    (1, 4): (0, 2),
    (2, 2): (2, 1),
    (3, 2): (6, 0),
}
# XLA:CPU makes one of two gathers of the same layer, unless they are in loops.
FORM = {3: "scanned"}


# By default one of the three that send two phases once a step.
@pytest.mark.default_cases("0-4")
@pytest.mark.parametrize(("stage", "accumulation"), covering(SCHEDULES, [(0, 4), (2, 2), (3, 2)]))
def test_a_step_sends_its_phases_and_nothing_else(stage, accumulation):
    found = sends(stage, accumulation=accumulation, form=FORM.get(stage, "listed"))
    large = [c for c in found if c.bytes * c.runs > SCALARS]
    assert {(c.kind, c.axes) for c in large} == {("collective-permute", ("data",))}
    for in_loop, phases in zip((True, False), SCHEDULES[stage, accumulation], strict=True):
        moved = volume(large, in_accumulation=in_loop)
        assert phases * PHASE <= moved <= phases * PHASE * 1.01


def on_tpu(**case: Any) -> list[Communication]:
    """The large collectives over data of a step in bf16."""
    found = collectives_of(run_on_topology("tests.system.tpu:rings", "v5e:2x4", **case))
    return [c for c in found if c.axes == ("data",) and c.bytes * c.runs > 20 * SCALARS]


@pytest.mark.sampled
def test_a_layer_comes_and_goes_by_itself_under_stage_3():
    """Gathered in each pass, scattered once: so that no more than one layer is ever whole."""
    found = on_tpu(stage=3)
    assert {(c.kind, c.dtype) for c in found} == {("collective-permute", "bf16")}
    layer = TPU_WIDTH**2 * 2 / 8 / 2  # bytes of a chunk, one direction's half
    assert {c.bytes // layer for c in found} == {1}
    assert sum(c.runs for c in found) == 2 * 7 * 3 * LAYERS, "of both directions"


@pytest.mark.full
@pytest.mark.parametrize("tensor", [1, 2])
def test_real_devices_go_round_in_loops(tensor):
    """A loop of N - 1 steps for each phase, whatever N is."""
    specs = {"partition_config": {"layer_specs": {"layers/*/w": "column"}}}
    cut = {"mesh": {"tensor": tensor}, "tensor_parallel": specs}
    found = on_tpu(stage=1, **cut)
    assert {(c.kind, c.runs) for c in found} == {("collective-permute", 8 // tensor - 1)}
    assert len(found) == 2 * 2, "two directions in two phases, of one bucket"


def test_across_replicas_goes_a_chunk():
    found = sends(1, mesh={"replica": 2})
    assert volume(found, axes=("data",)) == pytest.approx(2 * 3 / 4, rel=0.01)
    assert volume(found, axes=("replica",)) == pytest.approx(2 * 1 / 2 / 4, rel=0.01)


def test_what_tensor_cuts_goes_round_cut():
    cut = {"tensor_parallel": {"partition_config": {"layer_specs": {"layers/*/w": "column"}}}}
    found = sends(0, mesh={"tensor": 2}, **cut)
    assert volume(found, axes=("data",), kind="collective-permute") == pytest.approx(
        2 * 3 / 4 / 2, rel=0.02
    )


@pytest.mark.sampled
def test_packed_gradients_are_a_half_and_a_quarter_with_scales():
    """The width is one at which blocks of int8 are whole."""

    def of(wire: str) -> float:
        program = stack_program(
            jax.devices(),
            0,
            width=256,
            micro=2,
            mixed=False,
            parallel={"data_reduction": "ring", "ring_wire": wire},
        )
        return sum(map(ring_bytes, collectives_of(measure(*program))))

    plain = of("none")
    assert of("bf16") / plain == pytest.approx(1 / 2, rel=0.01)
    assert of("int8") / plain == pytest.approx(1 / 4 * (256 + 4) / 256, rel=0.02)
