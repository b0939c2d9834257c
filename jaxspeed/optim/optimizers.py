"""Optimizers by DeepSpeed's and torch's names, parameters and formulas, as Optax transformations.

Each function is one optimizer: a chain in the order of its formula. Optax's transformations are
used where they are the same; `transforms.py` and `muon.py` document the differences of
the others.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxspeed.config.optimizers import LEAST_SIZE, TWO_RATES
from jaxspeed.config.patterns import match
from jaxspeed.errors import ConfigError
from jaxspeed.optim.groups import GroupLike, Match, PathRules
from jaxspeed.optim.muon import (
    POLAR_EXPRESS,
    NewtonSchulz,
    scale_by_muon,
    scale_by_normuon,
    uses_muon,
)
from jaxspeed.optim.norms_and_biases import map_with_path
from jaxspeed.optim.schedules import LRSchedule
from jaxspeed.optim.soap import scale_by_soap
from jaxspeed.optim.transforms import (
    Step,
    add_weight_decay,
    damped_trace,
    in_float32,
    scale_by_adagrad,
    scale_by_lamb_coefficient,
    scale_by_rate,
    scale_by_raw_moments,
    with_scheduled_betas,
)
from jaxspeed.placement.matrices import MatrixView, ViewOf, view_of

# Implementation choices of torch and DeepSpeed that do not change the formula.
_IMPLEMENTATION_HINTS = frozenset(
    {"torch_adam", "set_grad_none", "fused", "foreach", "capturable", "differentiable"}
    | {"fp32_optimizer_states"}
)
# Unsupported variants of the formula. The config refuses them, and may pass them switched off.
_NOT_BUILT = frozenset({"amsgrad", "maximize", "max_grad_norm"})


@dataclass(frozen=True)
class OptimizerInputs:
    """Inputs of all optimizers: schedule, and settings and layouts by path."""

    schedule: LRSchedule
    rules: PathRules
    stacked: Callable[[str], int]
    matrix_stack: Callable[[str], int]
    inputs: Callable[[str], int | None]
    heads: Callable[[str], int]
    products: jax.typing.DTypeLike | None

    def view(self, path: str, p: Any) -> MatrixView | None:
        """The matrices of a leaf; None for those that Adam updates."""
        stack, inputs = self.matrix_stack(path), self.inputs(path)
        if jnp.iscomplexobj(p) or not uses_muon(path, p.ndim - stack, inputs):
            return None
        return view_of(p.shape, stack, inputs)

    def with_adam(
        self,
        name: str,
        view: ViewOf,
        direction: optax.GradientTransformation,
        adam: optax.GradientTransformation,
        weight_decay: float,
        rates: Sequence[optax.GradientTransformation],
    ) -> optax.GradientTransformation:
        """`direction` of the leaves that have a view, `adam` of all others, each with its rate."""
        directions = {name: direction, "adam": adam}
        return optax.partition(
            {
                label: optax.chain(of_leaves, self.decay(weight_decay), rate)
                for (label, of_leaves), rate in zip(directions.items(), rates, strict=True)
            },
            lambda params: map_with_path(lambda *leaf: name if view(*leaf) else "adam", params),
        )

    def decay(self, weight_decay: float) -> optax.GradientTransformation:
        return add_weight_decay(lambda path: self.rules.weight_decay(path, weight_decay))

    def rate(self, base_lr: float, first: int = 0) -> optax.GradientTransformation:
        """The schedule's rate, from the step `first` on."""

        def lr(step: Any) -> Any:
            rate = self.schedule.lr(step, base_lr)
            return jnp.where(step < first, 0, rate) if first else rate

        return scale_by_rate(lr, self.rules.lr_factor)

    def moments(
        self,
        make: Callable[[Any, Any], optax.GradientTransformation],
        betas: tuple[float, float],
    ) -> optax.GradientTransformation:
        """`make(b1, b2)` with the schedule's betas, if it has any."""
        if self.schedule.betas is None:
            return make(*betas)
        return with_scheduled_betas(make, self.schedule.betas)


