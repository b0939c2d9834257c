"""What the blocks of the families compile to when the tensor axis cuts them, for a TPU."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed import models
from jaxspeed.train.build import build_program
from jaxspeed.train.program import Program
from tests.system import stacks
from tests.system.measured import compile_step, measure, without

# No kernel takes 192 tokens: compiling splash attention takes most of a minute. What it exchanges
# over tensor is in test_shared_vocabulary.py.
LAYERS, EMBED, SEQ, MICRO = 2, 512, 192, 2
HEADS, VOCABULARY, MLP = 8, 2048, 2048
ACTIVATION = MICRO * SEQ * EMBED  # elements of one between the blocks, on each data rank
SIZES: dict[str, Any] = {
    "hidden_size": EMBED,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "intermediate_size": MLP,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": VOCABULARY, "max_position_embeddings": 256},
    "llama": {"vocab_size": VOCABULARY, "num_key_value_heads": HEADS},
    "vit": {"image_size": 64, "patch_size": 4, "num_classes": 16},
}


def block_program(
    devices: list[jax.Device],
    family: str = "gpt2",
    tensor: int = 4,
    stage: int = 0,
    layers: int = LAYERS,
    sizes: dict[str, Any] | None = None,
    micro: int = MICRO,
    seq: int = SEQ,
    **parallel: Any,
) -> tuple[Program, Any]:
    """A family's program in bf16, tensor x data, `micro` samples a data rank."""
    overrides = {**SIZES, **FAMILIES[family], "num_hidden_layers": layers, **(sizes or {})}
    built = models.build(family, None, overrides)
    data = len(devices) // tensor
    config = stacks.config_of(
        stage, micro=micro, mesh={"tensor": tensor, "data": data}, parallel=parallel
    )
    program = build_program(config, built.factory, built.loss, devices=devices)
    samples = data * micro
    if family == "vit":
        size = overrides["image_size"]
        return program, {
            "images": jax.ShapeDtypeStruct((samples, size, size, 3), jnp.float32),
            "labels": jax.ShapeDtypeStruct((samples,), jnp.int32),
        }
    return program, {"tokens": jax.ShapeDtypeStruct((samples, seq + 1), jnp.int32)}


CUT = {"sequence_parallel_activations": True, "tensor_overlap": "none"}
CASES: dict[str, dict[str, Any]] = {
    "gpt2, whole": {"family": "gpt2"},
    "gpt2, cut": {"family": "gpt2", **CUT},
    "llama, whole": {"family": "llama"},
    "llama, cut": {"family": "llama", **CUT},
    "vit, whole": {"family": "vit"},
    "gpt2, whole, unrolled": {"family": "gpt2", "sizes": {"unroll": True}},
    "gpt2, cut, unrolled": {"family": "gpt2", "sizes": {"unroll": True}, **CUT},
    "llama, whole, stage 3": {"family": "llama", "stage": 3},
    "llama, cut, stage 3": {"family": "llama", "stage": 3, **CUT},
    # With so many samples its matmuls gather their own weights.
    "llama, stage 3, recomputed": {
        "family": "llama",
        "stage": 3,
        "micro": 2 * MICRO,
        "remat": "full",
    },
    "llama, ring": {"family": "llama", **CUT, "tensor_overlap": "ring"},
}


NARROW = {"hidden_size": 128, "intermediate_size": 256}
WIDE_MICRO = 64
# For each site a program in which it matters.
DROPPED: dict[str, dict[str, Any]] = {
    "tensor.enter": CASES["gpt2, whole"],
    "tensor.leave": CASES["gpt2, cut"],
    "tensor.leave.backward": CASES["gpt2, cut"],
    # Activations larger than the weights: the compiler would rather move those.
    "tensor.columns": {"sizes": NARROW, "micro": WIDE_MICRO, **CUT},
    "tensor.columns.saved": CASES["gpt2, cut"],
}


def blocks(devices: list[jax.Device], names: list[str]) -> dict[str, Any]:
    return {name: measure(*block_program(devices, **CASES[name])) for name in names}


def dropped(devices: list[jax.Device]) -> dict[str, Any]:
    """The program of each site, with it and without."""
    found: dict[str, Any] = {}
    for site, case in DROPPED.items():
        kept = measure(*block_program(devices, **case))
        with without(site):
            found[site] = {"kept": kept, "dropped": measure(*block_program(devices, **case))}
    return found


HELD_MICRO, HELD_SEQ = 16, 256
HELD_WEIGHTS = 2 * (4 * EMBED * EMBED + 2 * EMBED * MLP)  # bf16 bytes of one layer's gradients


def held(devices: list[jax.Device]) -> dict[str, Any]:
    """Bytes that one layer more takes."""

    def temp(layers: int, tensor: int, **parallel: Any) -> int:
        program, batch = block_program(
            devices[: 2 * tensor],
            "gpt2",
            tensor,
            layers=layers,
            micro=HELD_MICRO,
            seq=HELD_SEQ,
            **parallel,
        )
        memory = compile_step(program, batch).memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    def one_more(tensor: int, **parallel: Any) -> float:
        return (temp(4, tensor, **parallel) - temp(2, tensor, **parallel)) / 2

    return {
        "tensor 1": one_more(1),
        "tensor 4, whole": one_more(4),
        "tensor 4, cut": one_more(4, **CUT),
    }
