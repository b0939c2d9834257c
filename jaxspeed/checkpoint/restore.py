"""Restoring of a full train state from a checkpoint of any mesh, ZeRO stage and precision."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.checkpoint.header import AdapterRecord, Header, LeafRecord, codec_of
from jaxspeed.checkpoint.leaves import (
    RING_ERRORS,
    Arrays,
    SavedLeaf,
    apart,
    as_state,
    donatable_copy,
    encoded_anew,
    group_in_state,
    packed,
    published,
    saved_leaves,
)
from jaxspeed.checkpoint.other_adapters import PREFIX as OTHERS
from jaxspeed.checkpoint.other_adapters import OtherAdapter, leaves_of_others
from jaxspeed.checkpoint.tensorstore_arrays import read_arrays
from jaxspeed.errors import CheckpointError
from jaxspeed.optim import loss_scale
from jaxspeed.placement.codec import PLAIN, Stored
from jaxspeed.placement.paths import listed
from jaxspeed.placement.rules import examples
from jaxspeed.placement.specs import by_dim, num_shards
from jaxspeed.train.program import Program
from jaxspeed.train_state.state import TrainState
from jaxspeed.user_models.pretrained_model import Weights

ReadsArrays = Callable[[epath.Path, Mapping[str, SavedLeaf]], dict[str, Stored]]
_COPY_BYTES = 256 << 20  # copied at once: the peak is one state and this
_SCALE = tuple(f"loss_scale/{name}" for name in loss_scale.LossScale._fields)


def restore_state(
    program: Program,
    folder: epath.Path,
    header: Header,
    ready: Callable[[], None],
    frozen: Mapping[str, Stored],
    reader: ReadsArrays = read_arrays,
) -> tuple[TrainState, dict[str, OtherAdapter], list[str]]:
    """The full state, the adapters that were not in use, and notes on what could not be restored.

    `ready` is called when all has been checked, before any array is read. Parameters that the
    checkpoint does not have are `frozen`, by their names, or are read from where the model's are.
    `reader` reads the folder of a checkpoint of another system.

    Raises:
      CheckpointError: its arrays are not those of this model and optimizer.
    """
    in_use = saved_leaves(program, bool(header.excluded))
    others: dict[str, bool] = {}  # whether each has moments
    for name in header.leaves:
        if name.startswith(OTHERS):
            adapter, _, rest = name.removeprefix(OTHERS).partition("/")
            others[adapter] = others.get(adapter, False) or not rest.startswith("params/")
    wanted = in_use | leaves_of_others(in_use, program, others)
    notes = []
    fresh: Arrays = {}
    if header.loss_scale_rule != repr(program.optimizer.rule):
        # Another rule's scale may be one that this rule never has.
        notes.append(
            f"the loss scale is reinitialized: its rule was {header.loss_scale_rule}, and now is "
            f"{program.optimizer.rule!r}"
        )
        fresh = fresh_loss_scale(program)
    of_rings = {name for name in {*wanted, *header.leaves} if name.startswith(f"{RING_ERRORS}/")}
    if of_rings & (wanted.keys() ^ header.leaves.keys()):
        notes.append("ring errors are reset to zero: they are of another mesh or layout")
        fresh |= _zero_ring_errors(program)
    missing = sorted(set(wanted) - set(header.leaves) - set(fresh))
    extra = sorted(set(header.leaves) - set(wanted) - of_rings)
    kinds = {name.split("/")[2 if name.startswith(OTHERS) else 0] for name in extra}
    if not missing and kinds == {"ema"}:
        notes.append("its moving average was not restored: the config sets none")
        extra = []
    _check(folder, wanted, header, missing, extra)
    check_adapters(program, folder, header)
    read = {name: leaf for name, leaf in wanted.items() if name not in fresh}
    on_disk = {name: as_on_disk(name, leaf, header.leaves[name]) for name, leaf in read.items()}
    tier = program.update.tier
    if tier and others:
        raise CheckpointError(
            f"{folder}: has the adapters {listed(sorted(others))} beside the one in use, which are "
            'not stored on a disk: set offload_optimizer.device to "cpu" or "none"'
        )
    ready()
    arrays = reader(folder, on_disk) if tier is None else {}

    def donatable(prefix: str, names: Iterable[str]) -> tuple[Arrays, Arrays]:
        named = {prefix + name: name for name in names if prefix + name in read}
        here = {named[name]: arrays.pop(name) for name in named if name in arrays}
        stored, was = ({n: of[name] for name, n in named.items()} for of in (read, on_disk))
        return donatable_arrays(program, here, stored, was)

    if tier is None:
        saved, params = donatable("", in_use)
    else:
        with tier.replacing():
            saved, params = _onto_disk(program, partial(reader, folder), read, on_disk)
    adapters = {name: OtherAdapter(*donatable(f"{OTHERS}{name}/", in_use)) for name in others}
    if header.excluded:
        base = frozen or {f"params/{path}": x for path, x in program.storage.frozen().items()}
        saved |= base
    rounded: dict[tuple[str, bool], list[str]] = {}
    for name, leaf in wanted.items():
        was = header.leaves.get(name)
        if was and name.startswith("params/") and _loses(was.dtype, leaf.stored.dtype):
            notes.append(f"{name} was rounded from {was.dtype} to {leaf.stored.dtype.name}")
        if name in on_disk and leaf.codec not in (PLAIN, on_disk[name].codec):
            rounded.setdefault((leaf.codec.name, name.startswith("opt/")), []).append(name)
    for (codec, moments), names in rounded.items():
        if moments:
            notes.append(
                f"{len(names)} moments were rounded by the codec {codec}: {examples(names)}"
            )
        else:
            notes += [f"{name} was rounded by the codec {codec}" for name in names]
    state = as_state(program, {**saved, **fresh}, params)
    if tier:
        tier.step = int(state.step)
    return state, adapters, notes


def _onto_disk(
    program: Program,
    reader: Callable[[Mapping[str, SavedLeaf]], dict[str, Stored]],
    leaves: Mapping[str, SavedLeaf],
    saved_as: Mapping[str, SavedLeaf],
) -> tuple[Arrays, Arrays]:
    """`donatable_arrays` of a checkpoint, in turn: what belongs on a disk is written there."""
    places, saved, params = program.storage.on_disk, dict[str, Stored](), dict[str, Stored]()

    def stored(name: str, x: Any) -> Any:
        return places[name].write(x) if name in places else x

    for names in _groups(leaves):
        group, was = ({name: of[name] for name in names} for of in (leaves, saved_as))
        values, published_params = donatable_arrays(program, reader(was), group, was)
        params |= published_params
        for name, x in values.items():
            parts = (
                {part: stored(f"{name}/{part}", y) for part, y in x.items()}
                if isinstance(x, dict)
                else {}
            )
            saved[name] = parts or stored(name, x)
    return saved, params


def check_adapters(program: Program, folder: epath.Path, header: Header) -> None:
    """Raise CheckpointError if adapters have other ranks or scales here than when they were saved.

    Their arrays may have the same shapes, and would be those of another model.
    """
    ours, theirs = AdapterRecord.of(program), header.adapters
    if ours is None or theirs is None:
        return
    both = sorted(theirs.adapters.keys() & ours.adapters.keys())
    unlike = [
        (was, now)
        for was, now in ((theirs.adapters[path], ours.adapters[path]) for path in both)
        if was.rank == now.rank and (was.ranks, was.scales) != (now.ranks, now.scales)
    ]
    if unlike:
        was, now = unlike[0]
        raise CheckpointError(
            f"{folder}: the adapters of {listed([x.path for x, _ in unlike])} were saved with "
            f"other ranks or scales: {was.path} with {[*was.ranks]} and {[*was.scales]}, and "
            f"here it has {[*now.ranks]} and {[*now.scales]}. Set lora.lora_alpha, "
            "lora.use_rslora, lora.rank_pattern and lora.alpha_pattern as they were"
        )


def check_base(folder: epath.Path, header: Header, weights: Weights | None) -> None:
    """Raise CheckpointError if these weights are not those that a checkpoint does not have.

    Weights of another base would be taken for its frozen parameters.
    """
    theirs, ours = header.base, weights.origin if weights is not None else None
    if theirs is None or theirs.files == (ours and ours.files):
        return
    why = f"{folder}: has only what was trained; its frozen parameters are those of {theirs.folder}"
    if ours is None:
        raise CheckpointError(f"{why}: set model.pretrained to that folder")
    names = sorted({*theirs.files, *ours.files})
    unlike = next(name for name in names if theirs.files.get(name) != ours.files.get(name))
    was, now = (of.files.get(unlike, "absent") for of in (theirs, ours))
    raise CheckpointError(
        f"{why}, and those of {ours.folder} are others: {unlike} was {was}, and is {now} there"
    )


def fresh_loss_scale(program: Program) -> Arrays:
    """The loss scale before the first step, by name."""
    at = dict(zip(_SCALE, program.shardings.loss_scale, strict=True))

    def make() -> Arrays:
        return dict(zip(_SCALE, loss_scale.init(program.optimizer.rule), strict=True))

    return jax.jit(make, out_shardings=at)()


def _zero_ring_errors(program: Program) -> Arrays:
    """The errors of rings before the first step, by name."""
    shapes = program.ring_errors

    def make() -> Arrays:
        return {f"{RING_ERRORS}/{name}": jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()}

    at = {f"{RING_ERRORS}/{name}": x.sharding for name, x in shapes.items()}
    return jax.jit(make, out_shardings=at)()


def as_on_disk(name: str, leaf: SavedLeaf, record: LeafRecord) -> SavedLeaf:
    """How the saved arrays of a value are read: as they are wanted, or as they were encoded.

    Raises:
      CheckpointError: they were stored by a codec that this version does not have.
    """
    codec = codec_of(name, record)
    if codec == PLAIN:
        return replace(leaf, codec=PLAIN, encoded={})
    wanted = {part: (tuple(x.shape), x.dtype.name) for part, x in leaf.encoded.items()}
    if codec == leaf.codec and record.arrays == wanted:
        return leaf
    mesh, spec = leaf.stored.sharding.mesh, by_dim(leaf.stored.sharding.spec, len(leaf.shape))

    def array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        """An encoded array, sharded as the value is where its dims allow that."""
        pairs = zip(shape, spec)  # an array may have fewer dims than its value
        fitting = [None if n % num_shards(entry, mesh.shape) else entry for n, entry in pairs]
        at = NamedSharding(mesh, PartitionSpec(*fitting))
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=at)

    arrays = {part: array(*array_record) for part, array_record in record.arrays.items()}
    return replace(leaf, codec=codec, encoded=arrays)


def donatable_arrays(
    program: Program,
    read: dict[str, Stored],
    leaves: Mapping[str, SavedLeaf],
    on_disk: Mapping[str, SavedLeaf] | None = None,
) -> tuple[Arrays, Arrays]:
    """(saved values by name, published parameters by path), in buffers that a step can donate.

    Arrays that were read may be in memory owned by NumPy, which XLA cannot reuse. `read` is emptied
    in the process. A value that was read as `on_disk` describes it is stored as in `leaves`.
    """
    on_disk = on_disk or leaves
    saved: Arrays = {}
    params: Arrays = {}
    for names in _groups(leaves):
        in_state: dict[str, SavedLeaf] = {}
        groups = {group.first: group for name in names if (group := leaves[name].packed)}
        for name in names:
            parts = leaves[name].parts.items() if not leaves[name].packed else ()
            of_kind = {part: leaf for part, leaf in parts if part[:4] == name[:4]}
            in_state |= of_kind or {name: leaves[name]}
        for group in groups.values():
            in_state |= group_in_state(group, leaves)
        paths = [n.removeprefix("params/") for n in in_state if n.startswith("params/")]
        rows = [row for path in paths if (row := program.table[path]).master and row.param]

        def finished(name: str, arrays: Arrays) -> Stored:
            leaf = leaves[name]
            if name not in arrays:
                return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), leaf.arrays)
            if on_disk[name].arrays == leaf.arrays:
                return donatable_copy(arrays[name], leaf)
            return encoded_anew(arrays[name], on_disk[name], leaf)

        def finish(
            arrays: Arrays, names: list[str] = names, rows: list = rows, groups: dict = groups
        ) -> Any:
            values: Arrays = {}
            for name in names:
                values |= apart(name, leaves[name], finished(name, arrays))
            for group in groups.values():
                values |= packed(group, leaves, values)
            return values, {row.path: published(row, values[f"params/{row.path}"]) for row in rows}

        at = (
            {n: jax.tree.map(lambda x: x.sharding, leaf.arrays) for n, leaf in in_state.items()},
            {row.path: program.shardings.params[row.path] for row in rows},
        )
        arrays = {name: read.pop(name) for name in names if name in read}
        # Ready, since what was read stays in memory until it is copied.
        values, made_params = jax.block_until_ready(jax.jit(finish, out_shardings=at)(arrays))
        saved.update(values)
        params.update(made_params)
    return saved, params


def _groups(leaves: Mapping[str, SavedLeaf]) -> Iterator[list[str]]:
    """Names of leaves that are copied at once; what is packed together is in one list."""
    units: dict[str, list[str]] = {}
    for name, leaf in leaves.items():
        units.setdefault(f"opt/{leaf.packed.first}" if leaf.packed else name, []).append(name)
    names: list[str] = []
    for unit in units.values():
        names += unit
        if sum(leaves[name].nbytes for name in names) >= _COPY_BYTES:
            yield names
            names = []
    if names:
        yield names


def _check(
    folder: epath.Path,
    wanted: Mapping[str, SavedLeaf],
    header: Header,
    missing: Iterable[str],
    extra: Iterable[str],
) -> None:
    there = header.leaves
    frozen = {name: ", which was frozen" if name in header.excluded else "" for name in missing}
    problems = {n: f"has no {n} {list(wanted[n].shape)}{why}" for n, why in frozen.items()}
    problems |= {name: f"has {name} {list(there[name].shape)}, unexpected" for name in extra}
    for name in wanted.keys() & there.keys():
        was, now = there[name], wanted[name]
        if was.shape != now.shape:
            problems[name] = f"has {name} {list(was.shape)}, expected {list(now.shape)}"
        elif was.key != now.key:
            problems[name] = f"has {name} as a {was.key} key, expected {now.key}"
    if not problems:
        return
    of_optimizer = {name for name in problems if name.startswith(("opt/", "ema/"))}
    if of_optimizer == set(problems):
        what = "optimizer"
        hint = "weights_only=True, or another output with run.init_from, restores only the weights"
    else:
        what = "model"
        hint = "weights_only=True restores what matches, with renames={old: new}"
        problems = {name: problems[name] for name in problems.keys() - of_optimizer}
    shown = [problems[name] for name in sorted(problems)]
    more = f"\n  ... and {len(shown) - 6} more" if len(shown) > 6 else ""
    lines = "".join(f"\n  {problem}" for problem in shown[:6])
    raise CheckpointError(f"{folder}: is of another {what}. It{lines}{more}\n{hint}")


def _loses(old: str, new: Any) -> bool:
    return jnp.promote_types(old, new) != jnp.dtype(new)
