"""ZeRO 3 gathers a quantized base in its codes, and no stack of layers exists in another form."""

import dataclasses
import functools
import importlib.util
import math
from typing import Any

import jax
import pytest
from jaxspeed.models import llama

from jaxspeed.hardware.targets import target_of
from jaxspeed.planner.compile import in_child
from jaxspeed.planner.memory import memory_of
from tests.support.topology import run_on_topology
from tests.system.measured import collectives_of, measure_on_gpus
from tests.system.quantized_programs import SEQ, SIZES, deep, program

CODES = {"nf4": "u8", "int8": "s8"}


def check(found: dict[str, Any], weights: str, sizes: Any, seq: int) -> None:
    layers = sizes["num_hidden_layers"]
    weight = sizes["hidden_size"] * sizes["intermediate_size"]
    smallest = sizes["hidden_size"] ** 2 * sizes["num_key_value_heads"]
    smallest //= sizes["num_attention_heads"]  # of a layer's matrices: the keys'
    assert seq * sizes["hidden_size"] < smallest, "activations are told from weights"
    table = sizes["vocab_size"] * sizes["hidden_size"]
    gathers = [c for c in collectives_of(found) if c.kind == "all-gather"]
    codes = [c for c in gathers if set(c.dtype.split("+")) == {CODES[weights]}]
    share = 2 if weights == "nf4" else 1
    assert sum(c.elements >= weight // share for c in codes) >= 2, "in both passes"
    for each in gathers:
        # XLA:GPU gathers norms together with codes: of these bytes at most so many are of norms.
        wide = 2 * (each.bytes - each.elements)
        of_table = each.runs * each.elements <= table and table % each.elements == 0
        assert wide < weight // 8 or of_table, f"gathered in {each.dtype}: {each}"
    for buffer in found["largest"]:
        first, *dims = buffer["shape"]
        if buffer["dtype"] in ("bf16", "f32") and first == layers:
            assert math.prod(dims) < smallest, f"a stack of layers: {buffer}"


@pytest.mark.sampled
@pytest.mark.parametrize("weights", CODES)
def test_codes_are_gathered_and_decoded_a_layer_at_a_time(weights):
    found = run_on_topology("tests.system.quantized_programs:step", "v5e:2x4", weights=weights)
    check(found, weights, SIZES, SEQ)


@pytest.mark.full
def test_so_are_those_of_eight_billion_parameters():
    found = run_on_topology(
        "tests.system.quantized_programs:step", "v5e:2x4", weights="nf4", preset="llama3-8b"
    )
    check(found, "nf4", dataclasses.asdict(llama.PRESETS["llama3-8b"]), 512)


needs_cuda = pytest.mark.skipif(
    not any(map(importlib.util.find_spec, in_child.CUDA_PLUGINS)),
    reason="needs jax[cuda13] (3.4 GB) to compile for a GPU",
)


@needs_cuda
@pytest.mark.parametrize("weights", CODES)
def test_gpus_gather_codes_too(weights):
    found = measure_on_gpus(target_of("h100:8"), functools.partial(program, weights=weights))
    check(found, weights, SIZES, SEQ)


@needs_cuda
@pytest.mark.full
def test_gpus_gather_the_codes_of_eight_billion_parameters():
    job = functools.partial(program, weights="nf4", preset="llama3-8b")
    found = measure_on_gpus(target_of("h100:8"), job)
    check(found, "nf4", dataclasses.asdict(llama.PRESETS["llama3-8b"]), 512)


@needs_cuda
@pytest.mark.full
def test_the_temporaries_of_a_gpu_are_smaller_than_the_codes_and_as_estimated():
    found = in_child.compile_for(target_of("h100:1"), deep).report
    estimate = memory_of(*deep(jax.devices()[:1]), "cuda")
    codes = sum(c.bytes for c in estimate.components if c.name == "parameters")
    assert found.temp_bytes < codes / 2
    assert estimate.device == pytest.approx(found.argument_bytes + found.temp_bytes, rel=0.1)
