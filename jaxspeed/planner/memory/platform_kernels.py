"""What a program takes on its platform, and a trace on another machine would not choose."""

from contextlib import AbstractContextManager, nullcontext

from jaxspeed.config import Config
from jaxspeed.ops import cudnn
from jaxspeed.tensor_parallel import best_overlap


def as_on(platform: str) -> AbstractContextManager[None]:
    """What is traced inside takes the attention kernel of a GPU although no cuDNN is here."""
    return cudnn.assumed() if platform == "cuda" else nullcontext()


def with_overlap(config: Config, platform: str) -> Config:
    """The config with `parallel.tensor_overlap: auto` as it is on that platform."""
    best = best_overlap({"cuda": "gpu"}.get(platform, platform))
    if config.tensor_overlap != "auto" or not config.parallel.sequence_parallel_activations:
        return config
    parallel = config.parallel.model_copy(update={"tensor_overlap": best})
    return config.model_copy(update={"parallel": parallel})