def build_optimizer(
    type: str,
    params: Mapping[str, Any],
    schedule: LRSchedule | None = None,
    *,
    groups: Sequence[GroupLike] = (),
    exclude_norms_and_biases: bool = False,
    match: Match = match,
    stacked: Callable[[str], int] = lambda path: 0,
    matrix_stack: Callable[[str], int] | None = None,
    inputs: Callable[[str], int | None] = lambda path: None,
    heads: Callable[[str], int] = lambda path: 1,
    products: jax.typing.DTypeLike | None = None,
    moment_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    """The optimizer of a config's `optimizer` section. Its updates are *added* to parameters.

    Parameters are any pytree; frozen leaves may be `optax.MaskedNode()`. The state counts completed
    updates: on a skipped step, keep the old state.

    Args:
      type: Adam, AdamW, SGD, Adagrad, Lamb, Lion, Muon, NorMuon or SOAP, in any case. With 8-bit
        or paged state (PagedAdamW8bit) the transformation is the same.
      params: its parameters by DeepSpeed's names, validated by the config.
      schedule: from `build_schedule`; None is the optimizer's constant lr.
      groups: learning-rate factors and weight decays by path pattern; the first match wins.
      exclude_norms_and_biases: no weight decay on them.
      match: whether a pattern matches a path, `(pattern, path) -> bool`; the config's by default.
      stacked: number of leading dims that index stacked layers, by path.
      matrix_stack: number of leading dims that number matrices, layers and experts, by path; None
        is `stacked`.
      inputs: number of dims after those that are inputs, of matrices with more than two dims; 0 of
        a leaf that is no matrix.
      heads: number of attention heads whose columns are matrices of their own (per_head_muon).
      products: dtype to which Muon and NorMuon round what they multiply; None is the moments'.
      moment_dtype: the stored dtype of moments; None is the dtype of their parameter.

    Raises:
      ConfigError: an unknown type.
    """
    optimizer, arguments = _call(type, params)
    rules = PathRules(groups, exclude_norms_and_biases, match)
    parts = OptimizerInputs(
        schedule or LRSchedule(), rules, stacked, matrix_stack or stacked, inputs, heads, products
    )
    return in_float32(optimizer(parts, **arguments), moment_dtype)


def base_learning_rates(type: str, params: Mapping[str, Any]) -> dict[str, float]:
    """The optimizer's learning rates, for `LRSchedule.lr(step, base_lr)`.

    `{"lr": ...}`, and for Muon and NorMuon, which have two, `{"muon_lr": ..., "adam_lr": ...}`.
    """
    optimizer, arguments = _call(type, params)
    if optimizer in (muon, normuon):
        names = ("lr", "muon_lr", "adam_lr")
        return _muon_rates(optimizer, *(arguments.get(name) for name in names))
    return {"lr": arguments.get("lr", inspect.signature(optimizer).parameters["lr"].default)}


def _call(
    type: str, params: Mapping[str, Any]
) -> tuple[Callable[..., optax.GradientTransformation], dict[str, Any]]:
    name = re.sub(r"^paged|\d+bit$", "", type.lower())
    if name not in _OPTIMIZERS:
        known = "Adam, AdamW, SGD, Adagrad, Lamb, Lion, Muon, NorMuon, SOAP"
        raise ConfigError(f"optimizer.type: unknown {type!r}; known: {known}")
    arguments = {
        key: value
        for key, value in params.items()
        if key not in _IMPLEMENTATION_HINTS
        and not LEAST_SIZE.fullmatch(key)
        and (value or key not in _NOT_BUILT)
    }
    if name == "adamw":  # the name has priority, as in DeepSpeed's engine
        arguments["adam_w_mode"] = True
    return _OPTIMIZERS[name], arguments


def adam(
    parts: OptimizerInputs,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
    adam_w_mode: bool = True,
) -> optax.GradientTransformation:
    """DeepSpeed's FusedAdam, torch.optim.AdamW; torch.optim.Adam where adam_w_mode is false.

    AdamW: `p - lr (m_hat / (sqrt(v_hat) + eps) + weight_decay p)`; Adam: weight_decay p is added
    to g.
    """

    def direction(b1: Any, b2: Any) -> optax.GradientTransformation:
        if bias_correction:
            return optax.scale_by_adam(b1, b2, eps)
        return scale_by_raw_moments(b1, b2, eps)

    moments, decay = parts.moments(direction, betas), parts.decay(weight_decay)
    return optax.chain(
        *((moments, decay) if adam_w_mode else (decay, moments)),
        parts.rate(lr),
    )


def sgd(
    parts: OptimizerInputs,
    *,
    lr: float = 1e-3,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    dampening: float = 0.0,
) -> optax.GradientTransformation:
    """torch.optim.SGD: `p - lr b`, with Nesterov `p - lr (g + momentum b)`.

    weight_decay p is added to g, and `b = momentum b + (1 - dampening) g`, the first b being g.
    """
    if nesterov and (momentum == 0 or dampening != 0):
        raise ConfigError(
            "optimizer.params.nesterov: needs a momentum above 0 and no dampening, "
            f"found momentum {momentum} and dampening {dampening}"
        )
    if momentum == 0:
        trace = optax.identity()
    elif dampening == 0:
        trace = optax.trace(momentum, nesterov)
    else:
        trace = damped_trace(momentum, dampening)
    return optax.chain(parts.decay(weight_decay), trace, parts.rate(lr))


def adagrad(
    parts: OptimizerInputs,
    *,
    lr: float = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
) -> optax.GradientTransformation:
    """torch.optim.Adagrad; weight_decay p is added to g."""
    direction = scale_by_adagrad(eps, lr_decay, initial_accumulator_value)
    return optax.chain(parts.decay(weight_decay), direction, parts.rate(lr))


def lamb(
    parts: OptimizerInputs,
    *,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    eps_inside_sqrt: bool = False,
    weight_decay: float = 0.0,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
) -> optax.GradientTransformation:
    """DeepSpeed's FusedLamb: `u = m / (sqrt(v) + eps) + weight_decay p`, with raw moments.

    The new parameter is

        p - lr sqrt(1 - b2^t) / (1 - b1^t) clip(||p|| / ||u||, min_coeff, max_coeff) u

    Unlike in the paper and in Optax, the bias correction scales the decay too.
    """

    def step_size(step: Step) -> jax.Array:
        rate = parts.schedule.lr(step, lr)
        if not bias_correction:
            return rate
        b1, b2 = parts.schedule.betas(step) if parts.schedule.betas else betas
        t = jnp.asarray(step) + 1
        return rate * jnp.sqrt(1 - b2**t) / (1 - b1**t)

    return optax.chain(
        parts.moments(
            lambda b1, b2: scale_by_raw_moments(b1, b2, eps, eps_inside_sqrt=eps_inside_sqrt), betas
        ),
        parts.decay(weight_decay),
        scale_by_lamb_coefficient(min_coeff, max_coeff, parts.stacked),
        scale_by_rate(step_size, parts.rules.lr_factor),
    )


def lion(
    parts: OptimizerInputs,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
) -> optax.GradientTransformation:
    """DeepSpeed's FusedLion: `p - lr (sign(b1 m + (1 - b1) g) + weight_decay p)`, then m with b2.

    sign(0) is 0 as in the paper (arXiv:2302.06675). DeepSpeed's kernels differ from each other
    there (plus lr on GPU, minus lr on CPU), and move weights that have no gradient.
    """
    direction = parts.moments(optax.scale_by_lion, betas)
    return optax.chain(direction, parts.decay(weight_decay), parts.rate(lr))


def muon(
    parts: OptimizerInputs,
    *,
    lr: float | None = None,
    muon_lr: float | None = None,
    adam_lr: float | None = None,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    ns_method: NewtonSchulz = "gram",
    per_head_muon: bool = False,
    consistent_rms: float | None = None,
) -> optax.GradientTransformation:
    """DeepSpeed's MuonWithAuxAdam: Muon for hidden (real) matrices, AdamW for all other leaves.

    `muon_lr` and `adam_lr` override `lr`; the defaults are 0.02 and 3e-4. A scheduler that sets an
    absolute lr (all but linear, WarmupCosineLR, and WarmupLR without `warmup_max_lr`) sets both to
    it, and none changes the betas: DeepSpeed's class declares none.
    """

    def view(path: str, p: Any) -> MatrixView | None:
        matrices = parts.view(path, p)
        heads = parts.heads(path) if per_head_muon else 1
        return matrices and replace(matrices, heads=heads)

    rates = _muon_rates(muon, lr, muon_lr, adam_lr)
    return parts.with_adam(
        "muon",
        view,
        scale_by_muon(momentum, ns_method, view, consistent_rms, parts.products),
        optax.scale_by_adam(*betas, eps),
        weight_decay,
        [parts.rate(lr) for lr in rates.values()],
    )


def normuon(
    parts: OptimizerInputs,
    *,
    lr: float | None = None,
    muon_lr: float | None = None,
    adam_lr: float | None = None,
    mu: float = 0.95,
    muon_beta2: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.01,
    epsilon: float = 1e-8,
    nesterov: bool = False,
    adjust_lr: Literal["spectral_norm", "rms_norm"] | None = "spectral_norm",
    use_gram_newton_schulz: bool = False,
) -> optax.GradientTransformation:
    """Dion's NorMuon for hidden (real) matrices, AdamW for all other leaves.

    The momentum is a sum, `m = mu m + g`. The default rates are 0.01 and 3e-4.
    """
    rates = _muon_rates(normuon, lr, muon_lr, adam_lr)
    direction = scale_by_normuon(
        muon_beta2,
        "gram" if use_gram_newton_schulz else "standard",
        POLAR_EXPRESS._replace(eps=epsilon),
        adjust_lr,
        parts.view,
        parts.products,
    )
    return parts.with_adam(
        "muon",
        parts.view,
        optax.chain(optax.trace(mu, nesterov), direction),
        optax.scale_by_adam(*betas, epsilon),
        weight_decay,
        [parts.rate(lr) for lr in rates.values()],
    )


def _muon_rates(
    optimizer: Callable[..., Any], lr: float | None, muon_lr: float | None, adam_lr: float | None
) -> dict[str, float]:
    def first(*values: float | None) -> float:
        return next(value for value in values if value is not None)

    of_matrices, of_others = TWO_RATES["Muon" if optimizer is muon else "NorMuon"]
    return {"muon_lr": first(muon_lr, lr, of_matrices), "adam_lr": first(adam_lr, lr, of_others)}


def soap(
    parts: OptimizerInputs,
    *,
    lr: float = 3e-3,
    betas: tuple[float, float] = (0.95, 0.95),
    shampoo_beta: float = -1.0,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10000,
) -> optax.GradientTransformation:
    """The authors' SOAP for hidden (real) matrices, AdamW for all other leaves.

    These are the matrices that Muon would update, if a side is at most `max_precond_dim`; a larger
    side is not rotated. The first step makes their bases, and neither updates nor decays them.
    """

    def view(path: str, p: Any) -> MatrixView | None:
        matrices = parts.view(path, p)
        return matrices if matrices and min(matrices.matrix) <= max_precond_dim else None

    def direction(b1: Any, b2: Any) -> optax.GradientTransformation:
        gram_beta = shampoo_beta if shampoo_beta >= 0 else b2
        return scale_by_soap(b1, b2, gram_beta, eps, precondition_frequency, max_precond_dim, view)

    return parts.with_adam(
        "soap",
        view,
        parts.moments(direction, betas),
        parts.moments(lambda b1, b2: optax.scale_by_adam(b1, b2, eps), betas),
        weight_decay,
        [parts.rate(lr, first=1), parts.rate(lr)],
    )


_OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adam": adam,
    "adamw": adam,
    "sgd": sgd,
    "adagrad": adagrad,
    "lamb": lamb,
    "lion": lion,
    "muon": muon,
    "normuon": normuon,
    "soap": soap,
}
