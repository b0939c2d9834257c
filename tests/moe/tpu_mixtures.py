"""Programs of mixtures, compiled for absent devices: kernels, a layer, and a step."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.config import load_config
from jaxspeed.hlo import collectives, largest_buffers
from jaxspeed.ops.moe import Routing, mixture
from jaxspeed.ops.moe import grouped_products as products
from jaxspeed.placement import build_mesh
from jaxspeed.train.build import build_program
from jaxspeed.train.program import Program
from jaxspeed.user_models.config_model import resolve_model
from tests.system.measured import measure

EXPERTS, K, EMBED, MLP = 16, 2, 512, 1024
BATCH, SEQ = 2, 256  # samples of a device, and their tokens


def kernels(devices: list[jax.Device]) -> dict[str, Any]:
    """Bytes of a device's grouped products with the sizes of real models, on one device."""
    mesh = jax.sharding.Mesh(devices[:1], ("data",))
    found = {}
    # rows, experts, in, out: Mixtral 8x7B, a part of DeepSeek-V3, gpt-oss, and a few rows.
    for rows, experts, a, b in (
        (16384, 8, 4096, 14336),
        (40960, 8, 7168, 2048),
        (8192, 32, 2880, 5760),
        (24, 8, 256, 100),
    ):
        for dtype in (jnp.bfloat16, jnp.float32):
            args = [
                jax.ShapeDtypeStruct(shape, kind, sharding=NamedSharding(mesh, P()))
                for shape, kind in (
                    ((1, 1, rows, a), dtype),
                    ((experts, a, b), dtype),
                    ((1, experts + 1), jnp.int32),
                    ((1, 1, rows, b), dtype),
                )
            ]

            def gradients(x: Any, w: Any, bounds: Any, ct: Any, rows: int = rows) -> Any:
                layout = products.Layout(None, (), ())

                def function(x: Any, w: Any) -> Any:
                    return products.grouped_product(x, w, bounds, layout=layout, active=rows)

                y, pullback = jax.vjp(function, x, w)
                return y, *pullback(ct)

            compiled = jax.jit(gradients).lower(*args).compile()
            found[f"{rows} {jnp.dtype(dtype)}"] = [
                compiled.memory_analysis().temp_size_in_bytes,
                compiled.as_text().count("tpu_custom_call"),
            ]
    return found


def exchanges(devices: list[jax.Device], sizes: dict[str, int]) -> dict[str, Any]:
    """The collectives of the gradients of one layer, and its largest arrays."""
    return gradients_of_layer(build_mesh(sizes, devices), sizes)


def gradients_of_layer(mesh: Any, sizes: dict[str, int]) -> dict[str, Any]:
    """Compile the gradients of one layer, and list what it exchanges."""
    shards = sizes.get("data", 1) * sizes.get("expert", 1)
    samples = tuple(axis for axis in ("data", "expert") if sizes.get(axis, 1) > 1)
    tensor = "tensor" if sizes.get("tensor", 1) > 1 else None
    batch = BATCH * shards

    def loss(x: Any, gate: Any, up: Any, down: Any, weights: Any, chosen: Any) -> Any:
        nothing = jnp.zeros(batch)
        counts = jnp.zeros((batch, EXPERTS), jnp.int32)
        routing = Routing(chosen, weights, counts, jnp.zeros(counts.shape), nothing, nothing)

        def feed_forward(rows: Any) -> Any:
            hidden = jax.nn.silu(rows.product(gate)) * rows.product(up)
            return rows.product(down, hidden * rows.weights)

        return jnp.sum(jnp.sin(mixture(x, routing, feed_forward).astype(jnp.float32)))

    def argument(shape: Any, dtype: Any, *spec: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    args = (
        argument((batch, SEQ, EMBED), jnp.bfloat16, samples),
        argument((EXPERTS, EMBED, MLP), jnp.bfloat16, "expert", None, tensor),
        argument((EXPERTS, EMBED, MLP), jnp.bfloat16, "expert", None, tensor),
        argument((EXPERTS, MLP, EMBED), jnp.bfloat16, "expert", tensor),
        argument((batch, SEQ, K), jnp.float32, samples),
        argument((batch, SEQ, K), jnp.int32, samples),
    )
    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4))).trace(*args).lower()
        compiled = lowered.compile()
    text = compiled.as_text()
    return {
        "collectives": [
            [c.kind, c.axes, c.elements, c.dtype, c.site] for c in collectives(text, mesh)
        ],
        "largest": [[b.dtype, list(b.shape)] for b in largest_buffers(text, 4)],
    }


LAYERS = 2


def program(
    devices: Sequence[jax.Device], mesh: dict[str, int], accumulation: int = 1, stage: int = 2
) -> tuple[Program, Any]:
    """A Mixtral's step with the sizes above, without remat, and the shapes of its batch."""
    config = load_config(
        {
            "model": {
                "family": "mixtral",
                "config": {
                    "hidden_size": EMBED,
                    "num_hidden_layers": LAYERS,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 4,
                    "intermediate_size": MLP,
                    "num_experts": EXPERTS,
                    "num_experts_per_tok": K,
                    "vocab_size": 512,
                },
            },
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": accumulation,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "mesh": mesh,
            "zero_optimization": {"stage": stage},
        }
    )
    made = build_program(config, *resolve_model(config), devices=devices)
    return made, {"tokens": jax.ShapeDtypeStruct((made.batch.train, SEQ + 1), jnp.int32)}


def step(devices: Sequence[jax.Device], **given: Any) -> dict[str, Any]:
    """What a Mixtral's step compiles to."""
    return measure(*program(devices, **given))


if __name__ == "__main__":
    import json
    import os
    import sys

    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    devices = topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices
    print(json.dumps(globals()[sys.argv[2]](devices, *map(json.loads, sys.argv[3:])), indent=1))
