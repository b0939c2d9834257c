"""A row of the table of hardware: what one kind of device has and does."""

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from jaxspeed.config.problems import did_you_mean
from jaxspeed.errors import ConfigError

BUILT_IN = Path(__file__).with_name("chips.yaml")
PLATFORMS = ("tpu", "cuda", "cpu")
# Of chips whose row says nothing of it.
_ALL = {
    "products": 0.8, "attention": 0.55, "bandwidth": 0.85, "links": 0.8, "outside": 0.8, "host": 0.8
}  # fmt: skip
REACHED: Mapping[str, Mapping[str, float]] = dict.fromkeys(PLATFORMS, _ALL)
HOP: Mapping[str, Mapping[str, float]] = {
    "tpu": {"links": 1e-6, "outside": 20e-6},
    "cuda": {"links": 10e-6, "outside": 10e-6},
    "cpu": {"links": 1e-6, "outside": 20e-6},
}


@dataclass(frozen=True)
class Chip:
    """One kind of device, as `chips.yaml` tells of it; figures are of a device.

    Attributes:
      name: as targets are given, `v5p`.
      platform: tpu, cuda or cpu.
      kind: what `jax.Device.device_kind` says.
      memory: bytes that a program may use.
      flops: dense operations a second, by the dtype of a product's operands.
      bandwidth: bytes a second of its memory.
      link: bytes a second over one link inside of a slice or node, in one direction.
      links: how many of them: of a TPU two a dim of its torus, of a GPU one.
      outside: bytes a second to other slices or nodes.
      host_link: bytes a second to its host's memory, in one direction.
      host_memory: bytes of its host's memory, a device.
      node: devices that share NVLink, or a host.
      sources: where each figure is from.
      kinds: other names by which JAX calls it.
      per_chip: devices of a chip, where each of its cores is one.
      pod: the largest torus of chips.
      compiler: what the compiler of its platform is told; None where none takes it.
      reached: the share of each figure that programs reach: `products` and `attention` of flops,
        `bandwidth`, `links`, `outside`, `host`.
      hop: seconds that a message takes beside its bytes: over `links`, and `outside`.
      tile: the side of the blocks in which products are computed.
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

    @property
    def compiles(self) -> bool:
        """Whether today's compilers take it."""
        return self.compiler is not None

    @property
    def torus_dims(self) -> int:
        """Of the torus that a TPU's links make; 0 where a switch joins all."""
        return self.links // 2 if self.platform == "tpu" else 0


def read_chips(path: str | Path = BUILT_IN) -> dict[str, Chip]:
    """The chips of a hardware file, by name.

    Raises:
      ConfigError: all that is wrong with it.
    """
    try:
        tree = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"hardware file {path}: {str(error).splitlines()[0]}") from None
    if not isinstance(tree, Mapping) or not tree:
        raise ConfigError(
            f"hardware file {path}: needs a mapping from the name of a chip to its figures"
        )
    problems: list[str] = []
    chips = {str(name): _chip(str(name), found, problems) for name, found in tree.items()}
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(f"{len(problems)} problem(s) in the hardware file {path}:{lines}")
    return {name: chip for name, chip in chips.items() if chip}


