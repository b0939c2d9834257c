"""A row of the hardware table (chips.yaml): memory, FLOP/s, bandwidth and links of one device."""

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from jaxspeed.errors import ConfigError
from jaxspeed.near_words import did_you_mean

BUILT_IN = Path(__file__).with_name("chips.yaml")
# libyaml's is ten times as fast: 0.1 s for the table.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
PLATFORMS = ("tpu", "cuda", "cpu")
# Defaults of chips whose row does not set them.
_ALL = {
    "products": 0.8, "attention": 0.55, "bandwidth": 0.85, "links": 0.8, "outside": 0.8,
    "host": 0.8, "concurrent": 1.0,
}  # fmt: skip
# NCCL's kernels run on the cores that compute: on 20 of 132 of an H800 (DeepSeek-V3,
# arXiv:2412.19437, section 3.2.2). A TPU's links are driven by its own DMA engines.
REACHED: Mapping[str, Mapping[str, float]] = {
    "tpu": _ALL,
    "cuda": {**_ALL, "concurrent": 1 - 20 / 132},
    "cpu": _ALL,
}
HOP: Mapping[str, Mapping[str, float]] = {
    "tpu": {"links": 1e-6, "outside": 20e-6},
    "cuda": {"links": 10e-6, "outside": 10e-6},
    "cpu": {"links": 1e-6, "outside": 20e-6},
}


@dataclass(frozen=True)
class Chip:
    """One kind of device, a row of `chips.yaml`; figures are per device.

    Attributes:
      name: as in targets, `v5p`.
      platform: tpu, cuda or cpu.
      kind: its `jax.Device.device_kind`.
      memory: bytes that a program may use.
      flops: dense FLOP/s, by the dtype of a matmul's operands.
      bandwidth: memory bandwidth in bytes/s.
      link: bytes/s over one link inside of a slice or node, in one direction.
      links: number of links: of a TPU two per torus dim, of a GPU one.
      outside: bytes/s to other slices or nodes.
      host_link: bytes/s to its host's memory, in one direction.
      host_memory: bytes of host memory per device.
      node: devices that share NVLink, or a host.
      sources: the source of each figure.
      kinds: other values of its `device_kind`.
      per_chip: devices per chip, if each core is one.
      pod: the largest torus of chips.
      compiler: options of the platform's compiler for it; None if none supports it.
      reached: achieved fraction of each figure: `products` and `attention` of flops,
        `bandwidth`, `links`, `outside`, `host`, and of compute while a collective runs
        (`concurrent`).
      hop: latency of a message in seconds: over `links`, and `outside`.
      tile: the side of a matmul tile.
      capability: a GPU's compute capability, a TPU's generation; None if unknown.
      on_chip: bytes of on-chip memory in which its compiler places a program's arrays.
    """

    name: str
    platform: str
    kind: str
    memory: int
    flops: Mapping[str, float]
    bandwidth: float
    link: float
    links: int
    outside: float
    host_link: float
    host_memory: int
    node: int
    sources: Mapping[str, str]
    kinds: tuple[str, ...] = ()
    per_chip: int = 1
    pod: tuple[int, ...] = ()
    compiler: Mapping[str, Any] | None = field(default=None)
    reached: Mapping[str, float] = field(default_factory=lambda: REACHED["cuda"])
    hop: Mapping[str, float] = field(default_factory=lambda: HOP["cuda"])
    tile: int = 128
    capability: tuple[int, int] | None = None
    on_chip: int = 0

    @property
    def compiles(self) -> bool:
        """Whether current compilers support it."""
        return self.compiler is not None

    @property
    def torus_dims(self) -> int:
        """Number of torus dims of a TPU's links; 0 for switched devices."""
        return self.links // 2 if self.platform == "tpu" else 0


def read_chips(path: str | Path = BUILT_IN) -> dict[str, Chip]:
    """The chips of a hardware file, by name.

    Raises:
      ConfigError: with all its problems.
    """
    try:
        tree = yaml.load(Path(path).read_text("utf-8"), _LOADER)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"hardware file {path}: {str(error).splitlines()[0]}") from None
    if not isinstance(tree, Mapping) or not tree:
        raise ConfigError(f"hardware file {path}: needs a mapping from chip names to their figures")
    problems: list[str] = []
    chips = {str(name): _chip(str(name), row, problems) for name, row in tree.items()}
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(f"{len(problems)} problem(s) in the hardware file {path}:{lines}")
    return {name: chip for name, chip in chips.items() if chip}


