"""DeepSpeed's hostfile, `--include`, `--exclude` and `.deepspeed_env`.

The semantics are those of deepspeed/launcher/runner.py. A slot is a device.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxspeed.errors import ConfigError

_LINE = re.compile(r"(\S+)\s+slots=(\d+)")
# What ssh, its ProxyCommand and a scheduler take as a host alone, never as an option or a command.
_HOST = re.compile(r"(\w[\w.-]*@)?[\w:\[][\w.:%\]-]*", re.ASCII)
MOST_SLOTS = 4096  # of a host
ENVIRONMENT_FILE = ".deepspeed_env"
# What DeepSpeed exports to other hosts, and the variables of JAX and its compilers.
_EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL_", "JAX_", "XLA_", "LIBTPU_", "TPU_")

Slots = dict[str, tuple[int, ...]]


def read_hostfile(path: str | Path) -> Slots:
    """The slots of each host, from lines of the form `worker-0 slots=4`.

    Raises:
      ConfigError: names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--hostfile {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--hostfile {str(path)!r}: {error}") from None
    hosts: Slots = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            raise ConfigError(f'{path}:{number}: "{line[:200]}"; needs HOST slots=NUMBER')
        checked_host(match[1], f"{path}:{number}")
        if len(match[2]) > 9 or int(match[2]) > MOST_SLOTS:
            slots = f"slots={match[2][:20]}"
            raise ConfigError(f"{path}:{number}: {slots}; needs at most {MOST_SLOTS}")
        if match[1] in hosts:
            raise ConfigError(f"{path}:{number}: {match[1]} is listed twice")
        hosts[match[1]] = tuple(range(int(match[2])))
    if not hosts:
        raise ConfigError(f"{path}: lists no host")
    return hosts


def checked_host(host: str, where: str) -> str:
    """The host, if it is a name or an address, and not an option or a command."""
    if not _HOST.fullmatch(host):
        raise ConfigError(
            f"{where}: {host[:200]!r} is no host: it needs a name or an address, or USER@ with one"
        )
    return host


def selected(hosts: Mapping[str, Sequence[int]], include: str = "", exclude: str = "") -> Slots:
    """The hosts and slots that remain, in the hostfile's order.

    Args:
      include, exclude: at most one of them: HOST[:SLOT[,SLOT ...]] joined by @. Without slots it
        means all of the host.

    Raises:
      ConfigError: names an unknown host or slot; or nothing remains.
    """
    if include and exclude:
        raise ConfigError("--include and --exclude: only one of them")
    option = "--include" if include else "--exclude"
    named = _selection(include or exclude, hosts, option)
    remaining: Slots = {}
    for host, slots in hosts.items():
        if include:
            remaining[host] = named.get(host, ())
        else:
            remaining[host] = tuple(slot for slot in slots if slot not in named.get(host, ()))
    remaining = {host: slots for host, slots in remaining.items() if slots}
    if not remaining:
        raise ConfigError(f"{option} {include or exclude}: no slot remains")
    return remaining


def _selection(text: str, hosts: Mapping[str, Sequence[int]], option: str) -> Slots:
    named: dict[str, set[int]] = {}
    for part in filter(None, text.split("@")):
        host, colon, numbers = part.partition(":")
        if host not in hosts:
            raise ConfigError(
                f"{option}: no host {host} in the hostfile; it has {', '.join(hosts)}"
            )
        try:
            slots = set(map(int, numbers.split(","))) if colon else set()
        except ValueError:
            raise ConfigError(f"{option}: {part}; needs HOST[:SLOT[,SLOT ...]]") from None
        if unknown := slots - set(hosts[host]):
            there = f"it has {', '.join(map(str, hosts[host])) or 'none'}"
            raise ConfigError(f"{option}: no slot {min(unknown)} on {host}; {there}")
        named.setdefault(host, set()).update(slots)
    return {host: tuple(sorted(slots or hosts[host])) for host, slots in named.items()}


def exported_environment(folders: Sequence[str | Path] | None = None) -> dict[str, str]:
    """Variables for processes on other hosts: JAX's and Python's, and those of `.deepspeed_env`.

    The file is read from the home and from the current folder, where the latter counts.
    """
    variables = {k: v for k, v in os.environ.items() if k.startswith(_EXPORTED)}
    name = os.environ.get("DS_ENV_FILE", ENVIRONMENT_FILE)
    for folder in (Path.home(), Path.cwd()) if folders is None else folders:
        file = Path(folder, name)
        if not file.is_file():
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            key, equals, value = line.partition("=")
            if not line.strip() or line.startswith("#"):
                continue
            if not equals:
                raise ConfigError(f'{file}:{number}: "{line}"; needs NAME=VALUE')
            variables[key.strip()] = value.strip()
    return variables
