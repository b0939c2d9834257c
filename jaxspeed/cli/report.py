"""`jaxspeed report`: versions, devices and their memories, known faults, extras, or the models."""

import argparse
import importlib
import importlib.metadata
import platform
import sys
from typing import Any

from jaxspeed.cli.common import command, out, print_json

CORE = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tokenizers"),
    *("numpy", "pydantic", "safetensors", "jinja2"),
)
EXTRAS = {
    "tpu": ("libtpu",),
    "cuda": ("jax-cuda13-plugin", "jax-cuda12-plugin"),
    "hf": ("transformers", "datasets"),
    "s3": ("s3fs",),
    "gs": ("gcsfs",),
    "eval": ("lm_eval",),
    "tensorboard": ("tensorboardX",),
    "wandb": ("wandb",),
    "ray": ("ray",),
    "plot": ("matplotlib",),
}


def add(commands: Any) -> None:
    parser = command(
        commands,
        "report",
        "show versions, devices and their memories, known faults, and the installed extras",
        "jaxspeed report --json",
        config=False,
    )
    parser.add_argument(
        "--devices",
        metavar="WHICH",
        help="cpu, gpu or tpu, or cpu:8; by default those that JAX finds",
    )
    parser.add_argument(
        "--models",
        action="store_true",
        help="show the model families instead: their presets, and the model types of Hugging Face "
        "that they read",
    )
    parser.add_argument(
        "--disk",
        metavar="PATH",
        help="measure a disk instead: how fast state on it would be read and written",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    report: dict[str, Any]
    if args.disk is not None:
        report = _measured(args.disk, as_text=not args.json)
    elif args.models:  # by name, so that the package imports no model of its own
        report = importlib.import_module("jaxspeed.models").known()
    else:
        report = _started(args.devices)
    if args.json:
        print_json(report)
        return 0
    from rich.table import Table

    table = Table(box=None, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in report.items():
        table.add_row(name, "\n".join(_lines(value)))
    out().print(table)
    return 0


def _measured(path: str, as_text: bool) -> dict[str, Any]:
    """Bytes a second of a disk, or these as text."""
    from jaxspeed.disk.measure import measure_disk
    from jaxspeed.placement.show import scaled_text

    speed = measure_disk(path)
    speeds = {"read": speed.read, "write": speed.write, "read and write": speed.both}
    shown = {name: scaled_text(x, "B/s") if as_text else x for name, x in speeds.items()}
    return {"disk": path, **shown, "page cache": "bypassed" if speed.is_direct else "used"}


def _started(devices: str | None) -> dict[str, Any]:
    """`machine()` once these devices are started."""
    from jaxspeed.engine.jax_setup import start_devices

    if devices:
        from jaxspeed.config import Config

        Config.load({"run": {"devices": devices}})  # the error of a config
    start_devices(devices)
    return machine()


def machine() -> dict[str, Any]:
    """Versions, devices, faults and extras, as reported by JAX and the installation."""
    import jax

    from jaxspeed.known_jax_bugs.programs import judged
    from jaxspeed.placement.show import bytes_text

    devices = jax.devices()
    first = devices[0]
    stats = first.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return {
        "jaxspeed": _version("jaxspeed"),
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "versions": {name: _version(name) for name in CORE},
        "backend": jax.default_backend(),
        "devices": {
            "count": len(devices),
            "kind": first.device_kind,
            "memory": bytes_text(limit) if limit else "unknown",
            "memory kinds": [memory.kind for memory in first.addressable_memories()],
            "default memory": first.default_memory().kind,
        },
        "interconnect": _interconnect(devices),
        "processes": jax.process_count(),
        "known faults": judged(jax.local_devices()),
        "extras": {
            extra: next((f"{n} {v}" for n in names if (v := _version(n))), None)
            for extra, names in EXTRAS.items()
        },
        "compilation cache": jax.config.jax_compilation_cache_dir or "in the user's cache folder",
        "executable": sys.executable,
    }


def _interconnect(devices: list[Any]) -> str:
    """The network of the devices: the torus of a TPU slice, otherwise their hosts."""
    from jaxspeed.placement.paths import counted

    coords: list[Any] = [getattr(device, "coords", None) for device in devices]
    hosts = len({device.process_index for device in devices})
    if all(coords):
        torus = "x".join(str(max(c[dim] for c in coords) + 1) for dim in range(len(coords[0])))
        slices = len({getattr(device, "slice_index", 0) for device in devices})
        on = f"{counted(slices, 'slice')}, {counted(hosts, 'host')}"
        return f"ICI, a torus of {torus}, {on}"
    if devices[0].platform == "cpu":
        return f"memory of {counted(hosts, 'host')}; the devices are simulated"
    return f"{counted(hosts, 'host')}, {counted(len(devices) // hosts, 'device')} each"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{name}: {_short(inner)}" for name, inner in value.items()]
    return [_short(value)]


def _short(value: Any) -> str:
    if value is None:
        return "not installed"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
