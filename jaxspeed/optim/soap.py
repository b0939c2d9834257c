"""SOAP: Adam in the eigenbases of Shampoo's preconditioners (Vyas et al., arXiv:2409.11321).

Follows the authors' nikhilvyas/SOAP (soap.py).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxspeed.optim.muon import on_matrices
from jaxspeed.optim.norms_and_biases import map_with_path
from jaxspeed.optim.owners import ByMatrix, Unrounded, in_batches
from jaxspeed.placement.matrices import MatrixView, ViewOf
from jaxspeed.placement.owned import Arrays


class SoapState(NamedTuple):
    """State of `scale_by_soap`."""

    count: jax.Array  # type: ignore[assignment]  # int32 [], updates completed; Optax's name
    moments: ByMatrix  # mu and nu, in the eigenbases
    bases: Unrounded  # of rows and of columns: the preconditioner, its eigenbasis


def scale_by_soap(
    b1: Any,
    b2: Any,
    gram_beta: Any,
    eps: float,
    frequency: int,
    max_precond_dim: int,
    view_of: ViewOf,
) -> optax.GradientTransformationExtraArgs:
    """SOAP's direction, 0 in the first update, which makes the bases.

    With G a gradient `[rows, columns]`, L and R moments of `G G^T` and `G^T G` (`gram_beta`), and P
    and Q their eigenbases before this update:

        m = b1 m + (1 - b1) P^T G Q        v = b2 v + (1 - b2) (P^T G Q)^2
        u = sqrt(1 - b2^t) / (1 - b1^t) P (m / (sqrt(v) + eps)) Q^T

    Every `frequency` updates a power iteration and QR update P and Q, sorted by their eigenvalues,
    v is sorted as they are, and m rotated. A side above `max_precond_dim` has no basis. Products
    are in full precision. `view_of` has the matrices of a leaf; each leaf has some.
    """

    def init(params: Any) -> SoapState:
        def side(dim: int) -> Any:
            def zeros(path: str, p: jax.Array) -> Any:
                view = view_of(path, p)
                assert view is not None
                size = view.matrix[dim]
                if size > max_precond_dim:
                    return optax.MaskedNode()
                dtype = jnp.promote_types(p.dtype, jnp.float32)
                return jnp.zeros((*p.shape[: view.stack], size, size), dtype)

            return map_with_path(zeros, params)

        names = {"rows": 0, "columns": 1, "gram_rows": 0, "gram_columns": 1}
        moments = {name: optax.tree.zeros_like(params) for name in ("mu", "nu")}
        squares = {name: side(dim) for name, dim in names.items()}
        return SoapState(jnp.zeros([], jnp.int32), ByMatrix(moments), Unrounded(squares))

    def update(
        updates: Any, state: SoapState, params: Any = None, *, placements: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        t = jnp.maximum(state.count, 1)

        def moments(x: Arrays) -> Arrays:
            g = x["update"]
            rotated = _rotated(g, x)
            x["mu"] = b1 * x["mu"] + (1 - b1) * rotated
            x["nu"] = b2 * x["nu"] + (1 - b2) * rotated**2
            u = _rotated(x["mu"] / (jnp.sqrt(x["nu"]) + eps), x, back=True)
            x["update"] = u * (jnp.sqrt(1 - b2**t) / (1 - b1**t)).astype(u.dtype)
            for side, gram in (("rows", g @ g.T), ("columns", g.T @ g)):
                if side in x:
                    x[f"gram_{side}"] = gram_beta * x[f"gram_{side}"] + (1 - gram_beta) * gram
            return x

        def direction(view: MatrixView, arrays: Arrays) -> Arrays:
            with jax.default_matmul_precision("highest"):
                arrays = in_batches(moments, arrays)
                is_due = state.count % frequency == 0
                kind = jnp.where(state.count == 0, 0, jnp.where(is_due, 1, 2))
                forms = [_first_bases, _next_bases, lambda x: x]
                branches = [lambda x, form=form: in_batches(form, x) for form in forms]
                return jax.lax.switch(kind, branches, arrays)

        trees = {"update": updates, **state.moments.by_matrix, **state.bases.by_matrix}
        new = on_matrices(direction, view_of, trees, placements)
        of_moments, bases = ({n: new[n] for n in old.by_matrix} for old in state[1:])
        count = optax.safe_increment(state.count)
        return new["update"], SoapState(count, ByMatrix(of_moments), Unrounded(bases))

    return optax.GradientTransformationExtraArgs(init, update)


def _rotated(x: jax.Array, bases: Arrays, back: bool = False) -> jax.Array:
    """`P^T x Q`, or back `P x Q^T`; a side without a basis as it is."""
    if "rows" in bases:
        x = (bases["rows"] if back else bases["rows"].T) @ x
    if "columns" in bases:
        x = x @ (bases["columns"].T if back else bases["columns"])
    return x


def _first_bases(x: Arrays) -> Arrays:
    """Eigenvectors, by falling eigenvalues. The moments are still 0: so were the bases."""
    bases = {
        side: jnp.linalg.eigh(x[f"gram_{side}"])[1][:, ::-1]
        for side in ("rows", "columns")
        if side in x
    }
    return x | bases


def _next_bases(x: Arrays) -> Arrays:
    """One power iteration of the bases, sorted by the eigenvalues that they estimate."""
    mu, nu, bases = _rotated(x["mu"], x, back=True), x["nu"], {}
    for dim, side in enumerate(("rows", "columns")):
        if side in x:
            basis, gram = x[side], x[f"gram_{side}"]
            order = jnp.argsort(jnp.sum(basis * (gram @ basis), axis=0), descending=True)
            nu = jnp.take(nu, order, axis=dim)
            bases[side] = jnp.linalg.qr(gram @ basis[:, order])[0]
    return x | bases | {"mu": _rotated(mu, bases), "nu": nu}
