"""What a run needs, which is checked before JAX is imported: packages, devices, steps."""

import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from jaxspeed.config.config import Config
from jaxspeed.config.cross_checks import simulated_mesh
from jaxspeed.config.schema import Settings
from jaxspeed.errors import ConfigError


class Package(NamedTuple):
    """An optional package, the key that needs it, and the extra that installs it."""

    key: str
    name: str
    extra: str
    otherwise: str = ""


RAY = Package("--engine ray", "ray", "ray")
_OF_BUCKETS = {"s3": "s3fs", "gs": "gcsfs"}


def refuse_missing(packages: Iterable[Package]) -> None:
    """Raise ConfigError if one is not installed; a folder of its name, as W&B writes one, is none.

    This imports none of them.
    """
    for key, name, extra, otherwise in packages:
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # of what is before the dot
            spec = None
        is_folder = spec and spec.origin is None and spec.submodule_search_locations is not None
        if spec is None or is_folder:
            raise ConfigError(
                f'{key}: needs {name}, which is not installed; pip install "jaxspeed[{extra}]"'
                f"{otherwise}"
            )


def refuse_missing_tasks(key: str, tasks: Iterable[str]) -> None:
    """Raise ConfigError if lm-eval, or the file of one of its tasks, is not there."""
    refuse_missing([Package(key, "lm_eval", "eval")])
    for task in tasks:
        if task.endswith((".yaml", ".yml")) and not Path(task).is_file():
            raise ConfigError(f"{key}: {task}: no such file")


def packages_of_url(key: str, url: str | None) -> Iterator[Package]:
    """The package for the URL of a bucket; none for a folder."""
    scheme, is_url, _ = (url or "").partition("://")
    if is_url:
        if scheme not in _OF_BUCKETS:
            raise ConfigError(f"{key}: {url} is neither a folder nor a gs:// or s3:// URL")
        yield Package(key, _OF_BUCKETS[scheme], scheme)


def monitor_packages(config: Settings) -> Iterator[Package]:
    for key, name in (("tensorboard", "tensorboardX"), ("wandb", "wandb")):
        if getattr(config, key).enabled:
            yield Package(f"{key}.enabled", name, key, f", or set {key}.enabled to false")


def packages(config: Settings) -> Iterator[Package]:
    """The optional packages that training needs, as far as the config's words show them."""
    yield from monitor_packages(config)
    for key in ("checkpoints", "init_from"):
        yield from packages_of_url(f"run.{key}", getattr(config.run, key))
    data = config.data
    for source in [*data.sources, *([data.eval] if data.eval else [])]:
        paths = [*([source.path] if source.path else []), *(source.paths or [])]
        on_hub = source.source == "huggingface" and not all(Path(p).exists() for p in paths)
        if on_hub:
            yield Package("data.source", "datasets", "hf")
        if source.source in ("parquet", "arrow") or any(p.endswith(".parquet") for p in paths):
            yield Package("data.path", "pyarrow", "arrow")
        if sys.version_info < (3, 14) and any(p.endswith(".zst") for p in paths):
            yield Package("data.path", "backports.zstd", "zstd")
    if data.tokenizer.endswith(".model"):
        yield Package("data.tokenizer", "sentencepiece", "sentencepiece")


def check_start(config: Config, more: Iterable[Package] = ()) -> None:
    """Check what training needs: packages, `more` too, simulated devices, a batch, steps.

    Raises:
      ConfigError: one is missing, or the mesh or the batch is of another number of devices.
    """
    refuse_missing([*more, *packages(config)])
    is_server = config.parallel.data_reduction == "parameter_server"
    if config.run.import_from and (config.run.init_from or is_server):
        raise ConfigError(
            "run.import_from: not with run.init_from, nor with a parameter server, which begins "
            "from a run that `jaxspeed checkpoint import` writes"
        )
    if config.run.eval_tasks:
        refuse_missing_tasks("run.eval_tasks", config.run.eval_tasks)
    sizes, misfit = simulated_mesh(config)
    if not is_server:
        if misfit:
            raise ConfigError(misfit)
        if sizes:
            config.batch_on(sizes)
    if config.run.steps is None and config.run.epochs is None:
        raise ConfigError(
            "run.steps: missing. Needs the number of steps to train for, or run.epochs."
        )
