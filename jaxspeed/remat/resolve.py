"""Resolution of the config's remat keys and a traced program to a residual policy."""

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.config.remat import Recompute
from jaxspeed.errors import ConfigError
from jaxspeed.hardware.chip import host_link, peak_flops
from jaxspeed.ops.free_axes import TENSOR
from jaxspeed.ops.moe.routing import DECISION
from jaxspeed.placement.constrain import constrain
from jaxspeed.remat.budget import (
    ActivationShards,
    Choice,
    RematCosts,
    UnitResiduals,
    cheapest,
)
from jaxspeed.remat.host_share import LARGEST_ERROR, fetched, offloaded
from jaxspeed.remat.unit_jaxprs import UnitJaxpr
from jaxspeed.zero3.residual_policy import ResidualPolicy

log = logging.getLogger("jaxspeed")

ATTENTION = "attention"  # the name of the output of `jaxspeed.ops.attention`
_KEY = "parallel.remat"
_UNKNOWN_PEAK = 312e12  # of simulated devices; an A100's
_policies = jax.checkpoint_policies
Move = Callable[[Any, bool], Any]


def resolve_policy(
    config: Recompute, units: Sequence[UnitJaxpr], shards: ActivationShards, device_kind: str
) -> ResidualPolicy | None:
    """The residual policy of a program's units; None: every residual is saved.

    Args:
      config: the remat keys.
      units: of the program.
      shards: of the units' activations.
      device_kind: of the devices that will run it.

    Raises:
      ConfigError: if the program has no such units or names.
    """
    if not config:
        return None
    if not units:
        raise ConfigError(
            f"{_KEY}: this model has no module calls whose activations could be recomputed, or no "
            "repeated ones to save in host memory; name them in parallel.units, mark functions "
            "with jaxspeed.unit, or use jax.checkpoint in the model"
        )
    # A router's choice is small, and recomputed it could be another one, by rounding.
    always = [DECISION] if any(DECISION in unit.names for unit in units) else []
    if config.budget is not None:
        costs = remat_costs(units, shards, device_kind)
        save, offload = choice_within(config.budget, costs)
        policy: Callable[..., Any] | None = names_policy({*save, *always} - offload, offload)
        put, get = _moves(config.partition, input_share(config.budget, costs))
    else:
        policy = _policy(config, units, always)
        put, get = _moves(config.partition, config.host_ratio)
    return ResidualPolicy(policy, units_together(config, units), put, get)


def _policy(
    config: Recompute, units: Sequence[UnitJaxpr], always: Sequence[str]
) -> Callable[..., Any] | None:
    """The policy of the config; activations of the names `always` are saved too."""
    if config.policy == "dots":
        dots = _policies.dots_with_no_batch_dims_saveable
        return _policies.save_from_both_policies(dots, names_policy(always, ())) if always else dots
    if config.policy == "attention":
        _check_names([ATTENTION], units)
        return names_policy([ATTENTION, *always], ())
    if config.policy == "names":
        _check_names([*config.save, *config.offload, *config.recomputed], units)
        saved = [name for name in always if name not in config.offload]
        return names_policy([*config.save, *saved], config.offload)
    return names_policy(always, ()) if always else None


def remat_costs(
    units: Sequence[UnitJaxpr], shards: ActivationShards, device_kind: str
) -> RematCosts:
    """Costs of the choices among the units' named activations on devices of a kind."""
    rate = peak_flops(device_kind) or _UNKNOWN_PEAK
    residuals = tuple(UnitResiduals.of(unit) for unit in units if unit.differentiated)
    return RematCosts(residuals, shards, rate / host_link(device_kind))


def choice_within(budget: int, costs: RematCosts) -> Choice:
    """The cheapest choice within a budget, which includes the units' inputs.

    In a budget that is less than those, nothing else is saved on the device.
    """
    return cheapest(costs, max(0, budget - costs.input_bytes))


