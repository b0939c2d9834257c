"""Muon: orthogonalized momentum for the hidden weight matrices (Jordan et al., 2024); NorMuon.

Muon follows DeepSpeed (deepspeed/runtime/zero/muon/original_muon.py and `set_optimizer_flags` in
deepspeed/__init__.py). Optax's `scale_by_muon` corrects the momentum's bias, which changes the
weights of momentum and gradient in the Nesterov sum, and has no Gram iteration. NorMuon (Li et al.,
arXiv:2510.05491) follows microsoft/dion (dion/normuon.py).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxspeed.optim.norms_and_biases import is_norm_or_bias, map_with_path
from jaxspeed.optim.owners import ByMatrix, by_owners, in_batches
from jaxspeed.placement.matrices import MatrixView, ViewOf
from jaxspeed.placement.owned import Arrays
from jaxspeed.placement.paths import flat_with_paths

NewtonSchulz = Literal["gram", "standard"]
_Coefficients = tuple[tuple[float, float, float], ...]  # a, b, c by iteration


class Polynomials(NamedTuple):
    """The quintics a x + b x^3 + c x^5 of an iteration, and the norm at which it starts."""

    coefficients: _Coefficients
    margin: float = 1.0  # the first norm is at most 1 / margin
    eps: float = 1e-7


QUINTIC = Polynomials(((3.4445, -4.7750, 2.0315),) * 5)
# Amsel et al. (arXiv:2505.16932): five iterations, safety factor 1.02 in all but the last.
POLAR_EXPRESS = Polynomials(
    (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    margin=1.02,
)
_RESTART = 2  # iterations after which the Gram iteration restarts from X, for stability


def uses_muon(path: str, ndim: int, inputs: int | None = None) -> bool:
    """Whether Muon updates a leaf; all others are updated by its Adam.

    DeepSpeed uses Muon for leaves with two dims or more and neither `embed` nor `lm_head` in the
    name. Here `wte`, `wpe` and a segment `head` or `classifier` are embeddings and heads too, and
    norms and biases are excluded, though a bias `[heads, head_dim]` has two dims, and so are the
    magnitudes of DoRA and the routers of mixtures.

    Args:
      path: of the leaf.
      ndim: number of dims without those that number layers and experts: 2, `[in, out]`, or 4, a
        convolution `[height, width, in, out]`.
      inputs: number of these dims that are inputs, if known: 1 for `[embed, heads, head_dim]`,
        whose matrix is embed x (heads head_dim). Any ndim is accepted then.
    """
    segments = path.lower().split("/")
    if any("embed" in segment or "lm_head" in segment for segment in segments):
        return False
    if {"wte", "wpe", "head", "classifier", "shared_expert_gate"}.intersection(segments):
        return False
    if any("router" in segment for segment in segments) or "moe/gate" in path.lower():
        return False
    if segments[0] == "lora" and "magnitude" in segments[-2:]:  # perhaps of a range of layers
        return False
    return (ndim in (2, 4) or inputs is not None) and not is_norm_or_bias(path)


class MuonState(NamedTuple):
    """State of `scale_by_muon`."""

    momentum: Any  # as the parameters


def scale_by_muon(
    momentum: float,
    ns_method: NewtonSchulz,
    view_of: ViewOf,
    consistent_rms: float | None = None,
    products: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon's direction `u = scale orthogonalize((1 - momentum) g + momentum m)`.

    Here `m = momentum m + (1 - momentum) g`, and scale is sqrt(max(1, out / in)), or
    sqrt(max(1, height / width)) for a convolution; with `consistent_rms` (Liu et al.,
    arXiv:2502.16982) it is consistent_rms sqrt(max(in, out)). Each head of a divided matrix is a
    matrix.

    Args:
      momentum: of the exponential average.
      ns_method: form of the Newton-Schulz iteration.
      view_of: the matrices of a leaf; each leaf has some.
      consistent_rms: root mean square of a direction.
      products: dtype to which the Nesterov sum and the direction are rounded, if any, as DeepSpeed
        does.
    """

    def direction(view: MatrixView, arrays: Arrays) -> Arrays:
        def of_one(x: Arrays) -> Arrays:
            u = x["update"][None]
            heads = orthogonalize(view.divided(u), ns_method)
            return {"update": view.joined(heads)[0].astype(u.dtype)}

        return in_batches(of_one, arrays)

    def scaled(path: str, u: jax.Array) -> jax.Array:
        view = view_of(path, u)
        assert view is not None
        return _scale(view, consistent_rms) * u

    def init(params: Any) -> MuonState:
        return MuonState(momentum=optax.tree.zeros_like(params))

    def update(
        updates: Any, state: MuonState, params: Any = None, *, placements: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        average = optax.tree.update_moment(updates, state.momentum, momentum, 1)
        nesterov = optax.tree.update_moment(updates, average, momentum, 1)
        results = on_matrices(direction, view_of, {"update": nesterov}, placements, products)
        return map_with_path(scaled, results["update"]), MuonState(average)

    return optax.GradientTransformationExtraArgs(init, update)


def _scale(view: MatrixView, consistent_rms: float | None) -> float:
    wide, tall = view.block
    if consistent_rms is not None:
        return max(wide, tall) ** 0.5 * consistent_rms
    if view.rows == 3:  # a convolution
        tall, wide = view.shape[view.stack :][:2]
    return max(1.0, tall / wide) ** 0.5


def scale_by_normuon(
    beta2: float,
    ns_method: NewtonSchulz,
    polynomials: Polynomials,
    adjust_lr: Literal["spectral_norm", "rms_norm"] | None,
    view_of: ViewOf,
    products: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """NorMuon's direction of a momentum: orthogonalized, each neuron divided by its moment's root.

    With O the orthogonalized matrix, a column of which is a neuron:

        v = beta2 v + (1 - beta2) mean_rows(O^2)        U = O / (sqrt(v) + 1e-8)

    and the direction is scale U ||O|| / ||U||. The scale is sqrt(out / in) ("spectral_norm"),
    0.2 sqrt(max(in, out)) ("rms_norm") or 1.
    """

    def direction(view: MatrixView, arrays: Arrays) -> Arrays:
        rows, columns = view.matrix
        scale = {
            "spectral_norm": (columns / rows) ** 0.5,
            "rms_norm": 0.2 * max(rows, columns) ** 0.5,
        }.get(adjust_lr or "", 1.0)

        def of_one(arrays: Arrays) -> Arrays:
            u, v = arrays["update"], arrays["second_moment"]
            x = orthogonalize(u, ns_method, polynomials)
            v = beta2 * v + (1 - beta2) * jnp.mean(x * x, axis=0)
            normalized = x / (jnp.sqrt(v) + 1e-8)
            norm, new = jnp.linalg.norm(x), jnp.linalg.norm(normalized)
            normalized *= scale * norm / jnp.maximum(new, 1e-8)
            return {"update": normalized.astype(u.dtype), "second_moment": v}

        return in_batches(of_one, arrays)

    def init(params: Any) -> ByMatrix:
        def zeros(path: str, p: jax.Array) -> jax.Array:
            view = view_of(path, p)
            assert view is not None
            return jnp.zeros((*p.shape[: view.stack], view.matrix[1]), p.dtype)

        return ByMatrix({"second_moment": map_with_path(zeros, params)})

    def update(
        updates: Any,
        state: ByMatrix,
        params: Any = None,
        *,
        placements: Any = None,
        **extra: Any,
    ) -> tuple[Any, Any]:
        trees = {"update": updates, **state.by_matrix}
        results = on_matrices(direction, view_of, trees, placements, products)
        return results.pop("update"), ByMatrix(results)

    return optax.GradientTransformationExtraArgs(init, update)


def on_matrices(
    function: Callable[[MatrixView, Arrays], Arrays],
    view_of: ViewOf,
    trees: Mapping[str, Any],
    placements: Any,
    products: jax.typing.DTypeLike | None = None,
) -> dict[str, Any]:
    """Apply a function of `by_owners` to the matrices of trees, by name.

    Each leaf of the tree "update" has matrices, and is exchanged in `products` if that is set. The
    other trees may lack leaves.
    """
    leaves = {name: flat_with_paths(tree) for name, tree in trees.items()}
    views, arrays = {}, {}
    for path, update in leaves["update"].items():
        view = view_of(path, update)
        assert view is not None
        views[path] = view
        arrays[path] = {name: flat[path] for name, flat in leaves.items() if path in flat}
        arrays[path]["update"] = update.astype(products or update.dtype)
    results = by_owners(function, views, arrays, placements)
    return {
        name: jax.tree.unflatten(
            jax.tree.structure(tree),
            [results[path][name].astype(x.dtype) for path, x in leaves[name].items()],
        )
        for name, tree in trees.items()
    }


def orthogonalize(
    x: jax.Array, ns_method: NewtonSchulz = "gram", polynomials: Polynomials = QUINTIC
) -> jax.Array:
    """Approximate `U V^T` of the singular value decomposition `x = U S V^T`, x  [..., m, n].

    The operands of matmuls are rounded to the dtype of x, as DeepSpeed's are; sums and the result
    are float32 at least. Matmuls in float32 have the platform's default precision (one bf16 pass on
    TPU, TF32 on GPU).
    """
    times = partial(_product, x.dtype)
    transposed = x.shape[-2] > x.shape[-1]
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    x = x.mT if transposed else x
    norm = jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)
    x = x / (polynomials.margin * norm + polynomials.eps)
    # The Gram matrix of a square matrix is as large, without gain.
    use_gram = ns_method == "gram" and x.shape[-2] < x.shape[-1]
    iterate = _gram_newton_schulz if use_gram else _newton_schulz
    x = iterate(x, polynomials.coefficients, times)
    return x.mT if transposed else x


_Product = Callable[[jax.Array, jax.Array], jax.Array]


def _product(dtype: Any, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a.astype(dtype), b.astype(dtype), preferred_element_type=a.dtype)


def _newton_schulz(x: jax.Array, coefficients: _Coefficients, times: _Product) -> jax.Array:
    """`x <- a x + b (x x^T) x + c (x x^T)^2 x`, each iteration."""
    for a, b, c in coefficients:
        gram = times(x, x.mT)
        x = a * x + times(b * gram + c * times(gram, gram), x)
    return x


def _gram_newton_schulz(x: jax.Array, coefficients: _Coefficients, times: _Product) -> jax.Array:
    """The same polynomials, iterated on the small matrix `R = x x^T`.

    One iteration is `x <- P x` with `P = a I + b R + c R^2`, so that `R <- P R P` and the product
    Q of all P is applied to x once. (https://tridao.me/blog/2026/gram-newton-schulz)
    """
    for part in (coefficients[:_RESTART], coefficients[_RESTART:]):
        iterations = len(part)
        gram = times(x, x.mT)
        identity = jnp.eye(gram.shape[-1], dtype=x.dtype)
        q = identity
        for i, (a, b, c) in enumerate(part):
            p = a * identity + b * gram + c * times(gram, gram)
            q = times(p, q) if i else p
            gram = times(times(p, gram), p) if i + 1 < iterations else gram
        x = times(q, x)
    return x
