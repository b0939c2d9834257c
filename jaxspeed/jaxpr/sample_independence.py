"""Sample independence: a proof that what a program computes of a batch is the sum of its parts'.

A forward analysis on the factors of `dim_relations`, which gives each value a kind
(`sample_values`). An operation without a rule mixes samples.

A program may compute with the number of samples n, which its trace has as a number (`jnp.mean`
divides by 32.0). So the traces of two batches are read side by side: a number that differs between
them is c n^degree, or else it mixes.

What is independent of the batch and varies along samples (`jnp.arange(n)`) mixes where it meets
them. A draw does not: each part of a batch draws its own numbers, which is noted.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxspeed.jaxpr.evaluate import derivative
from jaxspeed.jaxpr.primitives import (
    ADDITIONS,
    ADDS_INTO,
    CALLS,
    COLLECTIVES,
    CUSTOM_DERIVATIVE,
    KERNELS,
    KEYS,
    LINEAR_SOLVE,
    MANUAL_REGION,
    PAIRWISE,
    RANDOM,
    RESHAPES,
    SAME,
    SUMS,
    TWO_PASSES,
)
from jaxspeed.jaxpr.sample_derivatives import gradient_of, unlike
from jaxspeed.jaxpr.sample_rules import (
    INDEXED,
    axes_of,
    degree_of,
    elements,
    free_results,
    in_batches,
    is_alike,
    is_linear,
    is_sized,
    place,
    relations_of,
    with_columns,
    writes_along,
)
from jaxspeed.jaxpr.sample_values import (
    FREE,
    GUARD,
    MEAN,
    MIXED,
    NONE,
    SAMPLES,
    SUM,
    TOTAL,
    SampleKind,
    SampleValue,
    Values,
    either,
    free,
    mixed,
    samples,
    slice_of,
    stack_of,
    union,
    unnamed,
)
from jaxspeed.jaxpr.slicing import free_variables
from jaxspeed.jaxpr.traverse import (
    bodies,
    called,
    consts_and_carry,
    is_real,
    is_var,
    open_jaxpr,
    shape_of,
)


class UnlikeTracesError(Exception):
    """The traces of two numbers of samples do not correspond."""


@dataclass
class Analysis:
    """The traces of batches of `counts` samples.

    Attributes:
      over: the mesh axes that shard samples.
      differentiated: whether derivatives have to be sums over samples too, as for training.
      derivatives: by the equation; analyses of the same traces can share them.
    """

    counts: tuple[int, int]
    over: frozenset[str]
    differentiated: bool = True
    derivatives: dict[JaxprEqn, ClosedJaxpr] = field(default_factory=dict)
    _roots: dict[Any, int] = field(default_factory=dict)

    def run(self, program: Jaxpr, other: Jaxpr, inputs: Values) -> Values:
        """The results of two corresponding programs.

        Args:
          inputs: for each variable of `program`, constants first.

        Raises:
          UnlikeTracesError: they do not correspond.
        """
        known: dict[Any, SampleValue] = {}
        twins = dict(
            zip(
                (*other.constvars, *other.invars),
                (*program.constvars, *program.invars),
                strict=True,
            )
        )
        for v, value in zip(twins.values(), inputs, strict=True):
            known[v] = value if value.root is not None else replace(value, root=object())
        if len(program.eqns) != len(other.eqns):
            raise UnlikeTracesError

        def read(ones: Iterable[Any], others: Iterable[Any]) -> Values:
            values = []
            for v, twin in zip(ones, others, strict=True):
                if is_var(v) != is_var(twin) or (is_var(v) and twins[twin] is not v):
                    raise UnlikeTracesError
                values.append(known[v] if is_var(v) else self.constant(v.val, twin.val))
            return values

        for eqn, twin in zip(program.eqns, other.eqns, strict=True):
            lengths = [(len(e.invars), len(e.outvars)) for e in (eqn, twin)]
            if eqn.primitive is not twin.primitive or lengths[0] != lengths[1]:
                raise UnlikeTracesError
            operands = read(eqn.invars, twin.invars)
            results = self._equation(eqn, twin, operands)
            twins |= dict(zip(twin.outvars, eqn.outvars, strict=True))
            for i, (v, value) in enumerate(zip(eqn.outvars, results, strict=True)):
                if not self._has_a_size(value, v, twin.outvars[i]):
                    value = mixed(f"a {v.aval.str_short()} grows with the samples{place(eqn)}")
                if value.root is None:
                    value = replace(value, root=self._root(eqn, operands, i))
                known[v] = value
        return read(program.outvars, other.outvars)

    def run_closed(self, closed: Any, twin_closed: Any, inputs: Iterable[SampleValue]) -> Values:
        """The results of two corresponding programs with constants of their own."""
        (jaxpr, consts), (twin, others) = open_jaxpr(closed), open_jaxpr(twin_closed)
        return self.run(jaxpr, twin, [*map(self.constant, consts, others), *inputs])

    def constant(self, value: Any, twin: Any) -> SampleValue:
        """A constant of the programs, or a number."""
        if getattr(value, "dtype", None) == jax.dtypes.float0:  # a gradient of integers
            return SampleValue(FREE, zero=True)
        first, second = map(elements, (value, twin))
        if first is None or second is None:
            return free(np.ndim(value))
        lines = (
            first == first.take([0], axis=d) if first.size else True for d in range(first.ndim)
        )
        varies = frozenset(d for d, same in enumerate(lines) if not np.all(same))
        is_equal = first.shape == second.shape and np.array_equal(
            first, second, equal_nan=first.dtype.kind in "fc"
        )
        if is_equal:
            number = (str(first.dtype), first.item()) if first.ndim == 0 else None
            return SampleValue(FREE, varies=varies, zero=not first.any(), root=number)
        if varies and first.shape != second.shape:
            return SampleValue(FREE, varies=varies)
        ratio = self.counts[1] / self.counts[0]
        here, there = (x.reshape(-1)[:1].astype(np.float64) for x in (first, second))
        for degree in (0, 1, -1, 2, -2):
            if not varies and np.allclose(there, here * ratio**degree, rtol=1e-6, atol=0):
                return SampleValue(FREE, degree=degree, zero=not first.any())
        return mixed(f"computes with the number {here}, another one for other numbers of samples")

    def _root(self, eqn: JaxprEqn, operands: Values, number: int) -> Any:
        """Equal for equal operations on equal operands."""
        if eqn.primitive.name in RANDOM or bodies(eqn):
            return object()
        key = (eqn.primitive.name, number, tuple(x.root for x in operands), str(eqn.params))
        return self._roots.setdefault(key, len(self._roots))

    def _has_a_size(self, x: SampleValue, v: Any, twin: Any) -> bool:
        """Whether the dim of samples grows like their number, and no other dim does."""
        if x.kind is MIXED:
            return True
        here, there = shape_of(v), shape_of(twin)
        grown = {d for d, n in enumerate(there) if n != here[d]}
        sample_dims = grown if x.kind is FREE else {x.dim} - {None}
        as_many = grown == sample_dims or self.counts[0] == self.counts[1]
        return as_many and is_sized(here, there, self.counts)

    # -- operations --------------------------------------------------------------------------------

    def _equation(self, eqn: JaxprEqn, twin: JaxprEqn, operands: Values) -> Values:
        name = eqn.primitive.name
        if not is_alike(eqn, twin, self.counts):
            return self._mixed(eqn, "does something else for another number of samples")
        if name == "select_n" and operands[0].zero:
            return [operands[1]]
        if name in _PROGRAMS or name in CALLS:
            return _PROGRAMS.get(name, Analysis._call)(self, eqn, twin, operands)
        if name in ("concatenate", "stack") and (joined := with_columns(eqn, operands)):
            return [joined]
        if name in INDEXED and operands[1].columns:
            eqn, operands = in_batches(eqn, operands)
        if first := next((x for x in operands if x.kind is MIXED), None):
            return [first] * len(eqn.outvars)
        if name == "stop_gradient" or name in PAIRWISE:
            return list(operands)
        if name in KEYS or name in RANDOM:
            return self._drawn(eqn, operands)
        kinds = {x.kind for x in operands} - {FREE}
        if {SAMPLES, SUM} <= kinds and name != ADDS_INTO:
            return self._mixed(eqn)
        degree = degree_of(eqn, twin, operands, self.counts)
        if degree is None:
            return self._mixed(eqn, "computes with the number of samples")
        if all(x.kind is FREE for x in operands):
            return free_results(eqn, operands, degree)
        if name in COLLECTIVES and self.over.intersection(axes_of(eqn)):
            return self._mixed(eqn, "reduces over samples of all ranks")
        if all(x.kind in (FREE, SAMPLES) for x in operands):
            return self._of_samples(eqn, operands, degree)
        return self._of_sums(eqn, operands, degree)

    def _mixed(self, eqn: JaxprEqn, what: str = "mixes samples") -> Values:
        return [mixed(f"a {eqn.primitive.name} {what}{place(eqn)}")] * len(eqn.outvars)

    def _of_samples(self, eqn: JaxprEqn, operands: Values, degree: int) -> Values:
        """The results of an operation on samples and on what is independent of the batch."""
        name, draws = eqn.primitive.name, any(x.draws for x in operands)
        if all(x.kind is FREE or x.dim is None for x in operands):  # of one sample
            draws = draws or any(x.drawn for x in operands)
            return [SampleValue(SAMPLES, None, degree, draws=draws)] * len(eqn.outvars)
        relations = relations_of(eqn)
        if relations is None:
            return self._mixed(eqn)
        of_samples = {
            factors[x.dim] if x.dim is not None else None
            for x, factors in zip(operands, relations.operands, strict=True)
            if x.kind is SAMPLES
        }
        if len(of_samples) > 1 or None in of_samples or of_samples & relations.mixed:
            return self._mixed(eqn)
        (factor,) = of_samples
        for x, factors in zip(operands, relations.operands, strict=True):
            along = {dim for dim, f in enumerate(factors) if f == factor}
            if x.varies & along:
                return self._mixed(eqn, "numbers samples, or has a value for each of them")
            draws = draws or bool(x.drawn & along)
        target = operands[0]
        if writes_along(
            eqn, relations, [d for d, f in enumerate(relations.operands[0]) if f == factor]
        ):
            return self._mixed(eqn, "writes to a sample by its number")
        results = []
        for v, factors in zip(eqn.outvars, relations.results, strict=True):
            dims = [dim for dim, f in enumerate(factors) if f == factor]
            if name in RESHAPES and dims and shape_of(v)[dims[0]] % self.counts[0]:
                return self._mixed(eqn)
            if len(dims) == 1:
                results.append(SampleValue(SAMPLES, dims[0], degree, draws=draws))
            elif not dims and (name in SUMS or (name == ADDS_INTO and target.zero)):
                results.append(SampleValue(SUM, None, degree, draws=draws))
            else:
                return self._mixed(eqn)
        return results

    def _of_sums(self, eqn: JaxprEqn, operands: Values, degree: int) -> Values:
        """The results of an operation that reads a sum over samples, which has to be linear."""
        name, first, last = eqn.primitive.name, operands[0], operands[-1]
        others = [x for x in operands if x.kind in (FREE, SAMPLES)]
        sums = [x for x in operands if x not in others]
        kinds, alone = {x.kind for x in sums}, len(sums) == 1
        kept, result = replace(sums[0], degree=degree, root=None), None
        # The sums that a choice or a mean is of.
        roots = {x.root for x in sums if x.kind is not SUM or name == "select_n"}
        if name == "convert_element_type" and _truncates(eqn):
            pass
        elif kinds == {TOTAL}:
            adds = name == "add" or (name in ("sub", "add_any", ADDS_INTO) and first in sums)
            adds = adds and alone and all(x.dim is None for x in others)
            chosen = name == "select_n" and others == [first] and len({x.carry for x in sums}) == 1
            result = kept if adds or chosen or name in SAME else None
        elif not all(x.kind is FREE for x in others):
            if name == ADDS_INTO and alone and first in sums:
                zeros = replace(first, kind=FREE, zero=True)
                added = self._of_samples(eqn, [zeros, *operands[1:]], degree)
                if added[0].kind in (SUM, MIXED):
                    return added
        elif kinds == {SUM} and is_linear(name, operands):
            result = replace(kept, root=first.root if name in SAME else None)
        elif kinds == {SUM} and alone and name in ("max", "gt", "ne"):
            if name == "max" or (first in sums and last.zero):
                result = replace(kept, kind=GUARD, root=sums[0].root)
        elif name == "div" and last.kind in (SUM, GUARD):
            if first.kind is SUM and first.degree == last.degree:
                result = SampleValue(MEAN, root=last.root)
        elif name == "select_n" and first.kind is GUARD and len(roots) == 1:
            cases = {x.kind for x in operands[1:] if not x.zero}
            if cases == {MEAN}:
                result = SampleValue(MEAN, root=first.root)
            elif cases - {FREE} == {SUM}:
                result = replace(kept, kind=GUARD, root=first.root)
        elif kinds == {GUARD} and name in SAME:
            result = first
        elif kinds == {MEAN} and len(roots) == 1 and degree == 0:
            scaled = alone and (name == "mul" or (name == "div" and first in sums))
            if scaled or name in ADDITIONS | SAME | {"neg"}:
                result = sums[0]
        if result is None:
            return self._mixed(eqn, "is not linear in a sum over samples")
        return [replace(result, draws=any(x.draws for x in operands))] * len(eqn.outvars)

    def _drawn(self, eqn: JaxprEqn, operands: Values) -> Values:
        """Random keys and numbers: the leading dims are those of the operands."""
        name = eqn.primitive.name
        lead = max((len(shape_of(v)) for v in eqn.invars), default=0) - (name == "random_wrap")
        differs = union(x.varies | x.drawn for x in operands)
        results = []
        for v in eqn.outvars:
            dims = frozenset(range(len(shape_of(v))))
            drawn_dims = NONE if name in KEYS - {"random_split"} else dims - frozenset(range(lead))
            if all(x.kind is FREE for x in operands):
                results.append(SampleValue(FREE, drawn=(differs & dims) | drawn_dims))
                continue
            of = {(x.kind, x.dim) for x in operands if x.kind is not FREE}
            kind, dim = next(iter(of))
            if len(of) > 1 or kind is not SAMPLES or dim in differs or (dim or 0) >= max(lead, 1):
                return self._mixed(eqn)
            results.append(SampleValue(SAMPLES, dim))
        return results

    # -- programs within ---------------------------------------------------------------------------

    def _call(self, eqn: JaxprEqn, twin: JaxprEqn, operands: Values) -> Values:
        inner_bodies, twin_bodies = bodies(eqn), bodies(twin)
        if len(inner_bodies) != 1 or len(twin_bodies) != 1:
            return self._opaque(eqn, twin, operands)
        values = self.within(eqn).run_closed(inner_bodies[0], twin_bodies[0], operands)
        if not self.has_derivative(eqn):
            return values
        return self._with_derivative(eqn, twin, operands, values)

    def within(self, eqn: JaxprEqn) -> "Analysis":
        """What a function with a derivative of its own calls is not differentiated."""
        is_own = eqn.primitive.name in CUSTOM_DERIVATIVE
        return replace(self, differentiated=False) if is_own else self

    def has_derivative(self, eqn: JaxprEqn) -> bool:
        """Whether a function's derivative is another program that is run."""
        is_own = eqn.primitive.name in CUSTOM_DERIVATIVE and name_of(eqn) != TWO_PASSES
        return self.differentiated and is_own

    def derivative(self, eqn: JaxprEqn) -> ClosedJaxpr:
        """Traced once: a loop's body is read several times."""
        if eqn not in self.derivatives:
            self.derivatives[eqn] = derivative(eqn, by_tangents=is_by_tangents(eqn))
        return self.derivatives[eqn]

    def _with_derivative(
        self,
        eqn: JaxprEqn,
        twin: JaxprEqn,
        operands: Values,
        values: Values,
    ) -> Values:
        """The results of a function with a derivative of its own, MIXED where that mixes samples.

        Args:
          values: the results, as the function itself computes them.
        """
        inputs, name = free_variables([eqn]), name_of(eqn)
        operand_of = {v: x for v, x in zip(eqn.invars, operands, strict=True) if is_var(v)}
        # What is real: (value, variable, its twin).
        real_operands = [
            (operand_of[v], v, w) for v, w in zip(inputs, free_variables([twin])) if is_real(v)
        ]
        real_results = [
            x for x in zip(values, eqn.outvars, twin.outvars, strict=True) if is_real(x[1])
        ]
        kinds = {x.kind for x in (*values, *(x for x, _, _ in real_operands))}
        if not real_operands or not real_results or (kinds == {FREE} and is_by_tangents(eqn)):
            return values  # there is nothing to differentiate
        if first := next((x for x in values if x.kind is MIXED), None):
            return [first] * len(values)
        if not kinds <= {FREE, SAMPLES, SUM}:
            return self._mixed(
                eqn, f"with a derivative of its own ({name}) reads a sum over samples"
            )
        try:
            rule, twin_rule = self.derivative(eqn), self.derivative(twin)
        except Exception as error:  # user code, which runs only where it is differentiated
            return self._mixed(eqn, f"({name}) has no derivative ({type(error).__name__}: {error})")
        if is_by_tangents(eqn):
            carried = [replace(unnamed(x), draws=False) for x, _, _ in real_operands]
            wanted = [x for x, _, _ in real_results]
        else:
            carried, wanted = (
                [gradient_of(*x) for x in triples] for triples in (real_results, real_operands)
            )
        inside = replace(self, differentiated=False)
        derived_values = inside.run_closed(
            rule, twin_rule, [*(operand_of[v] for v in inputs), *carried]
        )
        # In training, its values are those that the derivative's rule computes.
        if why := next(filter(None, map(unlike, derived_values, [*values, *wanted])), None):
            return [mixed(f"in the derivative of {name}{place(eqn)}, {why}")] * len(values)
        draws = any(x.draws or x.drawn for x in derived_values[len(values) :])
        return [x if x.kind is FREE else replace(x, draws=x.draws or draws) for x in values]

    def _shard_map(self, eqn: JaxprEqn, twin: JaxprEqn, operands: Values) -> Values:
        """A region in which each device has a part of the samples, perhaps."""
        (body,), (other,) = bodies(eqn), bodies(twin)
        shares = {
            shape_of(v)[x.dim] // shape_of(inner)[x.dim]
            for x, v, inner in zip(operands, eqn.invars, body.jaxpr.invars, strict=True)
            if x.kind is SAMPLES and x.dim is not None
        }
        share = max(shares, default=1)
        if any(count % share for count in self.counts) or len(shares) > 1:
            return self._opaque(eqn, twin, operands)
        inside = replace(self, counts=(self.counts[0] // share, self.counts[1] // share))
        results = inside.run_closed(body, other, operands)
        alone = (FREE, SAMPLES, MIXED) if share > 1 else tuple(SampleKind)
        return [x if x.kind in alone else self._mixed(eqn)[0] for x in results]

    def _linear_solve(self, eqn: JaxprEqn, twin: JaxprEqn, operands: Values) -> Values:
        """A solution, by the program that finds it; the derivative runs the others."""
        lengths = eqn.params["const_lengths"]._asdict()
        right_sides, at = operands[sum(lengths.values()) :], {}
        for name, count in lengths.items():
            at[name] = operands[:count]
            operands = operands[count:]

        def run(name: str, values: Values) -> Values:
            program, twin_program = (getattr(e.params["jaxprs"], name) for e in (eqn, twin))
            return self.run_closed(program, twin_program, [*at[name], *values])

        solution = run("solve", right_sides)
        for name in ("transpose_solve", "matvec") if self.differentiated else ():
            if getattr(eqn.params["jaxprs"], name) is not None:
                pairs = zip(run(name, solution), solution, strict=True)
                if any((x.kind, x.dim) != (y.kind, y.dim) for x, y in pairs):
                    return self._mixed(eqn)
        return solution

    def _opaque(self, eqn: JaxprEqn, twin: JaxprEqn, operands: Values) -> Values:
        if first := next((x for x in operands if x.kind is MIXED), None):
            return [first] * len(eqn.outvars)
        shapes = ([shape_of(v) for v in (*e.invars, *e.outvars)] for e in (eqn, twin))
        if all(x.kind is FREE for x in operands) and len({*map(tuple, shapes)}) == 1:
            return [free(len(shape_of(v))) for v in eqn.outvars]
        return self._mixed(eqn)

    def _cond(self, eqn: JaxprEqn, twin: JaxprEqn, operands: Values) -> Values:
        index, *inputs = operands
        pairs = list(zip(bodies(eqn), bodies(twin), strict=True))
        platforms = eqn.params.get("branches_platforms") or ()
        if None in platforms:  # kernels of platforms compute what the default does
            pairs = [pairs[platforms.index(None)]]
        first, *rest = (self.run_closed(body, other, inputs) for body, other in pairs)
        for branch in rest:
            first = list(map(either, first, branch))
        if index.is_of_one_sample:
            one_sample = replace(samples(None), draws=index.draws)
            return [x if x.kind is TOTAL else either(x, one_sample) for x in first]
        if index.kind is MIXED:
            return [index] * len(eqn.outvars)
        return first if index.kind is FREE else self._mixed(eqn)

    def _while(self, eqn: JaxprEqn, twin: JaxprEqn, operands: Values) -> Values:
        skipped, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        (body,), (other,) = bodies(eqn), bodies(twin)
        ends, others = (e.params["cond_jaxpr"] for e in (eqn, twin))
        read, fixed = operands[:skipped], operands[skipped : skipped + consts]
        carry = list(map(unnamed, operands[skipped + consts :]))
        while True:
            (goes_on,) = self.run_closed(ends, others, [*read, *carry])
            apart = goes_on.kind is SAMPLES
            if goes_on.kind is not FREE and not apart:
                return [goes_on if goes_on.kind is MIXED else x for x in self._mixed(eqn)]
            after = list(map(either, carry, self.run_closed(body, other, [*fixed, *carry])))
            if apart:  # with dims in a `vmap`, each element of the carry has trips of its own
                trips = replace(samples(goes_on.dim), draws=goes_on.draws)
                after = [x if x.kind is TOTAL else either(x, trips) for x in after]
            lead = goes_on.varies | goes_on.drawn
            after = [replace(x, varies=x.varies | lead) if x.kind is FREE else x for x in after]
            if after == carry:
                return carry
            carry = after

    def _scan(self, eqn: JaxprEqn, twin: JaxprEqn, operands: Values) -> Values:
        num_consts, num_carry = consts_and_carry(eqn)
        (body,), (other,) = bodies(eqn), bodies(twin)
        fixed, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]
        xs = operands[num_consts + num_carry :]
        of_samples = any(x.kind is SAMPLES and x.dim == 0 for x in xs)
        if not of_samples and eqn.params["length"] != twin.params["length"]:
            return self._mixed(
                eqn, "has trips by the number of samples, as lax.map with a batch_size: not proved"
            )
        crossed = mixed(f"a scan carries values from sample to sample{place(eqn)}")

        def sliced(x: SampleValue) -> SampleValue:
            """A slice of what is scanned along samples."""
            if x.kind is SAMPLES and x.dim == 0:
                return replace(unnamed(x), dim=None)
            if x.kind is FREE and 0 not in x.varies:
                drawn = SampleValue(SAMPLES, None, x.degree, draws=True)
                return drawn if 0 in x.drawn else slice_of(x)
            return crossed

        def begun(number: int, x: SampleValue) -> SampleValue:
            if x.zero or x.kind is SUM:
                return SampleValue(TOTAL, None, x.degree, draws=x.draws, carry=number)
            return unnamed(x) if x.kind is FREE else crossed

        slices = [sliced(x) if of_samples else slice_of(x) for x in xs]
        carry = [begun(i, x) if of_samples else unnamed(x) for i, x in enumerate(carry)]
        if of_samples:
            fixed = [crossed if x.kind in (SAMPLES, TOTAL) else x for x in fixed]
        while True:
            results = self.run_closed(body, other, [*fixed, *carry, *slices])
            after = []
            for i, (old, new) in enumerate(zip(carry, results, strict=False)):
                is_total = old.kind is new.kind is TOTAL and new.carry == old.carry
                if not of_samples or is_total:
                    after.append(either(old, new))
                else:
                    is_same = body.jaxpr.outvars[i] is body.carried[i]
                    after.append(old if is_same else crossed)
            if after == carry:
                break
            carry = after
        stacked = results[num_carry:]
        if not of_samples:
            return [*carry, *map(stack_of, stacked)]
        ends = [replace(x, kind=SUM, carry=0) if x.kind is TOTAL else x for x in carry]
        of_each = [
            replace(unnamed(x), dim=0)
            if x.is_of_one_sample
            else replace(stack_of(x), varies=stack_of(x).varies - {0})
            if x.kind is FREE
            else crossed
            for x in stacked
        ]
        return [*ends, *of_each]


_PROGRAMS = {
    MANUAL_REGION: Analysis._shard_map,
    "cond": Analysis._cond,
    "while": Analysis._while,
    "scan": Analysis._scan,
    LINEAR_SOLVE: Analysis._linear_solve,
    **dict.fromkeys(KERNELS, Analysis._opaque),
}


def is_by_tangents(eqn: JaxprEqn) -> bool:
    """Whether the rule of a custom derivative is for tangents, not for gradients."""
    return eqn.primitive.name == "custom_jvp_call"


def name_of(eqn: JaxprEqn) -> str:
    return str(open_jaxpr(called(eqn))[0].debug_info.func_name)


def _truncates(eqn: JaxprEqn) -> bool:
    """Whether a cast is no linear operation: to integers, or to whether it is 0."""
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]  # type: ignore[attr-defined]
    to_inexact = jax.numpy.issubdtype(new, np.inexact)
    return not to_inexact and (jax.numpy.issubdtype(old, np.inexact) or new == np.bool_)