def input_share(budget: int, costs: RematCosts) -> float:
    """The share of the units' inputs that is offloaded where a budget is less than all of them."""
    if budget >= costs.input_bytes:
        return 0.0
    return min(1.0, 1 - budget / costs.input_bytes + LARGEST_ERROR)


def names_policy(save: Iterable[str], offload: Iterable[str]) -> Callable[..., Any]:
    """The policy that saves activations of these names, in device or in host memory."""
    if not (offload := list(offload)):
        return _policies.save_only_these_names(*save)
    return _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(save),
        names_which_can_be_offloaded=offload,
        offload_src="device",
        offload_dst="pinned_host",
    )


def _check_names(wanted: Iterable[str], units: Sequence[UnitJaxpr]) -> None:
    known = sorted({name for unit in units for name in unit.names})
    unknown = [name for name in wanted if name not in known]
    if unknown:
        there = ", ".join(known) or "none; name one with jax.ad_checkpoint.checkpoint_name(x, name)"
        raise ConfigError(
            f"{_KEY}: the model's units have no activation named {', '.join(unknown)}; "
            f"named activations: {there}"
        )


def units_together(config: Recompute, units: Sequence[UnitJaxpr]) -> int:
    """Number of units that are rematerialized together."""
    if config.every is None and config.count is None:
        return 1
    # A stack whose layers are trained in part is run by several scans.
    trips = [unit.times for unit in units if unit.times > 1] or [len(units)]
    divisors = [n for n in range(1, max(trips) + 1) if not any(length % n for length in trips)]
    layers = sum(trips)
    if config.every is None:
        assert config.count is not None
        wanted = config.count
        every = min(divisors, key=lambda n: (abs(layers // n - wanted), n))
        _note_count(wanted, layers // every, layers)
        return every
    if config.every not in divisors:
        raise ConfigError(
            f"{_KEY}.every_n: {config.every} does not divide the "
            f"{' + '.join(map(str, trips))} consecutive units of this model; "
            f"{', '.join(map(str, divisors))} do"
        )
    return config.every


@functools.cache
def _note_count(wanted: int, taken: int, layers: int) -> None:
    """Warn once; the loss is traced several times."""
    if taken != wanted:
        log.warning(
            "activation_checkpointing.number_checkpoints is %d, which does not divide the %d "
            "consecutive units of this model: %d are used, the nearest number that does",
            wanted,
            layers,
            taken,
        )


def _moves(partition: bool, host_ratio: float) -> tuple[Move | None, Move | None]:
    """The functions that move a residual to its storage and back.

    Residuals that are sharded over tensor inside a unit are saved so in any case; only the inputs
    of units are replicated.
    """
    if not partition and not host_ratio:
        return None, None

    def put(x: jax.Array, is_input: bool) -> Any:
        x = _partitioned(x, True) if partition and is_input else x
        return offloaded(x, host_ratio) if host_ratio else x

    def get(x: Any, is_input: bool) -> jax.Array:
        x = fetched(x) if host_ratio else x
        return _partitioned(x, False) if partition and is_input else x

    return put, get


def _partitioned(x: jax.Array, storing: bool) -> jax.Array:
    """Shard over tensor along the first dim after the samples that divides; or replicate again.

    It is constrained to be replicated first: otherwise the sharding propagates into the unit.
    """
    mesh = jax.sharding.get_abstract_mesh()
    num_shards = mesh.shape.get(TENSOR, 1)
    dim = next((d for d in range(1, x.ndim) if x.shape[d] % num_shards == 0), None)
    if num_shards == 1 or dim is None:
        return x

    def along(axis: str | None) -> NamedSharding:
        entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
        entries[dim] = axis
        return NamedSharding(mesh, PartitionSpec(*entries))

    x = constrain(x, along(None), "residual.replicated")
    return constrain(x, along(TENSOR), "residual.sharded") if storing else x
