"""The memory that a device needs for a step, by component: from the traced step, not compiled."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxspeed.placement.rows import HOST
from jaxspeed.placement.show import bytes_text
from jaxspeed.plan.memory.components import Component, Memory
from jaxspeed.plan.memory.cuts import cut_all
from jaxspeed.plan.memory.kinds import KINDS, Kinds
from jaxspeed.plan.memory.live import Held, Peak, peaks
from jaxspeed.plan.memory.narrow import narrow_values
from jaxspeed.plan.memory.opened import Value, open_program
from jaxspeed.plan.memory.tiles import Sizes, local_shape, nbytes
from jaxspeed.train.program import Program

MOST_TERMS = 4  # of a formula; the rest is a sum
# Fields of a TrainState, as components are named.
STATE = {"params": "parameters", "master": "masters", "opt": "optimizer", "ema": "average"}
REST, BATCH = "other state", "batch"


def memory_of(program: Program, batch: Any, platform: str | None = None) -> Memory:
    """What a device needs of its own memory, and of its host's, for a step.

    Args:
      program: on any devices, simulated ones too.
      batch: arrays or their shapes, of a whole step.
      platform: "tpu", "cuda" or "cpu", whose kernels and layouts count; by default the devices'.
    """
    platform = platform or _platform(program)
    given = (program.state, program.abstract_batch(batch))
    scope = open_program(program.step.trace(*given).jaxpr, platform)
    leaves = jax.tree_util.tree_flatten_with_path(given)[0]
    cut_all(scope, [x.sharding.spec for _, x in leaves], dict(program.mesh.shape))
    on_tpu = platform == "tpu"
    narrow = narrow_values(scope) if on_tpu else frozenset()
    sizes = Sizes(dict(program.mesh.shape), on_tpu, narrow)
    count = len(jax.tree.leaves(program.state))
    names = [_name(path) for path, _ in leaves]
    kinds = Kinds(scope, count, _vocabularies(program, leaves, scope.ins))
    device, host = peaks(scope, sizes, scope.ins[:count])
    waits = [x.sharding.memory_kind == HOST for _, x in leaves]
    state = _state(names, scope.ins, waits, sizes)
    made = [*_temporary(device, kinds, sizes, False), *_temporary(host, kinds, sizes, True)]
    return Memory((*state, *made))


def _platform(program: Program) -> str:
    name = program.mesh.devices.flat[0].platform
    return "cuda" if name == "gpu" else str(name)


def _name(path: Sequence[Any]) -> str:
    field = getattr(path[1], "name", None) if path[0].idx == 0 else None
    return BATCH if path[0].idx else STATE.get(str(field), REST)


def _vocabularies(
    program: Program, leaves: Sequence[tuple[Any, Any]], values: Sequence[Value]
) -> Iterator[Value]:
    """The stored copies of parameters with a dim of the vocabulary."""
    tables = {row.path for row in program.table if "vocab" in row.leaf.names}
    for (path, _), value in zip(leaves, values, strict=True):
        if getattr(path[-1], "key", None) in tables:
            yield value


def _state(
    names: Sequence[str], values: Sequence[Value], waits: Sequence[bool], sizes: Sizes
) -> Iterator[Component]:
    """What stays from step to step."""
    total: dict[tuple[bool, str], int] = defaultdict(int)
    terms: dict[tuple[bool, str], Counter[str]] = defaultdict(Counter)
    for name, value, host in zip(names, values, waits, strict=True):
        shape = local_shape(value, sizes.mesh)
        size = nbytes(shape, value.dtype, sizes.tiled and not host)
        total[host, name] += size
        terms[host, name][f"{_short(value.dtype)}"] += size
    for (host, name), size in total.items():
        if size:
            formula = " + ".join(f"{bytes_text(n)} {d}" for d, n in terms[host, name].items())
            yield Component(name, size, formula, host, lasting=True)


def _temporary(peak: Peak, kinds: Kinds, sizes: Sizes, host: bool) -> Iterator[Component]:
    """What is alive at once, when most is."""
    by_kind: dict[str, list[Held]] = defaultdict(list)
    for held in peak.held:
        by_kind[kinds.of(held)].append(held)
    for kind in KINDS:
        size = sum(h.bytes for h in by_kind[kind])
        if size:
            yield Component(kind, size, _formula(by_kind[kind], sizes), host)


def _formula(arrays: Sequence[Held], sizes: Sizes) -> str:
    """`6 bf16[12,8,1024,2816] + ...`: shapes on a device, the largest first."""
    bytes_: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for held in arrays:
        shape = ",".join(map(str, local_shape(held.value, sizes.mesh)))
        text = f"{_short(held.value.dtype)}[{shape}]"
        bytes_[text] += held.bytes
        counts[text] += 1
    largest = sorted(bytes_.items(), key=lambda item: (-item[1], item[0]))[:MOST_TERMS]
    terms = [f"{counts[t]} x {t}" if counts[t] > 1 else t for t, _ in largest]
    rest = sum(bytes_.values()) - sum(size for _, size in largest)
    return " + ".join([*terms, *([f"{bytes_text(rest)} of smaller ones"] if rest else [])])


def _short(dtype: Any) -> str:
    name = str(dtype)
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s")):
        name = name.replace(long, short)
    return name
