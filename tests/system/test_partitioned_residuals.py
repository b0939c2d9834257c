"""`partition_activations` shards saved unit inputs over tensor, and nothing else.

gpt2 on data 4 x tensor 2, read from the step compiled for simulated devices.
"""

import functools

import jax
import pytest

from jaxspeed.hlo.parser import Shape, parse
from jaxspeed.hlo.trip_counts import walk
from tests.system.measured import compile_step, without
from tests.system.pipeline_programs import pipeline_program

LAYERS, EMBED, SEQ, SAMPLES = 3, 32, 16, 5
SITES = ("residual.sharded", "residual.replicated")


@functools.cache
def compiled(partition, dropped=None):
    case = {
        "mesh": {"data": 4, "tensor": 2},
        "stage": 0,
        "seq": SEQ,
        "micro": SAMPLES,
        "micro_batches": 1,
        "sizes": {
            "hidden_size": EMBED,
            "num_attention_heads": 4,
            "num_hidden_layers": LAYERS,
            "vocab_size": 64,
            "max_position_embeddings": SEQ,
        },
        "parallel": {"remat": "full"},
        "activation_checkpointing": {"partition_activations": partition},
    }
    with without(dropped):
        program, batch = pipeline_program(jax.devices(), **case)
        return parse(compile_step(program, batch).as_text())


def saved(module):
    """Shapes on one device of what the forward loop over layers passes to the backward loop."""
    loops = [site.instruction for site in walk(module) if site.instruction.opcode == "while"]
    shapes = {part.dims for loop in loops for part in loop.shape if isinstance(part, Shape)}
    return {tuple(sorted(dims)) for dims in shapes if len(dims) == 4 and dims[0] == LAYERS}


def forward_collectives(module):
    """Number of collectives of activations in the forward loop."""
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    return sum(
        site.instruction.opcode in kinds
        and bool(site.loops)
        and "transpose" not in site.instruction.op_name
        for site in walk(module)
    )


REPLICATED = tuple(sorted((LAYERS, SAMPLES, SEQ, EMBED)))
SHARDED = tuple(sorted((LAYERS, SAMPLES, SEQ // 2, EMBED)))


@pytest.mark.sampled
def test_unit_inputs_are_saved_sharded_over_tensor():
    assert SHARDED in saved(compiled(True)) and REPLICATED not in saved(compiled(True))
    assert REPLICATED in saved(compiled(False)) and SHARDED not in saved(compiled(False))


def test_the_forward_pass_has_no_more_collectives():
    assert forward_collectives(compiled(True)) == forward_collectives(compiled(False))


@pytest.mark.full
@pytest.mark.parametrize("site", SITES)
def test_a_dropped_constraint_is_missed(site):
    found = compiled(True, site)
    right = SHARDED in saved(found) and REPLICATED not in saved(found)
    assert not right or forward_collectives(found) != forward_collectives(compiled(False))
