"""Random small modules: what one is made of is a `Spec`, drawn by hypothesis, printed readably.

A Spec says the same of an nnx and of a Linen module: a row of parts `[batch, WIDTH] -> [batch,
WIDTH]`, each with its own kind of parameter, state or random draw and a tanh behind it, which keeps
training from diverging, and a trained head. Every part reads what it keeps, so that a state that is
carried wrongly moves the parameters wrongly too. What is trained, and which norms run on their
statistics, is decided here from the Spec alone.

`plain=True` makes the module as a user of plain Flax would: each mode that training has to respect
is written out, and nothing is left for anyone to fill in.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from hypothesis import strategies as st

WIDTH, HIDDEN = 8, 12  # on 8 devices one dim is padded and the other is not
MOMENTUM = 0.8
# Where activations are close to 1, the variance is a difference of rounding errors.
EPSILON = 1e-2

# In the order in which hypothesis tries to make a failing module simpler.
KINDS = (
    "mlp",
    "norm",  # batch statistics
    "count",  # an integer
    "average",  # a moving average
    "first",  # a flag: what it sees first, it keeps
    "past",  # the weights of the last two calls, copied as they were
    "dropout",
    "noise",  # draws from a stream by hand
    "table",  # integers and an array that nothing changes
    "sow",  # into a tuple
    "add",  # sown into a sum
    "spectral",  # a complex parameter
    "phase",  # complex state
    "shared",  # one layer under two names, called by both
    "scanned",  # two layers stacked along one of their dims, called by a scan
    "nested",  # parameters and state in lists, dicts and tuples
    "half",  # a parameter and state in bf16
    "draws",  # a raw key that it splits itself
)
NNX_KINDS = (
    *KINDS,
    "declared",  # an Intermediate that the factory made
    "tally",  # a counter that the loss counts
    "teacher",  # frozen, and written by the loss: the moving average of a trained one
)
OVERWRITTEN = "overwritten"  # trained, and written by the loss
WITH_MODE = ("norm", "dropout", "noise")


class Described:
    """Prints the fields that are not at their defaults."""

    def __repr__(self) -> str:
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}
        shown = (f"{name}={x!r}" for name, (x, default) in values.items() if x != default)
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Part(Described):
    """One part of a module.

    Attributes:
      kind: of KINDS.
      frozen: none, some (what is named bias) or all of its parameters.
      mode: left at the default, none (an attribute of None), set (on its statistics, or
        deterministic) or eval (the factory calls `.eval()` on it).
      affine: the parameters of a norm: both, bias or none. One without stands behind a dense layer,
        whose parameters are those of the nearest module that has some.
      depth: how many modules are around it.
      calls: how often the module calls it.
      axis: the dim of a kernel along which scanned layers are stacked.
    """

    kind: str
    frozen: str = "none"
    mode: str = "default"
    affine: str = "both"
    depth: int = 0
    calls: int = 1
    axis: int = 0

    @property
    def runs_on_statistics(self) -> bool:
        """Whether a norm is part of what is frozen."""
        own = {"both": {"scale", "bias"}, "bias": {"bias"}, "none": {"kernel", "bias"}}[self.affine]
        return own <= {"none": set(), "some": {"bias"}, "all": own}[self.frozen]


@dataclass(frozen=True, repr=False)
class Spec(Described):
    """A module, its loss, and how parts of it are frozen.

    Attributes:
      container: list, dict or attributes.
      freezing: how `trainable` says it: patterns, function, or type (of Variable).
      reads: how the loss gets at what an nnx module has sown: as an attribute, or by nnx.state,
        nnx.pop or nnx.capture.
      weighted: whether the loss is a (sum, weight).
      evaluating: whether the factory calls `.eval()` on the whole module.
      setup: Linen's way of making submodules; else compact.
      collection: where a Linen module sows: one of its own, or that of its counters.
      staged: how the loss calls an nnx module: as it is, or by nnx.jit or nnx.remat.
    """

    parts: tuple[Part, ...]
    container: str = "list"
    freezing: str = "patterns"
    reads: str = "attribute"
    weighted: bool = False
    evaluating: bool = False
    setup: bool = False
    collection: str = "losses"
    staged: str = ""

    def settled(self, part: Part) -> bool:
        """Whether a part is in evaluation mode while the module is trained."""
        chosen = self.evaluating or part.mode in ("set", "eval")
        return chosen or (part.kind == "norm" and part.runs_on_statistics)

    def name(self, i: int) -> str:
        """Of part i, where parts are in a dict or attributes."""
        return str(i) if self.container == "list" else f"p{i}"

    def owner(self, path: str) -> Part | None:
        """The part that a parameter belongs to; None for the head. In nnx `parts/0/kernel` or
        `p0/kernel`, in Linen `parts_0/kernel` or `p0/kernel`."""
        number = re.search(r"\d+", path)
        return self.parts[int(number.group())] if number else None

    def is_trained(self, path: str) -> bool:
        part = self.owner(path)
        if part is None:
            return True
        if part.frozen == "all" or "teacher" in path.split("/"):
            return False
        return part.frozen == "none" or not path.endswith("/bias")

    def trainable(self, linen: bool) -> Any:
        """What `initialize` is given."""
        if not any(part.frozen != "none" or part.kind == "teacher" for part in self.parts):
            return None
        if self.freezing == "function":
            return self.is_trained
        if self.freezing == "type" and not linen:
            return nnx.LoRAParam
        return ["head", *(p for i in range(len(self.parts)) for p in self._patterns(i, linen))]

    def _patterns(self, i: int, linen: bool) -> Iterator[str]:
        part, name = self.parts[i], self.name(i)
        within = {"attributes": ""}.get(self.container, "parts_" if linen else "parts/")
        if part.frozen == "some":
            owner = "student/" if part.kind == "teacher" else ""
            yield f"{within}{name}/**/{owner}kernel"
            yield f"{within}{name}/**/{owner}scale"
        elif part.frozen == "none":
            yield f"{within}{name}/**/student" if part.kind == "teacher" else f"{within}{name}"


def specs(kinds: tuple[str, ...], linen: bool) -> st.SearchStrategy[Spec]:
    """Modules of at most four parts of these kinds."""
    modes = ("default", "set") if linen else ("default", "none", "set", "eval")

    def part(kind: str) -> st.SearchStrategy[Part]:
        return st.builds(
            Part,
            kind=st.just(kind),
            frozen=st.sampled_from(("none", "all", "some")),
            mode=st.sampled_from(modes) if kind in WITH_MODE else st.just("default"),
            affine=st.sampled_from(("both", "bias", "none")) if kind == "norm" else st.just("both"),
            depth=st.integers(0, 2),
            # A Linen module has no parameters of what it does not call.
            calls=st.sampled_from((1, 2) if linen else (1, 0, 2)),
            axis=st.integers(0, 2) if kind == "scanned" else st.just(0),
        )

    one = st.sampled_from(kinds).flatmap(part)
    parts = st.integers(1, 4).flatmap(lambda n: st.lists(one, min_size=n, max_size=n))
    return st.builds(
        Spec,
        parts=parts.map(tuple),
        container=st.sampled_from(("list", "dict", "attributes")),
        freezing=st.sampled_from(("patterns", "function") + (() if linen else ("type",))),
        weighted=st.booleans(),
        **(
            {"setup": st.booleans(), "collection": st.sampled_from(("losses", "counters"))}
            if linen
            else {
                "reads": st.sampled_from(("attribute", "state", "pop", "capture")),
                "evaluating": st.sampled_from((False, False, False, True)),
                "staged": st.sampled_from(("", "", "jit", "remat")),
            }
        ),
    )


# -- what parts compute, in either kind of module -------------------------------------------------


def per_sample(x: jax.Array) -> jax.Array:
    """[samples]: losses that are sown are sums over samples, as a (sum, weight) has to be."""
    return jnp.mean(x**2, axis=-1)


def counted(x: jax.Array, count: jax.Array) -> jax.Array:
    return x * (1 + 0.5 * jnp.cos(count.astype(x.dtype)))


def averaged(x: jax.Array, old: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(output, the new average)."""
    new = MOMENTUM * old + (1 - MOMENTUM) * jax.lax.stop_gradient(jnp.mean(x, axis=0))
    return x - new, new


