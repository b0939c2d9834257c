"""The optimizer of a run: the user's Optax transformation, or the one that the config names."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxspeed.config import Config, match
from jaxspeed.config.auto import DECAY_END
from jaxspeed.config.optimizers import OF_MATRICES
from jaxspeed.config.schema import Fp16
from jaxspeed.config.tree import read
from jaxspeed.errors import ConfigError
from jaxspeed.optim import (
    LRSchedule,
    base_learning_rates,
    build_optimizer,
    build_schedule,
    loss_scale,
)
from jaxspeed.placement import Leaf
from jaxspeed.placement.codec import AssignsCodecs
from jaxspeed.placement.linear_layers import (
    attention_heads,
    is_router,
    matrix_inputs,
    matrix_stack,
)
from jaxspeed.placement.precision import precision_of
from jaxspeed.quantization.moments import MOMENT_RULES
from jaxspeed.user_models.user_code import foreign


@dataclass(frozen=True)
class RunOptimizer:
    """An Optax transformation with clipping, loss scale, learning rates and EMA.

    Its updates get the table of a run as Optax's extra argument `placements`, from which a
    transformation reads where its leaves are stored.
    """

    transform: optax.GradientTransformationExtraArgs
    clipping: float  # 0: none
    rule: loss_scale.Rule
    learning_rates: Callable[[jax.Array], dict[str, jax.Array]]  # of the completed updates
    ema_decay: float | None
    codecs: Sequence[AssignsCodecs] = ()  # of its moments
    sees_matrices: bool = True  # whether its update may call `by_owners`


def optimizer_of(
    config: Config,
    custom: optax.GradientTransformation | None,
    leaves: Mapping[str, Leaf],
    covers: Callable[[str, str], bool] = match,
) -> RunOptimizer:
    """The optimizer of a config, or a user's; then clipping applies only if the config sets it.

    `leaves` are the parameters by path; the weight-decay and Muon rules see one layer of a stack.
    `covers(pattern, path)` says whether a pattern of a group covers a parameter.
    """
    section = config.optimizer
    if custom is not None:
        if isinstance(custom, type) or not (hasattr(custom, "init") and hasattr(custom, "update")):
            what = custom.__name__ if isinstance(custom, type) else f"a {type(custom).__name__}"
            raise ConfigError(
                f"optimizer: initialize was given {what}; it takes an Optax transformation, as "
                "optax.adamw(1e-3)"
            )
        if section is not None:
            raise ConfigError(
                "optimizer: given twice, to initialize(optimizer=...) and in the config; "
                "leave one out"
            )
        if config.scheduler is not None:
            raise ConfigError(
                "scheduler: a schedule belongs to the optimizer that initialize(optimizer=...) was "
                "given; leave the config's section out"
            )
        is_set = "gradient_clipping" in config.model_fields_set
        clipping = config.gradient_clipping if is_set else 0.0
        return RunOptimizer(_with_context(custom), clipping, _rule(config), _rates_of(custom), None)
    if section is None:
        raise ConfigError(
            'optimizer: missing; name one, as {"type": "AdamW", "params": {"lr": 1e-3}}, or pass '
            "initialize(optimizer=<an Optax transformation>)"
        )

    codecs = [
        rule_of(leaves.values(), section.params[name])
        for name, rule_of in MOMENT_RULES.items()
        if section.params.get(name)
    ]
    scheduler = config.scheduler
    if config.run.epochs is not None and read(config.given, DECAY_END) == "auto":
        raise ConfigError(
            f'{DECAY_END}: "auto" with run.epochs, which jaxspeed.run.train reads from its data; '
            "jaxspeed.initialize has none: set run.steps"
        )
    schedule = build_schedule(scheduler.type, scheduler.params) if scheduler else LRSchedule()
    if section.params.get("per_head_muon") and not any(
        leaf.trainable and attention_heads(leaf) > 1 for leaf in leaves.values()
    ):
        raise ConfigError(
            "optimizer.params.per_head_muon: no trained parameter qualifies; needed: weights "
            "[inputs, heads, head_dim] of queries, keys or values, with logical names of their dims"
        )

    def by_path[T](value: Callable[[Leaf], T], default: T) -> Callable[[str], T]:
        return lambda path: value(leaves[path]) if path in leaves else default

    transform = build_optimizer(
        section.type,
        section.params,
        schedule,
        groups=section.groups,
        exclude_norms_and_biases=section.exclude_norms_and_biases,
        match=covers,
        stacked=by_path(lambda leaf: leaf.stacked, 0),
        matrix_stack=by_path(matrix_stack, 0),
        inputs=by_path(lambda leaf: 0 if is_router(leaf) else matrix_inputs(leaf), None),
        heads=by_path(attention_heads, 1),
        # Of two bytes in fp16 too, whose range small sums leave.
        products=None if config.compute_dtype == "fp32" else jnp.bfloat16,
        moment_dtype=jnp.float32 if codecs else precision_of(config).opt,
    )
    base = base_learning_rates(section.type, section.params)

    def learning_rates(step: jax.Array) -> dict[str, jax.Array]:
        return {name: schedule.lr(step, lr) for name, lr in base.items()}

    return RunOptimizer(
        optax.with_extra_args_support(transform),
        config.gradient_clipping,
        _rule(config),
        learning_rates,
        section.ema_decay,
        codecs,
        sees_matrices=section.type in OF_MATRICES,
    )


def _rates_of(
    transform: optax.GradientTransformation,
) -> Callable[[jax.Array], dict[str, jax.Array]]:
    """The learning rate of a user's optimizer by completed updates, if it has one schedule."""
    schedules = _schedules_in(transform)
    if len(schedules) != 1:
        return lambda step: {}

    def rates(step: jax.Array) -> dict[str, jax.Array]:
        with foreign("the schedule of the optimizer's learning rate"):
            return {"lr": jnp.asarray(schedules[0](step), jnp.float32)}

    return rates


