"""Start-up check: all processes have the same config, code, versions and compiler flags.

A difference would show much later, as a collective that never ends.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxspeed.config.verdicts import shortened
from jaxspeed.errors import ConfigError, RunError
from jaxspeed.launch.rendezvous import explained_wait
from jaxspeed.run.watchdog import Watchdog

_PERIODS = 3  # in which the watchdog of process 0 names one that is stuck, after the time-out
_MOST = 50  # differences and missing processes that are shown
_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "numpy")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION")


def facts_of(written: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal in all processes, by name; `written` is the config as it was written."""
    facts: dict[str, Any] = {f"config {key}": x for key, x in _flat(written)}
    facts["python"] = platform.python_version()
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[package] = importlib.metadata.version(package)
    facts["jaxspeed's code"] = _code()
    return {**facts, **{name: os.environ.get(name) for name in _FLAGS}}


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key in value:
            yield from _flat(value[key], f"{path}.{key}" if path else str(key))
    else:
        yield path, json.loads(json.dumps(value, default=str))


def _code() -> str:
    """Digest of the package's files."""
    folder, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def meet(watchdog: Watchdog, facts: Mapping[str, Any]) -> None:
    """Wait for all processes, and compare their facts with those of process 0.

    Raises:
      RunError: on all processes, with the ranks that are missing at the time-out.
      ConfigError: on all processes, with each difference.
    """
    beats = watchdog.beats
    if beats is None or watchdog.met:
        return
    watchdog.will_meet()
    limit, longer = watchdog.sections.limit("start"), _PERIODS * watchdog.period
    until = time.monotonic() + limit

    def rest(more: float) -> float:
        return max(until + more - time.monotonic(), 0.1)

    waits = f"process {beats.rank}: not all processes have compared their configs"
    waits = f"{waits} with process 0's (limit {limit:.0f} s)"
    try:
        with explained_wait(waits):
            # A digest, so that process 0 need not send all facts to all.
            facts_here = {"host": watchdog.host, **facts}
            if beats.rank == 0:
                beats.answer("facts", facts_here)
                beats.answer("digest of facts", _digest(facts))
            elif beats.of(0) is None:  # it has no watchdog yet, which would name it
                beats.answered("digest of facts", rest(0))
            same = beats.answered("digest of facts", rest(longer)) == _digest(facts)
            first = {} if same else beats.answered("facts", rest(longer))
            different = [] if same else _differences(beats.rank, facts_here, first)
            beats.say("differs", different[:_MOST])
            if beats.rank == 0:
                answers = beats.wait_for_all("differs", rest(longer))
                missing = [rank for rank in range(beats.count) if rank not in answers]
                lines = [line for _, lines in sorted(answers.items()) for line in lines]
                answer = {"missing": missing[:_MOST], "different": lines[:_MOST]}
                beats.answer("met", {**answer, "beat": watchdog.beat()})
            result = beats.answered("met", rest(longer + 10))
    except jax.errors.JaxRuntimeError:
        raise RunError(f"process 0 has not answered for {limit:.0f} s") from None
    if result["missing"]:
        raise RunError(
            f"of {beats.count} processes, {len(result['missing'])} did not start within "
            f"{limit:.0f} s (run.watchdog.start): {', '.join(map(str, result['missing']))}"
        )
    if result["different"]:
        raise ConfigError("the processes of this run differ:\n" + "\n".join(result["different"]))
    watchdog.has_met(result["beat"])


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _differences(rank: int, facts: Mapping[str, Any], first: Mapping[str, Any]) -> list[str]:
    """A line for each fact in which this process differs from process 0."""
    lines = []
    for name in sorted({*facts, *first} - {"host"}):
        if facts.get(name) != first.get(name):
            here, there = (
                shortened(json.dumps(of[name]) if of.get(name) is not None else "not set")
                for of in (facts, first)
            )
            lines.append(
                f"  {name}: {here} in process {rank} ({facts['host']}), {there} in process 0 "
                f"({first['host']})"
            )
    return lines