_assumed: ContextVar[Chip | None] = ContextVar("chip", default=None)


@contextmanager
def assumed(chip: Chip) -> Iterator[None]:
    """Context in which programs are traced for this chip, which is absent."""
    token = _assumed.set(chip)
    try:
        yield
    finally:
        _assumed.reset(token)


def chip_for(kind: str) -> Chip | None:
    """The chip for which a program on devices of a kind is traced; None for CPUs and unknown ones.

    That of `assumed`, if any.
    """
    chip = _assumed.get()
    if chip is None:
        return chip_of_kind(kind)
    return chip if chip.platform != "cpu" else None


def chip_of_kind(kind: str) -> Chip | None:
    """The accelerator with this `device_kind`; None if unknown, as for a CPU.

    A GPU's name includes its memory and socket: of the rows whose words are all in it, the one with
    the most words.
    """
    words = set(kind.replace("-", " ").split())
    matches = [
        (len(named), chip)
        for chip in _built_in().values()
        for kind_name in (chip.kind, *chip.kinds)
        if (named := set(kind_name.replace("-", " ").split())) <= words and chip.platform != "cpu"
    ]
    return max(matches, key=lambda pair: pair[0])[1] if matches else None


@functools.cache
def _built_in() -> Mapping[str, Chip]:
    return read_chips()


_FIGURES = {
    "memory": "B",
    "bandwidth": "B/s",
    "link": "B/s",
    "outside": "B/s",
    "host_link": "B/s",
    "host_memory": "B",
}
_COUNTS = ("links", "node", "per_chip", "tile")
_DEFAULTS = {"tile": 128}
_KEYS = {each.name for each in fields(Chip)} - {"name", "kind"}
_OPTIONAL = {
    "sources",
    "per_chip",
    "pod",
    "compiler",
    "reached",
    "hop",
    "tile",
    "capability",
    "on_chip",
}


def _chip(name: str, row: Any, problems: list[str]) -> Chip | None:
    """Parse a row; its problems are added to `problems`."""
    if not isinstance(row, Mapping):
        problems.append(f"{name}: needs a mapping of figures, found {row!r}")
        return None
    before = len(problems)
    for key in sorted(set(map(str, row)) - _KEYS):
        problems.append(f"{name}.{key}: an unknown key. {did_you_mean(key, _KEYS)}".rstrip())
    for key in sorted(_KEYS - _OPTIONAL - set(row)):
        problems.append(f"{name}.{key}: missing")
    if len(problems) > before:
        return None

    def read(key: str, value: Any, unit: str) -> float:
        number = amount(value, unit)
        if number is None or not math.isfinite(number) or number <= 0:
            problems.append(f"{name}.{key}: found {value!r}. Needs more than 0, like 80 G{unit}.")
            return 1.0
        return number

    figures = {key: read(key, row[key], unit) for key, unit in _FIGURES.items()}
    if row["platform"] not in PLATFORMS:
        problems.append(f"{name}.platform: found {row['platform']!r}. Needs tpu, cuda or cpu.")
    flops, kinds = row["flops"], row["kinds"]
    if not isinstance(flops, Mapping) or "bf16" not in flops or "fp32" not in flops:
        problems.append(f"{name}.flops: found {flops!r}. Needs {{bf16: ..., fp32: ...}}.")
        flops = {}
    if not _is_list(kinds, str):
        problems.append(f"{name}.kinds: found {kinds!r}. Needs a list of JAX device kinds.")
        kinds = [""]
    counts = {key: row.get(key, _DEFAULTS.get(key, 1)) for key in _COUNTS}
    for key, count in counts.items():
        if not isinstance(count, int) or count < 1:
            problems.append(f"{name}.{key}: found {count!r}. Needs an integer of at least 1.")
    if not _is_list(row.get("pod", [1]), int):
        problems.append(f"{name}.pod: found {row['pod']!r}. Needs a list of integers.")
    capability = row.get("capability")
    if capability is not None and not (_is_list(capability, int) and len(capability) == 2):
        problems.append(
            f"{name}.capability: found {capability!r}. Needs two integers, like [9, 0]."
        )
    speeds = {kind: read(f"flops.{kind}", value, "FLOP/s") for kind, value in flops.items()}
    platform = str(row["platform"])
    reached = _numbers("reached", row.get("reached"), REACHED.get(platform, _ALL), read)
    hop = _numbers("hop", row.get("hop"), HOP.get(platform, HOP["cuda"]), read)
    for key, share in reached.items():
        if share > 1:
            problems.append(f"{name}.reached.{key}: found {share:g}. Needs a fraction up to 1.")
    on_chip = read("on_chip", row["on_chip"], "B") if "on_chip" in row else 0
    if len(problems) > before:
        return None
    source = "a user's hardware file"
    return Chip(
        name=name,
        platform=row["platform"],
        kind=kinds[0],
        memory=int(figures["memory"]),
        flops=speeds,
        bandwidth=figures["bandwidth"],
        link=figures["link"],
        links=counts["links"],
        outside=figures["outside"],
        host_link=figures["host_link"],
        host_memory=int(figures["host_memory"]),
        node=counts["node"],
        sources=row.get("sources") or dict.fromkeys([*_FIGURES, "flops"], source),
        kinds=tuple(kinds[1:]),
        per_chip=counts["per_chip"],
        pod=tuple(row.get("pod", ())),
        compiler=row.get("compiler"),
        reached=reached,
        hop=hop,
        tile=counts["tile"],
        capability=(capability[0], capability[1]) if capability else None,
        on_chip=int(on_chip),
    )