def _schedules_in(transform: optax.GradientTransformation) -> list[Callable[[jax.Array], Any]]:
    """The schedules that Optax's optimizers were given as `learning_rate`.

    Their closures alone hold them (0.2.8): that of `scale_by_learning_rate`, and that of
    `inject_hyperparams`. No other functions than Optax's are looked into.
    """
    schedules: list[Any] = []
    seen: set[int] = set()
    todo: list[Any] = [transform.update]
    while todo:
        captured = todo.pop()
        if id(captured) in seen:
            continue
        seen.add(id(captured))
        if isinstance(captured, tuple | list):
            todo += captured
        elif isinstance(captured, dict):
            todo += captured.values()
        elif inspect.isfunction(captured) and captured.__module__.startswith("optax"):
            inner = inspect.getclosurevars(captured).nonlocals
            if captured.__qualname__ == "scale_by_learning_rate.<locals>.<lambda>":
                schedules.append(inner["learning_rate"])
            elif injected := inner.get("sched_hps", {}).get("learning_rate"):
                schedules.append(getattr(injected, "schedule_fn", None))
            else:
                todo += inner.values()
    return [schedule for schedule in dict.fromkeys(schedules) if schedule is not None]


def _with_context(transform: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """A user's transformation whose errors name the call that raised them."""
    takes_more = optax.with_extra_args_support(transform)

    def init(params: Any) -> Any:
        with foreign("optimizer.init(parameters)"):
            return transform.init(params)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        with foreign("optimizer.update(gradients, state, parameters)"):
            return takes_more.update(grads, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _rule(config: Config) -> loss_scale.Rule:
    if config.compute_dtype != "fp16":
        return loss_scale.StaticRule()
    fp16 = config.fp16 if config.fp16.enabled else Fp16()
    return loss_scale.make_rule(
        loss_scale=fp16.loss_scale,
        initial_scale_power=fp16.initial_scale_power,
        loss_scale_window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        min_loss_scale=fp16.min_loss_scale,
    )