def chip_of_kind(kind: str) -> Chip | None:
    """The accelerator that JAX calls so; None where none is known, as of a CPU.

    A GPU's name says its memory and socket too: the row whose words are all in it, and of several
    the one of most words.
    """
    words = set(kind.replace("-", " ").split())
    found = [
        (len(named), chip)
        for chip in _built_in().values()
        for each in (chip.kind, *chip.kinds)
        if (named := set(each.replace("-", " ").split())) <= words and chip.platform != "cpu"
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None


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
_OPTIONAL = {"sources", "per_chip", "pod", "compiler", "reached", "hop", "tile"}


def _chip(name: str, found: Any, problems: list[str]) -> Chip | None:
    """A row; what is wrong with it is added to `problems`."""
    if not isinstance(found, Mapping):
        problems.append(f"{name}: needs a mapping of figures, found {found!r}")
        return None
    before = len(problems)
    for key in sorted(set(map(str, found)) - _KEYS):
        problems.append(f"{name}.{key}: an unknown key. {did_you_mean(key, _KEYS)}".rstrip())
    for key in sorted(_KEYS - _OPTIONAL - set(found)):
        problems.append(f"{name}.{key}: missing")
    if len(problems) > before:
        return None

    def read(key: str, value: Any, unit: str) -> float:
        number = amount(value, unit)
        if number is None or not math.isfinite(number) or number <= 0:
            problems.append(f"{name}.{key}: found {value!r}. Needs more than 0, as 80 G{unit}.")
            return 1.0
        return number

    figures = {key: read(key, found[key], unit) for key, unit in _FIGURES.items()}
    if found["platform"] not in PLATFORMS:
        problems.append(f"{name}.platform: found {found['platform']!r}. Needs tpu, cuda or cpu.")
    flops, kinds = found["flops"], found["kinds"]
    if not isinstance(flops, Mapping) or "bf16" not in flops or "fp32" not in flops:
        problems.append(f"{name}.flops: found {flops!r}. Needs {{bf16: ..., fp32: ...}}.")
        flops = {}
    if not _is_list(kinds, str):
        problems.append(f"{name}.kinds: found {kinds!r}. Needs a list of JAX's names of it.")
        kinds = [""]
    counts = {key: found.get(key, _DEFAULTS.get(key, 1)) for key in _COUNTS}
    for key, count in counts.items():
        if not isinstance(count, int) or count < 1:
            problems.append(f"{name}.{key}: found {count!r}. Needs a whole number from 1.")
    if not _is_list(found.get("pod", [1]), int):
        problems.append(f"{name}.pod: found {found['pod']!r}. Needs a list of whole numbers.")
    speeds = {kind: read(f"flops.{kind}", value, "FLOP/s") for kind, value in flops.items()}
    platform = str(found["platform"])
    reached = _numbers("reached", found.get("reached"), REACHED.get(platform, _ALL), read)
    hop = _numbers("hop", found.get("hop"), HOP.get(platform, HOP["cuda"]), read)
    for key, share in reached.items():
        if share > 1:
            problems.append(f"{name}.reached.{key}: found {share:g}. Needs a share, at most 1.")
    if len(problems) > before:
        return None
    given = "a user's hardware file"
    return Chip(
        name=name,
        platform=found["platform"],
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
        sources=found.get("sources") or dict.fromkeys([*_FIGURES, "flops"], given),
        kinds=tuple(kinds[1:]),
        per_chip=counts["per_chip"],
        pod=tuple(found.get("pod", ())),
        compiler=found.get("compiler"),
        reached=reached,
        hop=hop,
        tile=counts["tile"],
    )


def _numbers(
    key: str,
    found: Any,
    usual: Mapping[str, float],
    read: Callable[[str, Any, str], float],
) -> dict[str, float]:
    """What a row says of these figures, over the usual ones."""
    found = {} if found is None else found
    unknown = sorted(set(found) - set(usual)) if isinstance(found, Mapping) else [found]
    if unknown:
        read(f"{key}.{unknown[0]}", "an unknown key", "")
        return dict(usual)
    unit = "s" if key == "hop" else ""
    return {**usual, **{k: read(f"{key}.{k}", v, unit) for k, v in found.items()}}


def _is_list(found: Any, kind: type) -> bool:
    return isinstance(found, list) and bool(found) and all(isinstance(x, kind) for x in found)


# -- amounts as people write them: `80 GB`, `95.7 GiB`, `989.5 TFLOP/s` ---------------------------

_PREFIXES = {
    "": 1,
    **{prefix: 1000**power for power, prefix in enumerate("kMGTP", 1)},
    **{f"{prefix}i": 1024**power for power, prefix in enumerate("KMGTP", 1)},
}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([kMGTPK]i?)?([A-Za-z/]*)\s*")


def amount(written: Any, unit: str) -> float | None:
    """The number of an amount in this unit, which may be left out; None if it is none."""
    if isinstance(written, bool):
        return None
    if isinstance(written, int | float):
        return float(written)
    found = _FORM.fullmatch(written) if isinstance(written, str) else None
    if found is None or found[3] not in ("", unit) or (found[2] or "") not in _PREFIXES:
        return None
    return float(found[1]) * _PREFIXES[found[2] or ""]


# -- what a device can do at best, by what JAX calls it --------------------------------------------

UNKNOWN_LINK = 32e9  # bytes a second, of PCIe 4 by 16


def peak_flops(device_kind: str) -> float | None:
    """Floating-point operations a second at best; None where none is known, as of a CPU.

    Of dense products of bfloat16 with fp32 sums; a run in fp32 is held against it too, because its
    products run on the same units.
    """
    chip = chip_of_kind(device_kind)
    return chip.flops["bf16"] if chip else None


def host_link(device_kind: str) -> float:
    """Bytes a second between a device and its host's memory, in one direction, at best."""
    chip = chip_of_kind(device_kind)
    return chip.host_link if chip else UNKNOWN_LINK
