"""What a layer spec means for a parameter: which of its dims the tensor axis cuts.

    column      what the product makes:  y = x W[:, part],  b[part]
    row         what it sums over:       y = sum over parts of x[part] W[part, :],  b whole
    vocabulary  the rows of a table that is looked up, the outputs of a head
    replicated  none

The dim gets a logical name, so that the rules that cut every other leaf cut this one too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from jaxspeed.config import LayerSpec, match
from jaxspeed.config.problems import Problem, config_error
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.rules import LOGICAL_RULES, examples
from jaxspeed.placement.specs import by_dim

# A convolution's window is at most so large: a larger dim stacks layers, or is a feature dim.
LARGEST_WINDOW = 16


@dataclass(frozen=True)
class Use:
    """How a parameter stands in the products of the traced program, in dims of the whole leaf.

    In W [in, out] of `x @ W`, in is contracted and out is free. Dims that are neither stack layers
    or are a convolution's window.
    """

    contracted: tuple[int, ...]
    free: tuple[int, ...]


def named_by_specs(
    leaves: Sequence[Leaf],
    specs: Sequence[LayerSpec],
    uses: Mapping[str, Use] | None = None,
    *,
    logical_axes: Iterable[str] = (),
) -> tuple[Leaf, ...]:
    """The leaves, each with the names that the first spec that covers it gives its dims.

    Args:
      leaves: the model's parameters.
      specs: `Config.layer_specs`.
      uses: by path, how parameters stand in the products of the traced program, where it was
        traced: a parameter that is not in it is in no product. None: shapes and names decide.
      logical_axes: the patterns of parallel.logical_axes, which may not speak of the same leaf; a
        preset gives way to them.

    Raises:
      ConfigError: with every spec that covers nothing, that an earlier one hides, or whose dim
        cannot be told.
    """
    axes = tuple(logical_axes)
    by_axes = {leaf.path for leaf in leaves if any(match(p, leaf.path) for p in axes)}
    chosen = {leaf.path: _first(leaf, specs, leaf.path in by_axes) for leaf in leaves}
    problems = [*_idle(leaves, specs, chosen), *_said_twice(chosen, by_axes)]
    cutter = _Cutter(leaves, chosen, uses)
    named: list[Leaf] = []
    untold: dict[tuple[LayerSpec, tuple[int, ...], str], list[str]] = {}
    for leaf in leaves:
        spec = chosen[leaf.path]
        try:
            named.append(leaf if spec is None else _named(leaf, spec, cutter.dim(leaf, spec)))
        except _Untold as error:
            assert spec is not None
            untold.setdefault((spec, leaf.shape, str(error)), []).append(leaf.path)
    for (spec, shape, works), paths in untold.items():
        found = f"{spec.said} as {spec.type}, which covers {examples(paths)} of shape {shape}"
        problems.append(Problem(spec.key, found, works))
    if problems:
        raise config_error(problems, "the config, for this model")
    return tuple(named)


def _first(leaf: Leaf, specs: Iterable[LayerSpec], by_axes: bool) -> LayerSpec | None:
    covering = (spec for spec in specs if match(spec.pattern, leaf.path))
    return next((spec for spec in covering if not (by_axes and spec.by_preset)), None)


def _idle(
    leaves: Sequence[Leaf], specs: Sequence[LayerSpec], chosen: Mapping[str, LayerSpec | None]
) -> list[Problem]:
    """What was said and does nothing: the patterns of one regex or preset are one saying."""
    problems = []
    paths = [leaf.path for leaf in leaves]
    at_work = {(spec.key, spec.said) for spec in chosen.values() if spec}
    for saying, group in groupby(specs, key=lambda spec: (spec.key, spec.said)):
        key, said = saying
        of_group = list(group)
        covered = [path for path in paths if any(match(spec.pattern, path) for spec in of_group)]
        first = chosen[covered[0]] if covered else None
        if not covered:
            found = f"{said}, which covers no parameter of this model"
            problems.append(Problem(key, found, f"It has, for example: {examples(paths)}."))
        elif saying not in at_work and first and not of_group[0].by_preset:
            found = f"{said}, all of whose parameters {first.said} covers before it"
            problems.append(Problem(key, found, f"Put it before {first.said}, or remove it."))
    return problems


def _said_twice(chosen: Mapping[str, LayerSpec | None], by_axes: set[str]) -> list[Problem]:
    twice: dict[tuple[str, str], list[str]] = {}
    for path, spec in chosen.items():
        if spec is not None and path in by_axes:
            twice.setdefault((spec.key, spec.said), []).append(path)
    works = "Both say how it is cut: keep one."
    return [
        Problem(key, f"{said}, while parallel.logical_axes names {examples(paths)}", works)
        for (key, said), paths in twice.items()
    ]


class _Untold(Exception):
    """Which dim is cut cannot be told; its text says what would work."""


class _Cutter:
    """Finds the dim that a spec cuts, with what is known of the whole model."""

    def __init__(
        self,
        leaves: Sequence[Leaf],
        chosen: Mapping[str, LayerSpec | None],
        uses: Mapping[str, Use] | None,
    ) -> None:
        self._chosen = chosen
        self._uses = uses
        self._modules: dict[str, list[Leaf]] = {}
        for leaf in leaves:
            self._modules.setdefault(_module(leaf), []).append(leaf)

    def dim(self, leaf: Leaf, spec: LayerSpec) -> int | None:
        """The dim of the leaf that is cut; None leaves it whole."""
        if spec.type == "replicated" or not leaf.shape:
            return None
        rank = len(leaf.shape) - leaf.stacked
        if rank == 1 and spec.dim is None:
            return None if spec.type == "row" else leaf.stacked
        kernel = self._kernel_beside(leaf, spec)
        if kernel is not None:
            return self._bias_dim(leaf, kernel, spec)
        return self._kernel_dim(leaf, spec)

    def _kernel_dim(self, leaf: Leaf, spec: LayerSpec) -> int:
        if spec.dim is not None:
            return _said_dim(leaf, spec.dim)
        if spec.type == "vocabulary":
            return self._vocabulary_dim(leaf, spec)
        use = self._use(leaf)
        dims = () if use is None else use.free if spec.type == "column" else use.contracted
        if not dims:
            raise _no_dim(spec, self._uses is not None)
        return dims[0]

    def _use(self, leaf: Leaf) -> Use | None:
        """From the traced program, else from names, else from the shape."""
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

    def _vocabulary_dim(self, leaf: Leaf, spec: LayerSpec) -> int:
        if self._uses is not None:
            use = self._uses.get(leaf.path)
            return use.free[0] if use and use.free else leaf.stacked
        sizes = leaf.shape[leaf.stacked :]
        if sizes.count(max(sizes)) > 1:
            raise _no_dim(spec, self._uses is not None)
        return leaf.stacked + sizes.index(max(sizes))

    def _kernel_beside(self, leaf: Leaf, spec: LayerSpec) -> Leaf | None:
        """The weight whose outputs the leaf is added to, if it is a bias.

        A dim that was said is the kernel's where one spec speaks of both.
        """
        if not self._may_be_bias(leaf):
            return None
        for other in self._modules[_module(leaf)]:
            speaks_of_it = spec.dim is None or self._chosen[other.path] == spec
            if speaks_of_it and _without_inputs(other, leaf):
                return other
        return None

    def _may_be_bias(self, leaf: Leaf) -> bool:
        """Whether it may be added to what a product makes, rather than be in one."""
        return len(leaf.shape) - leaf.stacked <= 1 or leaf.path.rpartition("/")[2] == "bias"

    def _bias_dim(self, bias: Leaf, kernel: Leaf, spec: LayerSpec) -> int | None:
        """Where the kernel's cut is in the bias."""
        if spec.type == "row":
            return None
        try:
            dim = self._kernel_dim(kernel, spec)
        except _Untold:
            if self._chosen[kernel.path] == spec:
                return None  # the kernel's problem: one is enough
            raise
        kept = [dims for dims in _without_inputs(kernel, bias) if dim in dims]
        return kept[0].index(dim) if kept else None


