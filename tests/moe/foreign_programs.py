"""What mixtures that know nothing of jaxspeed compile to."""

from typing import Any

import jax

from jaxspeed.train.build import build_program
from tests.moe import foreign_mixtures as mixtures
from tests.system import stacks
from tests.system.measured import measure, without

# A device has more tokens than an expert has dims: the compiler would move few rather than weights.
EXPERTS, EMBED, MLP, SEQ, MICRO = 8, 128, 256, 128, 8
TOKENS = MICRO * SEQ  # of a device
ROWS = 2 * mixtures.TOP  # of the experts' capacity, for each token
WEIGHT = EXPERTS * EMBED * MLP
SITES = ("experts.local", "experts.exchange")


def compiled(
    devices: list[jax.Device], form: str, mesh: dict[str, int], stage: int = 0, dropped: str = ""
) -> dict[str, Any]:
    """One block's step, without the constraints of a site."""
    samples = MICRO * len(devices) // mesh.get("tensor", 1)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), mixtures.batch(samples, SEQ, EMBED)
    )
    program = build_program(
        stacks.config_of(stage, micro=MICRO, mesh=mesh),
        lambda rngs: mixtures.Mixture(rngs, form, True, (EXPERTS, EMBED, MLP), blocks=1),
        mixtures.loss,
        devices=devices,
    )
    with without(dropped or None):
        return measure(program, shapes)