def _numbers(
    key: str,
    written: Any,
    usual: Mapping[str, float],
    read: Callable[[str, Any, str], float],
) -> dict[str, float]:
    """The row's values of these figures over the defaults."""
    written = {} if written is None else written
    unknown = sorted(set(written) - set(usual)) if isinstance(written, Mapping) else [written]
    if unknown:
        read(f"{key}.{unknown[0]}", "an unknown key", "")
        return dict(usual)
    unit = "s" if key == "hop" else ""
    return {**usual, **{k: read(f"{key}.{k}", v, unit) for k, v in written.items()}}


def _is_list(entries: Any, kind: type) -> bool:
    return isinstance(entries, list) and bool(entries) and all(isinstance(x, kind) for x in entries)


# -- amounts with units: `80 GB`, `95.7 GiB`, `989.5 TFLOP/s` -------------------------------------

_PREFIXES = {
    "": 1,
    **{prefix: 1000**power for power, prefix in enumerate("kMGTP", 1)},
    **{f"{prefix}i": 1024**power for power, prefix in enumerate("KMGTP", 1)},
}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([kMGTPK]i?)?([A-Za-z/]*)\s*")


def amount(written: Any, unit: str) -> float | None:
    """The number of an amount in this (optional) unit; None if it cannot be parsed."""
    if isinstance(written, bool):
        return None
    if isinstance(written, int | float):
        return float(written)
    match = _FORM.fullmatch(written) if isinstance(written, str) else None
    if match is None or match[3] not in ("", unit) or (match[2] or "") not in _PREFIXES:
        return None
    return float(match[1]) * _PREFIXES[match[2] or ""]


# -- peaks by JAX's `device_kind` ------------------------------------------------------------------

UNKNOWN_LINK = 32e9  # bytes/s of PCIe 4 x16


def peak_flops(device_kind: str) -> float | None:
    """Peak FLOP/s; None if unknown, as for a CPU.

    Of dense bfloat16 matmuls with fp32 accumulation; MFU of an fp32 run uses it too, because its
    matmuls run on the same units.
    """
    chip = chip_of_kind(device_kind)
    return chip.flops["bf16"] if chip else None


def host_link(device_kind: str) -> float:
    """Peak bytes/s between a device and its host's memory, in one direction."""
    chip = chip_of_kind(device_kind)
    return chip.host_link if chip else UNKNOWN_LINK