def turned(x: jax.Array, old: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(output, the new phase), with a complex average."""
    z = jax.lax.stop_gradient(jnp.mean(jnp.exp(1j * x), axis=0))
    new = (MOMENTUM * old + (1 - MOMENTUM) * z).astype(old.dtype)
    return x * (1 + 0.3 * jnp.real(new)) + 0.3 * jnp.imag(new), new


def shifted(x: jax.Array, shift: jax.Array, known: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(output, the shift): the mean of what came first, for good."""
    shift = jnp.where(known, shift, jax.lax.stop_gradient(jnp.mean(x, axis=0)))
    return x - shift, shift


def spectral(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """Real in, real out, of both parts: the gradient is not its own conjugate."""
    z = x @ kernel
    return x + jnp.real(z) + jnp.sin(jnp.imag(z)) + bias


def halved(x: jax.Array, scale: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(output, the new state): bf16, in arithmetic that is fp32."""
    x = x * (1 + scale.astype(x.dtype)) + 0.1 * seen.astype(x.dtype)
    return x, (seen.astype(x.dtype) + 0.25).astype(seen.dtype)


def drawn(x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(output, the next key)."""
    key, own = jax.random.split(key)
    return x + 0.1 * jax.random.normal(own, x.shape), key


def dense_kernel(key: jax.Array) -> jax.Array:
    return jax.random.normal(key, (WIDTH, WIDTH)) * WIDTH**-0.5


def complex_kernel(key: jax.Array, shape: tuple[int, int] = (WIDTH, WIDTH)) -> jax.Array:
    real, imag = jax.random.normal(key, (2, *shape)) * (2 * WIDTH) ** -0.5
    return jax.lax.complex(real, imag)


# -- nnx ------------------------------------------------------------------------------------------


class Count(nnx.Variable):
    """A type of state that Flax does not know."""


class NnxMlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class NnxNorm(nnx.Module):
    """A norm, behind a dense layer if it has no parameters itself."""

    def __init__(self, affine, mode, rngs):
        if affine == "none":
            self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(
            WIDTH,
            use_running_average=mode,
            momentum=MOMENTUM,
            epsilon=EPSILON,
            use_fast_variance=False,
            use_bias=affine != "none",
            use_scale=affine == "both",
            rngs=rngs,
        )

    def __call__(self, x):
        return self.norm(self.dense(x) if hasattr(self, "dense") else x)


class NnxNoise(nnx.Module):
    def __init__(self, mode, rngs):
        self.deterministic, self.rngs = mode, rngs

    def __call__(self, x):
        return x if self.deterministic else x + 0.1 * jax.random.normal(self.rngs.noise(), x.shape)


class NnxTable(nnx.Module):
    """An integer Param, which nothing can train, and an array without a Variable."""

    def __init__(self, rngs):
        self.order = nnx.Param(jnp.arange(WIDTH)[::-1])
        self.factor = nnx.data(jnp.linspace(0.5, 1.5, WIDTH))

    def __call__(self, x):
        return x + 0.5 * x[:, self.order[...]] * self.factor


class NnxCount(nnx.Module):
    def __init__(self, rngs):
        self.count = Count(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.count[...] = self.count[...] + 1
        return counted(x, self.count[...])


class NnxTally(nnx.Module):
    """The loss counts."""

    def __init__(self, rngs):
        self.count = Count(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        return counted(x, self.count[...])


class NnxAverage(nnx.Module):
    def __init__(self, rngs):
        self.mean = nnx.Cache(jnp.zeros(WIDTH))

    def __call__(self, x):
        x, self.mean[...] = averaged(x, self.mean[...])
        return x


class NnxPhase(nnx.Module):
    def __init__(self, rngs):
        self.mean = nnx.BatchStat(jnp.zeros(WIDTH, jnp.complex64))

    def __call__(self, x):
        x, self.mean[...] = turned(x, self.mean[...])
        return x


class NnxFirst(nnx.Module):
    def __init__(self, rngs):
        self.shift, self.known = nnx.Variable(jnp.zeros(WIDTH)), nnx.Variable(jnp.asarray(False))

    def __call__(self, x):
        x, self.shift[...] = shifted(x, self.shift[...], self.known[...])
        self.known[...] = jnp.asarray(True)
        return x


class NnxPast(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.last, self.before = (nnx.Variable(jnp.eye(WIDTH)) for _ in range(2))

    def __call__(self, x):
        x = self.dense(x) + 0.3 * x @ self.before[...]
        self.before[...] = self.last[...]
        self.last[...] = self.dense.kernel[...]
        return x


class NnxSow(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = self.dense(x)
        self.sow(nnx.Intermediate, "penalty", per_sample(x))
        return x


class NnxAdd(NnxSow):
    def __call__(self, x):
        x = self.dense(x)
        for name, value in (("penalty", per_sample(x)), ("ones", jnp.ones(()))):
            self.sow(
                nnx.Intermediate, name, value, reduce_fn=jnp.add, init_fn=lambda: jnp.zeros(())
            )
        return x


class NnxDeclared(NnxSow):
    """What it declares counts on from where the factory left it."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.penalty = nnx.Intermediate(jnp.ones(()))

    def __call__(self, x):
        x = self.dense(x)
        self.penalty.set_value(self.penalty.get_value() + per_sample(x))
        return x


class NnxSpectral(nnx.Module):
    def __init__(self, rngs):
        self.kernel, self.bias = (
            nnx.Param(complex_kernel(rngs.params())),
            nnx.Param(jnp.ones(WIDTH)),
        )

    def __call__(self, x):
        return spectral(x, self.kernel[...], self.bias[...])


class NnxShared(nnx.Module):
    def __init__(self, rngs):
        self.dense = self.same = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.same(jnp.tanh(self.dense(x)))


class NnxScanned(nnx.Module):
    def __init__(self, axis, rngs):
        axes = nnx.StateAxes({nnx.Param: axis, ...: None})

        def layer(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

        made = nnx.split_rngs(splits=2)(nnx.vmap(layer, in_axes=(0,), out_axes=axes))
        self.layers, self.axes = made(rngs), axes

    def __call__(self, x):
        def run(layer, x):
            return jnp.tanh(layer(x))

        return nnx.scan(run, in_axes=(self.axes, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)


class NnxNested(nnx.Module):
    def __init__(self, rngs):
        kernel, bias = nnx.Param(dense_kernel(rngs.params())), nnx.Param(jnp.zeros(WIDTH))
        self.held = nnx.data([{"kernel": kernel}, ({"bias": bias}, nnx.Variable(jnp.zeros(WIDTH)))])
        self.fixed = nnx.data({"factor": (jnp.linspace(0.5, 1.5, WIDTH),)})

    def __call__(self, x):
        more, mean = self.held[1]
        y = x @ self.held[0]["kernel"][...] + more["bias"][...]
        y, mean[...] = averaged(y, mean[...])
        return y * self.fixed["factor"][0]


class NnxHalf(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.zeros(WIDTH, jnp.bfloat16))
        self.seen = nnx.Variable(jnp.zeros(WIDTH, jnp.bfloat16))

    def __call__(self, x):
        x, self.seen[...] = halved(x, self.scale[...], self.seen[...])
        return x


class NnxDraws(nnx.Module):
    def __init__(self, rngs):
        self.key = nnx.Variable(jax.random.PRNGKey(7))

    def __call__(self, x):
        x, self.key[...] = drawn(x, self.key[...])
        return x


class NnxTeacher(nnx.Module):
    def __init__(self, rngs):
        self.student, self.teacher = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return self.student(x) + 0.5 * self.teacher(x)


class NnxOverwritten(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(jnp.eye(WIDTH))

    def __call__(self, x):
        return x @ self.kernel[...]


class NnxAround(nnx.Module):
    def __init__(self, inner):
        self.inner = inner

    def __call__(self, x):
        return self.inner(x)


NNX = {
    "mlp": NnxMlp,
    "count": NnxCount,
    "tally": NnxTally,
    "average": NnxAverage,
    "phase": NnxPhase,
    "first": NnxFirst,
    "past": NnxPast,
    "table": NnxTable,
    "sow": NnxSow,
    "add": NnxAdd,
    "declared": NnxDeclared,
    "spectral": NnxSpectral,
    "teacher": NnxTeacher,
    "shared": NnxShared,
    "nested": NnxNested,
    "half": NnxHalf,
    "draws": NnxDraws,
    OVERWRITTEN: NnxOverwritten,
}


def nnx_part(part: Part, spec: Spec, plain: bool, rngs: nnx.Rngs) -> nnx.Module:
    mode = spec.settled(part) if plain else {"none": None, "set": True}.get(part.mode, False)
    if part.kind == "norm":
        made = NnxNorm(part.affine, mode, rngs)
    elif part.kind == "dropout":
        made = nnx.Dropout(0.3, deterministic=mode, rngs=rngs)
    elif part.kind == "noise":
        made = NnxNoise(mode, rngs)
    elif part.kind == "scanned":
        made = NnxScanned(part.axis, rngs)
    else:
        made = NNX[part.kind](rngs)
    for _ in range(part.depth):
        made = NnxAround(made)
    if part.mode == "eval" and not plain:
        made.eval()
    return made


class NnxNet(nnx.Module):
    def __init__(self, spec: Spec, plain: bool, rngs: nnx.Rngs) -> None:
        self.spec = spec
        made = [nnx_part(part, spec, plain, rngs) for part in spec.parts]
        named = {spec.name(i): part for i, part in enumerate(made)}
        if spec.container == "list":
            self.parts = nnx.List(made)
        elif spec.container == "dict":
            self.parts = nnx.Dict(named)
        else:
            for name, part in named.items():
                setattr(self, name, part)
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def made(self, i: int) -> Any:
        name = self.spec.name(i)
        if self.spec.container == "list":
            return self.parts[i]
        return self.parts[name] if self.spec.container == "dict" else getattr(self, name)

    def innermost(self, kind: str) -> Iterator[Any]:
        """The parts of a kind."""
        for i, part in enumerate(self.spec.parts):
            if part.kind == kind:
                module = self.made(i)
                for _ in range(part.depth):
                    module = module.inner
                yield module

    def __call__(self, x):
        for i, part in enumerate(self.spec.parts):
            for _ in range(part.calls):
                x = jnp.tanh(self.made(i)(x))
        return self.head(x)


def nnx_factory(spec: Spec, plain: bool = False) -> Callable[[nnx.Rngs], nnx.Module]:
    def factory(rngs: nnx.Rngs) -> nnx.Module:
        module = NnxNet(spec, plain, rngs)
        if spec.freezing == "type":
            tell_by_type(module, spec)
        if spec.evaluating and not plain:
            module.eval()
        return module

    return factory


def tell_by_type(module: nnx.Module, spec: Spec) -> None:
    """Make a LoRAParam of what is trained."""
    for keys, node in list(nnx.iter_graph(module)):
        held = (
            node if isinstance(node, dict) else vars(node) if isinstance(node, nnx.Module) else {}
        )
        for name, value in list(held.items()):
            path = "/".join(map(str, (*keys, name)))
            if type(value) is nnx.Param and spec.is_trained(path):
                made = nnx.LoRAParam(value[...])
                held.update({name: made}) if held is node else setattr(node, name, made)


def nnx_call(model: NnxNet, x: jax.Array) -> tuple[jax.Array, dict[str, list[Any]]]:
    """(output, what has been sown by name), got at as the Spec says."""
    sown: dict[str, list[Any]] = {"penalty": [], "ones": []}
    reads, staged = model.spec.reads, model.spec.staged
    if staged and reads != "capture":
        y = {"jit": nnx.jit, "remat": nnx.remat}[staged](lambda model, x: model(x))(model, x)
        found = (nnx.pop if reads == "pop" else nnx.state)(model, nnx.Intermediate)
    elif reads == "capture":
        y, found = nnx.capture(model, nnx.Intermediate)(x)
    else:
        y = model(x)
        found = (nnx.pop if reads == "pop" else nnx.state)(model, nnx.Intermediate)
    if reads == "attribute":
        parts = [p for kind in ("sow", "add", "declared") for p in model.innermost(kind)]
        pairs = [(name, getattr(p, name)) for p in parts for name in sown if hasattr(p, name)]
    else:
        pairs = [(str(keys[-1]), leaf) for keys, leaf in nnx.to_flat_state(found)]
    for name, leaf in pairs:
        value = leaf.get_value()
        sown[name] += list(value) if isinstance(value, tuple) else [value]
    return y, sown


def nnx_writes(model: NnxNet) -> None:
    """What the loss changes."""
    for part in model.innermost("tally"):
        part.count[...] = part.count[...] + 1
    for part in model.innermost("teacher"):
        old, new = part.teacher.kernel, part.student.kernel
        old[...] = 0.9 * old[...] + 0.1 * jax.lax.stop_gradient(new[...])
    for part in model.innermost(OVERWRITTEN):
        part.kernel[...] = 0.9 * jax.lax.stop_gradient(part.kernel[...])


# -- Linen ----------------------------------------------------------------------------------------


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(WIDTH, use_bias=False, name="dense")(x)), None


def nested_parameters(key: jax.Array) -> Any:
    return {"kernel": dense_kernel(key), "more": {"bias": jnp.zeros(WIDTH)}}


class LinenPart(nn.Module):
    """Every kind of part, in Linen."""

    part: Part
    spec: Spec
    plain: bool

    @nn.compact
    def __call__(self, x, train: bool):
        settled = self.spec.settled(self.part) if self.plain else self.part.mode == "set"
        evaluating = settled or not train
        change = train and not self.is_initializing()
        kind = self.part.kind
        if kind == "mlp":
            up, down = nn.Dense(HIDDEN, name="up"), nn.Dense(WIDTH, name="down")
            return x + down(jnp.tanh(up(x)))
        if kind == "norm":
            affine = self.part.affine
            x = nn.Dense(WIDTH, name="dense")(x) if affine == "none" else x
            return nn.BatchNorm(
                evaluating,
                momentum=MOMENTUM,
                epsilon=EPSILON,
                use_fast_variance=False,
                use_bias=affine != "none",
                use_scale=affine == "both",
                name="norm",
            )(x)
        if kind == "dropout":
            return nn.Dropout(0.3, deterministic=evaluating)(x)
        if kind == "noise":
            if evaluating:
                return x
            return x + 0.1 * jax.random.normal(self.make_rng("noise"), x.shape)
        if kind == "table":
            order = self.variable("constants", "order", lambda: jnp.arange(WIDTH)[::-1])
            return x + 0.5 * x[:, order.value]
        if kind == "count":
            count = self.variable("counters", "count", lambda: jnp.zeros((), jnp.int32))
            if change:
                count.value = count.value + 1
            return counted(x, count.value)
        if kind in ("average", "phase"):
            function, dtype = (averaged, None) if kind == "average" else (turned, jnp.complex64)
            mean = self.variable("averages", "mean", lambda: jnp.zeros(WIDTH, dtype))
            x, new = function(x, mean.value)
            if change:
                mean.value = new
            return x
        if kind == "first":
            shift = self.variable("cache", "shift", lambda: jnp.zeros(WIDTH))
            known = self.variable("cache", "known", lambda: jnp.asarray(False))
            x, new = shifted(x, shift.value, known.value)
            if change:
                shift.value, known.value = new, jnp.asarray(True)
            return x
        if kind == "past":
            kernel = self.param("kernel", nn.initializers.lecun_normal(), (WIDTH, WIDTH))
            last = self.variable("weights", "last", jnp.eye, WIDTH)
            before = self.variable("weights", "before", jnp.eye, WIDTH)
            x = x @ kernel + 0.3 * x @ before.value
            if change:
                before.value, last.value = last.value, kernel
            return x
        if kind == "shared":
            dense = nn.Dense(WIDTH, name="dense")
            return dense(jnp.tanh(dense(x)))
        if kind == "scanned":
            stack = nn.scan(
                LinenLayer,
                variable_axes={"params": self.part.axis},
                split_rngs={"params": True},
                length=2,
            )
            return stack(name="layers")(x, None)[0]
        if kind == "nested":
            held = self.param("held", nested_parameters)
            mean = self.variable("averages", "held", lambda: {"mean": jnp.zeros(WIDTH)})
            x, new = averaged(x @ held["kernel"] + held["more"]["bias"], mean.value["mean"])
            if change:
                mean.value = {"mean": new}
            return x
        if kind == "half":
            scale = self.param("scale", nn.initializers.zeros, (WIDTH,), jnp.bfloat16)
            seen = self.variable("averages", "half", lambda: jnp.zeros(WIDTH, jnp.bfloat16))
            x, new = halved(x, scale, seen.value)
            if change:
                seen.value = new
            return x
        if kind == "draws":
            key = self.variable("draws", "key", lambda: jax.random.PRNGKey(7))
            x, new = drawn(x, key.value)
            if change:
                key.value = new
            return x
        if kind == "spectral":
            kernel = self.param("kernel", complex_kernel)
            return spectral(x, kernel, self.param("bias", nn.initializers.ones, (WIDTH,)))
        return self.sowing(nn.Dense(WIDTH, name="dense")(x))

    def sowing(self, x):
        collection = self.spec.collection
        if self.part.kind == "sow":
            self.sow(collection, "penalty", per_sample(x))
            self.sow("intermediates", "seen", x)
            return x
        for name, value in (("penalty", per_sample(x)), ("ones", jnp.ones(()))):
            self.sow(collection, name, value, reduce_fn=jnp.add, init_fn=lambda: jnp.zeros(()))
        return x


class LinenAround(nn.Module):
    inner: nn.Module

    def __call__(self, x, train: bool):
        return self.inner(x, train)


def through(parts: Any, head: nn.Module, x: jax.Array, train: bool) -> jax.Array:
    for part, made in parts:
        for _ in range(part.calls):
            x = jnp.tanh(made(x, train))
    return head(x)


class LinenCompact(nn.Module):
    spec: Spec
    plain: bool

    @nn.compact
    def __call__(self, x, train: bool):
        prefix = "" if self.spec.container == "attributes" else "parts_"
        names = [f"{prefix}{self.spec.name(i)}" for i in range(len(self.spec.parts))]
        made = [
            linen_part(part, self.spec, self.plain, name=name)
            for part, name in zip(self.spec.parts, names)
        ]
        return through(zip(self.spec.parts, made), nn.Dense(WIDTH, name="head"), x, train)


class LinenSetup(nn.Module):
    spec: Spec
    plain: bool

    def setup(self):
        made = [linen_part(part, self.spec, self.plain) for part in self.spec.parts]
        named = {self.spec.name(i): part for i, part in enumerate(made)}
        if self.spec.container == "list":
            self.parts = made
        elif self.spec.container == "dict":
            self.parts = named
        else:
            for name, part in named.items():
                setattr(self, name, part)
        self.head = nn.Dense(WIDTH)

    def __call__(self, x, train: bool):
        names = [self.spec.name(i) for i in range(len(self.spec.parts))]
        if self.spec.container == "attributes":
            made = [getattr(self, name) for name in names]
        else:
            keys = range(len(names)) if self.spec.container == "list" else names
            made = [self.parts[key] for key in keys]
        return through(zip(self.spec.parts, made), self.head, x, train)


def linen_part(part: Part, spec: Spec, plain: bool, **own: Any) -> nn.Module:
    """Made within the module that calls this; what is inside of it finds its parent later."""
    if not part.depth:
        return LinenPart(part, spec, plain, **own)
    inner = LinenPart(part, spec, plain, parent=None)
    for _ in range(part.depth - 1):
        inner = LinenAround(inner, parent=None)
    return LinenAround(inner, **own)


def linen_module(spec: Spec, plain: bool = False) -> nn.Module:
    return (LinenSetup if spec.setup else LinenCompact)(spec, plain)


SOWN = ("penalty", "ones", "seen")  # names of what is sown


def linen_call(model: Any, x: jax.Array, collection: str) -> tuple[jax.Array, dict[str, list[Any]]]:
    """(output, what has been sown by name)."""
    y = model(x)
    sown: dict[str, list[Any]] = {"penalty": [], "ones": []}
    kept = model.variables.get(collection, {})
    for keys, value in jax.tree_util.tree_leaves_with_path(kept):
        names = (getattr(key, "key", None) for key in keys)
        name = next((name for name in names if name in sown), None)
        if name is not None:
            sown[name].append(value)
    return y, sown


# -- the loss -------------------------------------------------------------------------------------


def loss_of(spec: Spec, linen: bool) -> Callable[[Any, Any], Any]:
    """It reads what was sown, counts it as a metric, and writes what a loss may write."""

    def loss(model: Any, batch: Any) -> Any:
        x = batch["x"]
        y, sown = linen_call(model, x, spec.collection) if linen else nnx_call(model, x)
        error = per_sample(y - batch["y"]) + 0.1 * sum(sown["penalty"])
        if not linen:
            nnx_writes(model)
        metrics = {"sown": jnp.asarray(len(sown["penalty"]) + sum(sown["ones"]), jnp.float32)}
        if spec.weighted:
            return jnp.sum(error * batch["weight"]), jnp.sum(batch["weight"]), metrics
        return jnp.mean(error), metrics

    return loss
