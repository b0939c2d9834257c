"""Resolution of the config's remat keys and a traced program to a residual policy."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.config.remat import Recompute
from jaxspeed.errors import ConfigError
from jaxspeed.hardware.chip import host_link, peak_flops
from jaxspeed.ops.free_axes import TENSOR
from jaxspeed.placement.constrain import constrain
from jaxspeed.placement.show import bytes_text
from jaxspeed.remat.budget import Choice, Costs, Unit, choose
from jaxspeed.remat.unit_jaxprs import Member
from jaxspeed.zero3.residual_policy import ResidualPolicy

ATTENTION = "attention"  # the name of what `jaxspeed.ops.attention` gives
_KEY = "parallel.remat"
_UNKNOWN_PEAK = 312e12  # of simulated devices; an A100's
_policies = jax.checkpoint_policies
Move = Callable[[jax.Array, bool], jax.Array]


def keeping_of(
    words: Recompute, members: Sequence[Member], ways: int, device_kind: str
) -> ResidualPolicy | None:
    """What the units of a program keep; None: whatever their derivative needs.

    Args:
      words: what the config says.
      members: the units of the program.
      ways: into how many parts devices share what the units compute.
      device_kind: of the devices that will run it.

    Raises:
      ConfigError: where the program has no such units or names.
    """
    if not words:
        return None
    if not members:
        raise ConfigError(
            f"{_KEY}: this model has no repeated units whose activations could be made again; "
            "name them in parallel.units, or use jax.checkpoint in the model"
        )
    put, get = _moves(words)
    policy = _policy(words, members, ways, device_kind)
    return ResidualPolicy(policy, every_of(words, members), put, get)


def _policy(
    words: Recompute, members: Sequence[Member], ways: int, device_kind: str
) -> Callable[..., Any] | None:
    if words.policy == "dots":
        return _policies.dots_with_no_batch_dims_saveable
    if words.policy == "attention":
        _check_names([ATTENTION], members)
        return _policies.save_only_these_names(ATTENTION)
    if words.policy == "names":
        _check_names([*words.save, *words.offload, *words.recomputed], members)
        return of_names(words.save, words.offload)
    if words.budget is not None:
        return of_names(*chosen(words.budget, costs_of(members, ways, device_kind)))
    return None


def costs_of(members: Sequence[Member], ways: int, device_kind: str) -> Costs:
    """What choices among the activations that a program's units name cost on such a device."""
    rate = peak_flops(device_kind) or _UNKNOWN_PEAK
    return Costs(tuple(map(Unit.of, members)), ways, rate / host_link(device_kind))


def chosen(budget: int, costs: Costs) -> Choice:
    """The cheapest choice within a budget; what units are handed counts too."""
    if budget < costs.input_bytes:
        raise ConfigError(
            f"{_KEY}.budget: {bytes_text(budget)} is less than the {bytes_text(costs.input_bytes)} "
            'that the inputs of the units take by themselves ("full"); it needs at least that, or '
            "every_n, or activation_checkpointing.cpu_checkpointing"
        )
    return choose(costs, budget - costs.input_bytes)


def of_names(save: Iterable[str], offload: Iterable[str]) -> Callable[..., Any]:
    """The policy that keeps activations of these names, on the device or in host memory."""
    if not (offload := list(offload)):
        return _policies.save_only_these_names(*save)
    return _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(save),
        names_which_can_be_offloaded=offload,
        offload_src="device",
        offload_dst="pinned_host",
    )


def _check_names(wanted: Iterable[str], members: Sequence[Member]) -> None:
    known = sorted({name for member in members for name in member.names})
    unknown = [name for name in wanted if name not in known]
    if unknown:
        there = ", ".join(known) or "none: jax.ad_checkpoint.checkpoint_name(x, name) gives one"
        raise ConfigError(
            f"{_KEY}: the model's units have no activation named {', '.join(unknown)}; "
            f"named there: {there}"
        )


def every_of(words: Recompute, members: Sequence[Member]) -> int:
    """How many units are made again together."""
    if words.every is None and words.count is None:
        return 1
    layers = members[0].times if len(members) == 1 else len(members)
    if words.every is not None:
        every, what = words.every, f"{_KEY}.every_n: {words.every}"
    else:
        assert words.count is not None
        what = f"activation_checkpointing.number_checkpoints: {words.count}"
        every = layers // words.count if words.count and layers % words.count == 0 else 0
    if not every or layers % every:
        parts = [n for n in range(1, layers + 1) if layers % n == 0]
        raise ConfigError(
            f"{what} does not divide the {layers} units that follow each other here; "
            f"{', '.join(map(str, parts))} do"
        )
    return every


def _moves(words: Recompute) -> tuple[Move | None, Move | None]:
    """The way of what is kept to where it waits, and back.

    What tensor cuts inside of a unit is kept so in any case: only what units are handed is whole.
    """
    if not words.partition and not words.on_host:
        return None, None

    def put(x: jax.Array, handed: bool) -> jax.Array:
        x = _cut(x, True) if words.partition and handed else x
        return jax.device_put(x, jax.memory.Space.Host) if words.on_host else x

    def get(x: jax.Array, handed: bool) -> jax.Array:
        x = jax.device_put(x, jax.memory.Space.Device) if words.on_host else x
        return _cut(x, False) if words.partition and handed else x

    return put, get


def _cut(x: jax.Array, away: bool) -> jax.Array:
    """Over tensor, along the first dim after the samples' that divides.

    Pinned whole before, so that nothing else of the pass comes to be cut so too.
    """
    mesh = jax.sharding.get_abstract_mesh()
    ways = mesh.shape.get(TENSOR, 1)
    dim = next((d for d in range(1, x.ndim) if x.shape[d] % ways == 0), None)
    if ways == 1 or dim is None:
        return x

    def along(axis: str | None) -> NamedSharding:
        entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
        entries[dim] = axis
        return NamedSharding(mesh, PartitionSpec(*entries))

    x = constrain(x, along(None), "keeping.whole")
    return constrain(x, along(TENSOR), "keeping.cut") if away else x
