"""Apply layer specs: choose the dim of each parameter that is sharded over `tensor`.

    column      the outputs:          y = x W[:, shard],  b[shard]
    row         the contracted dim:   y = sum over shards of x[shard] W[shard, :],  b replicated
    vocabulary  the rows of an embedding, the outputs of a head
    replicated  none

The dim gets a logical name, so that the rules that shard every other leaf shard this one too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from jaxspeed.axes import TENSOR
from jaxspeed.config import TensorLayerSpec, match
from jaxspeed.config.problems import Problem, config_error
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.rules import LOGICAL_RULES, examples
from jaxspeed.placement.specs import by_dim

# A convolution's window is at most so large: a larger dim stacks layers, or is a feature dim.
LARGEST_WINDOW = 16


@dataclass(frozen=True)
class Use:
    """Dims of a parameter that matmuls of the traced program contract, and that they leave free.

    In W [in, out] of `x @ W`, in is contracted and out is free. Dims that are neither stack layers
    or are a convolution's window.
    """

    contracted: tuple[int, ...]
    free: tuple[int, ...]


def named_by_specs(
    leaves: Sequence[Leaf],
    specs: Sequence[TensorLayerSpec],
    uses: Mapping[str, Use] | None = None,
    *,
    logical_axes: Iterable[str] = (),
) -> tuple[Leaf, ...]:
    """Name the dims of each leaf by the first spec that covers it.

    Args:
      leaves: the model's parameters.
      specs: `Config.layer_specs`.
      uses: by path, the parameters' dims in the matmuls of the traced program, where it was
        traced: a parameter that is not in it is in no matmul. None: shapes and names decide.
      logical_axes: the patterns of parallel.logical_axes, which may not name the same leaf, except
        that they override a preset.

    Raises:
      ConfigError: lists every spec that covers nothing, that an earlier one hides, or whose dim is
        unknown.
    """
    axes = tuple(logical_axes)
    by_axes = {leaf.path for leaf in leaves if any(match(p, leaf.path) for p in axes)}
    chosen = {leaf.path: _first(leaf, specs, leaf.path in by_axes) for leaf in leaves}
    problems = [*_without_effect(leaves, specs, chosen), *_named_twice(chosen, by_axes)]
    finder = _DimFinder(leaves, chosen, uses)
    named: list[Leaf] = []
    unknown: dict[tuple[TensorLayerSpec, tuple[int, ...], str], list[str]] = {}
    for leaf in leaves:
        spec = chosen[leaf.path]
        try:
            named.append(leaf if spec is None else _named(leaf, spec, finder.dim(leaf, spec)))
        except _UnknownDim as error:
            assert spec is not None
            unknown.setdefault((spec, leaf.shape, str(error)), []).append(leaf.path)
    for (spec, shape, works), paths in unknown.items():
        found = f"{spec.written} as {spec.type}, which covers {examples(paths)} of shape {shape}"
        problems.append(Problem(spec.key, found, works))
    if problems:
        raise config_error(problems, "the config, for this model")
    return tuple(named)


def _first(leaf: Leaf, specs: Iterable[TensorLayerSpec], by_axes: bool) -> TensorLayerSpec | None:
    covering = (spec for spec in specs if match(spec.pattern, leaf.path))
    return next((spec for spec in covering if not (by_axes and spec.by_preset)), None)


def _without_effect(
    leaves: Sequence[Leaf],
    specs: Sequence[TensorLayerSpec],
    chosen: Mapping[str, TensorLayerSpec | None],
) -> list[Problem]:
    """Problems of specs that have no effect; the patterns of one regex or preset count as one."""
    problems = []
    paths = [leaf.path for leaf in leaves]
    at_work = {(spec.key, spec.written) for spec in chosen.values() if spec}
    for source, group in groupby(specs, key=lambda spec: (spec.key, spec.written)):
        key, written = source
        of_group = list(group)
        covered = [path for path in paths if any(match(spec.pattern, path) for spec in of_group)]
        first = chosen[covered[0]] if covered else None
        if not covered:
            found = f"{written}, which covers no parameter of this model"
            problems.append(Problem(key, found, f"It has, for example: {examples(paths)}."))
        elif source not in at_work and first and not of_group[0].by_preset:
            found = f"{written}, all of whose parameters {first.written} covers first"
            problems.append(Problem(key, found, f"Put it before {first.written}, or remove it."))
    return problems


def _named_twice(chosen: Mapping[str, TensorLayerSpec | None], by_axes: set[str]) -> list[Problem]:
    twice: dict[tuple[str, str], list[str]] = {}
    for path, spec in chosen.items():
        if spec is not None and path in by_axes:
            twice.setdefault((spec.key, spec.written), []).append(path)
    works = "Both set its sharding: keep one."
    return [
        Problem(key, f"{written}, while parallel.logical_axes names {examples(paths)}", works)
        for (key, written), paths in twice.items()
    ]


class _UnknownDim(Exception):
    """The dim to shard is unknown; the text states what would work."""


class _DimFinder:
    """Finds the dim that a spec shards, from the traced program, names and shapes."""

    def __init__(
        self,
        leaves: Sequence[Leaf],
        chosen: Mapping[str, TensorLayerSpec | None],
        uses: Mapping[str, Use] | None,
    ) -> None:
        self._chosen = chosen
        self._uses = uses
        self._modules: dict[str, list[Leaf]] = {}
        for leaf in leaves:
            self._modules.setdefault(_module(leaf), []).append(leaf)

    def dim(self, leaf: Leaf, spec: TensorLayerSpec) -> int | None:
        """Dim of the leaf to shard; None replicates it."""
        if spec.type == "replicated" or not leaf.shape:
            return None
        rank = len(leaf.shape) - leaf.stacked
        if rank == 1 and spec.dim is None:
            return None if spec.type == "row" else leaf.stacked
        kernel = self._kernel_beside(leaf, spec)
        if kernel is not None:
            return self._bias_dim(leaf, kernel, spec)
        return self._kernel_dim(leaf, spec)

    def _kernel_dim(self, leaf: Leaf, spec: TensorLayerSpec) -> int:
        if spec.dim is not None:
            return _given_dim(leaf, spec.dim)
        if spec.type == "vocabulary":
            return self._vocabulary_dim(leaf, spec)
        use = self._use(leaf)
        dims = () if use is None else use.free if spec.type == "column" else use.contracted
        if not dims:
            raise _no_dim(spec, self._uses is not None)
        return dims[0]

    def _use(self, leaf: Leaf) -> Use | None:
        """Dims by the traced program, else by names, else by the shape."""
        if self._uses is not None and leaf.path in self._uses:
            return self._uses[leaf.path]
        first, end = leaf.stacked, len(leaf.shape)
        if leaf.matrix_inputs is not None:
            inputs = first + leaf.matrix_inputs
            return Use(tuple(range(first, inputs)), tuple(range(inputs, end)))
        window = leaf.shape[first:-2]
        if end - first == 2 or (len(window) >= 2 and max(window) <= LARGEST_WINDOW):
            return Use((end - 2,), (end - 1,))
        return None

    def _vocabulary_dim(self, leaf: Leaf, spec: TensorLayerSpec) -> int:
        if self._uses is not None:
            use = self._uses.get(leaf.path)
            return use.free[0] if use and use.free else leaf.stacked
        sizes = leaf.shape[leaf.stacked :]
        if sizes.count(max(sizes)) > 1:
            raise _no_dim(spec, self._uses is not None)
        return leaf.stacked + sizes.index(max(sizes))

    def _kernel_beside(self, leaf: Leaf, spec: TensorLayerSpec) -> Leaf | None:
        """Find the weight whose outputs the leaf is added to, if it is a bias.

        A given dim is the kernel's where one spec covers both.
        """
        if not self._may_be_bias(leaf):
            return None
        for other in self._modules[_module(leaf)]:
            applies = spec.dim is None or self._chosen[other.path] == spec
            if applies and _without_inputs(other, leaf):
                return other
        return None

    def _may_be_bias(self, leaf: Leaf) -> bool:
        """Whether it may be added to a matmul's outputs, rather than be an operand."""
        return len(leaf.shape) - leaf.stacked <= 1 or leaf.path.rpartition("/")[2] == "bias"

    def _bias_dim(self, bias: Leaf, kernel: Leaf, spec: TensorLayerSpec) -> int | None:
        """Dim of the bias that corresponds to the kernel's sharded dim."""
        if spec.type == "row":
            return None
        try:
            dim = self._kernel_dim(kernel, spec)
        except _UnknownDim:
            if self._chosen[kernel.path] == spec:
                return None  # the kernel's problem: one is enough
            raise
        outputs = [dims for dims in _without_inputs(kernel, bias) if dim in dims]
        return outputs[0].index(dim) if outputs else None


