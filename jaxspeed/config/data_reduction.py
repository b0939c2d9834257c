"""Cross-field validation of `parallel.data_reduction`: XLA, ring or parameter server.

A key that has an effect with only one of them is an error with another.
"""

from collections.abc import Iterator

from jaxspeed.config.problems import Problem
from jaxspeed.config.schema import Settings
from jaxspeed.config.verdicts import shown

_KEY = "parallel.data_reduction"
_OF_MODE = {
    "ring": ("ring_directions", "ring_wire", "ring_bucket_bytes"),
    "parameter_server": (
        "servers",
        "max_staleness",
        "on_stale",
        "staleness_decay",
        "worker_pace",
    ),
}
_WITH_STALENESS = ("on_stale", "staleness_decay")


def data_reduction_problems(settings: Settings) -> Iterator[Problem]:
    """Yield keys of a reduction that is not chosen, and what the chosen one does not support."""
    yield from _of_another_mode(settings)
    reduction = settings.parallel.data_reduction
    if reduction == "ring":
        yield from _ring(settings)
    elif reduction == "parameter_server":
        yield from _server(settings)


def _of_another_mode(settings: Settings) -> Iterator[Problem]:
    parallel = settings.parallel
    for mode, keys in _OF_MODE.items():
        for key in keys if parallel.data_reduction != mode else ():
            if _differs(settings, key):
                actual = f"{shown(getattr(parallel, key))} with {_KEY} "
                actual += shown(parallel.data_reduction)
                works = f'Only {_KEY} "{mode}" uses it: set that, or remove the key.'
                yield Problem(f"parallel.{key}", actual, works, (_KEY,))


def _differs(settings: Settings, key: str) -> bool:
    """Whether it differs from the default, which the dump of another config may contain."""
    field = type(settings.parallel).model_fields[key]
    return bool(getattr(settings.parallel, key) != field.get_default(call_default_factory=True))


def _ring(settings: Settings) -> Iterator[Problem]:
    zero, parallel = settings.zero_optimization, settings.parallel
    yield from _no_pipeline(
        settings,
        "A ring reduces over the data ranks in one shard_map, and stages run in another, which "
        "XLA does not support inside of it",
    )
    if settings.mesh.seq != 1:
        actual = f'{settings.mesh.seq} with {_KEY} "ring"'
        works = (
            "A ring sums the gradients of ranks that compute the loss of entire samples: write 1, "
            f'or {_KEY} "xla".'
        )
        yield Problem("mesh.seq", actual, works, (_KEY,))
    if settings.communication_data_type is not None:
        actual = f'{shown(settings.communication_data_type)} with {_KEY} "ring"'
        works = "parallel.ring_wire sets the format of ring messages: remove this key."
        yield Problem("communication_data_type", actual, works, (_KEY,))
    if parallel.gradient_reduction == "micro_batch" and zero.stage < 2:
        actual = f'"micro_batch" with {_KEY} "ring" and ZeRO stage {zero.stage}'
        works = 'There a ring reduces once per step: write "step" or "auto".'
        about = (_KEY, "zero_optimization.stage")
        yield Problem("parallel.gradient_reduction", actual, works, about)
    if parallel.ring_wire == "int8" and zero.stage == 3:
        works = (
            "Stage 3 reduces inside of the backward pass, unit by unit; error feedback cannot "
            'be carried to the next step: write "bf16" or "none", or another stage.'
        )
        actual = '"int8" with ZeRO stage 3'
        yield Problem("parallel.ring_wire", actual, works, ("zero_optimization.stage",))
    if zero.offload_param.device == "cpu":
        works = (
            "Gradients are then offloaded one by one as they are computed, and a ring needs them "
            f'together on the devices: remove one, or write {_KEY} "xla".'
        )
        key = "zero_optimization.offload_param.device"
        yield Problem(key, f'"cpu" with {_KEY} "ring"', works, (_KEY,))


def _server(settings: Settings) -> Iterator[Problem]:
    if settings.run.executable is not None:
        works = "A parameter server's step is many programs, and a file contains one: remove it."
        yield Problem("run.executable", shown(settings.run.executable), works, (_KEY,))
    parallel = settings.parallel
    yield from _no_pipeline(
        settings,
        "Servers shard each parameter by itself, and stages store stacks of layers",
    )
    for axis, each_has in (("seq", "entire sequences"), ("expert", "all experts")):
        if (size := getattr(settings.mesh, axis)) != 1:
            works = (
                f"The devices of a worker are replica x tensor, and each has {each_has}: write 1, "
                f'or {_KEY} "xla".'
            )
            actual = f'{size} with {_KEY} "parameter_server"'
            yield Problem(f"mesh.{axis}", actual, works, (_KEY,))
    yield from _workers(settings)
    paces, ranks = len(parallel.worker_pace), settings.mesh.data
    if paces and ranks not in (-1, paces):
        works = f"Needs one per worker: mesh.data is {ranks}."
        yield Problem("parallel.worker_pace", f"{paces} paces", works, ("mesh.data",))
    for key in _WITH_STALENESS if parallel.max_staleness is None else ():
        if _differs(settings, key):
            actual = f"{shown(getattr(parallel, key))} without parallel.max_staleness"
            works = (
                "Without it training is synchronous, and no push stale: set it, or remove the key."
            )
            yield Problem(f"parallel.{key}", actual, works, ("parallel.max_staleness",))


def _workers(settings: Settings) -> Iterator[Problem]:
    """Yield keys that servers do not support, or workers with the parameters of one version."""
    with_servers = f'with {_KEY} "parameter_server"'
    mesh, zero = settings.mesh, settings.zero_optimization
    for axis in ("replica", "tensor"):
        if getattr(mesh, axis) == -1:
            works = "It sets the devices of each worker: write their number; mesh.data may be -1."
            yield Problem(f"mesh.{axis}", f"-1 {with_servers}", works, (_KEY,))
    if zero.stage:
        works = (
            "Servers already shard parameters, gradients and moments, and workers hold only "
            f'parameters: write 0, or {_KEY} "xla".'
        )
        yield Problem("zero_optimization.stage", f"{zero.stage} {with_servers}", works, (_KEY,))
    if zero.offload_param.device == "cpu":
        works = (
            "Each version arrives on the devices of the workers, so that a copy in host memory "
            f'would save none of theirs: shard it by mesh.tensor, or write {_KEY} "xla".'
        )
        path = "zero_optimization.offload_param.device"
        yield Problem(path, f'"cpu" {with_servers}', works, (_KEY,))
    if settings.parallel.gradient_reduction != "auto":
        actual = f"{shown(settings.parallel.gradient_reduction)} {with_servers}"
        works = "Workers push once for all their micro-batches: remove it."
        yield Problem("parallel.gradient_reduction", actual, works, (_KEY,))
    if settings.parallel.batch_parts != 1:
        actual = f"{settings.parallel.batch_parts} {with_servers}"
        yield Problem("parallel.batch_parts", actual, "Add workers instead: remove it.", (_KEY,))


def _no_pipeline(settings: Settings, reason: str) -> Iterator[Problem]:
    if settings.mesh.pipe != 1:
        actual = f"{settings.mesh.pipe} with {_KEY} {shown(settings.parallel.data_reduction)}"
        works = f'{reason}: write 1, or {_KEY} "xla".'
        yield Problem("mesh.pipe", actual, works, (_KEY,))
