"""Calls of DeepSpeed's that are written otherwise here: errors with the lines to write.

Attributes that only DeepSpeed's engine has are AttributeErrors, so that `hasattr` is false.
"""

import argparse
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from jaxspeed.errors import UsageError

_TRAIN = (
    "engine = jaxspeed.initialize(model, loss_fn, config)  # loss_fn(model, batch) is the loss",
    "metrics = engine.train_batch(batch)  # forward, backward and update of a global batch",
)
_ONE_PROGRAM = "the loss, its gradients and the update are one compiled program"
_CONFIG = (
    'engine = jaxspeed.initialize(model, loss_fn, config="ds_config.json")',
    "metrics = engine.train_batch(batch)",
)
_DATA = (
    "engine = jaxspeed.initialize(model, loss_fn, config)",
    "for batch in batches: engine.train_batch(batch)  # arrays of train_batch_size samples",
)

# Arguments of deepspeed.initialize: why they are none here, and the lines.
ARGUMENTS = {
    "args": ("the config is an argument, not in the command line's arguments", _CONFIG),
    "config_params": ("its other name is the argument", _CONFIG),
    "model_parameters": (
        "a model's parameters are known from its factory; trainable= selects some",
        (
            'engine = jaxspeed.initialize(model, loss_fn, config, trainable=["head"])',
            "metrics = engine.train_batch(batch)",
        ),
    ),
    "training_data": ("an engine holds no data: each step is given its batch", _DATA),
    "collate_fn": ("an engine holds no data: each step is given its batch", _DATA),
    "lr_scheduler": (
        "a schedule is the config's scheduler, or that of an Optax optimizer",
        (
            "optimizer = optax.adamw(optax.cosine_decay_schedule(1e-3, 1000))",
            "engine = jaxspeed.initialize(model, loss_fn, config, optimizer)",
        ),
    ),
}
_MESH = ("the config's mesh has the axes of all parallelism", _CONFIG)
_JOINED = ("processes that the environment names are joined", _CONFIG)
ARGUMENTS |= dict.fromkeys(("mpu", "mesh_param"), _MESH)
ARGUMENTS |= dict.fromkeys(("dist_init_required", "distributed_port"), _JOINED)

# Methods and attributes of DeepSpeed's engine.
_OF_STEPS = ("backward", "forward", "zero_grad", "allreduce_gradients", "no_sync")
METHODS = dict.fromkeys(_OF_STEPS, (_ONE_PROGRAM, _TRAIN)) | {
    "is_gradient_accumulation_boundary": (
        "a step accumulates gradient_accumulation_steps micro-batches itself",
        _TRAIN,
    ),
    "train": (
        "train_batch trains and eval_batch evaluates, without a mode",
        ("metrics = engine.train_batch(batch)", "metrics = engine.eval_batch(batch)"),
    ),
    "eval": (
        "train_batch trains and eval_batch evaluates, without a mode",
        ("metrics = engine.eval_batch(batch)", "outputs = engine.module(x)"),
    ),
    "get_lr": (
        "it is a metric of each step",
        ("metrics = engine.train_batch(batch)", 'lr = float(metrics["lr"])'),
    ),
    "get_global_grad_norm": (
        "it is a metric of each step",
        ("metrics = engine.train_batch(batch)", 'norm = float(metrics["grad_norm"])'),
    ),
    "save_16bit_model": (
        "weights are exported to a Hugging Face folder, or from a checkpoint",
        ('engine.save_pretrained("out", dtype="bf16")', 'engine.save_checkpoint("checkpoints")'),
    ),
}
METHODS["save_fp16_model"] = METHODS["save_16bit_model"]
_RANKS = (
    "a process drives all devices that it sees, and JAX knows its number",
    (
        "is_first = jax.process_index() == 0  # of jax.process_count() processes",
        "metrics = engine.train_batch(batch)  # the same global batch on each process",
    ),
)
METHODS |= dict.fromkeys(("local_rank", "global_rank", "world_size"), _RANKS)
_CALLED = (
    "an engine is no module: train_batch returns the loss as a metric",
    (
        'loss = engine.train_batch(batch)["loss"]  # one optimizer step',
        "outputs = engine.module(x)  # the model with the current parameters",
    ),
)
_STEP = (
    _ONE_PROGRAM,
    (
        "metrics = engine.train_batch(batch)  # in place of engine(batch), backward and step",
        "state, metrics = engine.step(engine.state, batch)  # or the same as a pure function",
    ),
)
_UNPACKED = ("initialize returns the engine alone", _CONFIG)


def explained(call: str, advice: tuple[str, tuple[str, ...]]) -> UsageError:
    """The error of a call, with the lines to write."""
    why, lines = advice
    text = "".join(f"\n    {line}" for line in lines)
    return UsageError(f"{call} is DeepSpeed's; here {why}. Write{text}\n(docs/from-deepspeed.md)")


def explain_arguments[**P, R](initialize: Callable[P, R]) -> Callable[P, R]:
    """Raise for DeepSpeed's arguments of `initialize`, which are not in its signature."""

    @functools.wraps(initialize)
    def checked(*args: P.args, **named: P.kwargs) -> R:
        used = [*named, *("args" for first in args[:1] if isinstance(first, argparse.Namespace))]
        for name in ARGUMENTS:
            if name in used:
                raise explained(f"initialize({name}=...)", ARGUMENTS[name])
        return initialize(*args, **named)

    return checked


class PureStep:
    """A compiled step, `step(state, batch)`, with an error where it is called as DeepSpeed's."""

    def __init__(self, step: Any) -> None:
        self._step = step

    def __call__(self, *args: Any, **named: Any) -> Any:
        if not args and not named:
            raise explained("engine.step()", _STEP)
        return self._step(*args, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


class DeepSpeedHabits:
    """Methods of DeepSpeed's engine that an engine does not have."""

    def __call__(self, *args: Any, **named: Any) -> NoReturn:
        """Raise UsageError: an engine is not called."""
        raise explained("engine(batch)", _CALLED)

    def __iter__(self) -> NoReturn:
        """Raise UsageError: DeepSpeed's `initialize` returns four things."""
        raise explained("engine, optimizer, loader, scheduler = initialize(...)", _UNPACKED)

    if not TYPE_CHECKING:  # type checkers know an engine's attributes

        def __getattr__(self, name: str) -> Any:
            if name in METHODS:
                raise explained(f"engine.{name}", METHODS[name])
            return object.__getattribute__(self, name)  # raises, also what a property did
