"""From the names of a leaf's dims to the mesh axes that cut them: the model axes of its spec."""

from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from jaxspeed.placement.zero import ways

# Logical dim -> mesh axis. A name that is not here (embed, head_dim, pos, ...) stays whole.
LOGICAL_RULES: Mapping[str, str] = {
    "layers": "pipe",
    "experts": "expert",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "tensor": "tensor",  # models that name the mesh axis itself
}


def model_spec(
    shape: Sequence[int], names: Sequence[str | None], axis_sizes: Mapping[str, int]
) -> PartitionSpec:
    """The spec that a leaf's logical names give it: each axis once, on a dim that it divides."""
    entries: list[str | None] = []
    for size, name in zip(shape, [*names, *([None] * (len(shape) - len(names)))], strict=True):
        axis = LOGICAL_RULES.get(name or "")
        fits = axis and axis not in entries and axis_sizes[axis] > 1
        entries.append(axis if fits and size % ways(axis, axis_sizes) == 0 else None)
    return PartitionSpec(*entries)
