"""What waits for the backward pass: cut over tensor where the config says so, and nothing besides.

gpt2 on data 4 x tensor 2, read from what is compiled for simulated devices.
"""

import functools

import jax
import pytest

from jaxspeed.hlo.parser import Shape, parse
from jaxspeed.hlo.trip_counts import walk
from tests.system.measured import compile_step, without
from tests.system.pipeline_programs import pipeline_program

LAYERS, EMBED, SEQ, SAMPLES = 3, 32, 16, 5
SITES = ("keeping.cut", "keeping.whole")


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


def kept(module):
    """The shapes on one device of what the loop over layers hands to the one that goes back."""
    loops = [site.instruction for site in walk(module) if site.instruction.opcode == "while"]
    shapes = {part.dims for loop in loops for part in loop.shape if isinstance(part, Shape)}
    return {tuple(sorted(dims)) for dims in shapes if len(dims) == 4 and dims[0] == LAYERS}


def crossing_forward(module):
    """How many collectives of activations the loop that goes forward holds."""
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    return sum(
        site.instruction.opcode in kinds
        and bool(site.loops)
        and "transpose" not in site.instruction.op_name
        for site in walk(module)
    )


WHOLE = tuple(sorted((LAYERS, SAMPLES, SEQ, EMBED)))
CUT = tuple(sorted((LAYERS, SAMPLES, SEQ // 2, EMBED)))


def test_what_units_are_handed_is_kept_cut_over_tensor():
    assert CUT in kept(compiled(True)) and WHOLE not in kept(compiled(True))
    assert WHOLE in kept(compiled(False)) and CUT not in kept(compiled(False))


def test_the_forward_pass_crosses_nothing_more_for_it():
    assert crossing_forward(compiled(True)) == crossing_forward(compiled(False))


@pytest.mark.parametrize("site", SITES)
def test_a_dropped_constraint_is_missed(site):
    found = compiled(True, site)
    right = CUT in kept(found) and WHOLE not in kept(found)
    assert not right or crossing_forward(found) != crossing_forward(compiled(False))
