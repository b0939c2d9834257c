"""Why lists of unlike layers are refused: what a program that branches by stage would come to.

All stages run one program. Stages of unlike layers would each take a branch of it, and what data
and tensor exchange would be inside of the branches. XLA's partitioner puts exchanges among *all*
devices there, which wait for stages that are in another branch: on simulated devices such a program
hangs (jax 0.10.2). Where this test fails, the partitioner has learnt it: lift the refusal.
"""

import re

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

WIDTHS, EMBED = (64, 96, 48, 80), 256
ROOM = 2 * EMBED * max(WIDTHS)  # the weights of any stage in one row, padded


def test_branches_of_unlike_stages_hold_exchanges_with_the_devices_of_other_branches():
    mesh = jax.make_mesh((4, 2), ("pipe", "data"), axis_types=(AxisType.Auto,) * 2)

    def branch(width):
        def run(flat, x):
            up = flat[: EMBED * width].reshape(EMBED, width)
            down = flat[EMBED * width : 2 * EMBED * width].reshape(width, EMBED)
            return x + jnp.tanh(x @ up) @ down

        return run

    def stage_body(stage, flat, x):
        def loss(flat):
            return lax.switch(stage[0], [branch(w) for w in WIDTHS], flat[0], x[0]).sum()

        cut = NamedSharding(jax.sharding.get_abstract_mesh(), P(None, "data"))
        return lax.with_sharding_constraint(jax.grad(loss)(flat), cut)

    by_stage = P("pipe")
    step = jax.shard_map(
        stage_body,
        mesh=mesh,
        in_specs=(by_stage, by_stage, by_stage),
        out_specs=by_stage,
        axis_names={"pipe"},
        check_vma=False,
    )
    cut = NamedSharding(mesh, P("pipe", "data"))  # ZeRO 3
    shapes = [
        jax.ShapeDtypeStruct((4,), jnp.int32, sharding=NamedSharding(mesh, by_stage)),
        jax.ShapeDtypeStruct((4, ROOM), jnp.float32, sharding=cut),
        jax.ShapeDtypeStruct((4, 16, EMBED), jnp.float32, sharding=cut),
    ]
    text = jax.jit(step).lower(*shapes).compile().as_text()
    branches = re.findall(r"branch_computations=\{([^}]*)\}", text)
    names = {name.strip().lstrip("%") for found in branches for name in found.split(",")}
    assert names
    inside = [
        body
        for name, body in re.findall(r"^%([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S)
        if name in names
    ]
    pairs = re.findall(r"source_target_pairs=\{(\{.*?\})\}", "\n".join(inside))
    devices = [set(map(int, re.findall(r"\d+", found))) for found in pairs]
    assert set(range(8)) in devices
