"""`jaxspeed.initialize`: an engine with a fresh state from a model, a loss and a config.

What an engine needs is imported by the functions, so that `import jaxspeed` costs little more than
JAX, Flax and Optax.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import optax

from jaxspeed.config import Config, load_config
from jaxspeed.deepspeed_habits import explain_arguments

if TYPE_CHECKING:
    from jaxspeed.config import AutoValues
    from jaxspeed.engine import Engine
    from jaxspeed.metrics import Sink


@explain_arguments
def initialize(
    model: Any = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    optimizer: optax.GradientTransformation | None = None,
    *,
    devices: Sequence[jax.Device] | None = None,
    example_batch: Any = None,
    example_extra: Any = None,
    trainable: Any = None,
    init_with: Callable[[Any, Any], Any] | None = None,
    executable: str | Path | None = None,
    auto: "AutoValues" = None,
) -> "Engine":
    """An engine with a freshly initialized state, each array created as its shards.

    If the environment names other processes they are joined, unless JAX has already started. Then
    the watchdog of `run.watchdog` watches the engine's calls and the time between them.

    Args:
      model: a factory of an `nnx.Module` (lambda rngs: ...), a PipelineModule, a Linen module, or
        a pair (init, apply); left out when the config names a model.
      loss_fn: `loss_fn(model, batch)`, which returns a loss, or (sum, weight), or either with a
        dict of metrics. A parameter `rng` (or `key`) gets a random key of each micro-batch, a
        parameter `extra` the arrays of `train_batch(batch, extra=...)`. Left out for a family's
        own loss and for a PipelineModule's.
      config: a path to JSON or YAML, a dict, or a Config.
      optimizer: any Optax transformation, instead of the config's.
      devices: the devices to use; by default all.
      example_batch: a batch, of any number of samples, from which a Linen module initializes its
        parameters; its shapes are enough unless these depend on its values. With it (or where the
        config names the model and `data.seq_len`) the memory of a step is estimated before
        anything is allocated, with a warning where the devices have less.
      example_extra: with an example batch, the arrays (or their shapes) that are passed as
        `train_batch(batch, extra=...)`, if the loss has a parameter `extra`.
      trainable: the parameters to train: path patterns, a function of the path, or a
        Variable type such as `nnx.LoRAParam`; all by default. Of a shared Variable a pattern may
        cover any path.
      init_with: `init_with(model, batch)` with the calls that create a Linen module's parameters;
        by default those of the loss.
      executable: a file of `jaxspeed plan --keep`, from which the step starts without compilation
        if it was compiled for this step; overrides `run.executable`. Loading it runs code: use
        only files from sources you trust.
      auto: values for keys that are "auto" in the config, which Hugging Face fills in:
        `{"preset": "hf", "train_micro_batch_size_per_gpu": 8, "optimizer.params.lr": 5e-5}`. The
        preset "hf" has Hugging Face's defaults, and its Trainer's AdamW and linear schedule where
        neither the config nor `optimizer` has one.

    Raises:
      ConfigError, PlacementError, ModelError: lists every problem, and what would work.
      RunError: there are other processes, which were not joined before JAX started.
    """
    from jaxspeed.known_jax_bugs import installed, refuse_old_jax

    refuse_old_jax(installed())
    from jaxspeed.engine.jax_setup import leave_out_libtpu
    from jaxspeed.launch.environment import start_processes
    from jaxspeed.metrics import require_monitors
    from jaxspeed.parameter_server.engine import engine_of
    from jaxspeed.run.watchdog import watchdog_of
    from jaxspeed.user_models.batches import WithExtra
    from jaxspeed.user_models.config_model import hidden_size_of

    leave_out_libtpu()
    over = [] if executable is None else [f"run.executable={json.dumps(str(executable))}"]
    source = {} if config is None else config
    known, passed = hidden_size_of(model), optimizer is not None
    loaded = load_config(source, over, auto=auto, hidden_size=known, has_optimizer=passed)
    start_processes(loaded.run.watchdog.start)
    monitored = require_monitors(loaded)
    if example_extra is not None:
        example_batch = WithExtra(example_batch, example_extra)
    watchdog = watchdog_of(loaded.run.watchdog)
    with watchdog.call("start", 0):
        engine = engine_of(
            loaded,
            model,
            loss_fn,
            optimizer,
            devices=devices,
            example_batch=example_batch,
            trainable=trainable,
            init_with=init_with,
        )
        if watchdog.watches:
            engine.watch_with(watchdog)
    if monitored:
        write_monitors(engine)
    return engine


def write_monitors(engine: "Engine") -> None:
    """Write each step's metrics to the monitors that the config enables, until the engine closes.

    Those without an `output_path` write into `run.output`, or else into the current folder. As in
    `jaxspeed train`, steps that are trained again replace what was written of them.
    """
    if jax.process_index() != 0:
        return
    from jaxspeed.metrics import monitors_of

    sinks: list[Sink] = []

    def write(step: int, metrics: dict[str, float]) -> None:
        if not sinks:
            sinks.extend(monitors_of(engine.config, engine.config.run.output or ".", step))
        for sink in sinks:
            sink.write({"step": step, **metrics})

    engine.add_hook(write)

    def close() -> None:
        for sink in sinks:
            sink.close()

    engine.on_close(close)
