"""What a program takes on its platform, and a trace on another machine would not choose."""

from collections.abc import Iterator
from contextlib import contextmanager

from jaxspeed.config import Config
from jaxspeed.tensor_parallel import best_overlap

CUDNN = 91300  # of the CUDA wheels that jaxspeed[cuda] installs


@contextmanager
def as_on(platform: str) -> Iterator[None]:
    """What is traced inside takes the attention kernel of a GPU although no cuDNN is here.

    JAX asks the installed cuDNN for its version, and the device for what it can, before it traces
    cuDNN's attention (`jax._src.cudnn`, jax 0.10.2 to 0.12.0). Where that module has changed the
    trace goes the plain way, and holds the scores.
    """
    if platform != "cuda":
        yield
        return
    try:
        from jax._src.cudnn import fused_attention_stablehlo as asked

        before = (asked.check_cudnn_version, asked.check_compute_capability)
    except (ImportError, AttributeError):
        yield
        return
    asked.check_cudnn_version = lambda: CUDNN
    asked.check_compute_capability = lambda capability: True
    try:
        yield
    finally:
        asked.check_cudnn_version, asked.check_compute_capability = before


def with_overlap(config: Config, platform: str) -> Config:
    """The config with `parallel.tensor_overlap: auto` as it is on that platform."""
    best = best_overlap({"cuda": "gpu"}.get(platform, platform))
    if config.tensor_overlap != "auto" or not config.parallel.sequence_parallel_activations:
        return config
    parallel = config.parallel.model_copy(update={"tensor_overlap": best})
    return config.model_copy(update={"parallel": parallel})