def _module(leaf: Leaf) -> str:
    return leaf.path.rpartition("/")[0]


def _without_inputs(kernel: Leaf, bias: Leaf) -> list[tuple[int, ...]]:
    """Dims of the kernel without a run of dims such that the rest has the shape of the bias.

    [embed, heads, head_dim] without its first is [heads, head_dim]; several runs may match.
    """
    dims = tuple(range(len(kernel.shape)))
    run = len(dims) - len(bias.shape)
    outputs = [dims[:start] + dims[start + run :] for start in range(len(bias.shape) + 1)]
    return [out for out in outputs if run > 0 and tuple(kernel.shape[d] for d in out) == bias.shape]


def _given_dim(leaf: Leaf, dim: int) -> int:
    rank = len(leaf.shape)
    if not -rank <= dim < rank:
        raise _UnknownDim(f"Needs a dim from 0 to {rank - 1}, not {dim}.")
    return dim % rank


def _no_dim(spec: TensorLayerSpec, traced: bool) -> _UnknownDim:
    which = "That dim is unknown from " + ("traced program and shape" if traced else "the shape")
    or_else = ", or pass an example_batch, so that it is found in the traced program"
    return _UnknownDim(
        f"{which}. Write it in layer_specs, "
        f'{{"{spec.pattern}": {{"type": "{spec.type}", "dim": k}}}}{"" if traced else or_else}.'
    )


def _named(leaf: Leaf, spec: TensorLayerSpec, dim: int | None) -> Leaf:
    """Name the dim, and remove names that would shard another dim over `tensor`."""
    names = by_dim(leaf.names, len(leaf.shape))
    sharded = [LOGICAL_RULES.get(name or "") == TENSOR for name in names]
    new = [None if is_sharded else name for name, is_sharded in zip(names, sharded, strict=True)]
    if dim is not None:
        agrees = sharded[dim] and spec.type != "vocabulary"
        new[dim] = names[dim] if agrees else spec.name
    return replace(leaf, names=tuple(new))