def _module(leaf: Leaf) -> str:
    return leaf.path.rpartition("/")[0]


def _without_inputs(kernel: Leaf, bias: Leaf) -> list[tuple[int, ...]]:
    """The dims of the kernel that are left when a run of its dims is left out to give the bias.

    [embed, heads, head_dim] without its first is [heads, head_dim]; several runs may do.
    """
    dims = tuple(range(len(kernel.shape)))
    run = len(dims) - len(bias.shape)
    ways = [dims[:start] + dims[start + run :] for start in range(len(bias.shape) + 1)]
    return [kept for kept in ways if run > 0 and tuple(kernel.shape[d] for d in kept) == bias.shape]


def _said_dim(leaf: Leaf, dim: int) -> int:
    rank = len(leaf.shape)
    if not -rank <= dim < rank:
        raise _Untold(f"Needs a dim from 0 to {rank - 1}, not {dim}.")
    return dim % rank


def _no_dim(spec: LayerSpec, traced: bool) -> _Untold:
    what = "Neither the traced program nor the shape tells" if traced else "The shape does not tell"
    or_else = ", or pass an example_batch, so that it is seen in the traced program"
    return _Untold(
        f"{what} which dim that is. Write it in layer_specs, "
        f'{{"{spec.pattern}": {{"type": "{spec.type}", "dim": k}}}}{"" if traced else or_else}.'
    )


def _named(leaf: Leaf, spec: LayerSpec, dim: int | None) -> Leaf:
    """The leaf with the dim named, and without names that would have the axis cut another."""
    names = by_dim(leaf.names, len(leaf.shape))
    cut = [LOGICAL_RULES.get(name or "") == "tensor" for name in names]
    kept = [None if is_cut else name for name, is_cut in zip(names, cut, strict=True)]
    if dim is not None:
        agrees = cut[dim] and spec.type != "vocabulary"
        kept[dim] = names[dim] if agrees else spec.name
    return replace(leaf, names=tuple(kept))
